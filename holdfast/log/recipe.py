"""Recipes: how to bring the store of a partition to exactly one version.

A recipe carries the last few deltas, which is all that a store needs that was there for the last batch. A store that
is further behind, or holds something else, walks the manifests back from the recipe's head. There are three ways: from the
version that it holds, if that is cheapest; from a snapshot, the newest first; or from the base, the version at which the
state was last empty. A way that turns out to be damaged is left for the next one. A delta is never skipped.

Trust no store unless the chain lists its very (version, attempt): otherwise it is wiped and built again. A store that
is ahead of the recipe means that this task is the old one: it fails and never wipes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterator

import msgspec

from holdfast.errors import Damaged, ZombieTask
from holdfast.log import paths
from holdfast.log.files import FileRef, read_delta
from holdfast.log.manifest import AttemptId, Chain, Manifest, ManifestId
from holdfast.log.snapshot import PartitionSnapshot, fetch, may_be_removed, read_snapshot, versions
from holdfast.log.storage import Storage
from holdfast.stores.base import EMPTY, DamagedStore, Mark, Store

TAIL = 8
"""How many versions a recipe carries itself."""

FILE_COST = 64 << 10
"""What the reading of a file costs besides its bytes, in bytes."""

LONG_S = 1.0
"""A restore of more than so many seconds is worth a word."""

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
        tail = _tail(chain, manifest, partition)
    return Recipe(partition, manifest.version, manifest.id, manifest.base, manifest.base_id, tail)


class Brought(msgspec.Struct, frozen=True):
    """What it took to bring a store to its version."""

    length: int
    """Bytes that were read."""
    seconds: float
    what: str
    """Where it began, and how many deltas came after that; for people."""


def bring(store: Store, storage: Storage, recipe: Recipe) -> Brought | None:
    """Bring `store` to exactly the version that the recipe wants; what that took, if it was more than `LONG_S`."""
    began = time.monotonic()
    going = steps(store, storage, recipe)
    length = 0
    while True:
        try:
            length += next(going)
        except StopIteration as end:
            way: Way | None = end.value
            break
    seconds = time.monotonic() - began
    return Brought(length, seconds, way.what) if way is not None and seconds > LONG_S else None


def steps(store: Store, storage: Storage, recipe: Recipe) -> Generator[int, None, Way | None]:
    """The same step by step: how many bytes each has brought, and in the end which way it was; None: nothing was to do.

    Whoever ends it early can go on with another one.
    """
    held = store.mark()
    if held == recipe.target:
        return None
    if held.version > recipe.head:
        raise _zombie(recipe, f"the local store is at version {held.version}", held.version)
    while True:
        known: list[int] = []
        damages: list[Damaged] = []
        for way in _ways(storage, recipe, store.mark(), known, damages):
            if way.snapshot is None and way.since not in (EMPTY, store.mark()):
                continue  # another way was taken in part
            try:
                yield from way.steps(store, storage, recipe)
                return way
            except DamagedStore as damage:
                if way.snapshot is None:
                    raise
                damages.append(damage)
            except Damaged as damage:
                damages.append(damage)
            logger.warning("partition %d: %s", recipe.partition, damages[-1])
        newest = Chain(storage).head()
        if newest is not None and newest.version > recipe.head:
            raise _zombie(recipe, "what it needs is gone", None) from damages[-1]
        if versions(storage)[-1:] <= known[-1:]:
            break
        logger.info("partition %d: a newer snapshot has appeared; beginning again", recipe.partition)
    if len(damages) == 1:
        raise damages[0]
    raise Damaged(
        f"partition {recipe.partition} cannot be brought to version {recipe.head}: "
        + "; ".join(map(str, damages))
        + ". Put the files back from a backup",
        name=getattr(damages[0], "name", None),
        partition=recipe.partition,
        version=recipe.head,
    )


def plan(storage: Storage, recipe: Recipe, held: Mark) -> Way | None:
    """How a store that holds `held` would be brought to the recipe's version; None if there is nothing to do or no way."""
    if held == recipe.target or held.version > recipe.head:
        return None
    return next(_ways(storage, recipe, held, [], []), None)


class Way(msgspec.Struct, frozen=True):
    """One way to a version: where it begins, and the deltas after that."""

    snapshot: PartitionSnapshot | None
    """What to begin with; None: with what `since` says."""
    since: Mark
    """What the store holds already; `EMPTY`: it is emptied first."""
    strides: list[Stride]

    @property
    def length(self) -> int:
        """Bytes to be read."""
        deltas = sum(stride.delta.length for stride in self.strides if stride.delta is not None)
        return deltas + (self.snapshot.length if self.snapshot is not None else 0)

    @property
    def what(self) -> str:
        """For people."""
        deltas = f"{len(self.strides):,} deltas"
        if self.snapshot is not None:
            return f"the snapshot of version {self.snapshot.version:,} and {deltas}"
        return f"from the beginning: {deltas}" if self.since == EMPTY else f"{deltas} behind"

    @property
    def cost(self) -> int:
        files = len(self.strides) + (len(self.snapshot.files) if self.snapshot is not None else 0)
        return self.length + FILE_COST * files

    def steps(self, store: Store, storage: Storage, recipe: Recipe) -> Iterator[int]:
        held = self.since
        if self.snapshot is not None:
            yield from fetch(storage, self.snapshot, store.staging())
            held = self.snapshot.mark
            store.replace(held)
        elif held == EMPTY:
            store.wipe()
            held = recipe.base_mark
            store.apply((), EMPTY, held)
        for stride in self.strides:
            store.apply(read_delta(storage, stride.delta) if stride.delta else (), held, stride.mark)
            held = stride.mark
            yield stride.delta.length if stride.delta is not None else 0


