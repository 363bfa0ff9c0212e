"""The store that lives in this process: for tests, and for applications that keep nothing.

The plainest thing that keeps the contract of `stores/base.py`, so it is also the model the other stores are read
against. A checkpoint holds two files: `entries.msgpack`, the entries in key order, and `mark.msgpack`.
"""

from __future__ import annotations

import shutil
import weakref
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import mkdtemp

import msgspec

from holdfast.stores.base import EMPTY, Change, DamagedStore, Mark, WrongVersion

_MARK = "mark.msgpack"
_ENTRIES = "entries.msgpack"


class MemoryStore:
    """A `Store` in a dict. It ends with the process; closing it changes nothing."""

    def __init__(self) -> None:
        self._mark = EMPTY
        self._values: dict[bytes, bytes] = {}
        self._staging: TemporaryPlace | None = None

    @classmethod
    def open(cls, directory: Path) -> MemoryStore:
        """The store that `checkpoint(directory)` wrote."""
        try:
            mark = msgspec.msgpack.decode((directory / _MARK).read_bytes(), type=Mark)
            entries = msgspec.msgpack.decode((directory / _ENTRIES).read_bytes(), type=list[tuple[bytes, bytes]])
        except (FileNotFoundError, msgspec.MsgspecError) as error:
            raise DamagedStore(f"{directory} is not a whole checkpoint: {error}", path=directory) from error
        store = cls()
        store._mark, store._values = mark, dict(entries)
        return store

    def mark(self) -> Mark:
        return self._mark

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return [self._values.get(key) for key in keys]

    def scan(self, start: bytes, end: bytes | None) -> Iterator[tuple[bytes, bytes]]:
        keys = sorted(self._values)
        stop = len(keys) if end is None else bisect_left(keys, end)
        return iter([(key, self._values[key]) for key in keys[bisect_left(keys, start) : stop]])

    def apply(self, changes: Iterable[Change], since: Mark, to: Mark) -> None:
        if self._mark == to:
            return
        if self._mark != since:
            raise WrongVersion(self._mark, since, to)
        values = dict(self._values)
        for key, value in changes:
            if value is None:
                values.pop(key, None)
            else:
                values[key] = value
        self._mark, self._values = to, values

    def checkpoint(self, directory: Path) -> None:
        directory.mkdir()
        (directory / _ENTRIES).write_bytes(msgspec.msgpack.encode(sorted(self._values.items())))
        (directory / _MARK).write_bytes(msgspec.msgpack.encode(self._mark))

    def staging(self) -> Path:
        if self._staging is None:
            self._staging = TemporaryPlace()
        directory = self._staging.path / "files"
        directory.mkdir(exist_ok=True)
        return directory

    def unstage(self) -> None:
        self._staging = None

    def replace(self, mark: Mark) -> None:
        staged = MemoryStore.open(self.staging())
        if staged._mark != mark:
            raise DamagedStore(f"the checkpoint holds {staged._mark}, not {mark}")
        self._mark, self._values = staged._mark, staged._values
        self._staging = None

    def wipe(self) -> None:
        self._mark, self._values = EMPTY, {}

    def close(self) -> None:
        pass


class TemporaryPlace:
    """A directory that goes when nobody refers to it any more."""

    def __init__(self) -> None:
        self.path = Path(mkdtemp(prefix="holdfast-memory-"))
        weakref.finalize(self, shutil.rmtree, self.path)
