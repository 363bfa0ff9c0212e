"""Snapshots: when they are taken, what they share, and what a restore makes of them."""

from __future__ import annotations

import errno
import logging
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from damage import rotted
from rig import Rig

from holdfast.errors import Damaged, StorageFailed, StorageFull
from holdfast.log import paths, recipe
from holdfast.log.manifest import Chain, cleared
from holdfast.log.recipe import TAIL, bring, plan, recipe_for, recipes_for
from holdfast.log.snapshot import Snapshot, fetch, newest_snapshot, read_snapshot, staged, upload, versions
from holdfast.log.storage import LocalStorage
from holdfast.runtime import ladder
from holdfast.runtime import snapshots as module
from holdfast.runtime.batch import NotNowError, Proposal
from holdfast.runtime.ladder import climb, held_marks
from holdfast.stores.base import EMPTY, DamagedStore, Mark
from holdfast.stores.memory import MemoryStore
from holdfast.stores.rocksdb import RocksDBStore
from holdfast.stores.slots import LocalStores
from holdfast.testing import MemoryStorage, MemoryStores


class Counting(MemoryStorage):
    """Counts what is read."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []

    def get(self, name: str) -> bytes:
        self.reads.append(name)
        return super().get(name)

    def of(self, prefix: str) -> int:
        return sum(name.startswith(prefix) for name in self.reads)


def newest(rig: Rig) -> Snapshot:
    found = newest_snapshot(rig.storage)
    assert found is not None
    return found


# -- when ----------------------------------------------------------------------------------------------------------------


def test_a_snapshot_is_taken_every_so_many_batches_of_the_version_before_the_batch() -> None:
    rig = Rig(every=3, keep=9)
    rig.run(8)
    assert versions(rig.storage) == [3, 6]
    assert newest(rig).manifest == rig.chain.read(6).id


def test_a_snapshot_is_taken_every_so_often() -> None:
    rig = Rig(every=timedelta(seconds=4), keep=9)
    rig.run(12)
    assert versions(rig.storage) == [3, 7, 11]


def test_by_itself_a_snapshot_is_taken_when_the_changes_have_become_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "VERSIONS", 5)
    rig = Rig(every=None, keep=9)
    rig.run(11)
    assert versions(rig.storage) == [5, 10]


def test_by_itself_a_snapshot_is_taken_when_the_changes_have_become_large(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(every=None, keep=9)
    rig.run(1)
    monkeypatch.setattr(module, "LEAST", 3 * sum(rig.storage.sizes(paths.DELTAS).values()))
    rig.start()  # a new run counts what the earlier one has written
    rig.run(5)
    assert versions(rig.storage)[:1] == [4]


def test_a_new_run_counts_from_the_last_snapshot() -> None:
    rig = Rig(every=4, keep=9)
    rig.run(6)
    rig.start()
    rig.run(2)
    assert versions(rig.storage) == [4]
    rig.run(1)
    assert versions(rig.storage) == [4, 8]


def test_batches_go_on_while_a_snapshot_is_uploaded_and_no_second_one_begins() -> None:
    rig = Rig(every=2, keep=9)
    rig.later = []
    rig.run(7)
    assert (len(rig.later), versions(rig.storage)) == (1, [])
    rig.later.pop()()
    assert versions(rig.storage) == [2]
    rig.lose_disks()
    rig.assert_exact()


def test_batches_do_not_wait_for_an_upload_in_the_background() -> None:
    rig = Rig(every=2, keep=9)
    put_file = rig.storage.put_file
    is_held, may_go_on = threading.Event(), threading.Event()

    def held(name: str, path: Path) -> None:
        is_held.set()
        assert may_go_on.wait(60)
        put_file(name, path)

    rig.storage.put_file = held
    rig.in_background = True
    rig.start()
    try:
        while not is_held.is_set() and rig.head.version < 1_000:
            rig.run(1)
        assert is_held.is_set(), "no upload has begun"
        begun = rig.head.version
        rig.run(20)
        assert versions(rig.storage) == []
    finally:
        may_go_on.set()
    rig.snapshots.close()
    (taken,) = versions(rig.storage)
    assert taken < begun
    rig.assert_exact()


def test_an_upload_that_fails_is_a_warning_and_is_tried_again_later(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise StorageFailed("no answer")

    rig = Rig(every=2, keep=9)
    with monkeypatch.context() as patch:
        patch.setattr(rig.storage, "put_file", refuse)
        rig.run(5)
    assert "the snapshot of version 2 could not be taken: no answer" in caplog.text
    assert versions(rig.storage) == []
    rig.run(module.PAUSE)
    assert versions(rig.storage)[0] == 2 + module.PAUSE


def test_what_cannot_be_cleared_up_is_a_warning_of_its_own_and_the_next_snapshot_comes_as_ever(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise StorageFailed("no answer")

    rig = Rig(every=2, keep=1)
    with monkeypatch.context() as patch:
        patch.setattr(rig.storage, "delete", refuse)
        rig.run(5)
    assert versions(rig.storage) == [2, 4]
    assert "what no recovery needs could not be removed: no answer" in caplog.text
    assert "could not be taken" not in caplog.text
    rig.run(2)
    assert versions(rig.storage) == [6]


def test_a_run_that_could_not_see_what_there_is_looks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise StorageFailed("no answer")

    rig = Rig(every=2, keep=9)
    with monkeypatch.context() as patch:
        patch.setattr(module, "newest_snapshot", refuse)
        rig.start()
    rig.run(module.PAUSE + 4)
    assert versions(rig.storage)


def test_a_partition_that_has_lost_its_copy_keeps_its_older_snapshot() -> None:
    rig = Rig(every=2, keep=9)
    rig.run(4)
    rig.later = []
    rig.run(2)
    for copies in rig.stores._copies.copy():  # type: ignore[attr-defined]
        if copies[1] == 1:
            del rig.stores._copies[copies]  # type: ignore[attr-defined]
    rig.later.pop()()
    assert [(part.partition, part.version) for part in newest(rig).partitions] == [(0, 4), (1, 2)]
    rig.later = None
    rig.lose_disks()
    rig.run(1)
    rig.assert_exact()


def test_without_an_older_one_a_lost_copy_means_no_snapshot() -> None:
    rig = Rig(every=2)
    rig.later = []
    rig.run(3)
    rig.stores._copies.clear()  # type: ignore[attr-defined]
    rig.later.pop()()
    assert versions(rig.storage) == []


def test_an_upload_that_was_overtaken_gives_up() -> None:
    rig = Rig(every=2, keep=9)
    rig.later = []
    rig.run(3)
    slow = rig.later.pop()
    rig.later = None
    rig.start()
    rig.run(3)
    before = versions(rig.storage)
    assert max(before) > 2
    slow()
    assert versions(rig.storage) == before


# -- what is sent ------------------------------------------------------------------------------------------------------------


def test_files_that_are_there_are_not_sent_again(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "checkpoint")
    store = RocksDBStore(tmp_path / "store")
    store.apply([(b"d%d" % n, b"value") for n in range(1_000)], EMPTY, Mark(1, "a"))
    store.checkpoint(tmp_path / "copy-1")
    first = upload(storage, tmp_path / "copy-1", 0, store.mark(), ())
    store.apply([(b"dnew", b"value")], store.mark(), Mark(2, "b"))
    store.checkpoint(tmp_path / "copy-2")
    second = upload(storage, tmp_path / "copy-2", 0, store.mark(), first.files)
    store.close()
    tables = {file.name for file in first.files if file.path.endswith(".sst")}
    assert tables and tables < {file.name for file in second.files}
    sent = [name for name in storage.names(paths.SNAPSHOT_FILES) if paths.version_of(name) == 2]
    assert len(sent) == len(second.files) - len({file.name for file in second.files} & {f.name for f in first.files})


def test_a_second_snapshot_of_a_run_sends_only_files_that_are_new(tmp_path: Path) -> None:
    rig = Rig(stores=LocalStores(tmp_path / "local"), every=3, keep=9, partitions=1, keys=5_000, pad=200)
    put_file, sent = rig.storage.put_file, []

    def counted(name: str, path: Path) -> None:
        sent.append(path.name)
        put_file(name, path)

    rig.storage.put_file = counted
    rig.run(4)
    first, before = {file.path: file for file in newest(rig).partitions[0].files}, len(sent)
    assert sorted(sent) == sorted(first)
    rig.run(3)
    assert versions(rig.storage) == [3, 6]
    second = {file.path: file for file in newest(rig).partitions[0].files}
    shared = {path for path, file in second.items() if file.name in {known.name for known in first.values()}}
    assert any(path.endswith(".sst") for path in shared), "nothing was left as it was"
    assert sorted(sent[before:]) == sorted(second.keys() - shared)


def test_a_copy_is_sent_in_slices_so_that_no_task_holds_its_slot_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SLICE", 1)
    rig = Rig(stores=LocalStores(tmp_path / "local"), every=3, keep=9, partitions=1, keys=1_000)
    at, tasks = rig.runner.at, []

    def counted(partition: int, function: Any) -> Any:
        tasks.append(partition)
        return at(partition, function)

    rig.runner.at = counted
    rig.run(4)
    files = newest(rig).partitions[0].files
    assert len(files) > 2
    assert len(tasks) == len(files)
    rig.lose_disks()
    rig.run(1)
    rig.assert_exact()


def test_a_task_that_does_not_find_the_copy_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(every=3, keep=9)
    at, elsewhere = rig.runner.at, [True]

    def once_elsewhere(partition: int, function: Any) -> Any:
        return None if elsewhere and elsewhere.pop() else at(partition, function)

    rig.runner.at = once_elsewhere
    rig.run(4)
    assert not elsewhere
    assert versions(rig.storage) == [3]


@pytest.mark.parametrize("lost", ["missing", "truncated"])
def test_a_shared_file_that_was_lost_is_sent_again_with_the_next_snapshot(tmp_path: Path, lost: str) -> None:
    rig = Rig(stores=LocalStores(tmp_path / "local"), every=3, keep=1, keys=1_000)
    rig.run(5)
    for name in rig.storage.names(paths.SNAPSHOT_FILES):
        if lost == "missing":
            del rig.storage.objects[name]
        else:
            rig.storage.objects[name] = rig.storage.objects[name][:-1]
    rig.run(3)
    assert versions(rig.storage) == [6]
    rig.stores = LocalStores(tmp_path / "another disk")
    rig.start()
    rig.run(1)
    rig.assert_exact()


def test_an_upload_refers_to_nothing_that_a_lost_one_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever clears up may remove it at any time: only what the newest snapshot names stays."""

    def refuse(*_: Any) -> None:
        raise StorageFailed("no answer")

    rig = Rig(every=2, keep=1)
    rig.run(2)
    with monkeypatch.context() as patch:
        patch.setattr(module, "publish", refuse)
        rig.driver.run_batch(Proposal(end=rig.head.position))
    left = {name: rig.storage.get(name) for name in rig.storage.names(paths.SNAPSHOT_FILES)}
    rig.start()
    rig.driver.run_batch(Proposal(end=rig.head.position))
    named = {file.name: rig.storage.get(file.name) for part in newest(rig).partitions for file in part.files}
    assert set(left.values()) & set(named.values()), "nothing of the state is as it was"
    assert not left.keys() & named.keys()


