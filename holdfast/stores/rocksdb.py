"""The store on a local disk: one RocksDB database per state partition.

Pooled Spark workers mean that any process may get the partition next, so a database is opened and closed at every
micro-batch, and everything here follows from that.

- No write-ahead log: the committed deltas are the log. A version is one WriteBatch that also holds the mark; a batch
  lies in one memtable and a memtable becomes one file, so whatever a kill leaves is some applied version, whole.
  That holds for one column family only.
- `close` flushes, so what was applied outlives the process. Each cycle thus adds one sorted run.
- Compaction never runs on into a close, which would throw its work away: `close` waits while there are more than
  `MAX_RUNS` runs. It is size-tiered (universal), since a leveled one would rewrite each change ten times.
- Every block that is read is checked. What RocksDB reports as corrupt or missing is `DamagedStore`. A block that nobody reads
  may rot unseen: `check` reads all of them, before files leave for a snapshot and when they come back from one.

Keys that begin with a zero byte belong to this module: the mark lies under one. The engine's keys begin with a letter.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar, cast

from rocksdict import (
    AccessType,
    BlockBasedOptions,
    Checkpoint,
    ChecksumType,
    DbClosedError,
    DBCompactionStyle,
    DBCompressionType,
    Options,
    Rdict,
    WriteBatch,
    WriteOptions,
)

from holdfast.errors import HoldfastError, StorageFailed, StorageFull, StorageReadOnly
from holdfast.failpoints import reach
from holdfast.stores.base import EMPTY, Change, DamagedStore, Mark, WrongVersion

T = TypeVar("T")

MAX_RUNS = 8
"""Sorted runs that a closed database may have. More make reads slower, fewer make compaction dearer."""

COMPACTION_LIMIT_S = 60.0
"""How long `close` waits for a compaction before it gives up and leaves it to the next one."""

PAGE = 512
"""Entries per call of RocksDB. One `get` of tens of thousands of keys costs 20 to 40 % more than many of these."""

STAGING = ".restore"
"""Ends the name of the directory beside a store in which another is made ready to take its place."""

CHECK = ".check"
"""Ends the name of the directory beside another in which tables of that one are checked."""

_MARK = b"\x00mark"
_FIRST = b"\x01"


class RocksDBStore:
    """A `Store` in the directory `path`. The caller holds the lock of the directory (`stores/slots.py`)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._db = _open(path)
        self._closed = False

    def mark(self) -> Mark:
        with named_errors(self.path):
            return _mark_of(self._db)

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        with named_errors(self.path):
            values: list[bytes | None] = []
            for start in range(0, len(keys), PAGE):
                values += cast("list[bytes | None]", self._db.get(list(keys[start : start + PAGE])))
            return values

    def scan(self, start: bytes, end: bytes | None) -> Iterator[tuple[bytes, bytes]]:
        after = max(start, _FIRST)
        while page := self._page(after, end):
            yield from page
            after = page[-1][0] + b"\x00"

    def apply(self, changes: Iterable[Change], since: Mark, to: Mark) -> None:
        held = self.mark()
        if held == to:
            return
        if held != since:
            raise WrongVersion(held, since, to)
        batch = WriteBatch(raw_mode=True)
        put, delete = batch.put, batch.delete
        for key, value in changes:
            if value is None:
                delete(key)
            else:
                put(key, value)
        put(_MARK, to.version.to_bytes(8, "big") + to.attempt.encode())
        with named_errors(self.path):
            self._db.write(batch)

    def checkpoint(self, directory: Path) -> None:
        if directory.exists():
            raise FileExistsError(errno.EEXIST, "a checkpoint is written to a new directory", str(directory))
        with named_errors(self.path):
            self._db.flush()
            Checkpoint(self._db).create_checkpoint(str(directory))

    def staging(self) -> Path:
        directory = self._staging
        with named_errors(directory):
            directory.mkdir(exist_ok=True)
        return directory

    def unstage(self) -> None:
        if self._staging.exists():
            with named_errors(self._staging):
                shutil.rmtree(self._staging)

    @property
    def _staging(self) -> Path:
        return self.path.with_name(f"{self.path.name}{STAGING}")

    def replace(self, mark: Mark) -> None:
        staged = self.staging()
        check(staged, mark, [path.name for path in staged.iterdir()])
        self._abandon()
        erase(self.path)  # whoever is killed here leaves an empty store, and the other one whole beside it
        reach("restore.emptied", mark.version)
        with named_errors(self.path):
            staged.rename(self.path)
        self._db = _open(self.path)
        self._closed = False

    def wipe(self) -> None:
        self._abandon()
        erase(self.path)
        self._db = _open(self.path)
        self._closed = False

    def _abandon(self) -> None:
        """Close a database that is about to go. One that is damaged complains of it, and is closed all the same."""
        self._closed = True
        with suppress(Exception):
            self._db.close()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            with named_errors(self.path):
                self._db.flush()
                _let_compaction_finish(self._db)
        finally:
            with named_errors(self.path):
                self._db.close()

    def _page(self, start: bytes, end: bytes | None) -> list[tuple[bytes, bytes]]:
        # An iterator keeps the database open, and locked, after `close`: none may outlive this call, not even in the
        # traceback of an error.
        entries = self._db.iter()
        try:
            with named_errors(self.path):
                page: list[tuple[bytes, bytes]] = []
                entries.seek(start)
                while entries.valid() and len(page) < PAGE:
                    key = entries.key()
                    if end is not None and key >= end:
                        break
                    page.append((key, entries.value()))
                    entries.next()
                entries.status()  # at damage an iterator ends as if there were no more; only this tells
                return page
        finally:
            del entries


