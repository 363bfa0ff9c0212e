"""Retention: what no recovery can need goes.

The floor is the oldest version in the `keep` newest snapshots of this chain, or in an older one that a pin asks for. While
a pin is older than every snapshot, nothing goes. Below the floor there is nothing to recover from, so these go:

    snapshots before the oldest that is kept; their files, unless one that is kept names them
    deltas and outboxes up to the floor; manifests and marks of delivery before it, but for the newest mark
    Spark's files before the floor, unless the manifest at the floor names them: a file that a later one names, that one
    names, too
    what puts that were killed have left half-written, a day later

Why this is safe, whoever runs it, however late, and beside whom:
- everything up to the floor was delivered: a snapshot of version v becomes visible only after v + 1 was committed, and that
  only happens after v was delivered;
- the floor only ever rises, so a run that slept on an old list deletes less, never more;
- a file that no visible snapshot names may belong to an upload that is under way. It carries the version that it was uploaded
  for, and is removed only if a newer snapshot is visible: an upload that finds a newer one gives up, and the snapshots after it
  refer to files of the newest only;
- manifests go one by one, in ascending order; the order of all else does not matter, so it goes together. A driver that was
  overtaken so long ago that the manifest which would fence it is gone finds its put successful and, looking back, the manifest
  before it gone as well: it is fenced all the same (`Chain.commit`). So is one that was about to begin the checkpoint: after
  version 0 it finds later ones.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import msgspec

from holdfast.errors import Damaged
from holdfast.failpoints import reach
from holdfast.log import paths
from holdfast.log.manifest import Chain
from holdfast.log.pins import oldest_pin
from holdfast.log.snapshot import Snapshot, is_of, read_snapshot, versions
from holdfast.log.storage import Storage

logger = logging.getLogger("holdfast")


class Removed(msgspec.Struct, frozen=True):
    """What a pass over the checkpoint has removed."""

    floor: int
    files: int
    length: int


def clear_up(storage: Storage, keep: int, now_ms: int) -> Removed | None:
    """Remove what nobody can need; None if there are not enough snapshots yet, or a reader needs what is before them all."""
    kept = _kept(storage, keep, oldest_pin(storage, now_ms))
    if not kept:
        return None
    floor = min(snapshot.floor for snapshot in kept)
    reach("retention.begin", floor)
    oldest = kept[-1].version
    named = {file.name for snapshot in kept for part in snapshot.partitions for file in part.files}
    marks = storage.sizes(paths.DELIVERED)
    removed = [
        _remove(storage, storage.sizes(paths.SNAPSHOTS), before=oldest),
        _remove(storage, storage.sizes(paths.SNAPSHOT_FILES), before=kept[0].version, but=named),
        _remove(storage, storage.sizes(paths.DELTAS), before=floor + 1),
        _remove(storage, storage.sizes(paths.OUTBOX), before=floor + 1),
        _remove(storage, _spark_files(storage), before=floor, but=_sparks_own(storage, floor)),
        _remove(storage, storage.sizes(paths.COMMITS), before=floor, in_order=True),
        _remove(storage, marks, before=floor, but=sorted(marks)[-1:]),
    ]
    for prefix in (*paths.CLASSES.values(), paths.PINS):
        halves = storage.sweep(prefix)
        removed.append((len(halves), sum(halves)))
    reach("retention.done", floor)
    return Removed(floor, sum(files for files, _ in removed), sum(length for _, length in removed))


def _kept(storage: Storage, keep: int, pinned: int | None) -> list[Snapshot]:
    """The snapshots that stay, newest first; none if everything does.

    That is while fewer than `keep` of this chain can be read, or none leads to the version that is pinned.
    """
    kept: list[Snapshot] = []
    chain = Chain(storage)
    for version in reversed(versions(storage)):
        if len(kept) >= keep and (pinned is None or kept[-1].version <= pinned):
            break
        try:
            snapshot = read_snapshot(storage, version)
        except Damaged as damage:
            logger.warning("%s; it does not count as a snapshot", damage)
            continue
        if is_of(chain, snapshot):
            kept.append(snapshot)
    leads_to_pinned = pinned is None or (bool(kept) and kept[-1].version <= pinned)
    return kept if len(kept) >= keep and leads_to_pinned else []


def _spark_files(storage: Storage) -> dict[str, int]:
    """What the checkpoint holds of Spark's; on a local disk Spark keeps its files itself, under other names."""
    return {name: size for name, size in storage.sizes(paths.SPARK_FILES).items() if paths.is_named_well(name)}


def _sparks_own(storage: Storage, version: int) -> list[str]:
    return [file.name for file in Chain(storage).read(version).spark_files.values()]


def _remove(
    storage: Storage, sizes: dict[str, int], *, before: int, but: Iterable[str] = (), in_order: bool = False
) -> tuple[int, int]:
    """Remove what is of a version before `before`, if so asked the oldest first; how many files and bytes that were."""
    spared = set(but)
    doomed = sorted(name for name in sizes if paths.version_of(name) < before and name not in spared)
    if in_order:
        for name in doomed:
            storage.delete(name)
    else:
        storage.delete_all(doomed)
    return len(doomed), sum(sizes[name] for name in doomed)