def test_a_file_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.log import snapshot

    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "table").write_bytes(b"content")
    first = upload(MemoryStorage(), copy, 0, Mark(1, "a"), ())
    monkeypatch.setattr(snapshot.hashlib, "file_digest", lambda *_: pytest.fail("hashed again"))
    assert upload(MemoryStorage(), copy, 0, Mark(1, "a"), ()).files[0].checksum == first.files[0].checksum


def test_an_interrupted_download_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, copy, staging = MemoryStorage(), tmp_path / "copy", tmp_path / "staging"
    copy.mkdir()
    staging.mkdir()
    for n in range(4):
        (copy / f"{n}.sst").write_bytes(b"%d" % n * 100)
    part = upload(storage, copy, 0, Mark(1, "a"), ())
    fetched: list[str] = []
    get = storage.get
    monkeypatch.setattr(storage, "get", lambda name: fetched.append(name) or get(name))
    going = fetch(storage, part, staging)
    next(going)
    next(going)
    going.close()
    (staging / "1.sst").write_bytes(b"torn by a kill")
    (staging / "stranger").write_bytes(b"")
    assert sum(fetch(storage, part, staging)) == 300
    assert fetched == [part.files[n].name for n in (0, 1, 1, 2, 3)]
    assert sorted(path.name for path in staging.iterdir()) == ["0.sst", "1.sst", "2.sst", "3.sst"]


