"""Where a host keeps its local stores: the slots of a partition, their locks, and who takes which."""

from __future__ import annotations

import multiprocessing
import multiprocessing.synchronize
import pickle
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from damage import rotted
from holding import contents, mark

from holdfast.stores import slots
from holdfast.stores.base import EMPTY, DamagedStore, Mark, Store
from holdfast.stores.rocksdb import MAX_RUNS, RocksDBStore
from holdfast.stores.slots import LocalStores

INSTANCE = "instance"


@pytest.fixture
def stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalStores:
    monkeypatch.setattr(slots, "PATIENCE_S", 0.05)
    settings_of_a_run = LocalStores(tmp_path)
    travelled: LocalStores = pickle.loads(pickle.dumps(settings_of_a_run))
    assert travelled == settings_of_a_run
    return travelled


def slot_of(store: Store) -> str:
    assert isinstance(store, RocksDBStore)
    return store.path.name


def advance(store: Store, to: int) -> None:
    for version in range(store.mark().version + 1, to + 1):
        store.apply([(b"dversion", b"%d" % version)], mark(version - 1), mark(version))


def test_a_partition_finds_its_store_again(stores: LocalStores) -> None:
    with stores.open(INSTANCE, 3) as store:
        advance(store, 5)
    with stores.open(INSTANCE, 3) as store:
        assert (slot_of(store), store.mark()) == ("slot-0", mark(5))
    with stores.open(INSTANCE, 4) as other:
        assert other.mark() == EMPTY


def test_a_second_opener_takes_another_slot_and_does_not_block(stores: LocalStores) -> None:
    with stores.open(INSTANCE, 0) as zombie:
        advance(zombie, 2)
        before = time.monotonic()
        with stores.open(INSTANCE, 0) as newcomer:
            assert time.monotonic() - before < 10.0  # it would be for ever
            assert slot_of(newcomer) == "slot-1"
            advance(newcomer, 4)
            assert zombie.mark() == mark(2)
        with stores.open(INSTANCE, 0) as again:  # still held: the other slot is found at once, with what it has
            assert (slot_of(again), again.mark()) == ("slot-1", mark(4))


def test_the_newest_free_slot_is_used_and_the_stale_one_is_collected(stores: LocalStores, tmp_path: Path) -> None:
    with stores.open(INSTANCE, 0) as zombie:
        advance(zombie, 2)
        with stores.open(INSTANCE, 0) as newcomer:
            advance(newcomer, 4)
    with stores.open(INSTANCE, 0) as store:
        assert (slot_of(store), store.mark()) == ("slot-1", mark(4))
    home = tmp_path / INSTANCE / "0"
    assert sorted(entry.name for entry in home.iterdir()) == ["slot-0.lock", "slot-1", "slot-1.lock"]


def test_wiping_a_store_keeps_others_out(stores: LocalStores) -> None:
    with stores.open(INSTANCE, 0) as store:
        advance(store, 1)
        store.wipe()
        with stores.open(INSTANCE, 0) as other:
            assert slot_of(other) != slot_of(store)


def test_a_held_slot_is_never_collected(stores: LocalStores) -> None:
    with stores.open(INSTANCE, 0) as zombie:
        advance(zombie, 1)
        for to in (3, 5):
            with stores.open(INSTANCE, 0) as store:
                advance(store, to)
        assert contents(zombie) == {b"dversion": b"1"}


def hold(stores: LocalStores, ready: multiprocessing.synchronize.Event) -> None:
    with stores.open(INSTANCE, 0) as store:
        advance(store, 1)
        ready.set()
        time.sleep(60)


def test_the_lock_of_a_killed_process_is_free_and_its_child_does_not_keep_it(stores: LocalStores) -> None:
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    holder = context.Process(target=hold, args=(stores, ready))
    holder.start()
    assert ready.wait(20)
    with stores.open(INSTANCE, 0) as store:
        assert slot_of(store) == "slot-1"
    holder.kill()
    holder.join()
    assert holder.exitcode == -signal.SIGKILL
    with stores.open(INSTANCE, 0) as store:
        assert slot_of(store) == "slot-0"


def test_a_program_that_was_started_meanwhile_does_not_hold_the_lock(stores: LocalStores) -> None:
    with stores.open(INSTANCE, 0):
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False)
    try:
        with stores.open(INSTANCE, 0) as store:
            assert slot_of(store) == "slot-0"
    finally:
        child.communicate(b"\n")


