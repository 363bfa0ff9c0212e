"""Recipes: how to bring the store of a partition to exactly one version.

A recipe carries the last few deltas, which is all that a store needs that was there for the last batch. A store that
is further behind, or holds something else, walks the manifests back from the recipe's head: to the version that it
holds, or to the base, the version at which the state was last empty.

Trust no store unless the chain lists its very (version, attempt): otherwise it is wiped and built again. A store that
is ahead of the recipe means that this task is the old one: it fails and never wipes.
"""

from __future__ import annotations

import logging
import time

import msgspec

from holdfast.errors import Damaged, ZombieTask
from holdfast.log import paths
from holdfast.log.files import FileRef, read_delta
from holdfast.log.manifest import AttemptId, Chain, Manifest, ManifestId
from holdfast.log.storage import Storage
from holdfast.stores.base import EMPTY, Mark, Store

TAIL = 8
"""How many versions a recipe carries itself."""

logger = logging.getLogger("holdfast")


class Stride(msgspec.Struct, frozen=True):
    """One version of one partition: what it is called and what it changed."""

    version: int
    attempt: AttemptId
    delta: FileRef | None

    @property
    def mark(self) -> Mark:
        return Mark(self.version, self.attempt)


class Recipe(msgspec.Struct, frozen=True):
    """The way to the version `head`, for one partition."""

    partition: int
    head: int
    head_id: ManifestId
    base: int
    base_id: ManifestId
    tail: tuple[Stride, ...]
    """The last versions, oldest first; empty if the base itself is wanted."""

    @property
    def base_mark(self) -> Mark:
        """What a store holds that was emptied at the base."""
        return Mark(self.base, self.base_id)

    @property
    def target(self) -> Mark:
        return self.tail[-1].mark if self.tail else self.base_mark


def recipe_for(chain: Chain, manifest: Manifest, partition: int, known: Recipe | None = None) -> Recipe:
    """The recipe for `manifest`; `known` is that of its parent, if it is at hand."""
    tail: tuple[Stride, ...]
    if manifest.base == manifest.version:
        tail = ()
    elif known is not None and known.head_id == manifest.parent:
        tail = (*known.tail, _stride(manifest, partition))[-TAIL:]
    else:
        tail = tuple(_walk(chain, manifest, partition, max(manifest.base, manifest.version - TAIL)))
    return Recipe(partition, manifest.version, manifest.id, manifest.base, manifest.base_id, tail)


def bring(store: Store, storage: Storage, recipe: Recipe) -> None:
    """Bring `store` to exactly the version that the recipe wants."""
    held = store.mark()
    if held == recipe.target:
        return
    if held.version > recipe.head:
        raise ZombieTask(
            f"partition {recipe.partition}: the local store is at version {held.version}, this task was told to continue "
            f"version {recipe.head}: a newer run owns the partition. If the checkpoint was put back from a backup, "
            "remove the local stores and start again",
            partition=recipe.partition,
            held=held.version,
            wanted=recipe.head,
        )
    strides = _strides_after(storage, recipe, held)
    if strides is None:
        if held != EMPTY and held.version >= recipe.base:  # before the base: the state was cleared since
            logger.warning("partition %d: the local store is not of this chain; building it again", recipe.partition)
        store.wipe()
        store.apply((), EMPTY, recipe.base_mark)
        held = recipe.base_mark
        strides = _strides_after(storage, recipe, held) or []
    _apply(store, storage, recipe, held, strides)


def _apply(store: Store, storage: Storage, recipe: Recipe, held: Mark, strides: list[Stride]) -> None:
    restoring = len(strides) > 1
    began = said = time.monotonic()
    for done, stride in enumerate(strides):
        store.apply(read_delta(storage, stride.delta) if stride.delta else (), held, stride.mark)
        held = stride.mark
        if restoring and time.monotonic() - said > 2:
            said = time.monotonic()
            left = (said - began) / (done + 1) * (len(strides) - done - 1)
            logger.info(
                "partition %d: restoring, %d of %d versions, %.0f s to go",
                recipe.partition, done + 1, len(strides), left,
            )  # fmt: skip


def _strides_after(storage: Storage, recipe: Recipe, held: Mark) -> list[Stride] | None:
    """What leads from `held` to the head, or None if the chain does not list `held`."""
    marks = [stride.mark for stride in recipe.tail]
    if held in marks:
        return list(recipe.tail[marks.index(held) + 1 :])
    if held.version < recipe.base or (held.version == recipe.base and held != recipe.base_mark):
        return None
    if held == recipe.base_mark and recipe.head - recipe.base == len(recipe.tail):
        return list(recipe.tail)
    chain = Chain(storage)
    head = chain.read(recipe.head)
    if head.id != recipe.head_id:
        name = paths.manifest(recipe.head)
        raise Damaged(f"{name} is not the commit that this task was told to continue", name=name)
    strides = list(_walk(chain, head, recipe.partition, held.version))
    if held == recipe.base_mark:
        return strides
    witness = _stride(chain.read(held.version), recipe.partition)
    return strides if witness.mark == held else None


def _walk(chain: Chain, manifest: Manifest, partition: int, stop: int) -> list[Stride]:
    """The strides of the versions after `stop` up to `manifest`, oldest first."""
    strides = []
    while manifest.version > stop:
        strides.append(_stride(manifest, partition))
        manifest = chain.parent_of(manifest)
    return strides[::-1]


def _stride(manifest: Manifest, partition: int) -> Stride:
    commit = manifest.partitions[partition]
    return Stride(manifest.version, commit.attempt, commit.delta)
