"""Recipes: how a local store comes to exactly one version, wherever it was."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast import State
from holdfast.errors import Damaged, ZombieTask
from holdfast.log import paths
from holdfast.log.manifest import Chain, cleared
from holdfast.log.recipe import TAIL, Recipe, bring, recipe_for, recipes_for
from holdfast.state.codecs import JsonCodec
from holdfast.state.documents import document_prefix, read_document
from holdfast.state.keys import decode_key
from holdfast.stores.base import EMPTY, Mark
from holdfast.stores.memory import MemoryStore
from holdfast.testing import Harness, MemoryStorage

FAR = TAIL + 4


class Log:
    """A checkpoint whose version v has counted key "a" v times and has forgotten key "b" if v is even."""

    def __init__(self, versions: int) -> None:
        self.harness = Harness(lambda sdf: sdf.update(count, stateful=True))
        self.reads: list[str] = []
        self.extend(versions)

    def extend(self, versions: int) -> None:
        for _ in range(versions):
            self.harness.feed(("a", 0), ("b", 0))
            self.harness.run()

    def clear(self) -> None:
        chain = Chain(self.harness.storage)
        head = chain.head()
        assert head is not None
        chain.commit(cleared(head))
        self.harness.restart()

    def recipe(self, version: int | None = None) -> Recipe:
        chain = Chain(self.harness.storage)
        manifest = chain.head() if version is None else chain.read(version)
        assert manifest is not None
        return recipe_for(chain, manifest, 0)

    def bring(self, store: MemoryStore, recipe: Recipe | None = None) -> MemoryStore:
        """Bring `store` to the recipe's version and note what was read on the way."""
        self.reads = []
        bring(store, _Watched(self.harness.storage, self.reads), recipe or self.recipe())
        return store

    def kinds_read(self) -> list[str]:
        return sorted({name.partition("/")[0] for name in self.reads})


class _Watched(MemoryStorage):
    def __init__(self, storage: MemoryStorage, reads: list[str]) -> None:
        super().__init__()
        self.objects = storage.objects
        self._reads = reads

    def get(self, name: str) -> bytes:
        self._reads.append(name)
        return super().get(name)


def count(_: Any, state: State) -> None:
    state.set("n", state.get("n", 0) + 1)


def counts(store: MemoryStore) -> dict[Any, Any]:
    prefix = document_prefix("default")
    return {
        decode_key(key[len(prefix) :]): read_document(value, JsonCodec(), 0)["n"]
        for key, value in store.scan(b"", None)
    }


def test_a_new_store_is_built_from_the_first_delta() -> None:
    log = Log(3)
    store = log.bring(MemoryStore())
    assert counts(store) == {"a": 3, "b": 3}
    assert store.mark() == log.recipe().target
    assert log.reads == log.harness.storage.names("deltas/")


def test_a_store_that_fits_is_taken_as_it_is() -> None:
    log = Log(3)
    store = log.bring(log.bring(MemoryStore()))
    assert counts(store) == {"a": 3, "b": 3}
    assert log.reads == []


@pytest.mark.parametrize("behind", [1, 2, TAIL - 1])
def test_a_store_a_few_versions_behind_applies_just_those_and_reads_no_manifest(behind: int) -> None:
    log = Log(FAR)
    store = log.bring(MemoryStore())
    log.extend(behind)
    recipe = log.recipe()
    log.bring(store, recipe)
    assert counts(store) == {"a": FAR + behind, "b": FAR + behind}
    assert log.reads == log.harness.storage.names("deltas/")[-behind:]


@pytest.mark.parametrize("behind", [TAIL, TAIL + 1, 3 * TAIL])
def test_a_store_far_behind_finds_its_way_through_the_manifests(behind: int) -> None:
    log = Log(2)
    store = log.bring(MemoryStore())
    log.extend(behind)
    log.bring(store)
    assert counts(store) == {"a": 2 + behind, "b": 2 + behind}
    assert [name for name in log.reads if name.startswith("deltas/")] == log.harness.storage.names("deltas/")[2:]
    assert log.kinds_read() == ["commits", "deltas"]