# -- a store that has rotted -----------------------------------------------------------------------------------------------


def cold_rig(home: Path, *, every: int, keep: int) -> Rig:
    """With keys of which each comes once: what a batch has written is never read by another."""
    return Rig(stores=LocalStores(home / "local"), every=every, keep=keep, partitions=1, keys=30_000, pad=500)


def rot_a_table(home: Path, store: str = "local/*/0/slot-0", *, newest: bool = False) -> Path:
    """A bit of a value flips in the oldest table that has values, or in the newest."""
    tables = sorted(table for table in home.glob(f"{store}/*.sst") if b"xxxxxxxx" in table.read_bytes())
    table = tables[-1 if newest else 0]
    rotted(table, table.read_bytes().rindex(b"xxxxxxxx"))  # the first block has the mark
    return table


@pytest.mark.parametrize("every", [2, 5])
def test_a_block_that_has_rotted_is_in_no_snapshot_and_the_store_is_built_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, every: int
) -> None:
    rig = cold_rig(tmp_path, every=every, keep=2)
    rig.run(2)
    table = rot_a_table(tmp_path)
    rig.run(every)
    assert f"damaged blocks in {table.name}; trying again later" in caplog.text
    assert versions(rig.storage) == []
    rig.run(module.PAUSE + 4 * every)
    assert len(versions(rig.storage)) == 2 and len(rig.storage.names(paths.DELTAS)) < rig.head.version
    rig.stores = LocalStores(tmp_path / "another disk")
    rig.start()
    rig.run(1)
    rig.assert_exact()


