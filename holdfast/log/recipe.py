"""Recipes: how to bring the store of a partition to exactly one version.

A recipe carries the last few deltas, which is all that a store needs that was there for the last batch. A store that
is further behind, or holds something else, walks the manifests back from the recipe's head. There are three ways: from the
version that it holds, if that is cheapest; from a snapshot, the newest first; or from the base, the version at which the
state was last empty. A way that turns out to be damaged is left for the next one. A delta is never skipped.

Who restores many partitions, or one in many steps, walks once and shares the walk: `Walk.lengthened` makes recipes that
carry everything the walk has passed, so that nobody reads these manifests again.

Trust no store unless the chain lists its very (version, attempt): otherwise it is wiped and built again. A store that
is ahead of the recipe means that this task is the old one: it fails and never wipes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

import msgspec

from holdfast.errors import Damaged, ZombieTask
from holdfast.log import paths
from holdfast.log.files import FileRef, read_delta
from holdfast.log.manifest import AttemptId, Chain, Manifest, ManifestId
from holdfast.log.snapshot import PartitionSnapshot, changed, fetch, may_be_removed, read_snapshot, versions
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


def recipes_for(chain: Chain, manifest: Manifest, known: Sequence[Recipe] = ()) -> tuple[Recipe, ...]:
    """The recipes of all partitions for `manifest`; `known` are those of its parent, if they are at hand.

    Otherwise the last few manifests are read, each once.
    """
    partitions = range(len(manifest.partitions))
    tails: list[tuple[Stride, ...]]
    if manifest.base == manifest.version:
        tails = [() for _ in partitions]
    elif known and known[0].head_id == manifest.parent:
        tails = [(*known[partition].tail, _stride(manifest, partition))[-TAIL:] for partition in partitions]
    else:
        last = _last(chain, manifest)
        tails = [tuple(_stride(one, partition) for one in last) for partition in partitions]
    return tuple(_recipe(manifest, partition, tail) for partition, tail in enumerate(tails))


def recipe_for(chain: Chain, manifest: Manifest, partition: int) -> Recipe:
    """The same for one partition."""
    return _recipe(manifest, partition, tuple(_stride(one, partition) for one in _last(chain, manifest)))


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


def steps(
    store: Store, storage: Storage, recipe: Recipe, left: list[Damaged] | None = None
) -> Generator[int, None, Way | None]:
    """The same step by step: how many bytes each has brought, and in the end which way it was; None: nothing was to do.

    Whoever ends it early can go on with another one. If a way was left because it is damaged, that is added to `left`: another
    one would begin with the same way again, and undo what was fetched on the next.
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
                store.unstage()  # what was fetched for a way that was left
                return way
            except DamagedStore:
                raise  # this disk is at fault: whoever tries again begins with an empty store
            except Damaged as damage:
                damages.append(damage)
            logger.warning("partition %d: %s", recipe.partition, damages[-1])
            if left is not None:
                left.append(damages[-1])
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


def plan(storage: Storage, recipe: Recipe, held: Mark, walk: Walk | None = None) -> Way | None:
    """How a store that holds `held` would be brought to the recipe's version; None if there is nothing to do or no way.

    `walk` is one from the same head that is shared with others.
    """
    if held == recipe.target or held.version > recipe.head:
        return None
    return next(_ways(storage, recipe, held, [], [], walk), None)


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
            staging = store.staging()
            yield from fetch(storage, self.snapshot, staging)
            held = self.snapshot.mark
            try:
                store.replace(held)
            except DamagedStore as damage:
                raise _blamed(damage, self.snapshot, staging) from damage
        elif held == EMPTY:
            store.wipe()
            held = recipe.base_mark
            store.apply((), EMPTY, held)
        for stride in self.strides:
            store.apply(read_delta(storage, stride.delta) if stride.delta else (), held, stride.mark)
            held = stride.mark
            yield stride.delta.length if stride.delta is not None else 0


def _blamed(damage: DamagedStore, part: PartitionSnapshot, staging: Path) -> Damaged:
    """Whose fault it is that a snapshot does not become a store: that of this disk, or its own."""
    rotten = changed(part, staging)
    for path in rotten:
        path.unlink()  # to be fetched again
    if rotten:
        return damage
    return Damaged(
        f"{part.files[0].name} and the other files of partition {part.partition} at version {part.version} are as the snapshot "
        f"says, but no whole store: {damage}",
        name=part.files[0].name,
    )


