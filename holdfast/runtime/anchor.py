"""The task runner on Spark: every state partition is a task, and stays where its store is.

A job is a map over an *anchor*, a cached data set with as many partitions as there is state. Spark sends each task to
the executor that caches its block, so a partition moves only when that executor is lost. For a ranged source the anchor
is an RDD with a number per partition (20 ms a job less than a DataFrame), and the task reads the range itself. For a
Spark source it is a DataFrame without rows but partitioned like the shuffled rows, and the job runs over the union of
both, which Spark keeps at P partitions. A later stage has an anchor of the same kind, partitioned like the mail that it is
sent, and runs over the union: all stages are one job.

Correctness never depends on placement: a partition that wakes up elsewhere restores from its recipe, and the driver
counts receipts.
"""

from __future__ import annotations

import logging
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import TaskContext

from holdfast.log.manifest import new_id
from holdfast.log.storage import Storage
from holdfast.pickling import dumps, loads
from holdfast.plan.program import Program
from holdfast.runtime.exchange import Inbox, Mail, Outcome
from holdfast.runtime.job import Failure, Job
from holdfast.runtime.session import runtime_session
from holdfast.runtime.task import Stores, failure_of, raise_failure, run_task, without_gc
from holdfast.sources.arrow import ArrowMap, map_in_arrow
from holdfast.sources.spark import ROUTE, SparkSource, routes
from holdfast.vault import unlock

if TYPE_CHECKING:
    from pyspark import RDD, Broadcast
    from pyspark.sql import DataFrame, SparkSession

logger = logging.getLogger("holdfast")


