"""What comes back: the ways from a snapshot and from deltas, and the ladder at the start of a run."""

from __future__ import annotations

import errno
import logging
import time
from pathlib import Path
from typing import Any

import pytest
from rig import Rig, newest

from holdfast.errors import Damaged, StorageFull
from holdfast.log import paths, recipe
from holdfast.log.manifest import Chain, cleared
from holdfast.log.recipe import TAIL, bring, plan, recipe_for, recipes_for
from holdfast.log.snapshot import fetch, read_snapshot, staged, upload, versions
from holdfast.log.storage import LocalStorage
from holdfast.runtime import ladder
from holdfast.runtime.batch import NotNowError
from holdfast.runtime.ladder import climb, held_marks
from holdfast.stores.base import EMPTY, DamagedStore, Mark
from holdfast.stores.memory import MemoryStore
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


@pytest.mark.parametrize(("theirs", "partition"), [(2, ""), (1, "partition 1: ")], ids=["history", "partitions"])
def test_a_snapshot_of_another_time_line_is_not_taken(
    theirs: int, partition: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if it has fewer partitions."""
    rig, other = Rig(every=4, keep=9, partitions=2), Rig(every=4, keep=9, partitions=theirs)
    rig.run(4)
    other.run(6)
    for name in other.storage.names(paths.SNAPSHOTS) + other.storage.names(paths.SNAPSHOT_FILES):
        rig.storage.objects[name] = other.storage.objects[name]
    rig.run(2)
    rig.lose_disks()
    rig.run(1)
    rig.assert_exact()
    assert f"{partition}the snapshot of version 4 is not of this chain" in caplog.text


def test_a_snapshot_from_before_a_clear_is_void() -> None:
    rig = Rig(every=2, keep=9)
    rig.run(3)
    rig.chain.commit(cleared(rig.head))
    rig.lose_disks()
    rig.run(1)
    assert set(rig.counts().values()) == {1}


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
