"""Slots: where the local stores of a host lie, and who may open one.

    <local_dir>/<instance>/<partition>/slot-<n>/       a database
    <local_dir>/<instance>/<partition>/slot-<n>.lock   held (flock) by whoever has it open
    <local_dir>/<instance>/<partition>/slot-<n>.damaged    its database is not to be used any more
    <local_dir>/<instance>/<partition>/slot-<n>.restore/   a database on its way from a snapshot to the slot
    <local_dir>/<instance>/<partition>/copy-<attempt>/     a copy of one, on its way to a snapshot

A partition needs one slot. A second one appears when a task finds the first held for longer than `PATIENCE_S`, by a
zombie of an earlier attempt or by a reader: the newcomer must neither block nor share. The rules:
- no database is opened, emptied or removed without its lock;
- a lock file lies outside the database and is never deleted, so two processes can never lock two files of one name;
- of the slots that nobody holds, the one at the highest version is used and the others are removed;
- a slot that is damaged is emptied: whoever opens it builds it again from the log. Whoever finds the damage without the
  lock, in a copy, leaves a note;
- a partition has one copy: to make one removes those before it, which are leftovers of killed runs. An upload may be reading
  one of them, so a copy goes as a whole: it is renamed first;
- what nobody has opened for `STALE_S` is removed: of partitions that moved away, and of instances that are no more.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from rocksdict import DbClosedError

from holdfast.stores.base import DamagedStore, Mark, Store
from holdfast.stores.rocksdb import CHECK, STAGING, RocksDBStore, check, erase, named_errors

PATIENCE_S = 1.0
"""How long a newcomer waits for a slot that is held before it starts another one."""

STALE_S = 24 * 3600.0
"""After so long without use a local store is taken for one that is not coming back."""

_COPY = "copy-"
_DAMAGED = ".damaged"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LocalStores:
    """The local stores of this host. Plain settings: it travels to the tasks."""

    local_dir: Path

    @contextmanager
    def open(self, instance: str, partition: int) -> Iterator[Store]:
        """The store of a partition, locked while the block runs and closed after it. It may be at any version."""
        home = self._home(instance, partition)
        with named_errors(home):
            home.mkdir(parents=True, exist_ok=True)
            held = _lock_slots(home)
        try:
            store = _newest(held)
            try:
                yield store
            finally:
                _close(store)
        finally:
            for lock in held.values():
                _unlock(lock)

    @contextmanager
    def scratch(self) -> Iterator[Store]:
        """An empty store that is gone when the block ends; what a kill leaves of it lies in `<local_dir>/scratch`."""
        parent = self.local_dir / "scratch"
        with named_errors(parent):
            parent.mkdir(parents=True, exist_ok=True)
            directory = Path(tempfile.mkdtemp(dir=parent))
        store = RocksDBStore(directory)
        try:
            yield store
        finally:
            store.close()
            with named_errors(directory):
                shutil.rmtree(directory)

    def kept(self, instance: str) -> set[int]:
        """The partitions of an instance that have a store on this host, whatever it holds."""
        return {int(home.name) for home in (self.local_dir / instance).glob("[0-9]*") if _slots(home)}

    def copy(self, instance: str, partition: int, store: Store, name: str) -> None:
        """Keep a copy of an open store as it is. Earlier copies of the partition go."""
        home = self._home(instance, partition)
        with named_errors(home):
            for copy in sorted(home.glob(f"{_COPY}*")):  # a copy before what belongs to it
                _remove(copy)
        store.checkpoint(home / f"{_COPY}{name}")

    def copied(self, instance: str, partition: int, name: str) -> Path | None:
        """The directory of a copy; None if it is not on this host."""
        directory = self._home(instance, partition) / f"{_COPY}{name}"
        return directory if directory.is_dir() else None

    def check(self, copy: Path, mark: Mark, files: Iterable[str]) -> None:
        """`DamagedStore` unless a copy is a whole store at `mark`; of its tables, those among `files` are read to the end."""
        check(copy, mark, files)

    def distrust(self, instance: str, partition: int) -> None:
        """Whoever opens the store of a partition next finds it empty. Who has it open is not disturbed."""
        home = self._home(instance, partition)
        with named_errors(home):
            for slot in _slots(home):
                _note(slot).touch()

    def forget(self, instance: str, partition: int, name: str) -> None:
        """Remove a copy, and what else nobody on this host needs any more."""
        directory = self.copied(instance, partition, name)
        with named_errors(self.local_dir):
            if directory is not None:
                _remove(directory)
            self.collect(time.time() - STALE_S)

    def collect(self, before: float) -> None:
        """Remove the stores that nobody holds and nobody has opened since `before`, in seconds since 1970."""
        for lock_file in self.local_dir.glob("*/*/slot-*.lock"):
            if lock_file.stat().st_mtime < before:
                _remove_stale(lock_file)
        for scratch in self.local_dir.glob("scratch/*"):
            if scratch.stat().st_mtime < before:
                shutil.rmtree(scratch)

    def _home(self, instance: str, partition: int) -> Path:
        return self.local_dir / instance / str(partition)


def _remove_stale(lock_file: Path) -> None:
    slot = lock_file.with_suffix("")
    doomed = [path for path in (slot, *_beside(slot), *slot.parent.glob(f"{_COPY}*")) if path.is_dir()]
    if not doomed:
        return
    lock = _lock(slot, touch=False)
    if lock is None:
        return
    try:
        for directory in doomed:
            shutil.rmtree(directory)
        _note(slot).unlink(missing_ok=True)
        log.info("removed %s, which nobody has used for a while", slot)
    finally:
        _unlock(lock)


def _beside(slot: Path) -> list[Path]:
    """The directories that belong to a slot and go with it."""
    return [slot.with_name(f"{slot.name}{STAGING}"), slot.with_name(f"{slot.name}{STAGING}{CHECK}")]


def _note(slot: Path) -> Path:
    """Is there if the slot is to be emptied."""
    return slot.with_name(f"{slot.name}{_DAMAGED}")


def _slots(home: Path) -> list[Path]:
    return [slot for slot in home.glob("slot-*") if not slot.suffix and slot.is_dir()]


def _remove(copy: Path) -> None:
    """Remove a copy, at once for whoever looks for it. Another process may be at it, too."""
    gone = copy.with_name(f"{_COPY}{secrets.token_hex(8)}.gone")
    with suppress(FileNotFoundError):
        copy.rename(gone)
        shutil.rmtree(gone)


def _lock_slots(home: Path) -> dict[Path, int]:
    """The slots of `home` that nobody holds, each with its lock now held: at least one, a new one if need be."""
    limit = time.monotonic() + PATIENCE_S
    while True:
        slots = _slots(home) or [home / "slot-0"]
        held = {slot: lock for slot in slots if (lock := _lock(slot)) is not None}
        if held:
            return held
        if time.monotonic() > limit:
            break
        time.sleep(0.01)
    for n in count():
        slot = home / f"slot-{n}"
        lock = _lock(slot)
        if lock is not None:
            log.warning("the local store %s is held by another process; taking %s", home, slot.name)
            return {slot: lock}
    raise AssertionError("count() does not end")


def _newest(held: dict[Path, int]) -> RocksDBStore:
    """Open the held slot at the highest version, remove the others and let go of their locks."""
    stores = sorted((_open(slot) for slot in held), key=lambda store: (-store.mark().version, store.path))
    for stale in stores[1:]:
        _close(stale)
        with named_errors(stale.path):
            for directory in (stale.path, *_beside(stale.path)):
                if directory.exists():
                    shutil.rmtree(directory)
        _unlock(held.pop(stale.path))
    return stores[0]


def _open(slot: Path) -> RocksDBStore:
    note = _note(slot)
    if note.exists():
        log.warning("emptying a damaged local store: %s", slot)
        if slot.exists():
            erase(slot)
        with named_errors(note):
            note.unlink()
    try:
        store = RocksDBStore(slot)
    except DamagedStore as damage:
        log.warning("emptying a damaged local store: %s", damage)
        erase(slot)
        return RocksDBStore(slot)
    try:
        store.mark()
    except DamagedStore as damage:
        log.warning("emptying a damaged local store: %s", damage)
        store.wipe()
    return store


def _close(store: RocksDBStore) -> None:
    """A store may turn out to be damaged only now, in a compaction. All that was read from it was checked: only it is lost."""
    try:
        store.close()
    except (DamagedStore, DbClosedError) as damage:
        log.warning("emptying a damaged local store: %s", damage)
        erase(store.path)


def _lock(slot: Path, *, touch: bool = True) -> int | None:
    """The lock of a slot, now held, or None; `touch`: the slot counts as used."""
    lock = os.open(f"{slot}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    if touch:
        os.utime(lock)
    return lock


def _unlock(lock: int) -> None:
    fcntl.flock(lock, fcntl.LOCK_UN)  # a child that was forked in between shares the lock: closing is not enough
    os.close(lock)
