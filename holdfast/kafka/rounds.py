"""What tasks do in a restore: read the next records of the changelogs, put them down, and fill the local stores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pyarrow as pa
from confluent_kafka import Message

from holdfast.kafka.changelog import MILESTONE, Milestone, decode_milestone, documents, index_of
from holdfast.kafka.connection import Connection
from holdfast.kafka.cursors import Cursor, cursor
from holdfast.log import paths
from holdfast.log.files import changes_of, write_table
from holdfast.log.manifest import AttemptId, InstanceId, PartitionCommit, new_id
from holdfast.log.recipe import Recipe, bring
from holdfast.log.storage import Storage
from holdfast.stores.base import Mark, Store

WINDOW = 1_000
"""Offsets before the end in which to look for a milestone, at first."""

NO_CHANGES = pa.table({"key": pa.array([], pa.binary()), "value": pa.array([], pa.binary())})


class Lane(msgspec.Struct, frozen=True):
    """A partition of a changelog topic, and the state partition that it follows."""

    store: str
    topic: str
    partition: int
    local: int
    """In the topic."""


class Round(msgspec.Struct, frozen=True):
    """What one partition reads in one round."""

    version: int
    recipe: Recipe
    """Of the version before."""
    cleared: int
    ranges: tuple[tuple[Lane, int, int], ...]
    """(changelog, from, to)."""


def round_task(
    token: str, connection: Connection, group: str, instance: InstanceId, jobs: list[Round]
) -> Callable[[int, Storage, Any], PartitionCommit]:
    def task(partition: int, storage: Storage, stores: Any) -> PartitionCommit:
        job = jobs[partition]
        tables: list[pa.Table] = []
        is_timed = False
        for lane, since, to in job.ranges:
            read = _read(cursor(token, connection, group, lane.topic, lane.local), since, to)
            changes = documents(lane.store, job.cleared, read)
            index = index_of(lane.store, changes)
            is_timed = is_timed or index.num_rows > 0
            tables += [changes, index]
        changes = pa.concat_tables(tables).sort_by("key") if tables else NO_CHANGES
        attempt = AttemptId(new_id())
        delta = None
        if changes.num_rows:
            delta = write_table(storage, paths.delta(job.version, partition, attempt), changes, kind="delta")
        store: Store
        with stores.open(instance, partition) as store:
            bring(store, storage, job.recipe)
            store.apply(changes_of(changes), job.recipe.target, Mark(job.version, attempt))
        at_once = 0 if is_timed else None  # the first batch looks what is due
        return PartitionCommit(partition, attempt, delta, due_ms=at_once, event_due_ms=at_once)

    return task


def ready_task(
    token: str, connection: Connection, group: str, lanes: tuple[Lane, ...]
) -> Callable[[int, Storage, Any], None]:
    """Where this has run, a worker is up, with its consumers, and has loaded what a round needs."""

    def task(partition: int, storage: Storage, stores: Any) -> None:
        for lane in lanes:
            if lane.partition == partition:
                cursor(token, connection, group, lane.topic, lane.local)
        documents("", 0, {}).sort_by("key")

    return task


def _read(reading: Cursor, since: int, to: int) -> dict[bytes, bytes | None]:
    """The last value of each key in a range."""
    latest: dict[Any, bytes | None] = {}
    reading.move(since)
    while reading.at < to:
        found = reading.take(to)
        latest.update(zip(map(Message.key, found), map(Message.value, found), strict=True))
    return latest


def last_milestone(
    connection: Connection, group: str, topic: str, partition: int, low: int, high: int
) -> Milestone | None:
    """The last milestone of a changelog partition: near its end, unless aborted transactions lie after it."""
    window = WINDOW
    reading = Cursor(connection, group, topic, partition)
    try:
        while high > low:
            since = max(low, high - window)
            reading.move(since)
            found: bytes | None = None
            while reading.at < high:
                for message in reading.take(high):
                    if message.key() == MILESTONE:
                        found = message.value()
            if found is not None:
                return decode_milestone(topic, partition, found)
            if since == low:
                return None
            window *= 20
        return None
    finally:
        reading.close()
