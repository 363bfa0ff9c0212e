"""The recovery ladder at the start of a run: who needs what, and how long it takes.

    the local store fits, or is a few deltas behind    nothing is said: the first batch sees to it
    many deltas behind                                 they are applied
    too far behind, or nothing there                   a snapshot, and the deltas after it
    no snapshot                                        every delta since the state was last empty

Partitions restore in parallel and in rounds of a few seconds, so that the driver can say how far they are. A restore that is
interrupted, also by the end of a round, goes on where it stopped.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from holdfast.errors import HoldfastError
from holdfast.log.manifest import InstanceId
from holdfast.log.recipe import Recipe, plan, steps
from holdfast.log.storage import Storage
from holdfast.runtime.restoring import RestoreLine
from holdfast.runtime.task import Stores
from holdfast.stores.base import EMPTY, DamagedStore, Mark

ROUND_S = 2.0

logger = logging.getLogger("holdfast")


class Tasks(Protocol):
    """Runs a function once per partition, where the partition is."""

    def each(self, function: Callable[[int, Storage, Stores], Any]) -> list[Any]:
        """What it returned, by partition. An exception means that some may not have run."""


class Need(msgspec.Struct, frozen=True):
    """What a partition has to read."""

    length: int
    deltas: int
    snapshot: int | None
    """Of which version."""
    is_empty: bool
    """Whether there is nothing to begin with."""


def held_marks(instance: InstanceId) -> Callable[[int, Storage, Stores], Mark]:
    """What the local store of each partition holds."""

    def task(partition: int, storage: Storage, stores: Stores) -> Mark:
        with stores.open(instance, partition) as store:
            return store.mark()

    return task


def climb(app: str, tasks: Tasks, instance: InstanceId, recipes: Sequence[Recipe], held: Sequence[Mark] | None) -> None:
    """Restore the partitions that are not nearly there; `held` is what some of them hold, if that is known already.

    If those fit, so do the others: they were kept and lost together. If not, the first batch restores them.
    """
    if held is None or all(_fits(mark, recipe) for mark, recipe in zip(held, recipes, strict=False)):
        return
    try:
        _restore(app, tasks, instance, recipes)
    except Exception as error:  # a worker was lost, or a store is damaged: the first batch goes on with it
        if isinstance(error, HoldfastError) and not isinstance(error, DamagedStore):
            raise
        logger.warning("%s: restoring was interrupted; going on", app)
        logger.debug("interrupted by", exc_info=error)


def _restore(app: str, tasks: Tasks, instance: InstanceId, recipes: Sequence[Recipe]) -> None:
    needs = tasks.each(_need(instance, recipes))
    for partition, need in enumerate(needs):
        if need is not None:
            logger.info("%s: partition %d: %s", app, partition, _rung(need))
    total = sum(need.length for need in needs if need is not None)
    if not any(needs):
        return
    line = RestoreLine(app, "the checkpoint", total / 1e6, "MB")
    done = 0
    while True:
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
        snapshot = None if way.snapshot is None else way.snapshot.version
        return Need(way.length, len(way.strides), snapshot, way.since == EMPTY)

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


def _rung(need: Need) -> str:
    deltas = f"{need.deltas:,} deltas"
    if need.snapshot is not None:
        return f"the snapshot of version {need.snapshot:,} and {deltas}, {need.length / 1e6:,.1f} MB"
    if need.is_empty:
        return f"from the beginning: {deltas}, {need.length / 1e6:,.1f} MB"
    return f"{deltas} behind, {need.length / 1e6:,.1f} MB"
