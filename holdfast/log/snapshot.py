"""Snapshots: the files of every partition at one version, so that a restore need not begin with the first delta.

A snapshot becomes visible by one put, of the list of its files, when all of them are there. A file is written once, under
a name that carries the version it was uploaded for and a random id, and is shared by the snapshots that come after it for as
long as they contain it without a break: an upload refers to files of the newest visible snapshot and to no others.

Layout: snapshots/<version, 20 digits>.json, format 1, sealed like a manifest; snapshot-files/<version>-<partition>-<upload>-<n>.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from holdfast.errors import Damaged
from holdfast.failpoints import reach
from holdfast.log import paths
from holdfast.log.manifest import Chain, InstanceId, ManifestId, new_id
from holdfast.log.sealed import sealed, unsealed
from holdfast.log.storage import Missing, Storage, raise_as_storage_error
from holdfast.stores.base import Mark

FORMAT = 1
CHECKSUMS = "checksums.json"
"""Beside the copies of a store: what is known of files that do not change any more."""

logger = logging.getLogger("holdfast")


class SnapshotFile(msgspec.Struct, frozen=True):
    """A file of a store, and where it lies in the checkpoint."""

    path: str
    """Its name in the directory of the store."""
    name: str
    length: int
    checksum: str
    """blake2b of the whole file, 16 bytes in hex."""


class PartitionSnapshot(msgspec.Struct, frozen=True):
    """One partition, at the version that its files hold."""

    partition: int
    version: int
    attempt: str
    """With the version, the mark of the store."""
    files: tuple[SnapshotFile, ...]

    @property
    def mark(self) -> Mark:
        return Mark(self.version, self.attempt)

    @property
    def length(self) -> int:
        return sum(file.length for file in self.files)


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The state at a version. See docs/formats.md for every field."""

    format: int = FORMAT
    version: int
    manifest: ManifestId
    """Of that version."""
    instance: InstanceId
    holder: str
    """Who took it, for people."""
    time_ms: int
    """When it became visible."""
    partitions: tuple[PartitionSnapshot, ...]

    @property
    def floor(self) -> int:
        """The oldest version that a partition has here: a restore needs what came after it."""
        return min(part.version for part in self.partitions)

    @property
    def length(self) -> int:
        return sum(part.length for part in self.partitions)


def versions(storage: Storage) -> list[int]:
    """Of the visible snapshots, oldest first."""
    return [paths.version_of(name) for name in storage.names(paths.SNAPSHOTS)]


def may_be_removed(storage: Storage, version: int) -> bool:
    """Whether the manifest of `version` may be gone because a snapshot has made it needless."""
    return any(found > version for found in versions(storage))


def read_snapshot(storage: Storage, version: int) -> Snapshot:
    name = paths.snapshot(version)
    try:
        data = storage.get(name)
    except Missing:
        raise Damaged(f"{name} is missing", name=name) from None
    snapshot = unsealed(name, data, Snapshot, "snapshot", FORMAT)
    if snapshot.version != version:
        raise Damaged(f"{name} is the snapshot of version {snapshot.version}", name=name)
    return snapshot


def newest_snapshot(storage: Storage) -> Snapshot | None:
    """The newest one of this chain; None also if it cannot be read."""
    chain = Chain(storage)
    for version in reversed(versions(storage)):
        try:
            snapshot = read_snapshot(storage, version)
        except Damaged as damage:
            logger.warning("%s", damage)
            return None
        if is_of(chain, snapshot):
            return snapshot
    return None


def is_of(chain: Chain, snapshot: Snapshot) -> bool:
    """Whether `snapshot` holds what the chain says. One from before a checkpoint was put back in part does not."""
    try:
        return chain.read(snapshot.version).id == snapshot.manifest
    except Damaged:
        return False


def publish(storage: Storage, snapshot: Snapshot) -> None:
    """Make it visible: everything that it names is there."""
    storage.put(paths.snapshot(snapshot.version), sealed(snapshot))


def unsent(copy: Path, known: Iterable[SnapshotFile]) -> dict[str, int]:
    """The files of a local copy that are not `known` to be in the checkpoint, and their lengths."""
    there = {(file.checksum, file.length) for file in known}
    checksums = Checksums(copy.parent / CHECKSUMS)
    lengths = {path: path.stat().st_size for path in sorted(copy.iterdir())}
    found = {path.name: length for path, length in lengths.items() if (checksums.of(path), length) not in there}
    checksums.save()
    return found