def _ways(storage: Storage, recipe: Recipe, held: Mark, known: list[int], damages: list[Damaged]) -> Iterator[Way]:
    """The ways from `held` to the head, the best first; what stands in the way of one is added to `damages`.

    The snapshots are listed only if they are needed, and added to `known`.
    """
    walk = _Walk(storage, recipe)
    if any(stride.mark == held for stride in recipe.tail):
        yield Way(None, held, walk.after(held) or [])
        own = None
    else:
        own = _own_way(walk, recipe, held)
    known += versions(storage)
    for version in reversed(known):
        if not recipe.base <= version <= recipe.head or (version <= held.version and own is not None):
            continue
        try:
            part = read_snapshot(storage, version).partitions[recipe.partition]
            strides = walk.after(part.mark)
        except Damaged as damage:
            logger.warning("partition %d: %s", recipe.partition, damage)
            damages.append(damage)
            continue
        if strides is None:
            logger.warning("partition %d: the snapshot of version %d is not of this chain", recipe.partition, version)
            continue
        way = Way(part, part.mark, strides)
        if own is not None and own.cost <= way.cost:
            yield own
            own = None
        yield way
    if own is not None:
        yield own
    try:
        strides = walk.after(recipe.base_mark)
    except Damaged as damage:
        damages.append(damage)
        return
    yield Way(None, EMPTY, strides or [])


def _own_way(walk: _Walk, recipe: Recipe, held: Mark) -> Way | None:
    """From what the store holds, if the chain lists it."""
    try:
        strides = walk.after(held)
    except Damaged as damage:
        logger.debug("partition %d: the way from version %d is gone", recipe.partition, held.version, exc_info=damage)
        return None
    if strides is not None:
        return Way(None, held, strides)
    if held != EMPTY and held.version >= recipe.base:  # before the base: the state was cleared since
        logger.warning("partition %d: the local store is not of this chain; building it again", recipe.partition)
    return None


class _Walk:
    """The way back from a recipe's head, manifest by manifest, as far as anyone asked."""

    def __init__(self, storage: Storage, recipe: Recipe) -> None:
        self._chain = Chain(storage)
        self._recipe = recipe
        self._strides: list[Stride] = []
        """Newest first, down to the one after `_at`."""
        self._at: Manifest | None = None

    def after(self, mark: Mark) -> list[Stride] | None:
        """What leads from `mark` to the head, oldest first; None if the chain does not list it."""
        recipe = self._recipe
        marks = [stride.mark for stride in recipe.tail]
        if mark in marks:
            return list(recipe.tail[marks.index(mark) + 1 :])
        if mark.version < recipe.base or (mark.version == recipe.base and mark != recipe.base_mark):
            return None
        if mark == recipe.base_mark and recipe.head - recipe.base == len(recipe.tail):
            return list(recipe.tail)
        at = self._back_to(mark.version)
        if mark != recipe.base_mark and _stride(at, recipe.partition).mark != mark:
            return None
        return [stride for stride in reversed(self._strides) if stride.version > mark.version]

    def _back_to(self, version: int) -> Manifest:
        recipe = self._recipe
        if self._at is None:
            self._at = self._chain.read(recipe.head)
            if self._at.id != recipe.head_id:
                name = paths.manifest(recipe.head)
                raise Damaged(f"{name} is not the commit that this task was told to continue", name=name)
        while self._at.version > version:
            parent = self._chain.parent_of(self._at)
            self._strides.append(_stride(self._at, recipe.partition))
            self._at = parent
        if self._at.version == version:
            return self._at
        return self._chain.read(version)  # it was passed before, and checked


def _zombie(recipe: Recipe, why: str, held: int | None) -> ZombieTask:
    return ZombieTask(
        f"partition {recipe.partition}: {why}, this task was told to continue version {recipe.head}: a newer run owns the "
        "partition. If the checkpoint was put back from a backup, remove the local stores and start again",
        partition=recipe.partition,
        held=held,
        wanted=recipe.head,
    )


def _tail(chain: Chain, manifest: Manifest, partition: int) -> tuple[Stride, ...]:
    """The strides of the last versions up to `manifest`: `TAIL` of them, or as many as there are."""
    strides: list[Stride] = []
    stop = max(manifest.base, manifest.version - TAIL)
    while manifest.version > stop:
        strides.append(_stride(manifest, partition))
        try:
            manifest = chain.parent_of(manifest)
        except Damaged:
            if not may_be_removed(chain.storage, manifest.version - 1):
                raise
            break
    return tuple(reversed(strides))


def _stride(manifest: Manifest, partition: int) -> Stride:
    commit = manifest.partitions[partition]
    return Stride(manifest.version, commit.attempt, commit.delta)