def test_a_table_that_rotted_after_it_was_sent_is_still_whole_in_the_checkpoint(tmp_path: Path) -> None:
    rig = cold_rig(tmp_path, every=2, keep=1)
    rig.run(3)
    rot_a_table(tmp_path)
    rig.run(2)
    assert versions(rig.storage) == [4]
    rig.stores = LocalStores(tmp_path / "another disk")
    rig.start()
    rig.run(1)
    rig.assert_exact()


@pytest.fixture
def rotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    """A checkpoint whose second snapshot was taken of a damaged store."""
    rig = cold_rig(tmp_path, every=3, keep=2)  # no compaction yet, which would find the damage
    rig.run(5)
    assert versions(rig.storage) == [3]
    rot_a_table(tmp_path, newest=True)
    with monkeypatch.context() as patch:
        patch.setattr(LocalStores, "check", lambda *_: None)
        rig.run(2)
    assert versions(rig.storage) == [3, 6]
    rig.stores = LocalStores(tmp_path / "another disk")
    rig.start()
    return rig


def test_a_snapshot_that_was_taken_of_a_damaged_store_is_left_for_an_older_one(
    rotten: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rotten.run(1)
    rotten.assert_exact()
    assert "but no whole store" in caplog.text
    assert "was lost" not in caplog.text  # no job


def test_if_every_snapshot_was_taken_of_a_damaged_store_the_error_comes_at_once_and_names_it(rotten: Rig) -> None:
    rotten.storage.delete(paths.snapshot(3))
    for name in rotten.storage.names(paths.DELTAS):
        if paths.version_of(name) <= 3:
            rotten.storage.delete(name)
    with pytest.raises(Damaged, match="but no whole store") as caught:
        rotten.run(1)
    assert newest(rotten).partitions[0].files[0].name in str(caught.value)


def test_a_file_that_rots_between_being_fetched_and_being_used_is_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = cold_rig(tmp_path, every=4, keep=1)
    rig.run(6)
    replace = RocksDBStore.replace

    def late(store: RocksDBStore, mark: Mark) -> None:
        monkeypatch.undo()
        rot_a_table(store.staging(), ".")
        replace(store, mark)

    monkeypatch.setattr(RocksDBStore, "replace", late)
    rig.stores = LocalStores(tmp_path / "another disk")
    rig.start()
    rig.run(1)
    rig.assert_exact()


def test_a_copy_that_lost_a_file_under_the_upload_is_not_published(tmp_path: Path) -> None:
    rig = cold_rig(tmp_path, every=3, keep=1)
    rig.later = []
    rig.run(4)
    min(tmp_path.glob("local/*/0/copy-*/*.sst")).unlink()
    rig.later.pop()()
    assert versions(rig.storage) == []
    rig.later = None
    rig.run(module.PAUSE + 1)
    assert versions(rig.storage)
    rig.stores = LocalStores(tmp_path / "another disk")
    rig.start()
    rig.run(1)
    rig.assert_exact()


def test_a_copy_that_goes_while_it_is_checked_is_lost_and_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    check = LocalStores.check

    def late(stores: LocalStores, copy: Path, mark: Mark, files: Any) -> None:
        stores.forget(copy.parents[1].name, 0, copy.name.removeprefix("copy-"))
        check(stores, copy, mark, files)

    rig = cold_rig(tmp_path, every=3, keep=1)
    monkeypatch.setattr(LocalStores, "check", late)
    rig.run(4)
    assert "partition 0 has lost its copy of version 3" in caplog.text
    assert not list(tmp_path.glob("local/*/0/*.damaged"))


# -- what a restore makes of it ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("local", [False, True], ids=["memory", "rocksdb"])
def test_a_lost_disk_comes_back_from_a_snapshot_and_the_deltas_after_it(tmp_path: Path, local: bool) -> None:
    storage = LocalStorage(tmp_path / "checkpoint", durable=False) if local else MemoryStorage()
    rig = Rig(storage, LocalStores(tmp_path / "local") if local else None, every=6, keep=1)
    rig.run(6)
    untouched = MemoryStorage()
    folders = (paths.COMMITS, paths.DELTAS)
    untouched.objects = {name: storage.get(name) for folder in folders for name in storage.names(folder)}
    rig.run(3)
    untouched.objects |= {name: storage.get(name) for folder in folders for name in storage.names(folder)}
    assert versions(rig.storage) == [6]
    assert paths.version_of(rig.storage.names(paths.COMMITS)[0]) == 6
    rig.stores = LocalStores(tmp_path / "another disk") if local else MemoryStores()
    rig.start()
    rig.run(1)
    rig.assert_exact()
    for partition in range(2):
        expected = MemoryStore()
        bring(expected, untouched, recipe_for(Chain(untouched), Chain(untouched).read(9), partition))
        with rig.stores.open(rig.head.instance, partition) as store:
            assert store.mark() == expected.mark()
            assert list(store.scan(b"d", b"e")) == list(expected.scan(b"d", b"e"))


def test_a_damaged_snapshot_is_left_for_an_older_one(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(every=4, keep=2)
    rig.run(10)
    assert versions(rig.storage) == [4, 8]
    for file in (file for part in newest(rig).partitions for file in part.files):
        rig.storage.objects[file.name] = b"x" + rig.storage.objects[file.name][1:]
    rig.lose_disks()
    rig.run(1)
    rig.assert_exact()
    assert "is damaged: it is not what the snapshot says" in caplog.text


@pytest.mark.parametrize("what", ["list", "file"])
def test_without_any_snapshot_the_deltas_since_the_base_are_taken_if_they_are_there(what: str) -> None:
    rig = Rig(every=4, keep=2)
    rig.run(6)
    rig.storage.delete(paths.snapshot(4) if what == "list" else rig.storage.names(paths.SNAPSHOT_FILES)[0])
    rig.lose_disks()
    rig.run(1)
    rig.assert_exact()


def test_if_nothing_is_left_to_restore_from_the_error_says_what_is_missing() -> None:
    rig = Rig(every=4, keep=1)
    rig.run(6)
    lost = [part.files[0].name for part in newest(rig).partitions]
    for name in lost:
        rig.storage.delete(name)
    rig.lose_disks()
    with pytest.raises(Damaged, match="partition 0 cannot be brought to version 6") as caught:
        rig.run(1)
    assert lost[0] in str(caught.value)


def test_a_snapshot_of_another_time_line_is_not_taken(caplog: pytest.LogCaptureFixture) -> None:
    rig, other = Rig(every=4, keep=9), Rig(every=4, keep=9)
    rig.run(4)
    other.run(6)
    for name in other.storage.names(paths.SNAPSHOTS) + other.storage.names(paths.SNAPSHOT_FILES):
        rig.storage.objects[name] = other.storage.objects[name]
    rig.run(2)
    rig.lose_disks()
    rig.run(1)
    rig.assert_exact()
    assert "the snapshot of version 4 is not of this chain" in caplog.text


def test_a_snapshot_from_before_a_clear_is_void() -> None:
    rig = Rig(every=2, keep=9)
    rig.run(3)
    rig.chain.commit(cleared(rig.head))
    rig.lose_disks()
    rig.run(1)
    assert set(rig.counts().values()) == {1}


def test_a_snapshot_with_fewer_partitions_is_not_taken(caplog: pytest.LogCaptureFixture) -> None:
    rig, other = Rig(every=4, keep=9, partitions=2), Rig(every=4, keep=9, partitions=1)
    rig.run(4)
    other.run(6)
    for name in other.storage.names(paths.SNAPSHOTS) + other.storage.names(paths.SNAPSHOT_FILES):
        rig.storage.objects[name] = other.storage.objects[name]
    rig.run(2)
    rig.lose_disks()
    rig.run(1)
    rig.assert_exact()
    assert "partition 1: the snapshot of version 4 is not of this chain" in caplog.text


def test_what_was_fetched_for_a_way_that_was_left_is_removed(tmp_path: Path) -> None:
    rig = Rig(stores=LocalStores(tmp_path / "local"), every=4, keep=2)
    rig.run(6)
    for part in newest(rig).partitions:
        rig.storage.delete(part.files[-1].name)
    rig.stores = LocalStores(tmp_path / "another disk")
    rig.start()
    rig.run(1)
    rig.assert_exact()
    assert not list(tmp_path.glob("another disk/*/*/*.restore"))


def test_a_full_local_disk_has_its_name_in_a_restore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    storage, copy, staging = MemoryStorage(), tmp_path / "copy", tmp_path / "staging"
    copy.mkdir()
    staging.mkdir()
    (copy / "table").write_bytes(b"content")
    part = upload(storage, copy, 0, Mark(1, "a"), ())
    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(StorageFull, match=r"checksums\.json"):
        list(fetch(storage, part, staging))
    assert not list(tmp_path.glob("*.tmp"))


def test_a_store_far_behind_takes_the_cheaper_way() -> None:
    rig = Rig(every=20, keep=9)
    rig.run(25)
    recipe = recipe_for(rig.chain, rig.head, 0)
    early = rig.chain.read(2).partitions[0]
    way = plan(rig.storage, recipe, Mark(2, early.attempt))
    assert way is not None and way.snapshot is not None
    late = rig.chain.read(16).partitions[0]
    way = plan(rig.storage, recipe, Mark(16, late.attempt))
    assert way is not None and way.snapshot is not None  # one file instead of nine
    near = rig.chain.read(19).partitions[0]
    way = plan(rig.storage, recipe, Mark(19, near.attempt))
    assert way is not None and way.snapshot is None


def test_a_view_reads_from_a_snapshot() -> None:
    rig = Rig(every=4, keep=1)
    rig.run(7)
    assert len(rig.storage.names(paths.DELTAS)) == 2 * 3
    rig.assert_exact()


# -- the ladder ------------------------------------------------------------------------------------------------------------


def test_a_start_says_what_each_partition_needs_and_when_the_state_is_whole(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(every=12, keep=9)
    rig.run(15)
    rig.lose_disks()
    recipes = [recipe_for(rig.chain, rig.head, partition) for partition in range(2)]
    held = rig.runner.each(held_marks(rig.head.instance))
    with caplog.at_level(logging.INFO, logger="holdfast"):
        climb("app", rig.runner, rig.storage, rig.head.instance, recipes, held)
    assert "partition 1: the snapshot of version 12 and 3 deltas, 0.0 MB" in caplog.text
    assert "the state is whole again" in caplog.text
    assert rig.runner.each(held_marks(rig.head.instance)) == [recipe.target for recipe in recipes]
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="holdfast"):
        climb(
            "app", rig.runner, rig.storage, rig.head.instance, recipes, rig.runner.each(held_marks(rig.head.instance))
        )
    assert not caplog.text


def test_a_restore_in_rounds_goes_on_where_the_last_round_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "ROUND_S", -1.0)
    rig = Rig(every=12, keep=9)
    rig.run(15)
    rig.lose_disks()
    recipes = [recipe_for(rig.chain, rig.head, partition) for partition in range(2)]
    climb("app", rig.runner, rig.storage, rig.head.instance, recipes, [EMPTY, EMPTY])
    rig.run(1)
    rig.assert_exact()


@pytest.mark.parametrize("has_snapshot", [True, False])
def test_a_restore_reads_each_manifest_once_however_many_partitions_and_rounds_there_are(
    monkeypatch: pytest.MonkeyPatch, has_snapshot: bool
) -> None:
    monkeypatch.setattr(ladder, "ROUND_S", -1.0)
    rig = Rig(Counting(), every=7 if has_snapshot else None, keep=99, partitions=4)
    rig.run(8)
    rig.snapshots._every = None
    rig.run(40)
    rig.stores = MemoryStores()
    rig.storage.reads.clear()
    rig.start()
    assert rig.storage.of(paths.COMMITS) <= TAIL + 3, "a start reads manifests for every partition"
    rig.storage.reads.clear()
    recipes = recipes_for(rig.chain, rig.head)
    climb("app", rig.runner, rig.storage, rig.head.instance, recipes, [EMPTY])
    assert rig.runner.each(held_marks(rig.head.instance)) == [recipe.target for recipe in recipes]
    assert rig.storage.of(paths.DELTAS) == 4 * (rig.head.version - (7 if has_snapshot else 0))
    assert rig.storage.of(paths.COMMITS) <= rig.head.version + TAIL + 3
    rig.run(1)
    rig.assert_exact()


def test_a_store_that_retention_has_left_behind_costs_a_round_one_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "ROUND_S", -1.0)
    rig = Rig(Counting(), every=20, keep=1)
    rig.run(2)
    old = rig.stores
    rig.stores = MemoryStores()
    rig.start()
    rig.run(56)
    rig.stores = old
    rig.start()
    recipes = recipes_for(rig.chain, rig.head)
    rig.storage.reads.clear()
    climb("app", rig.runner, rig.storage, rig.head.instance, recipes, [EMPTY])
    assert rig.runner.each(held_marks(rig.head.instance)) == [recipe.target for recipe in recipes]
    assert rig.storage.of(paths.COMMITS) < 45, "the walk was made again"
    rig.run(1)
    rig.assert_exact()


