"""Verification: read everything that the chain names and say what is wrong.

It only reads, and goes on after a problem. An application may run meanwhile: files are listed before the chain is read, so
what is listed and not named by then is nobody's, or of a batch that is on its way. What is gone is damage only if, by the
snapshots that are there by then, it is still needed: retention may have passed it.

Found are, as damage:
    manifests   missing, changed, not the ones that their successors continue, or at odds with their parents
    deltas      missing, changed, not readable, not in order; not what the counters of their manifest say
    outboxes    missing, changed, not readable
    marks       of other commits, or not readable; one after the last manifest means that manifests are missing
    Spark's     files of Spark's own checkpoint that a manifest names: missing or changed
    snapshots   not readable, of other commits, or with files that are missing or changed
and, as orphans, files that no commit or snapshot names. They cost space and nothing else.

What lies before the oldest snapshot may be gone: the chain may begin there. What nothing names cannot be missed: the last
manifest if it had no output, a mark of delivery, and a snapshot, as long as there is another.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Literal

import msgspec
import pyarrow as pa

from holdfast.errors import Damaged, FutureFormat
from holdfast.log import paths
from holdfast.log.files import FileRef, changes_of, read_bytes, read_table
from holdfast.log.manifest import Chain, Manifest, ManifestId, PartitionCommit
from holdfast.log.sealed import sealed
from holdfast.log.snapshot import Snapshot, SnapshotFile, is_of, is_whole, read_snapshot
from holdfast.log.storage import Missing, Storage
from holdfast.stores.base import Change

COUNTED = 2_000_000
"""Documents whose sizes are kept in mind to recompute the counters of manifests; with more, these are taken as they are."""

_DOCUMENT = b"d"
"""What the store keys of documents begin with; the counters are of these."""


class Finding(msgspec.Struct, frozen=True):
    """One thing that was found."""

    kind: Literal["damage", "orphan"]
    name: str
    version: int | None
    message: str


class Tally(msgspec.Struct):
    """What was read so far."""

    first: int | None = None
    last: int | None = None
    versions: int = 0
    to_read: int = 0
    """Versions in all."""
    files: int = 0
    bytes: int = 0
    damaged: int = 0
    orphans: int = 0
    orphan_bytes: int = 0
    counters: Literal["recomputed", "not recomputed"] = "recomputed"
    """Whether the numbers of keys and bytes in the manifests were compared with the deltas."""


class Verification:
    """One reading of a checkpoint: `findings` does it, `tally` says what it has come to."""

    def __init__(self, storage: Storage, progress: Callable[[Tally], None] = lambda tally: None) -> None:
        self.tally = Tally()
        self._storage = storage
        self._chain = Chain(storage)
        self._progress = progress
        self._named: set[str] = set()
        self._sparks: set[FileRef] = set()
        """Files of Spark's that were read."""
        self._ids: dict[int, ManifestId | None] = {}
        """By version: its manifest's id, or None if the manifest cannot be read."""
        self._lost: list[range] = []
        """Versions whose manifests are missing or cannot be read: nobody can tell what they named."""
        self._counters = _Counters()
        self._snapshots: list[Snapshot] = []
        """Those that can be read, oldest first."""
        self._seen: list[str] | None = None
        """The names of the snapshots that the next two were found among."""
        self._of_this_chain: list[Snapshot] = []
        self._usable: list[Snapshot] = []
        """Those of this chain whose files are there, so that a restore can begin with them."""

    def findings(self) -> Iterator[Finding]:
        for finding in self._all():
            if finding.kind == "damage":
                self.tally.damaged += 1
            else:
                self.tally.orphans += 1
            yield finding

    def _all(self) -> Iterator[Finding]:
        listed = {prefix: self._storage.sizes(prefix) for prefix in (paths.DELTAS, paths.OUTBOX, paths.SNAPSHOT_FILES)}
        listed[paths.SPARK_FILES] = self._well_named(paths.SPARK_FILES)  # on a local disk Spark has others there
        marks = self._storage.sizes(paths.DELIVERED)
        snapshots = self._storage.sizes(paths.SNAPSHOTS)
        commits = self._storage.sizes(paths.COMMITS)
        yield from self._strangers(commits | marks | snapshots)
        yield from self._lists(sorted(filter(paths.is_named_well, snapshots)))
        yield from self._commits({name: size for name, size in commits.items() if paths.is_named_well(name)})
        yield from self._marks(sorted(filter(paths.is_named_well, marks)))
        yield from self._copies()
        for prefix, sizes in listed.items():
            yield from self._orphans(prefix, sizes)
        if not self._counters.are_whole:
            self.tally.counters = "not recomputed"

    # -- the chain ---------------------------------------------------------------------------------------------------

    def _commits(self, sizes: dict[str, int]) -> Iterator[Finding]:
        """Every manifest, oldest first, and what it names."""
        tally = self.tally
        tally.to_read = len(sizes)
        before: Manifest | None = None
        kept_from = self._kept_from(sorted(sizes))
        for name in sorted(sizes):
            version = paths.version_of(name)
            if version < kept_from:
                yield Finding("orphan", name, version, f"{name} lies before what is kept; the next snapshot removes it")
                continue
            try:
                manifest = self._chain.read(version)
            except (Damaged, FutureFormat) as error:
                if self._is_retired(name):
                    before = tally.first = tally.last = None  # the chain begins anew behind it
                    self._counters.forget()
                else:
                    yield from self._unreadable(name, version, error)
                    before, tally.last = None, version
                continue
            self._ids[version] = manifest.id
            self._count(sizes[name])
            yield from self._place(before, manifest)
            yield from self._contents(before, manifest)
            before, tally.last = manifest, version
            tally.first = version if tally.first is None else tally.first
            tally.versions += 1
            self._progress(tally)
        if tally.last is None:  # all of them were retired while they were read: others have taken their place
            later = {name: size for name, size in self._well_named(paths.COMMITS).items() if name not in sizes}
            if later:
                yield from self._commits(later)

    def _kept_from(self, names: list[str]) -> int:
        """The version before which manifests are what a clearing up has left: none, if the chain is there from its beginning."""
        with suppress(Damaged, FutureFormat):  # said when it is read again
            oldest = self._chain.read(paths.version_of(names[0])) if names else None
            if oldest is None or oldest.parent is None or _begins_anew(oldest):
                return -1
        return min((snapshot.floor for snapshot in self._of_this_chain), default=-1)

    def _unreadable(self, name: str, version: int, error: Exception) -> Iterator[Finding]:
        self._ids[version] = None
        self._lost.append(range(version, version + 1))
        self._counters.forget()
        last = self.tally.last
        if last is not None and version != last + 1:
            yield self._gap(last + 1, version)
        yield Finding("damage", name, version, str(error))

    def _place(self, before: Manifest | None, manifest: Manifest) -> Iterator[Finding]:
        """Whether a manifest belongs where it is; `before`: the one before it, if that could be read."""
        version, last = manifest.version, self.tally.last
        if last is None:
            yield from self._beginning(manifest)
        elif version != last + 1 and not _begins_anew(manifest):
            if not self._may_be_gone(version):
                yield self._gap(last + 1, version)
            self._counters.forget()
            before = None  # it continues one that is gone
        if before is not None and manifest.parent != before.id:
            yield _damage(manifest, f"is not a continuation of version {before.version}: it names another parent")
        if before is not None:
            yield from self._inheritance(before, manifest)
        if manifest.base == version and manifest.base_id != manifest.id:
            yield _damage(manifest, "is its own base, under another id")
        if [commit.partition for commit in manifest.partitions] != list(
            range(sum(s.partitions for s in manifest.stages))
        ):
            yield _damage(manifest, "has other partitions than its stages")

    def _beginning(self, manifest: Manifest) -> Iterator[Finding]:
        """The oldest manifest: whether what comes before it may be gone."""
        if not _begins_anew(manifest) and not self._may_begin_at(manifest.version):
            yield self._gap(0, manifest.version)
        elif manifest.version > 0:
            self._counters.forget()

    def _inheritance(self, before: Manifest, manifest: Manifest) -> Iterator[Finding]:
        """What a manifest has from its parent."""
        if (manifest.app, manifest.instance) != (before.app, before.instance):
            yield _damage(manifest, f"is of another application or instance than version {before.version}")
        if manifest.base == manifest.version:
            return
        if (manifest.base, manifest.base_id) != (before.base, before.base_id):
            yield _damage(manifest, f"has another base than version {before.version}")
        if len(manifest.partitions) != len(before.partitions):
            yield _damage(manifest, f"has another number of partitions than version {before.version}")
        if manifest.time_ms < before.time_ms:
            yield _damage(manifest, f"has an earlier processing time than version {before.version}")
        if (manifest.watermark_ms or 0) < (before.watermark_ms or 0) and manifest.watermark_ms is not None:
            yield _damage(manifest, f"has an earlier watermark than version {before.version}")

    def _gap(self, since: int, to: int) -> Finding:
        """The manifests from `since` on, before `to`, are missing."""
        self._lost.append(range(since, to))
        name = paths.manifest(since)
        which = f"{name} is missing" if since == to - 1 else f"{name} and all up to version {to - 1} are missing"
        return Finding("damage", name, since, f"{which}: the chain of commits is broken there")

    # -- what manifests name -----------------------------------------------------------------------------------------

    def _contents(self, before: Manifest | None, manifest: Manifest) -> Iterator[Finding]:
        if manifest.base == manifest.version:
            self._counters.begin(len(manifest.partitions))
        for commit in manifest.partitions:
            yield from self._delta(before, manifest, commit)
            for ref in commit.outboxes.values():
                table = yield from self._table(manifest, ref, "outbox")
                if table is not None and table.num_rows != ref.rows:
                    yield _row_damage(manifest, ref, table)

        for ref in manifest.spark_files.values():
            yield from self._spark_file(manifest, ref)

    def _spark_file(self, manifest: Manifest, ref: FileRef) -> Iterator[Finding]:
        """A file of Spark's; one that several commits name is read once. At the floor it is still needed."""
        self._named.add(ref.name)
        if ref in self._sparks:
            return
        try:
            read_bytes(self._storage, ref)
        except Damaged as error:
            if self._may_be_gone(manifest.version + 1):
                return
            yield Finding("damage", ref.name, manifest.version, str(error))
        else:
            self._count(ref.length)
        self._sparks.add(ref)

    def _delta(self, before: Manifest | None, manifest: Manifest, commit: PartitionCommit) -> Iterator[Finding]:
        changes: list[Change] = []
        ref = commit.delta
        if ref is not None:
            table = yield from self._table(manifest, ref, "delta")
            if table is None:
                self._counters.forget()
                return
            if table.schema.names != ["key", "value"] or {str(kind) for kind in table.schema.types} != {"binary"}:
                self._counters.forget()
                yield Finding("damage", ref.name, manifest.version, f"{ref.name} has other columns than a delta")
                return
            if table.num_rows != ref.rows:
                yield _row_damage(manifest, ref, table)
            changes = list(changes_of(table))
            keys = [key for key, _ in changes]
            if any(one >= other for one, other in pairwise(keys)):
                yield Finding("damage", ref.name, manifest.version, f"{ref.name} is not in the order of its keys")
        grown = self._counters.grow(commit.partition, changes)
        is_comparable = before is not None and len(before.partitions) == len(manifest.partitions)
        if manifest.kind == "batch" and before is not None and is_comparable and grown is not None:
            yield from _miscounted(before.partitions[commit.partition], manifest, commit, changes, grown)

    def _table(self, manifest: Manifest, ref: FileRef, kind: str) -> Generator[Finding, None, pa.Table | None]:
        """A file that a manifest names, as a table; None if that cannot be had."""
        self._named.add(ref.name)
        try:
            table = read_table(self._storage, ref, kind)
        except (Damaged, FutureFormat) as error:
            if not (self._may_be_gone(manifest.version) or self._is_retired(paths.manifest(manifest.version))):
                yield Finding("damage", ref.name, manifest.version, str(error))
            return None
        except (pa.ArrowException, ValueError, OSError):
            said = f"{ref.name} has the right checksum and is no Arrow file"
            yield Finding("damage", ref.name, manifest.version, said)
            return None
        self._count(ref.length)
        return table

    # -- snapshots ---------------------------------------------------------------------------------------------------

    @property
    def _floor(self) -> int:
        """The version up to which what was written is in every snapshot that can be used, and may be gone."""
        return min((snapshot.floor for snapshot in self._usable), default=-1)

    def _may_be_gone(self, version: int) -> bool:
        """Whether no recovery needs what a version has written, as the snapshots are by now."""
        if version > self._floor:
            self._look()
        return version <= self._floor

    def _may_begin_at(self, version: int) -> bool:
        """Whether no recovery needs the versions before this one, as the snapshots are by now."""
        if version > self._beginning_of_kept:
            self._look()
        return version <= self._beginning_of_kept

    @property
    def _beginning_of_kept(self) -> int:
        return max((snapshot.floor for snapshot in self._usable), default=0)

    def _look(self) -> None:
        """Which snapshots of this chain there are now, and which of them can be used. Nothing is read if they are the same."""
        names = self._snapshot_names()
        while names != self._seen:
            self._seen = names
            self._of_this_chain = [snapshot for snapshot in self._readable(names) if is_of(self._chain, snapshot)]
            there = self._storage.sizes(paths.SNAPSHOT_FILES)
            self._usable = [
                snapshot
                for snapshot in self._of_this_chain
                if all(there.get(file.name) == file.length for part in snapshot.partitions for file in part.files)
            ]
            names = self._snapshot_names()  # one that was retired meanwhile looks like one that cannot be used

    def _snapshot_names(self) -> list[str]:
        return [name for name in self._storage.names(paths.SNAPSHOTS) if paths.is_named_well(name)]

    def _readable(self, names: list[str]) -> Iterator[Snapshot]:
        for name in names:
            with suppress(Damaged, FutureFormat):  # of those that are read, `_lists` has said so
                yield read_snapshot(self._storage, paths.version_of(name))

    def _lists(self, names: list[str]) -> Iterator[Finding]:
        """What each snapshot consists of."""
        for name in names:
            version = paths.version_of(name)
            try:
                snapshot = read_snapshot(self._storage, version)
            except (Damaged, FutureFormat) as error:
                if name in self._storage.names(paths.SNAPSHOTS):
                    self._lost.append(range(version, version + 1))
                    yield Finding("damage", name, version, str(error))
                continue
            self._snapshots.append(snapshot)
        self._look()

    def _copies(self) -> Iterator[Finding]:
        """The files of each snapshot; one that several share is read once."""
        for snapshot in self._snapshots:
            name = paths.snapshot(snapshot.version)
            if self._ids.get(snapshot.version) not in (None, snapshot.manifest):
                said = f"{name} is of another commit than version {snapshot.version}"
                yield Finding("damage", name, snapshot.version, said)
            self._count(len(sealed(snapshot)))
            files = [file for part in snapshot.partitions for file in part.files if file.name not in self._named]
            for file in files:
                self._named.add(file.name)
                if self._is_copied(file):
                    self._count(file.length)
                elif name in self._storage.names(paths.SNAPSHOTS):  # else it was retired meanwhile
                    said = f"{file.name} is missing or damaged; a restore takes an older snapshot, if there is one"
                    yield Finding("damage", file.name, snapshot.version, said)

    def _is_copied(self, file: SnapshotFile) -> bool:
        with tempfile.NamedTemporaryFile(prefix="holdfast-verify-") as temporary:
            try:
                self._storage.get_file(file.name, Path(temporary.name))
            except Missing:
                return False
            return is_whole(Path(temporary.name), file)

    # -- the rest ----------------------------------------------------------------------------------------------------

    def _marks(self, names: list[str]) -> Iterator[Finding]:
        last = -1 if self.tally.last is None else self.tally.last
        for name in names:
            version = paths.version_of(name)
            try:
                data = self._storage.get(name)
            except Missing:
                continue  # removed meanwhile; nothing needs it
            self._count(len(data))
            if version > last:
                self._lost.append(range(last + 1, version + 1))
                missing = paths.manifest(version)
                said = f"{missing} is missing, though {name} says that its output was delivered"
                yield Finding("damage", missing, version, said)
            elif version in self._ids:
                yield from self._mark(name, version, data)
            elif not self._is_lost(version):
                yield Finding("orphan", name, version, f"{name} is of a version that is no longer there")

    def _mark(self, name: str, version: int, data: bytes) -> Iterator[Finding]:
        try:
            marked = msgspec.json.decode(data, type=dict[str, str]).get("manifest")
        except (msgspec.DecodeError, UnicodeDecodeError):
            said = f"{name} cannot be read; if version {version} is the last one, it is delivered again"
            yield Finding("damage", name, version, said)
            return
        if self._ids[version] not in (None, marked):
            said = f"{name} marks the output of another commit than version {version}"
            yield Finding("damage", name, version, said)

    def _orphans(self, prefix: str, sizes: dict[str, int]) -> Iterator[Finding]:
        last = -1 if self.tally.last is None else self.tally.last
        nameless = sizes.keys() - self._named
        if nameless:
            nameless &= set(self._storage.names(prefix))  # some may be gone by now
        for name in sorted(nameless):
            version = paths.version_of(name) if paths.is_named_well(name) else None
            if version is None:
                said = "is not a file of Holdfast"
            elif self._is_lost(version):
                continue
            elif prefix == paths.SNAPSHOT_FILES:
                said = "is named by no snapshot: an upload is on its way, or was lost on it"
            elif version > last:
                said = "is not committed: a batch is on its way, or was lost on it"
            else:
                said = "is named by no commit: the work of an attempt that lost"
            self.tally.orphan_bytes += sizes[name]
            yield Finding("orphan", name, version, f"{name} {said}")

    def _strangers(self, names: dict[str, int]) -> Iterator[Finding]:
        for name in sorted(names):
            if not paths.is_named_well(name):
                yield Finding(
                    "damage", name, None, f"{name} is not a file of Holdfast and is in its way; move it elsewhere"
                )

    def _well_named(self, prefix: str) -> dict[str, int]:
        return {name: size for name, size in self._storage.sizes(prefix).items() if paths.is_named_well(name)}

    def _is_lost(self, version: int) -> bool:
        return any(version in versions for versions in self._lost)

    def _is_retired(self, name: str) -> bool:
        """Whether a manifest is gone by now because it was no longer needed, and everything before it with it."""
        names = self._storage.names(paths.COMMITS)
        return bool(names) and name < names[0]

    def _count(self, size: int) -> None:
        self.tally.files += 1
        self.tally.bytes += size


