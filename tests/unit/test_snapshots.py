"""Snapshots: when they are taken, what is sent, and that none is made of a store that has rotted."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from damage import rotted
from rig import Rig, newest

from holdfast.errors import Damaged, StorageFailed
from holdfast.log import paths
from holdfast.log.snapshot import fetch, upload, versions
from holdfast.log.storage import LocalStorage
from holdfast.runtime import snapshots as module
from holdfast.runtime.batch import Proposal
from holdfast.stores.base import EMPTY, Mark
from holdfast.stores.rocksdb import RocksDBStore
from holdfast.stores.slots import LocalStores
from holdfast.testing import MemoryStorage


def refuse(*_: Any) -> None:
    raise StorageFailed("no answer")


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