class SparkRunner:
    """Runs jobs on a Spark session."""

    def __init__(
        self,
        spark: SparkSession,
        program: Program,
        storage: Storage,
        stores: Stores,
        secrets: Mapping[str, Any] | None = None,
    ) -> None:
        self._context = spark.sparkContext
        self._session = runtime_session(spark)
        self._program = program
        self._work = _Work(self._context.broadcast(dumps((program, storage, stores))), dict(secrets or {}))
        self._warming: threading.Thread | None = None
        self._found: list[Any] | None = None
        self._anchor: RDD[int] | None = None
        self._shuffled_anchor: DataFrame | None = None
        self._mail_anchors: dict[int, RDD[Any]] = {}
        self._mail_frames: dict[int, DataFrame] = {}
        self._routes: dict[int, list[int]] = {}

    def run(self, job: Job, rows: Any) -> list[Outcome]:
        self._warmed()
        if rows is not None:
            return self._run_over(rows, job)
        levels = self._program.levels
        results = self._ranges().mapPartitionsWithIndex(_range_task(self._work, job))
        for level in range(1, len(levels)):
            sent = results.partitionBy(len(levels[level]), _local)
            results = self._mailboxes(level).union(sent).mapPartitionsWithIndex(_mail_task(self._work, job, level))
        return [pickle.loads(result) for _, result in results.collect()]

    def _run_over(self, rows: DataFrame, job: Job) -> list[Outcome]:
        """The same as DataFrames: from one to an RDD, mail would go through another Python process."""
        results = map_in_arrow(self._union(rows), _rows_task(self._work, job, self._routes_to(1)), _MAIL)
        for level in range(1, len(self._program.levels)):
            sent = results.repartition(len(self._program.levels[level]), ROUTE)
            task = _mailed_rows_task(self._work, job, level, self._routes_to(level + 1))
            results = map_in_arrow(self._mail_frame(level).union(sent), task, _MAIL)
        return [pickle.loads(row.result) for row in results.collect()]

    def each(self, function: Callable[[int, Storage, Stores], Any]) -> list[Any]:
        """Run `function(partition, storage, stores)` once per partition, where the partition is; what it returned, in order."""
        self._warmed()
        outcomes = []
        for level, partitions in enumerate(self._program.levels):
            outcomes += (
                self._place(level).mapPartitionsWithIndex(_each_task(self._work, function, partitions.start)).collect()
            )
        for _, failure in outcomes:
            if failure is not None:
                raise_failure(failure)
        return [result for result, _ in outcomes]

    def at(self, partition: int, function: Callable[[int, Storage, Stores], Any]) -> Any:
        """Run `function(partition, storage, stores)` where the partition is, in one task, beside whatever else runs."""
        level = self._program.stage_of(partition).level
        first = self._program.levels[level].start
        job = self._place(level).mapPartitionsWithIndex(_each_task(self._work, function, first))
        ((result, failure),) = self._context.runJob(job, list, [partition - first])
        if failure is not None:
            raise_failure(failure)
        return result

    def warm_up(self, function: Callable[[int, Storage, Stores], Any] | None = None) -> None:
        """Start the workers and the anchor in the background, while Spark is busy with the start of the query.

        `function` is called on the way for the partitions of the first level; `warmed_up` has what it returned.
        """
        if not isinstance(self._program.source, SparkSource):
            anchor = self._ranges()
            self._warming = threading.Thread(
                target=self._open_workers, args=(anchor, function), name="holdfast-warm-up", daemon=True
            )
            self._warming.start()

    def warmed_up(self) -> list[Any] | None:
        """What the function of `warm_up` returned, by partition; None if it was not called everywhere."""
        self._warmed()
        return self._found

    def _open_workers(self, anchor: RDD[int], function: Callable[[int, Storage, Stores], Any] | None) -> None:
        try:
            if function is None:
                anchor.mapPartitions(_open(self._work)).collect()
                return
            outcomes = anchor.mapPartitionsWithIndex(_each_task(self._work, function, 0)).collect()
            if all(failure is None for _, failure in outcomes):
                self._found = [result for result, _ in outcomes]
        except Exception as error:  # the first batch meets it too, and can say what it means
            logger.debug("the workers could not be started beforehand", exc_info=error)

    def close(self) -> None:
        for anchor in (
            self._anchor,
            self._shuffled_anchor,
            *self._mail_anchors.values(),
            *self._mail_frames.values(),
        ):
            if anchor is not None:
                anchor.unpersist()

    def _warmed(self) -> None:
        if self._warming is not None:
            self._warming.join()  # or the anchor would be cached in two places
            self._warming = None

    def _place(self, level: int) -> RDD[Any]:
        """The anchor of a level, whatever it is made of."""
        if not isinstance(self._program.source, SparkSource):
            return self._ranges() if level == 0 else self._mailboxes(level)
        return self._mail_frame(level).rdd if level > 0 else self._shuffled().rdd

    def _ranges(self) -> RDD[int]:
        if self._anchor is None:
            partitions = self._program.partitions
            self._anchor = self._context.parallelize(range(partitions), partitions).cache()
        return self._anchor

    def _mailboxes(self, level: int) -> RDD[Any]:
        """The anchor of a later level."""
        if level not in self._mail_anchors:
            count = len(self._program.levels[level])
            empty = self._context.parallelize([(target, None) for target in range(count)], count)
            self._mail_anchors[level] = empty.partitionBy(count, _local).cache()
        return self._mail_anchors[level]

    def _mail_frame(self, level: int) -> DataFrame:
        """The same, where the first level is a DataFrame."""
        if level not in self._mail_frames:
            empty = self._session.createDataFrame([], _MAIL)
            self._mail_frames[level] = empty.repartition(len(self._program.levels[level]), ROUTE).persist()
        return self._mail_frames[level]

    def _routes_to(self, level: int) -> list[int]:
        """By partition of a level: what Spark's hash partitioning sends there. None are needed after the last level."""
        if level == len(self._program.levels):
            return [0]
        count = len(self._program.levels[level])
        if count not in self._routes:
            self._routes[count] = routes(self._session, count)
        return self._routes[count]

    def _shuffled(self, rows: DataFrame | None = None) -> DataFrame:
        """The anchor of the first level where Spark reads; `rows` are those of a batch, if there is one at hand."""
        if self._shuffled_anchor is None:
            partitions = self._program.partitions
            frame = self._program.source.routed(partitions) if rows is None else rows
            empty = self._session.createDataFrame([], frame.schema)
            self._shuffled_anchor = empty.repartition(partitions, ROUTE).persist()
        return self._shuffled_anchor

    def _union(self, rows: DataFrame) -> DataFrame:
        anchor = self._shuffled(rows)
        shuffled = rows.repartition(self._program.partitions, ROUTE)
        # In this order: the anchor's session has adaptive execution off. Without the route among its columns, Spark would not
        # see that both sides are partitioned alike, and keep twice as many partitions.
        return anchor.union(shuffled)


class _Work:
    """What all tasks of a run share, unpickled once per worker process.

    Spark writes a broadcast to a file. Secrets are not part of it: they go with the closure of each job, in memory.
    """

    def __init__(self, broadcast: Broadcast[bytes], secrets: dict[str, Any]) -> None:
        self.token = new_id()
        self._broadcast = broadcast
        self._secrets = secrets

    def open(self) -> tuple[Program, Storage, Stores]:
        if self.token not in _opened:
            _opened.clear()
            unlock(self._secrets)
            _opened[self.token] = loads(self._broadcast.value)
        return _opened[self.token]


