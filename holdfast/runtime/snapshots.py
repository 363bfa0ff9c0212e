"""Taking snapshots, and clearing up behind them, beside the batches.

When a snapshot is due, the tasks of the next job keep a copy of their stores as they are before the batch: hard links,
made in milliseconds. It is a copy of a committed version, named by its mark. After the job's commit, a thread on the
driver has the copies uploaded where they are, one partition at a time, makes the snapshot visible by one put, and then
removes what no recovery can need any more. A batch never waits for any of it, and whatever fails here is tried again later:
nothing is lost without a snapshot but time.

What is removed cannot be had again, so a file is read to its end, with the checksums of its blocks, before it is sent. If it is
damaged there is no snapshot, and the store that it is from is built again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import msgspec

from holdfast.failpoints import reach
from holdfast.log import paths
from holdfast.log.manifest import AttemptId, Chain, InstanceId, Manifest
from holdfast.log.retention import clear_up
from holdfast.log.snapshot import PartitionSnapshot, Snapshot, SnapshotFile, newest_snapshot, publish, unsent, upload
from holdfast.log.storage import Exists, Storage
from holdfast.runtime.task import Stores
from holdfast.stores.base import DamagedStore, Mark

SLICE = 64 << 20
"""Bytes that one task sends: whoever waits for its slot, where there is none to spare, waits for no more than that."""
TRIES = 3
"""How often a task looks for a copy."""
VERSIONS = 500
"""Versions after which a snapshot is due by itself."""
LEAST = 64 << 20
"""Bytes of deltas and outboxes after which it is due earlier, if they are also more than the last snapshot has."""
PAUSE = 10
"""Versions to wait after a snapshot that could not be taken."""
PATIENCE_S = 30.0
"""How long the end of a run waits for an upload that is under way."""

Start = Callable[[Callable[[], None]], threading.Thread | None]

logger = logging.getLogger("holdfast")


class Places(Protocol):
    """Runs a function where a partition is."""

    def at(self, partition: int, function: Callable[[int, Storage, Stores], Any]) -> Any:
        """What `function(partition, storage, stores)` returned. An exception means that it may not have run."""


class _Last(msgspec.Struct, frozen=True):
    """What the next snapshot is measured by."""

    version: int
    time_ms: int
    length: int


def _in_background(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, name="holdfast-snapshots", daemon=True)
    thread.start()
    return thread


class Snapshots:
    """The snapshots of one run. All but the uploading itself happens in the driver's thread."""

    def __init__(
        self,
        storage: Storage,
        places: Places,
        *,
        every: timedelta | int | None,
        keep: int,
        clock: Callable[[], int],
        holder: str,
        start: Start = _in_background,
    ) -> None:
        self._storage = storage
        self._places = places
        self._every = every
        self._keep = keep
        self._clock = clock
        self._holder = holder
        self._start = start
        self._last: _Last | None = None
        self._written = 0
        """Bytes of deltas and outboxes that this run has committed."""
        self._counted = 0
        """How many of them the last snapshot holds; less than none: what was there before this run."""
        self._is_busy = False
        self._is_closing = False
        self._not_before = 0
        self._thread: threading.Thread | None = None

    def begin(self, head: Manifest) -> None:
        """Look what there is."""
        self._is_busy = True
        self._thread = self._start(lambda: self._guarded(head, lambda: self._look(head)))

    def is_due(self, head: Manifest) -> bool:
        """Whether the next job is to copy the stores."""
        if self._is_busy or head.version < self._not_before:
            return False
        last = self._last
        if last is None:  # looking has failed
            self.begin(head)
            return False
        if head.version <= last.version:
            return False
        if isinstance(self._every, timedelta):
            passed = abs(self._clock() - last.time_ms)  # a clock that was put back must not stop them
            return passed >= self._every / timedelta(milliseconds=1)
        if self._every is not None:
            return head.version - last.version >= self._every
        return head.version - last.version >= VERSIONS or self._written - self._counted > max(LEAST, last.length)

    def committed(self, manifest: Manifest) -> None:
        """Count what a version has written."""
        self._written += sum(
            file.length
            for commit in manifest.partitions
            for file in (commit.delta, *commit.outboxes.values())
            if file is not None
        )

    def take(self, head: Manifest, marks: Sequence[Mark], copies: Sequence[AttemptId | None]) -> None:
        """Make a snapshot of the copies that tasks have kept of `head`: by partition the attempt that has one."""
        self._is_busy = True
        written = self._written

        def work() -> None:
            taken = self._upload(head, marks, copies)
            if taken is None:
                self._not_before = head.version + PAUSE
                return
            self._last = _Last(taken.version, taken.time_ms, taken.length)
            self._counted = written
            self._clear_up()

        self._thread = self._start(lambda: self._guarded(head, work))

    def close(self) -> None:
        """Let an upload that is under way finish, if that does not take long."""
        if self._thread is not None:
            self._thread.join(PATIENCE_S)
        self._is_closing = True

    # -- in the background -------------------------------------------------------------------------------------------

    def _guarded(self, head: Manifest, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._not_before = head.version + PAUSE
            if not self._is_closing:
                logger.warning(
                    "the snapshot of version %d could not be taken: %s; trying again later", head.version, error
                )
                logger.debug("it failed with", exc_info=error)
        finally:
            self._is_busy = False

    def _look(self, head: Manifest) -> None:
        newest = newest_snapshot(self._storage)
        if newest is not None and newest.floor >= head.base:
            last = _Last(newest.version, newest.time_ms, newest.length)
        else:
            chain = Chain(self._storage)
            oldest = chain.read(chain.first())
            last = _Last(head.base, oldest.time_ms, 0)
        if self._every is None:
            sizes = {**self._storage.sizes(paths.DELTAS), **self._storage.sizes(paths.OUTBOX)}
            self._counted = self._written - sum(
                size for name, size in sizes.items() if paths.version_of(name) > last.version
            )
        self._last = last

    def _upload(self, head: Manifest, marks: Sequence[Mark], copies: Sequence[AttemptId | None]) -> Snapshot | None:
        began = time.monotonic()
        reach("upload.begin", head.version)
        known = newest_snapshot(self._storage)
        if known is not None and known.version >= head.version:
            return known
        there = (
            {} if known is None else {part.partition: part for part in known.partitions if part.version >= head.base}
        )
        sizes = self._storage.sizes(paths.SNAPSHOT_FILES) if there else {}
        whole = {  # a file that was lost would be missing in every snapshot from now on
            partition: tuple(file for file in part.files if sizes.get(file.name) == file.length)
            for partition, part in there.items()
        }
        parts: list[PartitionSnapshot] = []
        for partition, (mark, copy) in enumerate(zip(marks, copies, strict=True)):
            if self._is_closing:
                return None
            part = None
            if copy is not None:
                part = self._send(partition, head.instance, copy, mark, whole.get(partition, ()))
            if part is None:
                part = there.get(partition)
                if part is None or len(whole[partition]) < len(part.files):
                    logger.warning("partition %d has lost its copy of version %d; no snapshot", partition, head.version)
                    return None
                logger.warning("partition %d keeps its snapshot of version %d", partition, part.version)
            parts.append(part)
        snapshot = Snapshot(
            version=head.version,
            manifest=head.id,
            instance=head.instance,
            holder=self._holder,
            time_ms=self._clock(),
            partitions=tuple(parts),
        )
        reach("snapshot.begin", head.version)
        newest = newest_snapshot(self._storage)
        if newest is not None and newest.version >= head.version:
            return newest  # another run was faster; retention may have taken our files for leftovers
        if newest != known:
            return None  # what is shared with the one that was the newest may be gone by now
        try:
            publish(self._storage, snapshot)
        except Exists:
            return None
        reach("snapshot.visible", head.version)
        sent = {file.name for part in parts for file in part.files}
        if known is not None:
            sent -= {file.name for part in known.partitions for file in part.files}
        logger.info(
            "snapshot of version %d: %.1f MB, %.1f MB of them new, in %.1f s",
            snapshot.version,
            snapshot.length / 1e6,
            sum(file.length for part in parts for file in part.files if file.name in sent) / 1e6,
            time.monotonic() - began,
        )
        return snapshot

    def _send(
        self, partition: int, instance: InstanceId, copy: AttemptId, mark: Mark, known: tuple[SnapshotFile, ...]
    ) -> PartitionSnapshot | None:
        """The copy of one partition, slice by slice; None if it is lost."""
        tries = TRIES
        while tries and not self._is_closing:
            sent: tuple[PartitionSnapshot, bool] | None = self._places.at(
                partition, _upload_task(instance, copy, mark, known)
            )
            if sent is None:  # gone, or the task was not where it is because a batch was in the way
                tries -= 1
                continue
            part, is_whole = sent
            if is_whole:
                return part
            known = part.files
        return None

    def _clear_up(self) -> None:
        try:
            removed = clear_up(self._storage, self._keep, self._clock())
        except Exception as error:
            logger.warning(
                "what no recovery needs could not be removed: %s; trying again with the next snapshot", error
            )
            logger.debug("it failed with", exc_info=error)
            return
        if removed is not None and removed.files:
            logger.info(
                "removed %d files (%.1f MB) that no recovery needs; it would begin at version %d",
                removed.files,
                removed.length / 1e6,
                removed.floor,
            )


def _upload_task(
    instance: InstanceId, copy: AttemptId, mark: Mark, known: tuple[SnapshotFile, ...]
) -> Callable[[int, Storage, Stores], tuple[PartitionSnapshot, bool] | None]:
    """A task that sends a slice of a copy: what is there by then, and whether that is all. None: the copy is not here."""

    def task(partition: int, storage: Storage, stores: Stores) -> tuple[PartitionSnapshot, bool] | None:
        directory = stores.copied(instance, partition, copy)
        if directory is None:
            return None
        try:
            left = unsent(directory, known)
            slice_ = _first(left, SLICE)
            stores.check(directory, mark, slice_)
            part = upload(storage, directory, partition, mark, known, slice_)
        except FileNotFoundError:  # a newer run on this host has made room for its own
            return None
        except DamagedStore:
            if stores.copied(instance, partition, copy) is None:  # likewise
                return None
            stores.distrust(instance, partition)
            stores.forget(instance, partition, copy)
            raise
        if len(slice_) < len(left):
            return part, False
        reach("upload.done", mark.version)
        stores.forget(instance, partition, copy)
        return part, True

    return task


def _first(lengths: dict[str, int], most: int) -> list[str]:
    """The first of these files that together have at most so many bytes; one at least, if there is one."""
    found: list[str] = []
    for name, length in lengths.items():
        most -= length
        if found and most < 0:
            break
        found.append(name)
    return found
