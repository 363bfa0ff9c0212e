"""Backfill: a changelog topic that begins to follow a store which has state already gets all of it first.

That happens when changelog topics are turned on, again or for the first time, and when a topic was replaced. Everything
in the topic from before is void: the documents are written under a version of their own, and the milestone says that the
state was empty before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import msgspec

from holdfast.kafka import names
from holdfast.kafka.changelog import records
from holdfast.kafka.publishing import Publisher, Route
from holdfast.log.manifest import AttemptId, Chain, Manifest, ManifestId, PartitionCommit, new_id
from holdfast.log.recipe import Recipe, bring, recipes_for
from holdfast.log.storage import Storage
from holdfast.sinks.kafka import Tasks, shipment_of, surely_each
from holdfast.state.documents import document_prefix

CHUNK = 100_000
"""Documents of one transaction."""


def backfilled(head: Manifest, changelogs: dict[str, str], holder: str) -> Manifest:
    """The manifest from which on these changelogs follow their stores."""
    return msgspec.structs.replace(
        head,
        version=head.version + 1,
        id=ManifestId(new_id()),
        parent=head.id,
        holder=holder,
        kind="backfilled",
        cleared=head.version,
        changelogs=changelogs,
        published_by=None,
        partitions=tuple(
            PartitionCommit(
                commit.partition,
                AttemptId(new_id()),
                keys=commit.keys,
                bytes=commit.bytes,
                due_ms=commit.due_ms,
                event_due_ms=commit.event_due_ms,
            )
            for commit in head.partitions
        ),
    )


def backfill(route: Route, chain: Chain, head: Manifest, to: Manifest, tasks: Tasks) -> int:
    """Publish the state at `head` as the whole content of the changelogs at `to`; the number of documents."""
    recipes = recipes_for(chain, head)
    return sum(surely_each(tasks, "fill the changelogs", _task(route, to, recipes)))


def _task(route: Route, to: Manifest, recipes: tuple[Recipe, ...]) -> Callable[[int, Storage, Any], int]:
    def task(partition: int, storage: Storage, stores: Any) -> int:
        publisher = Publisher(route, names.task_slot(partition), CHUNK)
        shipment = shipment_of(to, partition)
        count = 0
        try:
            with stores.open(to.instance, partition) as local:
                bring(local, storage, recipes[partition])
                for store, topic, lane in route.lanes(partition):
                    prefix = document_prefix(store)
                    for chunk in _chunks(records(store, to.version, local.scan(prefix, prefix[:-1] + b"\1"))):
                        count += len(chunk)
                        publisher.send_changelog(topic, lane, chunk, None)
                    publisher.send_changelog(topic, lane, [], route.milestone(store, shipment, shipment.parts[0]))
        finally:
            publisher.close()
        return count

    return task


def _chunks(changes: Iterator[Any]) -> Iterator[list[Any]]:
    while chunk := list(islice(changes, CHUNK)):
        yield chunk
