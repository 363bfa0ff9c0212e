"""The recovery ladder at the start of a run: who needs what, and how long it takes.

    the local store fits, or is a few deltas behind    nothing is said: the first batch sees to it
    many deltas behind                                 they are applied
    too far behind, or nothing there                   a snapshot, and the deltas after it
    no snapshot                                        every delta since the state was last empty

Partitions restore in parallel and in rounds of a few seconds, so that the driver can say how far they are. A restore that is
interrupted, also by the end of a round, goes on where it stopped. The driver walks the manifests, once for all partitions, and
the rounds get recipes that reach as far back as they have to: each manifest is read once, however many rounds there are.
What a task has to restore by itself, later or because nobody was asked, is in its receipt (`job.Receipt.restored`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import msgspec

from holdfast.errors import Damaged, HoldfastError
from holdfast.log.manifest import InstanceId
from holdfast.log.recipe import Recipe, Walk, plan, steps
from holdfast.log.snapshot import staged
from holdfast.log.storage import Storage
from holdfast.runtime.batch import NotNowError
from holdfast.runtime.restoring import RestoreLine
from holdfast.runtime.task import Stores
from holdfast.stores.base import DamagedStore, Mark

ROUND_S = 2.0

logger = logging.getLogger("holdfast")


class Tasks(Protocol):
    """Runs a function once per partition, where the partition is."""

    def each(self, function: Callable[[int, Storage, Stores], Any]) -> list[Any]:
        """What it returned, by partition. An exception means that some may not have run."""


class Found(msgspec.Struct, frozen=True):
    """What a partition has."""

    mark: Mark
    fetched: dict[str, int]
    """Of a restore that was interrupted: the files that are there, and their lengths."""


def held_marks(instance: InstanceId) -> Callable[[int, Storage, Stores], Mark]:
    """What the local store of each partition holds."""

    def task(partition: int, storage: Storage, stores: Stores) -> Mark:
        with stores.open(instance, partition) as store:
            return store.mark()

    return task


def climb(
    app: str,
    tasks: Tasks,
    storage: Storage,
    instance: InstanceId,
    recipes: Sequence[Recipe],
    held: Sequence[Mark] | None,
    kept: Collection[int] = (),
    is_stopping: Callable[[], bool] = lambda: False,
) -> None:
    """Restore the partitions that are not nearly there; `NotNowError` if the run is asked to stop before that is done.

    `held` is what some of them hold, if that is known already, and `kept` are those that have a store on this host. Where both
    say that all is in its place nobody is asked, and if they are wrong the first batch restores what is missing.
    """
    if _is_in_place(recipes, held, kept):
        return
    try:
        _restore(app, tasks, storage, instance, recipes, is_stopping)
    except NotNowError:
        raise
    except Exception as error:  # a worker was lost, or a store is damaged: the first batch goes on with it
        if isinstance(error, HoldfastError) and not isinstance(error, DamagedStore):
            raise
        logger.warning("%s: restoring was interrupted; going on", app)
        logger.debug("interrupted by", exc_info=error)


def _is_in_place(recipes: Sequence[Recipe], held: Sequence[Mark] | None, kept: Collection[int]) -> bool:
    if all(recipe.head == recipe.base for recipe in recipes):
        return True  # there is no state
    if held is not None and not all(_fits(mark, recipe) for mark, recipe in zip(held, recipes, strict=False)):
        return False
    if held is not None and not kept:
        return True  # they are on other hosts; the others were kept with those that fit
    return len(kept) == len(recipes)


def _restore(
    app: str,
    tasks: Tasks,
    storage: Storage,
    instance: InstanceId,
    recipes: Sequence[Recipe],
    is_stopping: Callable[[], bool],
) -> None:
    walk = Walk(storage, recipes[0])
    left: list[Recipe | None] = [None for _ in recipes]
    total = 0
    for partition, found in enumerate(tasks.each(_look(instance, recipes))):
        recipe = recipes[partition]
        way = None if _fits(found.mark, recipe) else plan(storage, recipe, found.mark, walk)
        if way is not None:
            length = way.length - (0 if way.snapshot is None else staged(way.snapshot, found.fetched))
            logger.info("%s: partition %d: %s, %s MB", app, partition, way.what, f"{length / 1e6:,.1f}")
            left[partition] = recipe
            total += length
    if not any(left):
        return
    left = [None if recipe is None else walk.lengthened(recipe) for recipe in left]
    line = RestoreLine(app, "the checkpoint", total / 1e6, "MB")
    done = 0
    while True:
        if is_stopping():
            logger.info("%s: restoring was stopped; the next run goes on with it", app)
            raise NotNowError
        rounds = tasks.each(_round(instance, left))
        done += sum(length for length, _ in rounds)
        left = [recipe if is_left else None for recipe, (_, is_left) in zip(left, rounds, strict=True)]
        if not any(left):
            break
        line.show(min(done, total) / 1e6)
    line.end()


def _fits(held: Mark, recipe: Recipe) -> bool:
    return held == recipe.target or held.version > recipe.head or any(stride.mark == held for stride in recipe.tail)


def _look(instance: InstanceId, recipes: Sequence[Recipe]) -> Callable[[int, Storage, Stores], Found]:
    def task(partition: int, storage: Storage, stores: Stores) -> Found:
        with stores.open(instance, partition) as store:
            mark = store.mark()
            if _fits(mark, recipes[partition]):
                return Found(mark, {})
            return Found(mark, {path.name: path.stat().st_size for path in store.staging().iterdir()})

    return task


def _round(
    instance: InstanceId, recipes: Sequence[Recipe | None]
) -> Callable[[int, Storage, Stores], tuple[int, bool]]:
    """A task that restores for a while: how many bytes it has brought, and whether there is more to do.

    One that has met damage goes on to the end, because the next round would not know of it.
    """

    def task(partition: int, storage: Storage, stores: Stores) -> tuple[int, bool]:
        recipe = recipes[partition]
        if recipe is None:
            return 0, False
        brought = 0
        limit: float | None = None
        damages: list[Damaged] = []
        with stores.open(instance, partition) as store:
            for length in steps(store, storage, recipe, damages):
                brought += length
                now = time.monotonic()
                limit = now + ROUND_S if limit is None else limit  # what came before the first step is no step
                if now > limit and not damages:
                    return brought, True
        return brought, False

    return task
