"""What goes to Kafka after a commit: outputs, changelogs, positions, and the note that says so.

A small version is published by the driver over a producer that stays open, in one transaction. A large one is published
by tasks, one transaction per partition with everything of that partition: its output, its changelog, its position and its
note. So wherever a crash falls, each partition in Kafka is whole at one version and at the position that belongs to it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Literal, Protocol

from holdfast.errors import Damaged, ForeignTarget, MarkerLost
from holdfast.kafka import names
from holdfast.kafka.publishing import Note, Part, Publisher, Route, Shipment, check_instance, fence, ledger
from holdfast.log import paths
from holdfast.log.manifest import Chain, Manifest
from holdfast.log.snapshot import may_be_removed
from holdfast.log.storage import Missing, Storage
from holdfast.sinks.surely import surely

NOTES_S = 3600.0
"""How often to see that the notes are still there. Kafka forgets an offset when its group was idle for days."""
LARGE = 20_000
"""Records from which on tasks publish: below, starting them costs more than it saves."""

logger = logging.getLogger("holdfast")


class Tasks(Protocol):
    """Runs a function once per partition, where the partition is."""

    def each(self, function: Callable[[int, Storage, Any], Any]) -> list[Any]:
        """What it returned, by partition. An exception means that some may not have run."""


def surely_each(tasks: Tasks, what: str, function: Callable[[int, Storage, Any], Any]) -> list[Any]:
    """As `each`, again if the job was lost with a worker or an executor: for functions that bear being run again."""
    return surely(what, lambda: tasks.each(function))


class KafkaPublisher:
    """The publisher of a run. Lives on the driver."""

    def __init__(self, route: Route, chain: Chain, tasks: Tasks, partitions: int, *, several: bool) -> None:
        self.sinks = frozenset(route.topics)
        self._route = route
        self._chain = chain
        self._tasks = tasks
        self._slots = [names.DRIVER_SLOT, *map(names.task_slot, range(partitions))]
        self._driver = Publisher(route, names.DRIVER_SLOT)
        self._several = several
        """Records change their partition within a version: it must be one transaction, or a restore could see half of it."""
        self._noted = 0.0
        self._out = -1
        """The last version that is known to be out: versions are published in order, so all before it are, too."""

    def prepare(self, head: Manifest) -> None:
        """Fence the run before this one; see that what is out belongs to this chain; mend notes that are gone."""
        self._driver.open()
        fence(self._route, self._slots[1:])  # notes cannot be read while a transaction on them is open
        self._mend_notes(head)
        self._driver.read_note_again()

    def _mend_notes(self, head: Manifest) -> None:
        """Check what the notes say; write those again that are gone: what they would say is known by other means."""
        self._driver.mend(lambda: self._lost_notes(head))
        self._noted = time.monotonic()

    def _lost_notes(self, head: Manifest) -> list[Any]:
        notes = ledger(self._route.connection, self._route.group)
        committed = set(self._chain.storage.names(paths.COMMITS))
        lost = []
        for slot, note in zip(self._slots, notes.read(self._slots), strict=True):
            if note is None:
                lost.append(slot)
            else:
                self._check(note, head, committed)
                self._out = max(self._out, note.version)
        if not lost:
            return []
        note = note_of(self._last_known_out(head))
        return [notes.entry(slot, note) for slot in lost]

    def fence(self) -> None:
        """End whatever the run before this one has left open: what it has published is then certain."""
        fence(self._route, self._slots)

    def way(self, rows: int, head: Manifest) -> Literal["driver", "tasks"]:
        if rows <= LARGE or self._several:
            return "driver"
        if time.monotonic() - self._noted > NOTES_S:
            self._mend_notes(head)  # the slots of tasks may not have been used for so long that Kafka forgot them
        return "tasks"

    def publish(self, manifest: Manifest) -> None:
        if manifest.version < self._out:  # its mark of delivery cannot be read, or was never written
            return
        if manifest.published_by == "tasks":
            surely_each(self._tasks, f"publish version {manifest.version}", _publish_task(self._route, manifest))
        else:
            self._driver.publish(shipment_of(manifest), self._chain.storage)
        self._out = manifest.version

    def close(self) -> None:
        self._driver.close()

    def _check(self, note: Note, head: Manifest, committed: set[str]) -> None:
        check_instance(note, head.instance)
        if note.version > head.version:
            raise ForeignTarget(
                f"version {note.version} is out in Kafka, the checkpoint ends at version {head.version}: it was put back from an "
                "older copy. Put the newest one back, or recover from the changelog topics in an empty checkpoint",
                out=note.version,
                head=head.version,
            )
        following = paths.manifest(min(note.version + 1, head.version))
        if {paths.manifest(note.version), following} <= committed:  # else it is from before a restore, or was removed
            try:
                manifest = head if note.version == head.version else self._chain.read(note.version)
            except Damaged:
                if may_be_removed(self._chain.storage, note.version):  # by an earlier run that is still clearing up
                    return
                raise
            # A name that was removed may have been taken since, by a run that was fenced with that.
            if manifest.id != note.manifest and not may_be_removed(self._chain.storage, note.version):
                raise ForeignTarget(
                    f"version {note.version} is out in Kafka with another commit than this checkpoint has: it was put back from a "
                    "copy that went another way",
                    out=note.version,
                )

    def _last_known_out(self, head: Manifest) -> Manifest:
        """The version up to which everything is out, as the checkpoint knows it. To clear again would change nothing."""
        while head.kind in ("clear", "backfilled"):
            head = self._chain.parent_of(head)
        if head.kind in ("start", "restored"):
            return head
        try:
            self._chain.storage.get(paths.delivered(head.version))
        except Missing:
            raise MarkerLost(
                f"the note of what was published last is gone from consumer group {self._route.group}, and the checkpoint does not "
                f"say either whether version {head.version} is out. Look at the output topics: if it is, create the file "
                f'{paths.delivered(head.version)} in the checkpoint with the content {{"manifest": "{head.id}"}}; if not, put the '
                f"note back with {note_of(head)}, but for the version before",
                version=head.version,
            ) from None
        logger.warning("consumer group %s has lost its notes; the checkpoint knows that all is out", self._route.group)
        return head


def note_of(manifest: Manifest) -> Note:
    return Note(manifest.instance, manifest.version, manifest.id)


def shipment_of(manifest: Manifest, only: int | None = None) -> Shipment:
    """What a version publishes; `only`: that of one partition."""
    position = manifest.position or {}
    reading = manifest.stages[0].partitions
    offsets: list[int] = position.get("offsets") or []
    quiet: list[int] = position.get("quiet") or offsets
    outs = [max(offset, out) for offset, out in zip(offsets, quiet, strict=True)]
    several = len(manifest.stages) > 1

    def lanes(of: list[int], partition: int) -> tuple[int, ...]:
        return tuple(of[partition::reading]) if partition < reading else ()

    return Shipment(
        note=note_of(manifest),
        cleared=manifest.cleared,
        time_ms=manifest.time_ms,
        topics=position.get("topics", {}),
        parts=tuple(
            Part(
                commit.partition,
                lanes(offsets, commit.partition),
                lanes(outs, commit.partition),
                commit.delta,
                commit.outboxes,
                commit.keys,
                commit.bytes,
            )
            for commit in manifest.partitions
            if only is None or commit.partition == only
        ),
        watermark_ms=manifest.watermark_ms,
        event_ms=manifest.event_ms,
        offsets=tuple(offsets) if several else (),
        outs=tuple(outs) if several else (),
    )


def _publish_task(route: Route, manifest: Manifest) -> Callable[[int, Storage, Any], None]:
    def task(partition: int, storage: Storage, stores: Any) -> None:
        shipment = shipment_of(manifest, partition)
        publisher = Publisher(route, names.task_slot(partition), shipment.rows)
        try:
            publisher.publish(shipment, storage)
        finally:
            publisher.close()

    return task