@pytest.mark.timeout(60)
def test_a_restore_in_rounds_comes_to_its_end_when_a_file_of_the_newest_snapshot_is_damaged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ladder, "ROUND_S", -1.0)
    rig = Rig(stores=LocalStores(tmp_path / "disk"), every=10, keep=9)
    rig.run(24)
    for part in newest(rig).partitions:
        rig.storage.objects[part.files[-1].name] = b"no longer"
    rig.stores = LocalStores(tmp_path / "another disk")
    rig.start()
    recipes = recipes_for(rig.chain, rig.head)
    climb("app", rig.runner, rig.storage, rig.head.instance, recipes, [EMPTY])
    assert rig.runner.each(held_marks(rig.head.instance)) == [recipe.target for recipe in recipes]
    rig.run(1)
    rig.assert_exact()


def test_the_time_of_a_round_begins_with_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the walk through the manifests takes, a round makes more than one step."""
    now = [0.0]

    class Slow(Counting):
        def names(self, prefix: str) -> list[str]:
            now[0] += 10.0
            return super().names(prefix)

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    rig = Rig(Slow(), every=None)
    rig.run(12)
    rig.lose_disks()
    rounds: list[Any] = []
    each = rig.runner.each

    def counted(function: Any) -> list[Any]:
        rounds.append(function)
        return each(function)

    monkeypatch.setattr(rig.runner, "each", counted)
    climb("app", rig.runner, rig.storage, rig.head.instance, recipes_for(rig.chain, rig.head), [EMPTY])
    assert len(rounds) == 2, "one for what the stores hold, one that restores"


def test_a_store_that_is_damaged_at_the_start_is_left_to_the_first_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(*_: Any) -> None:
        raise DamagedStore("a block is damaged")

    rig = Rig(every=12, keep=9)
    rig.run(15)
    rig.lose_disks()
    recipes = [recipe_for(rig.chain, rig.head, partition) for partition in range(2)]
    with monkeypatch.context() as patch:
        patch.setattr(MemoryStore, "apply", damaged)
        climb("app", rig.runner, rig.storage, rig.head.instance, recipes, [EMPTY, EMPTY])
    rig.run(1)
    rig.assert_exact()


@pytest.mark.parametrize(
    ("held", "kept", "asks"),
    [
        ("fits", {0, 1}, False),
        ("fits", set(), False),
        ("fits", {0}, True),
        ("is empty", {0, 1}, True),
        ("is not known", {0, 1}, False),
        ("is not known", {1}, True),
        ("is not known", set(), True),
    ],
)
def test_partitions_are_asked_only_if_something_may_be_missing(held: str, kept: set[int], asks: bool) -> None:
    rig = Rig(every=12, keep=9)
    rig.run(15)
    recipes = [recipe_for(rig.chain, rig.head, partition) for partition in range(2)]
    marks = {"fits": [recipes[0].target], "is empty": [EMPTY], "is not known": None}[held]
    asked: list[Any] = []

    class Asked:
        def each(self, function: Any) -> list[Any]:
            asked.append(function)
            return rig.runner.each(function)

    climb("app", Asked(), rig.storage, rig.head.instance, recipes, marks, kept)
    assert bool(asked) is asks


def test_where_there_is_no_state_nobody_is_asked() -> None:
    rig = Rig()
    recipes = [recipe_for(rig.chain, rig.head, partition) for partition in range(2)]
    climb("app", None, rig.storage, rig.head.instance, recipes, None)  # type: ignore[arg-type]


def test_a_restore_hears_that_the_run_is_to_stop_and_the_next_one_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "ROUND_S", -1.0)
    rig = Rig(every=12, keep=9)
    rig.run(15)
    rig.lose_disks()
    recipes = [recipe_for(rig.chain, rig.head, partition) for partition in range(2)]
    answers = [True, False, False, False]
    with pytest.raises(NotNowError):
        climb("app", rig.runner, rig.storage, rig.head.instance, recipes, None, is_stopping=lambda: answers.pop())
    assert not answers
    held = rig.runner.each(held_marks(rig.head.instance))
    assert [mark.version for mark in held] == [13, 13]
    rig.run(1)
    rig.assert_exact()


def test_a_run_that_is_stopped_while_it_restores_begins_no_batch() -> None:
    rig = Rig()
    rig.run(2)

    def stopped(*_: Any) -> None:
        raise NotNowError

    rig.driver._restore = stopped
    for _ in range(2):
        with pytest.raises(NotNowError):
            rig.run(1)
    assert rig.head.version == 2
    assert rig.chain.head() == rig.head


def test_what_an_interrupted_restore_has_fetched_is_not_to_be_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ladder, "ROUND_S", -1.0)
    rig = Rig(stores=LocalStores(tmp_path / "local"), every=12, keep=9, partitions=1, keys=100)
    rig.run(15)
    rig.stores = LocalStores(tmp_path / "another disk")
    rig.start()
    recipes = [recipe_for(rig.chain, rig.head, 0)]
    way = plan(rig.storage, recipes[0], EMPTY)
    assert way is not None and way.snapshot is not None
    ((brought, is_left),) = rig.runner.each(ladder._round(rig.head.instance, recipes))
    (found,) = rig.runner.each(ladder._look(rig.head.instance, recipes))
    assert is_left and brought
    assert staged(way.snapshot, found.fetched) == brought


def test_what_tasks_restore_themselves_is_told_in_one_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(every=12, keep=9)
    rig.run(15)
    rig.lose_disks()
    monkeypatch.setattr(recipe, "LONG_S", -1.0)
    with caplog.at_level(logging.INFO, logger="holdfast"):
        rig.run(1)
    (line,) = [record.getMessage() for record in caplog.records if "restored" in record.getMessage()]
    assert "2 partitions were restored in their tasks" in line
    assert "the snapshot of version 12 and 3 deltas" in line


def test_an_ordinary_batch_says_nothing_of_its_last_delta(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(every=None)
    with caplog.at_level(logging.INFO, logger="holdfast"):
        rig.run(3)
    assert not caplog.records


# -- the store itself --------------------------------------------------------------------------------------------------------


def test_a_store_does_not_become_a_checkpoint_with_another_mark() -> None:
    store, other = MemoryStore(), MemoryStore()
    store.apply([(b"da", b"1")], EMPTY, Mark(1, "mine"))
    other.apply([(b"da", b"2")], EMPTY, Mark(1, "another's"))
    staging = store.staging()
    staging.rmdir()
    other.checkpoint(staging)
    with pytest.raises(Damaged):
        store.replace(Mark(1, "mine"))
    assert store.get_many([b"da"]) == [b"1"]


def test_a_snapshot_in_the_place_of_another_is_damage() -> None:
    rig = Rig(every=2, keep=9)
    rig.run(5)
    rig.storage.objects[paths.snapshot(4)] = rig.storage.objects[paths.snapshot(2)]
    with pytest.raises(Damaged, match="is the snapshot of version 2"):
        read_snapshot(rig.storage, 4)
