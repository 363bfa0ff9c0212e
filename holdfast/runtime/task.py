"""A task: one batch of one state partition. The letters are those of the protocol in batch.py.

    a  bring the local store to exactly the version that the batch continues
    b  read the input, run the steps, keep changes in memory (processing.py)
    c  put delta and outboxes under names of their own
    d  return the receipt, or send it on to the next stage (exchange.py)

Everything that a task writes is either garbage or named by a commit. An exception becomes part of the receipt, so that
Spark does not try a deterministic failure again and the caller gets the exception itself.
"""

from __future__ import annotations

import gc
import logging
import traceback
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import NoReturn, Protocol

import msgspec

from holdfast.errors import HoldfastError, UserFunctionFailed
from holdfast.failpoints import reach
from holdfast.log.manifest import AttemptId, InstanceId, new_id
from holdfast.log.recipe import bring
from holdfast.log.storage import Storage
from holdfast.pickling import dumps, loads
from holdfast.plan.program import Program
from holdfast.plan.record import Chunk, Place
from holdfast.runtime.exchange import Inbox, LostMailError, Mail, Outcome, mailed
from holdfast.runtime.job import Failure, Job, Receipt
from holdfast.runtime.processing import Processing, message_of
from holdfast.sources.base import Reading
from holdfast.stores.base import DamagedStore, Mark, Store

logger = logging.getLogger("holdfast")


class Stores(Protocol):
    """Where this host keeps its local stores."""

    def open(self, instance: InstanceId, partition: int) -> AbstractContextManager[Store]:
        """The store of a partition, for this task alone."""

    def scratch(self) -> AbstractContextManager[Store]:
        """An empty store for what a task cannot keep in memory; gone afterwards."""

    def copy(self, instance: InstanceId, partition: int, store: Store, name: AttemptId) -> None:
        """Keep a copy of an open store as it is. Earlier copies of the partition go."""

    def copied(self, instance: InstanceId, partition: int, name: AttemptId) -> Path | None:
        """The directory of a copy; None if it is not on this host."""

    def check(self, copy: Path, mark: Mark, files: Iterable[str]) -> None:
        """`DamagedStore` unless a copy is a whole store at `mark`; of its files, those in `files` are read to the end."""

    def distrust(self, instance: InstanceId, partition: int) -> None:
        """Whoever opens the store of a partition next finds it empty. Who has it open is not disturbed."""

    def forget(self, instance: InstanceId, partition: int, name: AttemptId) -> None:
        """Remove a copy, and what else nobody on this host needs any more."""


def run_task(
    program: Program,
    job: Job,
    partition: int,
    chunks: Reading | Inbox | Iterable[Chunk],
    storage: Storage,
    stores: Stores,
) -> list[tuple[int, Mail] | Outcome]:
    """One attempt of one task: what it sends to the next level, or what it returns to the driver.

    A local store that turns out to be damaged is wiped and the exception let through: the job is lost, not wrong, and
    the driver runs it again.
    """
    inbox = chunks if isinstance(chunks, Inbox) else None
    reading = iter(chunks)
    processing: Processing | None = None
    attempt = AttemptId(new_id())
    receipt: Receipt | None
    try:
        reach("task.begin", job.version)
        with without_gc(), ExitStack() as scratch, stores.open(job.instance, partition) as store:
            try:
                restored = bring(store, storage, job.recipes[partition])  # a
                reach("task.restored", job.version)
                copied = job.copies and _copied(stores, job, partition, store, attempt)
                processing = Processing(
                    program, job, partition, attempt, store, lambda: scratch.enter_context(stores.scratch())
                )
                for chunk in reading:  # b
                    processing.process(chunk)
                receipt = None
                if inbox is None or not inbox.failed:
                    processing.finish()
                    reach("task.processed", job.version)
                    receipt = processing.receipt(storage, getattr(chunks, "end", None), copied=copied)  # c, d
                    if restored is not None:
                        receipt = msgspec.structs.replace(receipt, restored=restored)
                processing.release()
            except DamagedStore:
                store.wipe()
                raise
    except DamagedStore as damage:
        logger.warning("partition %d: %s; it will be built again", partition, damage)
        raise
    except LostMailError:
        raise
    except Exception as error:
        if inbox is not None:
            for _ in reading:  # an error over the work of two attempts says nothing: the job is lost, then
                pass
        place = processing.place if processing is not None else None
        receipt = Receipt(
            version=job.version, partition=partition, attempt=attempt, span=job.span, failure=failure_of(error, place)
        )
    return list(mailed(program, receipt, processing.sent if processing is not None else {}, inbox, partition))


def _copied(stores: Stores, job: Job, partition: int, store: Store, attempt: AttemptId) -> bool:
    """Whether a copy could be made; without one there is no snapshot, and nothing else is amiss."""
    try:
        stores.copy(job.instance, partition, store, attempt)
    except DamagedStore:
        raise
    except (HoldfastError, OSError) as error:
        logger.warning("partition %d: no copy for a snapshot: %s", partition, error)
        return False
    reach("task.copied", job.version)
    return True


@contextmanager
def without_gc() -> Iterator[None]:
    """A batch makes many objects and drops them together: looking for cycles among them meanwhile is wasted work."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def failure_of(error: Exception, place: Place | None) -> Failure:
    try:
        pickled = dumps(error)
        loads(pickled)
    except Exception:  # whatever an exception's own pickling may raise
        pickled = None
    return Failure(
        kind=type(error).__qualname__,
        message=message_of(error),
        traceback="".join(traceback.format_exception(error)),
        pickled=pickled,
        place=place,
    )


def raise_failure(failure: Failure) -> NoReturn:
    """Raise a task's exception as itself, with its place attached."""
    error: Exception
    if failure.pickled is not None:
        error = loads(failure.pickled)
    else:
        error = UserFunctionFailed(f"{failure.kind}: {failure.message}", kind=failure.kind)
    if failure.place is not None:
        error.holdfast_place = failure.place  # type: ignore[attr-defined]
        error.add_note(f"at {failure.place}")
    error.add_note("in a task:\n" + failure.traceback.rstrip())
    raise error