def _ways(
    storage: Storage,
    recipe: Recipe,
    held: Mark,
    known: list[int],
    damages: list[Damaged],
    walk: Walk | None = None,
) -> Iterator[Way]:
    """The ways from `held` to the head, the best first; what stands in the way of one is added to `damages`.

    The snapshots are listed only if they are needed, and added to `known`.
    """
    walk = walk or Walk(storage, recipe)
    if any(stride.mark == held for stride in recipe.tail):
        yield Way(None, held, walk.after(recipe, held) or [])
        own = None
    else:
        own = _own_way(walk, recipe, held)
    known += versions(storage)
    for version in reversed(known):
        if not recipe.base <= version <= recipe.head or (version <= held.version and own is not None):
            continue
        try:
            parts = read_snapshot(storage, version).partitions
            part = parts[recipe.partition] if recipe.partition < len(parts) else None
            strides = None if part is None else walk.after(recipe, part.mark)
        except Damaged as damage:
            logger.warning("partition %d: %s", recipe.partition, damage)
            damages.append(damage)
            continue
        if part is None or strides is None:
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
        strides = walk.after(recipe, recipe.base_mark)
    except Damaged as damage:
        damages.append(damage)
        return
    yield Way(None, EMPTY, strides or [])


def _own_way(walk: Walk, recipe: Recipe, held: Mark) -> Way | None:
    """From what the store holds, if the chain lists it."""
    try:
        strides = walk.after(recipe, held)
    except Damaged as damage:
        logger.debug("partition %d: the way from version %d is gone", recipe.partition, held.version, exc_info=damage)
        return None
    if strides is not None:
        return Way(None, held, strides)
    if held != EMPTY and held.version >= recipe.base:  # before the base: the state was cleared since
        logger.warning("partition %d: the local store is not of this chain; building it again", recipe.partition)
    return None


class Walk:
    """The way back from the head of a recipe, manifest by manifest, as far as anyone asked; all partitions can share it."""

    def __init__(self, storage: Storage, recipe: Recipe) -> None:
        self._chain = Chain(storage)
        self._head = recipe.head
        self._head_id = recipe.head_id
        self._passed: list[Manifest] = []
        """Newest first, without a gap."""

    def after(self, recipe: Recipe, mark: Mark) -> list[Stride] | None:
        """What leads from `mark` to the head, oldest first; None if the chain does not list it."""
        marks = [stride.mark for stride in recipe.tail]
        if mark in marks:
            return list(recipe.tail[marks.index(mark) + 1 :])
        if mark.version < recipe.base or (mark.version == recipe.base and mark != recipe.base_mark):
            return None
        if mark == recipe.base_mark and recipe.head - recipe.base == len(recipe.tail):
            return list(recipe.tail)
        if marks and mark.version >= marks[0].version:
            return None
        at = self._back_to(mark.version)
        if mark != recipe.base_mark and _stride(at, recipe.partition).mark != mark:
            return None
        return [_stride(one, recipe.partition) for one in reversed(self._passed) if one.version > mark.version]

    def lengthened(self, recipe: Recipe) -> Recipe:
        """The recipe with everything that was passed: with it nobody has to read these manifests again."""
        passed = [one for one in reversed(self._passed) if one.version > recipe.base]
        if len(passed) <= len(recipe.tail):
            return recipe
        return msgspec.structs.replace(recipe, tail=tuple(_stride(one, recipe.partition) for one in passed))

    def _back_to(self, version: int) -> Manifest:
        if not self._passed:
            head = self._chain.read(self._head)
            if head.id != self._head_id:
                name = paths.manifest(self._head)
                raise Damaged(f"{name} is not the commit that this task was told to continue", name=name)
            self._passed.append(head)
        if self._passed[-1].version > version:
            self._chain.read(version)  # one that retention has removed is not worth the walk
        while self._passed[-1].version > version:
            self._passed.append(self._chain.parent_of(self._passed[-1]))
        return self._passed[self._head - version]


def _zombie(recipe: Recipe, why: str, held: int | None) -> ZombieTask:
    return ZombieTask(
        f"partition {recipe.partition}: {why}, this task was told to continue version {recipe.head}: a newer run owns the "
        "partition. If the checkpoint was put back from a backup, remove the local stores and start again",
        partition=recipe.partition,
        held=held,
        wanted=recipe.head,
    )


def _last(chain: Chain, manifest: Manifest) -> list[Manifest]:
    """The last manifests up to `manifest`, oldest first: `TAIL` of them, or as many as there are after the base."""
    last: list[Manifest] = []
    stop = max(manifest.base, manifest.version - TAIL)
    while manifest.version > stop:
        last.append(manifest)
        try:
            manifest = chain.parent_of(manifest)
        except Damaged:
            if not may_be_removed(chain.storage, manifest.version - 1):
                raise
            break
    return last[::-1]


def _recipe(manifest: Manifest, partition: int, tail: tuple[Stride, ...]) -> Recipe:
    return Recipe(partition, manifest.version, manifest.id, manifest.base, manifest.base_id, tail)


def _stride(manifest: Manifest, partition: int) -> Stride:
    commit = manifest.partitions[partition]
    return Stride(manifest.version, commit.attempt, commit.delta)