def upload(
    storage: Storage,
    copy: Path,
    partition: int,
    mark: Mark,
    known: Iterable[SnapshotFile],
    only: Collection[str] | None = None,
) -> PartitionSnapshot:
    """Put the files of a local copy into the checkpoint, but for those that are `known` to be there.

    With `only`, no others but these; then the others are not in what is returned.
    """
    there = {(file.checksum, file.length): file.name for file in known}
    checksums = Checksums(copy.parent / CHECKSUMS)
    identity = new_id()
    files = []
    for number, path in enumerate(sorted(copy.iterdir())):
        length, checksum = path.stat().st_size, checksums.of(path)
        name = there.get((checksum, length))
        if name is None and only is not None and path.name not in only:
            continue
        if name is None:
            name = paths.snapshot_file(mark.version, partition, identity, number)
            storage.put_file(name, path)
            reach("upload.file", mark.version)
        files.append(SnapshotFile(path.name, name, length, checksum))
    checksums.save()
    return PartitionSnapshot(partition, mark.version, mark.attempt, tuple(files))


def fetch(storage: Storage, part: PartitionSnapshot, directory: Path) -> Iterator[int]:
    """Bring the files into `directory`, and nothing else; after each, its length. Those that are whole already are kept."""
    wanted = {file.path for file in part.files}
    with _named_errors(directory):
        for path in directory.iterdir():
            if path.name not in wanted:
                path.unlink()
    checksums = Checksums(directory.parent / CHECKSUMS)
    for file in part.files:
        path = directory / file.path
        if path.parent != directory:
            raise Damaged(f"{file.name} belongs to {file.path!r}, which is no plain name", name=file.name)
        if not path.exists() or not _is_whole(path, file, checksums):
            with _named_errors(path):
                path.unlink(missing_ok=True)
            try:
                storage.get_file(file.name, path)
            except Missing:
                raise Damaged(f"{file.name} is missing, though a snapshot names it", name=file.name) from None
            if not _is_whole(path, file, checksums):
                raise Damaged(f"{file.name} is damaged: it is not what the snapshot says", name=file.name)
            checksums.save()
            reach("restore.file", part.version)
            yield file.length
    reach("restore.fetched", part.version)


def changed(part: PartitionSnapshot, directory: Path) -> list[Path]:
    """The files in `directory` that have changed since they were fetched. All are read again."""
    return [path for file in part.files if not is_whole(path := directory / file.path, file)]


def staged(part: PartitionSnapshot, there: Mapping[str, int]) -> int:
    """How many bytes of it `fetch` will not have to bring, as far as the lengths of the files that are there tell."""
    return sum(file.length for file in part.files if there.get(file.path) == file.length)


def _is_whole(path: Path, file: SnapshotFile, checksums: Checksums) -> bool:
    return path.stat().st_size == file.length and checksums.of(path) == file.checksum


@contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise_as_storage_error(error, path)


def is_whole(path: Path, file: SnapshotFile) -> bool:
    """Whether a local copy of a file is what the snapshot says."""
    return path.stat().st_size == file.length and digest(path) == file.checksum


class Checksums:
    """Checksums of local files, remembered in the file `path` by what a file is: its inode, its size and its last change."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._used: dict[str, str] = {}
        try:
            self._known = msgspec.json.decode(path.read_bytes(), type=dict[str, str])
        except (FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError):
            self._known = {}

    def of(self, path: Path) -> str:
        found = path.stat()
        identity = f"{found.st_ino} {found.st_size} {found.st_mtime_ns}"
        checksum = self._known.get(identity)
        if checksum is None:
            checksum = digest(path)
            self._known[identity] = checksum
        self._used[identity] = checksum
        return checksum

    def save(self) -> None:
        """Remember those that were asked for, and forget the others."""
        temporary = self._path.with_name(f"{self._path.name}.{new_id()}.tmp")
        with _named_errors(self._path):
            try:
                temporary.write_bytes(msgspec.json.encode(self._used))
                temporary.replace(self._path)
            except OSError:
                temporary.unlink(missing_ok=True)
                raise


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, _blake2b).hexdigest()


def _blake2b() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=16)
