"""Retention: what no recovery can need goes, and nothing else."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rig import Rig

from holdfast.errors import Fenced, SourceMismatch, StorageReadOnly, ZombieTask
from holdfast.log import paths
from holdfast.log.files import FileRef
from holdfast.log.manifest import Chain, SparkBatch, new_id
from holdfast.log.pins import LEASE_MS, Lease, Pin, oldest_pin
from holdfast.log.recipe import bring, recipe_for
from holdfast.log.retention import clear_up
from holdfast.log.snapshot import newest_snapshot, versions
from holdfast.runtime.batch import Proposal
from holdfast.runtime.view import StateView
from holdfast.state.codecs import JsonCodec
from holdfast.stores.base import EMPTY, Mark
from holdfast.stores.memory import MemoryStore
from holdfast.stores.slots import STALE_S, LocalStores
from holdfast.testing import MemoryStorage


def numbers(rig: Rig, folder: str) -> list[int]:
    return sorted({paths.version_of(name) for name in rig.storage.names(folder)})


# -- what goes and what stays --------------------------------------------------------------------------------------------


def test_everything_before_the_oldest_snapshot_that_is_kept_goes() -> None:
    rig = Rig(every=3, keep=2)
    rig.run(11)
    assert versions(rig.storage) == [6, 9]
    assert numbers(rig, paths.COMMITS) == list(range(6, 12))
    assert numbers(rig, paths.DELTAS) == list(range(7, 12))
    assert numbers(rig, paths.SNAPSHOT_FILES) == [6, 9]
    rig.assert_exact()
    rig.lose_disks()
    rig.run(1)
    rig.assert_exact()


def test_manifests_go_one_by_one_the_oldest_first_and_all_else_together() -> None:
    class Watched(MemoryStorage):
        def __init__(self) -> None:
            super().__init__()
            self.alone: list[str] = []
            self.together: list[Sequence[str]] = []

        def delete(self, name: str) -> None:
            self.alone.append(name)
            super().delete(name)

        def delete_all(self, names: Sequence[str]) -> None:
            self.together.append(names)
            for name in names:
                super().delete(name)

    rig = Rig(Watched(), every=6, keep=1)
    rig.run(7)
    assert rig.storage.alone == [paths.manifest(version) for version in range(6)]
    assert sum(map(len, rig.storage.together)) >= 2 * 6
    assert len(rig.storage.together) <= len(paths.CLASSES)


def test_nothing_goes_before_there_are_as_many_snapshots_as_are_to_be_kept() -> None:
    rig = Rig(every=3, keep=3)
    rig.run(8)
    assert versions(rig.storage) == [3, 6]
    assert numbers(rig, paths.COMMITS) == list(range(9))


def test_a_damaged_snapshot_does_not_count() -> None:
    rig = Rig(every=3, keep=2)
    rig.run(5)
    rig.storage.objects[paths.snapshot(3)] = b"{}"
    rig.run(3)
    assert numbers(rig, paths.COMMITS) == list(range(9))


def test_a_snapshot_of_another_time_line_does_not_count() -> None:
    rig, other = Rig(every=2, keep=1), Rig(every=8, keep=1)
    other.run(10)
    for name in other.storage.names(paths.SNAPSHOTS) + other.storage.names(paths.SNAPSHOT_FILES):
        rig.storage.objects[name] = other.storage.objects[name]
    rig.run(4)
    assert versions(rig.storage) == [2, 8]
    assert numbers(rig, paths.COMMITS) == [2, 3, 4]
    rig.assert_exact()


def test_files_of_an_upload_that_is_under_way_stay_and_those_of_a_lost_one_go_later() -> None:
    rig = Rig(every=2, keep=1)
    rig.run(3)
    under_way, lost = paths.snapshot_file(4, 0, "b" * 32, 0), paths.snapshot_file(1, 0, "a" * 32, 0)
    rig.storage.put(under_way, b"")
    rig.storage.put(lost, b"")
    clear_up(rig.storage, 1, 0)
    assert under_way in rig.storage.objects
    assert lost not in rig.storage.objects
    rig.run(4)
    assert under_way not in rig.storage.objects


def test_work_of_attempts_that_lost_goes_with_its_version() -> None:
    rig = Rig(every=3, keep=1)
    rig.run(2)
    orphan = paths.delta(2, 0, "c" * 32)
    rig.storage.put(orphan, b"")
    rig.run(3)
    assert orphan not in rig.storage.objects


def test_the_newest_mark_of_delivery_stays() -> None:
    rig = Rig(every=3, keep=1)
    rig.run(1)
    rig.storage.put(paths.delivered(0), b"{}")
    rig.storage.put(paths.delivered(1), b"{}")
    rig.run(4)
    assert numbers(rig, paths.DELIVERED) == [1]
    rig.start()


def test_sparks_files_stay_as_long_as_a_manifest_that_is_kept_names_them() -> None:
    rig = Rig(every=3, keep=2)
    always = FileRef(paths.spark_file(1, new_id()), 1, "", 0)
    rig.storage.put(always.name, b"m")
    for version in range(1, 12):
        mine = FileRef(paths.spark_file(version, new_id()), 1, "", 0)
        rig.storage.put(mine.name, b"o")
        assert rig.head.position is not None
        end = {"taken": rig.head.position["taken"] + 10}
        rig.driver.run_batch(Proposal(end=end, spark_files={"metadata": always, f"offsets/{version}": mine}))
    assert numbers(rig, paths.SPARK_FILES) == [1, *range(6, 12)]
    assert always.name in rig.storage.names(paths.SPARK_FILES)


def test_the_checkpoint_does_not_grow_with_the_number_of_batches() -> None:
    rig = Rig(every=5, keep=2)
    sizes = []
    for _ in range(12):
        rig.run(10)
        sizes.append(sum(map(len, rig.storage.objects.values())))
    assert max(sizes[6:]) < 1.2 * max(sizes[:6])


# -- who was overtaken ---------------------------------------------------------------------------------------------------


def test_a_driver_whose_next_version_was_committed_and_removed_is_fenced() -> None:
    rig = Rig(every=2, keep=1)
    rig.run(1)
    zombie = rig.driver
    rig.start()
    rig.run(6)
    assert paths.manifest(2) not in rig.storage.objects
    rig.driver, rig.stores = zombie, type(rig.stores)()
    rig.runner.stores = rig.stores
    with pytest.raises((Fenced, ZombieTask)):
        rig.run(1)
    with pytest.raises(Fenced):
        rig.chain.commit(msgspec.structs.replace(zombie.head, version=2, id="zombie", parent=zombie.head.id))
    rig.lose_disks()
    rig.run(3)
    rig.assert_exact()
    assert paths.manifest(2) not in rig.storage.objects


def test_a_driver_that_finds_its_version_taken_and_then_gone_is_fenced() -> None:
    rig = Rig(every=2, keep=1)
    rig.run(1)
    slow = rig.head
    rig.run(1)
    get = rig.storage.get

    def late(name: str) -> bytes:
        if name == paths.manifest(2):
            rig.storage.get = get
            rig.run(6)
            assert name not in rig.storage.objects
        return bytes(get(name))

    rig.storage.get = late
    with pytest.raises(Fenced):
        rig.chain.commit(msgspec.structs.replace(slow, version=2, id="slow", parent=slow.id))


def test_a_driver_that_was_about_to_begin_is_fenced_when_others_have_begun_and_cleared_up() -> None:
    rig = Rig(every=2, keep=1)
    first = rig.chain.read(0)
    rig.run(5)
    assert paths.manifest(0) not in rig.storage.objects
    with pytest.raises(Fenced):
        rig.chain.commit(msgspec.structs.replace(first, id="zombie", instance="zombie"))
    rig.lose_disks()
    rig.run(3)
    rig.assert_exact()
    assert paths.manifest(0) not in rig.storage.objects


def test_a_commit_that_was_in_time_stays_when_others_went_on_from_it() -> None:
    rig = Rig(every=1, keep=1)
    rig.run(1)
    get = rig.storage.get
    slow = rig.driver
    others: list[int] = []

    def overtaken(name: str) -> bytes:
        if name == paths.manifest(1) and paths.manifest(2) in rig.storage.objects and not others:
            others.append(1)
            rig.start()
            rig.run(1)
            assert name not in rig.storage.objects
        return bytes(get(name))

    rig.storage.get = overtaken
    with pytest.raises(Fenced):
        slow.run_batch(Proposal(end={"taken": 20}))
    assert others and paths.manifest(2) in rig.storage.objects
    rig.assert_exact()


def test_a_task_of_a_driver_that_was_overtaken_is_a_zombie() -> None:
    rig = Rig(every=2, keep=1)
    rig.run(1)
    recipe = recipe_for(rig.chain, rig.head, 0)
    rig.run(6)
    with pytest.raises(ZombieTask, match="a newer run owns the partition"):
        bring(MemoryStore(), rig.storage, recipe)


def test_a_batch_that_spark_replays_after_its_manifest_is_gone_is_refused() -> None:
    rig = Rig(every=2, keep=1)
    rig.run(6)
    driver: Any = rig.driver
    driver.head = msgspec.structs.replace(rig.head, spark=SparkBatch("q", 9, "x"))
    for version in numbers(rig, paths.COMMITS):
        if version < rig.head.version:
            rig.storage.delete(paths.manifest(version))
    rig.storage.objects[paths.snapshot(rig.head.version + 1)] = b""
    with pytest.raises(SourceMismatch, match="committed so long ago"):
        driver._check_same_rows(SparkBatch("q", 2, "y"))


def test_a_store_from_before_the_floor_is_built_again_from_a_snapshot() -> None:
    rig = Rig(every=2, keep=1)
    rig.run(1)
    store = MemoryStore()
    bring(store, rig.storage, recipe_for(rig.chain, rig.head, 0))
    base = MemoryStore()
    base.apply((), EMPTY, Mark(0, rig.head.base_id))
    rig.run(14)
    recipe = recipe_for(rig.chain, rig.head, 0)
    for old in (store, base):
        bring(old, rig.storage, recipe)
        assert old.mark() == recipe.target


# -- readers -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("read", ["get", "items", "two at a time"])
def test_a_view_uses_its_stores_again_also_after_a_reader_that_has_left(read: str) -> None:
    rig = Rig(every=None, partitions=2)
    made: list[MemoryStore] = []

    def new_store() -> MemoryStore:
        made.append(MemoryStore())
        return made[-1]

    view = StateView(rig.chain, "default", JsonCodec(), new_store=new_store)
    for version in range(1, 6):
        rig.run(1)
        if read == "get":
            assert all(view.get(f"k{n}")["n"] == version for n in range(10))  # type: ignore[index]
        elif read == "items":
            assert next(view.items())[1]["n"] == version
        else:
            one = view.items()
            first = next(one)
            rig.run(1)
            assert {document["n"] for _, document in view.items()} == {2 * version}
            assert {document["n"] for _, document in [first, *one]} == {2 * version - 1}
    assert len(made) == (4 if read == "two at a time" else 2)


def test_a_view_that_meets_a_removed_file_begins_again_at_the_newest_version_with_a_pin() -> None:
    rig = Rig(every=2, keep=1)
    rig.run(3)
    seen: list[int | None] = []

    class Overtaken(MemoryStorage):
        def __init__(self) -> None:
            super().__init__()
            self.objects = rig.storage.objects

        def names(self, prefix: str) -> list[str]:
            found = super().names(prefix)
            if prefix == paths.SNAPSHOTS:
                seen.append(oldest_pin(rig.storage, time.time_ns() // 1_000_000))
                if len(seen) == 1:
                    rig.run(12)
            return found

    view = StateView(Chain(Overtaken()), "default", JsonCodec(), new_store=MemoryStore)
    assert {document["n"] for _, document in view.items()} == {15}
    assert seen[0] is None
    assert 15 in seen
    assert not rig.storage.names(paths.PINS)


def test_a_pin_keeps_what_leads_to_its_version_until_it_ends() -> None:
    rig = Rig(every=2, keep=1)
    rig.run(5)
    assert versions(rig.storage) == [4]
    lease = Lease(rig.storage, 5, lambda: rig.now_ms)
    rig.run(6)
    assert versions(rig.storage) == [4, 6, 8, 10]
    bring(MemoryStore(), rig.storage, recipe_for(rig.chain, rig.chain.read(5), 0))
    lease.end()
    rig.run(2)
    assert versions(rig.storage) == [12]


def test_a_pin_that_is_older_than_every_snapshot_keeps_everything_until_it_ends() -> None:
    rig = Rig(every=4, keep=1)
    rig.run(3)
    lease = Lease(rig.storage, 3, lambda: rig.now_ms)
    rig.run(4)
    assert versions(rig.storage) == [4]
    assert numbers(rig, paths.DELTAS) == list(range(1, 8))
    bring(MemoryStore(), rig.storage, recipe_for(rig.chain, rig.chain.read(3), 0))
    lease.end()
    clear_up(rig.storage, 1, rig.now_ms)
    assert numbers(rig, paths.DELTAS) == [5, 6, 7]


def test_a_pin_that_has_ended_and_cannot_be_deleted_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(every=2, keep=1)
    delete = rig.storage.delete

    def refuse(name: str) -> None:
        if name.startswith(paths.PINS):
            raise StorageReadOnly("another's")
        delete(name)

    monkeypatch.setattr(rig.storage, "delete", refuse)
    Lease(rig.storage, 0, lambda: -LEASE_MS)
    rig.run(5)
    assert numbers(rig, paths.COMMITS) == [4, 5]


def test_a_pin_that_was_not_renewed_ends_by_itself() -> None:
    storage = MemoryStorage()
    Lease(storage, 3, lambda: 1_000)
    assert oldest_pin(storage, 1_000 + LEASE_MS - 1) == 3
    assert oldest_pin(storage, 1_000 + LEASE_MS) is None
    assert not storage.objects


def test_a_pin_is_renewed_before_it_ends_and_never_missing_in_between() -> None:
    now = [0]
    storage = MemoryStorage()
    lease = Lease(storage, 3, lambda: now[0])
    for now[0] in range(0, 5 * LEASE_MS, LEASE_MS // 3):
        lease.renew()
        assert oldest_pin(storage, now[0]) == 3
        assert len(storage.objects) == 1
    lease.end()
    assert not storage.objects


def test_a_pin_of_a_clock_far_ahead_and_half_a_pin_hold_nothing_up() -> None:
    storage = MemoryStorage()
    storage.put(paths.pin("far"), msgspec.json.encode(Pin(1, 10 * LEASE_MS)))
    storage.put(paths.pin("half"), b'{"version": 1, "ex')
    assert oldest_pin(storage, 0) is None
    assert not storage.objects


def test_a_checkpoint_that_cannot_be_written_is_read_without_a_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise StorageReadOnly("read-only")

    storage = MemoryStorage()
    monkeypatch.setattr(storage, "put", refuse)
    monkeypatch.setattr(storage, "delete", refuse)
    Lease(storage, 1, lambda: 0).end()


# -- local disks ---------------------------------------------------------------------------------------------------------


def test_local_stores_that_nobody_has_used_for_long_go_and_those_that_are_held_stay(tmp_path: Path) -> None:
    stores = LocalStores(tmp_path)
    with stores.open("old", 0), stores.open("old", 1) as held, stores.open("new", 0):
        pass
    long_ago = time.time() - 2 * STALE_S
    for lock in tmp_path.glob("old/*/slot-0.lock"):
        os.utime(lock, (long_ago, long_ago))
    with stores.open("old", 1) as held:
        os.utime(tmp_path / "old/1/slot-0.lock", (long_ago, long_ago))
        stores.collect(time.time() - STALE_S)
        assert held.mark() == EMPTY
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/*/slot-0")) == [
        "new/0/slot-0",
        "old/1/slot-0",
    ]


def test_a_new_copy_replaces_the_one_that_a_killed_run_left(tmp_path: Path) -> None:
    stores = LocalStores(tmp_path)
    with stores.open("i", 0) as store:
        stores.copy("i", 0, store, "first")
        stores.copy("i", 0, store, "second")
    assert stores.copied("i", 0, "first") is None
    assert stores.copied("i", 0, "second") is not None
    stores.forget("i", 0, "second")
    assert stores.copied("i", 0, "second") is None


def test_the_newest_snapshot_is_that_of_this_chain() -> None:
    rig = Rig(every=2)
    assert newest_snapshot(rig.storage) is None
    rig.run(3)
    found = newest_snapshot(rig.storage)
    assert found is not None and found.version == 2