def test_a_recipe_made_on_its_parent_s_is_the_one_that_the_manifests_give() -> None:
    log = Log(FAR)
    chain = Chain(log.harness.storage)
    known: tuple[Recipe, ...] = ()
    for version in range(FAR + 1):
        known = recipes_for(chain, chain.read(version), known)
        assert known == recipes_for(chain, chain.read(version))
        assert known[0] == log.recipe(version)
    assert len(known[0].tail) == TAIL


@pytest.mark.parametrize("version", [1, FAR - 2, FAR])
def test_a_store_of_another_chain_is_wiped_and_built_again(version: int, caplog: pytest.LogCaptureFixture) -> None:
    log, other = Log(FAR), Log(FAR)
    store = other.bring(MemoryStore(), other.recipe(version))
    log.bring(store)
    assert counts(store) == {"a": FAR, "b": FAR}
    assert store.mark() == log.recipe().target
    assert "is not of this chain; building it again" in caplog.text


def test_a_store_with_the_delta_of_an_attempt_that_lost_is_not_trusted() -> None:
    log = Log(3)
    store = log.bring(MemoryStore(), log.recipe(2))
    store.apply([(b"junk", b"junk")], log.recipe(2).target, Mark(3, "an attempt that lost"))
    log.bring(store)
    assert counts(store) == {"a": 3, "b": 3}


@pytest.mark.parametrize("ahead", [1, TAIL + 2])
def test_a_store_that_is_ahead_makes_the_task_a_zombie_and_is_not_touched(ahead: int) -> None:
    log = Log(2 + ahead)
    store = log.bring(MemoryStore())
    with pytest.raises(ZombieTask, match="a newer run owns the partition") as caught:
        log.bring(store, log.recipe(2))
    assert (caught.value.held, caught.value.wanted) == (2 + ahead, 2)  # type: ignore[attr-defined]
    assert counts(store) == {"a": 2 + ahead, "b": 2 + ahead}


def test_after_a_clear_every_store_is_empty() -> None:
    log = Log(FAR)
    stores = [MemoryStore(), log.bring(MemoryStore(), log.recipe(2)), log.bring(MemoryStore())]
    log.clear()
    for store in stores:
        log.bring(store)
        assert counts(store) == {}
        assert store.mark() == log.recipe().base_mark
        assert log.reads == []


@pytest.mark.parametrize("after", [1, FAR])
def test_after_a_clear_only_what_came_later_is_applied(after: int) -> None:
    log = Log(3)
    old = log.bring(MemoryStore())
    log.clear()
    log.extend(after)
    for store in (old, MemoryStore()):
        log.bring(store)
        assert counts(store) == {"a": after, "b": after}
        assert [name for name in log.reads if name.startswith("deltas/")] == log.harness.storage.names("deltas/")[3:]


def test_a_store_that_was_emptied_by_another_clear_is_not_trusted() -> None:
    log, other = Log(2), Log(2)
    for one in (log, other):
        one.clear()
        one.extend(1)
    store = other.bring(MemoryStore(), other.recipe(3))
    log.bring(store)
    assert counts(store) == {"a": 1, "b": 1}
    assert store.mark() == log.recipe().target


def test_a_version_in_which_nothing_changed_is_a_version_of_the_store_too() -> None:
    log = Log(2)
    log.harness.run()
    store = log.bring(MemoryStore())
    assert counts(store) == {"a": 2, "b": 2}
    assert store.mark().version == 3


def test_a_missing_delta_is_never_skipped() -> None:
    log = Log(3)
    (_, second, _) = log.harness.storage.names("deltas/")
    log.harness.storage.delete(second)
    store = MemoryStore()
    with pytest.raises(Damaged, match=f"{second} is missing"):
        log.bring(store)
    assert counts(store) == {"a": 1, "b": 1}  # whole versions only


def test_a_recipe_whose_head_was_replaced_is_refused() -> None:
    log, other = Log(FAR), Log(FAR)
    recipe = log.recipe()
    name = paths.manifest(FAR)
    log.harness.storage.objects[name] = other.harness.storage.objects[name]
    with pytest.raises(Damaged, match="is not the commit that this task was told to continue"):
        log.bring(MemoryStore(), recipe)


def test_a_new_store_is_empty() -> None:
    assert MemoryStore().mark() == EMPTY