class _Counters:
    """By partition: the documents and their sizes, as long as they are known and not too many."""

    def __init__(self) -> None:
        self.are_whole = True
        self._sizes: list[dict[bytes, int]] | None = None

    def begin(self, partitions: int) -> None:
        """The state is empty."""
        self._sizes = [{} for _ in range(partitions)]

    def forget(self) -> None:
        self._sizes = None
        self.are_whole = False

    def grow(self, partition: int, changes: list[Change]) -> tuple[int, int] | None:
        """By how many documents and bytes the state grows; None if that cannot be told."""
        if self._sizes is None or sum(map(len, self._sizes)) > COUNTED or partition >= len(self._sizes):
            self.forget()
            return None
        sizes = self._sizes[partition]
        documents = size = 0
        for key, value in changes:
            if key[:1] != _DOCUMENT:
                continue
            known = sizes.pop(key, None)
            if known is not None:
                documents -= 1
                size -= known + len(key)
            if value is not None:
                sizes[key] = len(value)
                documents += 1
                size += len(key) + len(value)
        return documents, size


def _miscounted(
    before: PartitionCommit, manifest: Manifest, commit: PartitionCommit, changes: list[Change], grown: tuple[int, int]
) -> Iterator[Finding]:
    documents = [value for key, value in changes if key[:1] == _DOCUMENT]
    removed = documents.count(None)
    if (commit.keys_updated, commit.keys_removed) != (len(documents) - removed, removed):
        yield _damage(manifest, f"counts other changes than partition {commit.partition} has")
    if (commit.keys - before.keys, commit.bytes - before.bytes) != grown:
        yield _damage(manifest, f"counts other keys or bytes than partition {commit.partition} has")


def _begins_anew(manifest: Manifest) -> bool:
    """Whether it is the first one of a restore from Kafka, which may come after versions that are in Kafka alone."""
    return manifest.kind in ("restoring", "restored") and manifest.base == manifest.version


def _damage(manifest: Manifest, said: str) -> Finding:
    name = paths.manifest(manifest.version)
    return Finding("damage", name, manifest.version, f"{name} {said}")


def _row_damage(manifest: Manifest, ref: FileRef, table: pa.Table) -> Finding:
    said = f"{ref.name} has {table.num_rows} rows where the commit says {ref.rows}"
    return Finding("damage", ref.name, manifest.version, said)
