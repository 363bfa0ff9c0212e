"""The recovery ladder at the start of a run: who needs what, and how long it takes.

    the local store fits, or is a few deltas behind    nothing is said: the first batch sees to it
    many deltas behind                                 they are applied
    too far behind, or nothing there                   a snapshot, and the deltas after it
    no snapshot                                        every delta since the state was last empty

Partitions restore in parallel and in rounds of a few seconds, so that the driver can say how far they are. A restore that is
interrupted, also by the end of a round, goes on where it stopped. What a task has to restore by itself, later or because nobody
was asked, is in its receipt (`job.Receipt.restored`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import msgspec

from holdfast.errors import HoldfastError
from holdfast.log.manifest import InstanceId
from holdfast.log.recipe import Recipe, plan, steps
from holdfast.log.snapshot import staged
from holdfast.log.storage import Storage
from holdfast.runtime.batch import NotNowError
from holdfast.runtime.restoring import RestoreLine
from holdfast.runtime.task import Stores
from holdfast.stores.base import Mark

ROUND_S = 2.0

logger = logging.getLogger("holdfast")


class Tasks(Protocol):
    """Runs a function once per partition, where the partition is."""

    def each(self, function: Callable[[int, Storage, Stores], Any]) -> list[Any]:
        """What it returned, by partition. An exception means that some may not have run."""


class Need(msgspec.Struct, frozen=True):
    """What a partition has to read."""

    length: int
    """In bytes, without what is there already."""
    what: str
    """Where it begins; for people."""


def held_marks(instance: InstanceId) -> Callable[[int, Storage, Stores], Mark]:
    """What the local store of each partition holds."""

    def task(partition: int, storage: Storage, stores: Stores) -> Mark:
        with stores.open(instance, partition) as store:
            return store.mark()

    return task


def climb(
    app: str,
    tasks: Tasks,
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
        _restore(app, tasks, instance, recipes, is_stopping)
    except (HoldfastError, NotNowError):
        raise
    except Exception as error:  # a worker or an executor was lost: the first batch goes on with it
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
    app: str, tasks: Tasks, instance: InstanceId, recipes: Sequence[Recipe], is_stopping: Callable[[], bool]
) -> None:
    needs = tasks.each(_need(instance, recipes))
    for partition, need in enumerate(needs):
        if need is not None:
            logger.info("%s: partition %d: %s, %s MB", app, partition, need.what, f"{need.length / 1e6:,.1f}")
    total = sum(need.length for need in needs if need is not None)
    if not any(needs):
        return
    line = RestoreLine(app, "the checkpoint", total / 1e6, "MB")
    done = 0
    while True:
        if is_stopping():
            logger.info("%s: restoring was stopped; the next run goes on with it", app)
            raise NotNowError
        rounds = tasks.each(_round(instance, recipes))
        done += sum(length for length, _ in rounds)
        if not any(is_left for _, is_left in rounds):
            break
        line.show(min(done, total) / 1e6)
    line.end()


def _fits(held: Mark, recipe: Recipe) -> bool:
    return held == recipe.target or held.version > recipe.head or any(stride.mark == held for stride in recipe.tail)


def _need(instance: InstanceId, recipes: Sequence[Recipe]) -> Callable[[int, Storage, Stores], Need | None]:
    def task(partition: int, storage: Storage, stores: Stores) -> Need | None:
        recipe = recipes[partition]
        with stores.open(instance, partition) as store:
            held = store.mark()
            way = None if _fits(held, recipe) else plan(storage, recipe, held)
            if way is None:
                return None
            there = 0 if way.snapshot is None else staged(way.snapshot, store.staging())
            return Need(way.length - there, way.what)

    return task


def _round(instance: InstanceId, recipes: Sequence[Recipe]) -> Callable[[int, Storage, Stores], tuple[int, bool]]:
    """A task that restores for a while: how many bytes it has brought, and whether there is more to do."""

    def task(partition: int, storage: Storage, stores: Stores) -> tuple[int, bool]:
        limit = time.monotonic() + ROUND_S
        brought = 0
        with stores.open(instance, partition) as store:
            if _fits(store.mark(), recipes[partition]):
                return 0, False
            for length in steps(store, storage, recipes[partition]):
                brought += length
                if time.monotonic() > limit:
                    return brought, True
        return brought, False

    return task
