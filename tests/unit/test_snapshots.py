"""Snapshots: when they are taken, what they share, and what a restore makes of them."""

from __future__ import annotations

import logging
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from rig import Rig

from holdfast.errors import Damaged, StorageFailed
from holdfast.log import paths, recipe
from holdfast.log.manifest import Chain, cleared
from holdfast.log.recipe import bring, plan, recipe_for
from holdfast.log.snapshot import Snapshot, fetch, newest_snapshot, read_snapshot, upload, versions
from holdfast.log.storage import LocalStorage
from holdfast.runtime import ladder
from holdfast.runtime import snapshots as module
from holdfast.runtime.batch import NotNowError, Proposal
from holdfast.runtime.ladder import climb, held_marks
from holdfast.stores.base import EMPTY, Mark
from holdfast.stores.memory import MemoryStore
from holdfast.stores.rocksdb import RocksDBStore
from holdfast.stores.slots import LocalStores
from holdfast.testing import MemoryStorage, MemoryStores


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
        climb("app", rig.runner, rig.head.instance, recipes, held)
    assert "partition 1: the snapshot of version 12 and 3 deltas, 0.0 MB" in caplog.text
    assert "the state is whole again" in caplog.text
    assert rig.runner.each(held_marks(rig.head.instance)) == [recipe.target for recipe in recipes]
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="holdfast"):
        climb("app", rig.runner, rig.head.instance, recipes, rig.runner.each(held_marks(rig.head.instance)))
    assert not caplog.text


def test_a_restore_in_rounds_goes_on_where_the_last_round_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "ROUND_S", -1.0)
    rig = Rig(every=12, keep=9)
    rig.run(15)
    rig.lose_disks()
    recipes = [recipe_for(rig.chain, rig.head, partition) for partition in range(2)]
    climb("app", rig.runner, rig.head.instance, recipes, [EMPTY, EMPTY])
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

    climb("app", Asked(), rig.head.instance, recipes, marks, kept)
    assert bool(asked) is asks


def test_where_there_is_no_state_nobody_is_asked() -> None:
    rig = Rig()
    recipes = [recipe_for(rig.chain, rig.head, partition) for partition in range(2)]
    climb("app", None, rig.head.instance, recipes, None)  # type: ignore[arg-type]


def test_a_restore_hears_that_the_run_is_to_stop_and_the_next_one_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "ROUND_S", -1.0)
    rig = Rig(every=12, keep=9)
    rig.run(15)
    rig.lose_disks()
    recipes = [recipe_for(rig.chain, rig.head, partition) for partition in range(2)]
    answers = [True, False, False, False]
    with pytest.raises(NotNowError):
        climb("app", rig.runner, rig.head.instance, recipes, None, is_stopping=lambda: answers.pop())
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
    (whole,) = rig.runner.each(ladder._need(rig.head.instance, recipes))
    ((brought, is_left),) = rig.runner.each(ladder._round(rig.head.instance, recipes))
    (rest,) = rig.runner.each(ladder._need(rig.head.instance, recipes))
    assert is_left and brought
    assert rest.length == whole.length - brought


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