_opened: dict[str, tuple[Program, Storage, Stores]] = {}


def _open(work: _Work) -> Callable[[Iterable[int]], Iterator[int]]:
    """A task that does nothing but import and unpickle what the others need."""

    def task(anchor: Iterable[int]) -> Iterator[int]:
        work.open()
        return iter(anchor)

    return task


def _range_task(work: _Work, job: Job) -> Callable[[int, Iterable[int]], Iterator[tuple[int, bytes]]]:
    """A task that reads its range itself; without one it has no input."""

    def task(partition: int, anchor: Iterable[int]) -> Iterator[tuple[int, bytes]]:
        for _ in anchor:  # says nothing, but a worker that leaves input unread is not used again
            pass
        program, storage, stores = work.open()
        reading: Any = () if job.span is None else program.source.read(partition, program.partitions, job.span)
        yield from _addressed(program, partition, run_task(program, job, partition, reading, storage, stores))

    return task


def _mail_task(
    work: _Work, job: Job, level: int
) -> Callable[[int, Iterable[tuple[int, bytes | None]]], Iterator[tuple[int, bytes]]]:
    """A task of a later stage."""

    def task(index: int, mail: Iterable[tuple[int, bytes | None]]) -> Iterator[tuple[int, bytes]]:
        program, storage, stores = work.open()
        partition = program.levels[level][index]
        sent = (pickle.loads(item) for _, item in mail if item is not None)
        inbox = Inbox(program.levels[level - 1], sent, in_order=program.in_order)
        yield from _addressed(program, partition, run_task(program, job, partition, inbox, storage, stores))

    return task


def _addressed(
    program: Program, partition: int, results: list[tuple[int, Mail] | Outcome]
) -> Iterator[tuple[int, bytes]]:
    """Mail by the number of its target within the next level, which is where the shuffle brings it; an outcome by nothing.

    In bytes: whatever Spark passes it through does not have to understand it.
    """
    level = program.stage_of(partition).level
    for result in results:
        if isinstance(result, Outcome):
            yield 0, pickle.dumps(result, pickle.HIGHEST_PROTOCOL)
        else:
            target, mail = result
            yield target - program.levels[level + 1].start, pickle.dumps(mail, pickle.HIGHEST_PROTOCOL)


def _local(target: int) -> int:
    """How mail is partitioned: by its target. One function for all, or Spark would take two partitionings for different."""
    return target


def _each_task(
    work: _Work, function: Callable[[int, Storage, Stores], Any], first: int
) -> Callable[[int, Iterable[Any]], Iterator[tuple[Any, Failure | None]]]:
    """A task that calls a function of ours; what it raises comes back as a failure, not as Spark's text."""

    def task(index: int, anchor: Iterable[Any]) -> Iterator[tuple[Any, Failure | None]]:
        for _ in anchor:
            pass
        _, storage, stores = work.open()
        try:
            with without_gc():
                result = function(first + index, storage, stores)
            yield result, None
        except Exception as error:
            yield None, failure_of(error, None)

    return task


_MAIL = f"{ROUTE} int, result binary"


def _rows_task(work: _Work, job: Job, onward: list[int]) -> ArrowMap:
    """A task that is given its rows by Spark; `onward` are the routes to the next level."""

    def task(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        program, storage, stores = work.open()
        partition = _task_number()
        results = run_task(program, job, partition, program.source.chunks(batches), storage, stores)
        yield from _as_rows(_addressed(program, partition, results), onward)

    return task


def _mailed_rows_task(work: _Work, job: Job, level: int, onward: list[int]) -> ArrowMap:
    """A task of a later stage, with mail in rows."""

    def task(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        program, storage, stores = work.open()
        partition = program.levels[level][_task_number()]
        sent = (pickle.loads(item.as_buffer()) for batch in batches for item in batch.column("result"))
        inbox = Inbox(program.levels[level - 1], sent, in_order=program.in_order)
        results = run_task(program, job, partition, inbox, storage, stores)
        yield from _as_rows(_addressed(program, partition, results), onward)

    return task


def _task_number() -> int:
    context = TaskContext.get()
    assert context is not None
    return context.partitionId()


def _as_rows(results: Iterable[tuple[int, bytes]], onward: list[int]) -> Iterator[pa.RecordBatch]:
    for target, result in results:
        columns = {ROUTE: pa.array([onward[target]], pa.int32()), "result": pa.array([result], pa.binary())}
        yield pa.RecordBatch.from_pydict(columns)
