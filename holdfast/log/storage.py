"""Storage: durable objects with names, written once.

The whole protocol needs few verbs. `put` creates and never overwrites, and what it has returned from survives a power
cut. On a local disk that takes more than a plain write: bytes go to a temporary name, are synced, are linked to
their final name (the link fails if that name exists, which makes it a put-if-absent), and the directory is synced.
Nothing half-written is ever visible under its final name. What a kill leaves under a temporary one is swept up later.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, NoReturn, Protocol

from holdfast.errors import HoldfastError, StorageFailed, StorageFull, StorageReadOnly

LEFT_S = 24 * 3600.0
"""After so long without a change a half-written file is taken for one that nobody finishes."""

_HALF = re.compile(r"\.[0-9a-f]{16}\.tmp")


class Exists(Exception):
    """The name is taken."""


class Missing(Exception):
    """There is no object of that name."""


class Storage(Protocol):
    """The port. After any exception but `Exists` and `Missing` the outcome of a call is unknown."""

    def put(self, name: str, data: bytes) -> None:
        """Create `name` durably, or raise `Exists` and change nothing.

        If the name holds these very bytes already, a put may succeed: an object store cannot tell them from its own. Bytes
        that two writers must not both succeed with have a random id in them.
        """

    def get(self, name: str) -> bytes:
        """The bytes of `name`, or `Missing`."""

    def put_file(self, name: str, path: Path) -> None:
        """As `put`, of the content of a local file, which need not fit in memory."""

    def get_file(self, name: str, path: Path) -> None:
        """Write the bytes of `name` to a local file, new or not; `Missing` if there are none."""

    def names(self, prefix: str) -> list[str]:
        """The names right below `prefix`, which ends with '/', sorted."""

    def sizes(self, prefix: str) -> dict[str, int]:
        """The same with their lengths in bytes."""

    def delete(self, name: str) -> None:
        """Remove `name`; nothing happens if there is none."""

    def delete_all(self, names: Sequence[str]) -> None:
        """Remove all of these, in any order; after an exception some may be there and others not."""

    def sweep(self, prefix: str) -> list[int]:
        """Remove what puts right below `prefix` have left that never came to an end; the lengths in bytes.

        A put that is under way is never in danger, unless it has done nothing for `LEFT_S`; then it fails.
        """


class LocalStorage:
    """A directory on a local disk. Picklable: tasks open the same directory.

    One that is not `durable` is as good while the machine runs, and waits for no disk.
    """

    def __init__(self, root: Path, *, durable: bool = True) -> None:
        self.root = root
        self._durable = durable

    def __repr__(self) -> str:
        return f"LocalStorage({str(self.root)!r})"

    def put(self, name: str, data: bytes) -> None:
        self._create(name, lambda file: file.write(data))

    def put_file(self, name: str, path: Path) -> None:
        with path.open("rb") as source:
            self._create(name, lambda file: shutil.copyfileobj(source, file, 1 << 20))

    def _create(self, name: str, write: Callable[[BinaryIO], object]) -> None:
        final = self.root / name
        temporary = final.with_name(_half())
        try:
            try:
                descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            except FileNotFoundError:
                _make_directory(final.parent)
                descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            try:
                try:
                    with os.fdopen(descriptor, "wb") as file:
                        write(file)
                        file.flush()
                        if self._durable:
                            os.fsync(file.fileno())
                    os.link(temporary, final)
                except FileExistsError:
                    raise Exists(name) from None
            finally:
                temporary.unlink(missing_ok=True)
            if self._durable:
                sync_directory(final.parent)
        except OSError as error:
            raise_as_storage_error(error, final)

    def get(self, name: str) -> bytes:
        try:
            return (self.root / name).read_bytes()
        except FileNotFoundError:
            raise Missing(name) from None
        except OSError as error:
            raise_as_storage_error(error, self.root / name)

    def get_file(self, name: str, path: Path) -> None:
        try:
            shutil.copyfile(self.root / name, path)
        except FileNotFoundError as error:
            if not path.parent.is_dir():
                raise_as_storage_error(error, path)
            raise Missing(name) from None
        except OSError as error:
            raise_as_storage_error(error, path)

    def names(self, prefix: str) -> list[str]:
        return sorted(self.sizes(prefix))

    def sizes(self, prefix: str) -> dict[str, int]:
        found: dict[str, int] = {}
        try:
            with os.scandir(self.root / prefix) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                        if not entry.name.startswith(".") and not entry.is_dir():
                            found[prefix + entry.name] = entry.stat().st_size
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise_as_storage_error(error, self.root / prefix)
        return found

    def delete(self, name: str) -> None:
        try:
            (self.root / name).unlink(missing_ok=True)
        except OSError as error:
            raise_as_storage_error(error, self.root / name)

    def delete_all(self, names: Sequence[str]) -> None:
        for name in names:
            self.delete(name)

    def sweep(self, prefix: str) -> list[int]:
        directory = self.root / prefix
        swept = []
        try:
            halves = [path for path in directory.iterdir() if _HALF.fullmatch(path.name)] if directory.is_dir() else []
            now = _file_time(directory) if halves else 0.0
            for half in halves:
                with contextlib.suppress(FileNotFoundError):  # its put has ended
                    found = half.stat()
                    if found.st_mtime < now - LEFT_S:
                        half.unlink()
                        swept.append(found.st_size)
        except OSError as error:
            raise_as_storage_error(error, directory)
        return swept


def _half() -> str:
    """A name for a file on its way."""
    return f".{secrets.token_hex(8)}.tmp"


def _file_time(directory: Path) -> float:
    """What the file system takes for now: its clock is the one that dates files, and may be another machine's."""
    probe = directory / _half()
    os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
    try:
        return probe.stat().st_mtime
    finally:
        probe.unlink()


def raise_as_storage_error(error: OSError, path: Path) -> NoReturn:
    """Turn an operating system's error into the one that says what to do."""
    raise storage_error(error, path) from error


def disk_error(text: str, path: Path) -> HoldfastError | None:
    """The same for what others, such as Spark, say about a disk, if it is what `text` is about."""
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        if os.strerror(number) in text:
            return storage_error(OSError(number, os.strerror(number)), path)
    return None


def storage_error(error: OSError, path: Path) -> HoldfastError:
    reason = os.strerror(error.errno) if error.errno else str(error)
    kind: type[HoldfastError] = StorageFailed
    advice = "look at the disk, then start again: the last commit is untouched"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        kind, advice = StorageFull, "free some space, then start again: the last commit is untouched"
    elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        kind, advice = StorageReadOnly, "make it writable for this user, then start again"
    return kind(f"{path}: {reason}; {advice}", path=str(path), errno=error.errno)


def _make_directory(directory: Path) -> None:
    """Create `directory` and its parents so that a power cut cannot lose them."""
    missing = [directory, *directory.parents]
    for parent in reversed([path for path in missing if not path.exists()]):
        parent.mkdir(exist_ok=True)
        sync_directory(parent.parent)


def sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