def check(directory: Path, mark: Mark, files: Iterable[str]) -> None:
    """`DamagedStore` unless `directory` is a database at `mark` with all that it needs; nobody may have it open.

    Of its tables, those among `files` are read to the end and every block is checked; its `files` names the damaged ones.
    Not checked are bloom filters, which are not used when they are damaged.
    """
    with named_errors(directory):
        if not (directory / "CURRENT").exists():
            raise DamagedStore(f"{directory} has no CURRENT file", path=directory)
        held = _read(directory, _mark_of)
        if held != mark:
            raise DamagedStore(f"{directory} holds {held}, not {mark}", path=directory)
        tables = sorted(name for name in files if name.endswith(".sst"))
        damaged = sorted(set(tables) - _whole(directory, tables)) if tables else []
    if damaged:
        raise DamagedStore(f"{directory}: damaged blocks in {', '.join(damaged)}", path=directory, files=damaged)


def _whole(directory: Path, tables: Sequence[str]) -> set[str]:
    """Those of `tables` that can be read to the end.

    RocksDB reads single tables only when it repairs a database. So it gets one that has nothing but links to these, and
    takes up those that are whole.
    """
    place = directory.with_name(f"{directory.name}{CHECK}")
    if place.exists():  # of a check that was killed
        shutil.rmtree(place)
    place.mkdir()
    try:
        for table in tables:
            os.link(directory / table, place / table)
        Rdict.repair(str(place), _options())
        return _read(place, lambda db: {Path(file["name"]).name for file in db.live_files()})
    finally:
        shutil.rmtree(place)


def _read(directory: Path, question: Callable[[Rdict], T]) -> T:
    """What a database answers that is not to be changed."""
    db = Rdict(str(directory), _options(), {"default": _options()}, AccessType.read_only(False))
    try:
        return question(db)
    finally:
        db.close()


def _mark_of(db: Rdict) -> Mark:
    held = db.get(_MARK)
    return EMPTY if held is None else Mark(int.from_bytes(held[:8], "big"), held[8:].decode())


def erase(path: Path) -> None:
    """Empty the directory of a database that nobody has open."""
    with named_errors(path):
        for entry in path.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()


def _open(path: Path) -> Rdict:
    with named_errors(path):
        path.mkdir(parents=True, exist_ok=True)
        # Without CURRENT, RocksDB would start a new database over the tables of the lost one.
        if not (path / "CURRENT").exists() and any(path.glob("*.sst")):
            raise DamagedStore(f"{path} has tables but no CURRENT file", path=path)
        # Unless the options of the column family are given again, rocksdict reads them back from the database, and
        # what comes back has no bloom filter: reads are then twice as slow, and nothing says so.
        db = Rdict(str(path), _options(), column_families={"default": _options()})
        db.set_write_options(_without_wal())
        return db


def _let_compaction_finish(db: Rdict) -> None:
    # RocksDB's own "compaction-pending" can stay set with nothing left to do: count the runs instead.
    limit = time.monotonic() + COMPACTION_LIMIT_S
    while _runs(db) > MAX_RUNS and time.monotonic() < limit:
        time.sleep(0.002)


def _runs(db: Rdict) -> int:
    levels = [file["level"] for file in db.live_files()]
    return levels.count(0) + len(set(levels) - {0})


def _options() -> Options:
    table = BlockBasedOptions()
    table.set_format_version(5)
    table.set_checksum_type(ChecksumType.xxh3())
    table.set_bloom_filter(10, False)
    table.set_block_size(2048)
    table.set_block_restart_interval(4)
    table.disable_cache()  # the database lives for one batch: the page cache is the cache

    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_block_based_table_factory(table)
    options.set_compression_type(DBCompressionType.none())
    options.set_allow_mmap_reads(True)
    options.set_write_buffer_size(64 << 20)
    options.set_memtable_prefix_bloom_ratio(0.05)  # most keys of a batch were not in the delta before it
    options.set_memtable_whole_key_filtering(True)
    options.set_compaction_style(DBCompactionStyle.universal())
    options.set_level_zero_file_num_compaction_trigger(MAX_RUNS)
    options.set_level_zero_slowdown_writes_trigger(1 << 20)
    options.set_level_zero_stop_writes_trigger(1 << 20)
    options.set_max_background_jobs(2)
    options.set_max_open_files(-1)  # every table is opened, so a missing one is found, when the database is
    options.set_skip_stats_update_on_db_open(True)
    options.set_stats_dump_period_sec(0)
    options.set_stats_persist_period_sec(0)
    options.set_keep_log_file_num(1)
    options.set_max_log_file_size(1 << 20)
    return options


def _without_wal() -> WriteOptions:
    options = WriteOptions()
    options.disable_wal = True  # type: ignore[assignment, method-assign]  # a property; its stub says method
    return options


@contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Errors of RocksDB and of the file system get their names in `holdfast.errors`; `path` is where they happened."""
    try:
        yield
    except (HoldfastError, DbClosedError):
        raise
    except Exception as error:
        raise _kind(str(error))(f"{path}: {error}", path=path) from error


def _kind(text: str) -> type[HoldfastError]:
    if "No space left" in text or "Disk quota exceeded" in text:
        return StorageFull
    if "Read-only file system" in text or "Permission denied" in text:
        return StorageReadOnly
    if "Corruption" in text or "No such file" in text or "Invalid argument" in text:
        return DamagedStore
    return StorageFailed