@pytest.mark.parametrize("where", ["CURRENT", "the mark"])
def test_a_damaged_slot_is_emptied(stores: LocalStores, tmp_path: Path, where: str) -> None:
    with stores.open(INSTANCE, 0) as store:
        advance(store, 1)
    slot = tmp_path / INSTANCE / "0" / "slot-0"
    if where == "CURRENT":
        (slot / "CURRENT").unlink()
    else:
        table = next(slot.glob("*.sst"))
        content = bytearray(table.read_bytes())
        content[content.index(b"attempt-1")] ^= 1
        table.write_bytes(content)
    with stores.open(INSTANCE, 0) as store:
        assert (slot_of(store), store.mark(), contents(store)) == ("slot-0", EMPTY, {})


def test_a_slot_that_a_compaction_finds_damaged_is_emptied_when_it_is_closed(
    stores: LocalStores, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever writes while the compaction fails hears of it too."""

    def fill(store: Store, version: int) -> None:
        changes = [(b"d%d-%d" % (version, n), b"value" * 20) for n in range(200)]
        store.apply(changes, store.mark(), Mark(version, "attempt"))

    for version in range(3):
        with stores.open(INSTANCE, 0) as store:
            fill(store, version)
    table = min((tmp_path / INSTANCE / "0" / "slot-0").glob("*.sst"))
    content = bytearray(table.read_bytes())
    content[len(content) // 4] ^= 1
    table.write_bytes(content)
    emptied_at = None
    for version in range(3, 30):
        with suppress(DamagedStore), stores.open(INSTANCE, 0) as store:
            if store.mark() == EMPTY:
                emptied_at = version
                break
            fill(store, version)
    assert emptied_at is not None, "no compaction has met the damage"
    assert "emptying a damaged local store" in caplog.text


def apply_for(seconds: float, store: Store) -> None:
    """Small versions, each flushed, one after the other."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        version = store.mark().version + 1
        store.apply([(b"dversion", b"%d" % version)], store.mark(), mark(version))
        store.checkpoint(store.staging() / f"{version}")  # flushes


def test_a_store_whose_compaction_has_failed_can_be_emptied_and_used(stores: LocalStores, tmp_path: Path) -> None:
    path = tmp_path / INSTANCE / "0" / "slot-0"
    for version in range(MAX_RUNS - 1):
        with stores.open(INSTANCE, 0) as store:
            changes = [(b"d%d-%d" % (version, n), b"value" * 20) for n in range(200)]
            store.apply(changes, store.mark(), mark(version))
    table = min(path.glob("*.sst"))
    rotted(table, table.stat().st_size // 4)
    with stores.open(INSTANCE, 0) as store:
        with pytest.raises(DamagedStore):
            apply_for(20.0, store)
        store.wipe()
        store.apply([(b"da", b"1")], EMPTY, mark(0))
    with stores.open(INSTANCE, 0) as store:
        assert (store.mark(), contents(store)) == (mark(0), {b"da": b"1"})


def test_a_store_that_is_not_trusted_is_empty_for_the_next_one_and_whole_for_who_has_it(
    stores: LocalStores, tmp_path: Path
) -> None:
    with stores.open(INSTANCE, 0) as store:
        advance(store, 1)
        stores.distrust(INSTANCE, 0)
        advance(store, 2)
        assert contents(store) == {b"dversion": b"2"}
    with stores.open(INSTANCE, 0) as store:
        assert (slot_of(store), store.mark(), contents(store)) == ("slot-0", EMPTY, {})
        advance(store, 3)
    with stores.open(INSTANCE, 0) as store:
        assert store.mark() == mark(3)
    assert sorted(entry.name for entry in (tmp_path / INSTANCE / "0").iterdir()) == ["slot-0", "slot-0.lock"]


def test_a_copy_goes_as_a_whole(stores: LocalStores, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Path | None] = []
    rmtree = shutil.rmtree

    def looking(path: Path) -> None:
        found.append(stores.copied(INSTANCE, 0, "first"))
        rmtree(path)

    with stores.open(INSTANCE, 0) as store:
        stores.copy(INSTANCE, 0, store, "first")
        assert stores.copied(INSTANCE, 0, "first")
        monkeypatch.setattr(slots.shutil, "rmtree", looking)
        stores.copy(INSTANCE, 0, store, "second")
    assert found == [None]


def test_a_scratch_store_is_empty_and_gone_afterwards(tmp_path: Path) -> None:
    with LocalStores(tmp_path).scratch() as store:
        assert store.mark() == EMPTY
        store.apply([(b"dkey", b"value")], EMPTY, Mark(0, "spilled"))
        assert store.get_many([b"dkey"]) == [b"value"]
    assert not any((tmp_path / "scratch").iterdir())
