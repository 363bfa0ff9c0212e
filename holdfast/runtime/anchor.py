"""The task runner on Spark: every state partition is a task, and stays where its store is.

A job is a map over an *anchor*, a cached DataFrame with as many partitions as there is state. Spark sends each task
to the executor that caches its block, so a partition moves only when that executor is lost. For a ranged source the
anchor has one row per partition and the task reads the range itself. For a Spark source the anchor is empty but
partitioned like the shuffled rows, and the job runs over the union of both, which Spark keeps at P partitions.

Correctness never depends on placement: a partition that wakes up elsewhere restores from its recipe, and the driver
counts receipts.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import TaskContext

from holdfast.log.manifest import new_id
from holdfast.log.storage import Storage
from holdfast.pickling import dumps, loads
from holdfast.plan.program import Program
from holdfast.runtime.job import Job, Receipt
from holdfast.runtime.session import runtime_session
from holdfast.runtime.task import Stores, run_task
from holdfast.sources.arrow import ArrowMap, map_in_arrow
from holdfast.sources.spark import ROUTE, SparkSource

if TYPE_CHECKING:
    from pyspark import Broadcast
    from pyspark.sql import DataFrame, SparkSession

_RECEIPT = "receipt binary"


class SparkRunner:
    """Runs jobs on a Spark session."""

    def __init__(self, spark: SparkSession, program: Program, storage: Storage, stores: Stores) -> None:
        self._session = runtime_session(spark)
        self._program = program
        self._work = _Work(spark.sparkContext.broadcast(dumps((program, storage, stores))))
        self._routes = routes(self._session, program.partitions) if isinstance(program.source, SparkSource) else []
        self._anchor: DataFrame | None = None

    def run(self, job: Job, rows: Any) -> list[Receipt]:
        frame = self._anchored() if rows is None else self._union(rows)
        result = map_in_arrow(frame, _task(self._work, job), _RECEIPT).collect()
        return [pickle.loads(row.receipt) for row in result]

    def close(self) -> None:
        if self._anchor is not None:
            self._anchor.unpersist()

    def _anchored(self) -> DataFrame:
        if self._anchor is None:
            partitions = self._program.partitions
            self._anchor = self._session.range(0, partitions, 1, partitions).persist()
        return self._anchor

    def _union(self, rows: DataFrame) -> DataFrame:
        routed = self._program.source.routed(rows, self._routes)
        shuffled = routed.repartition(self._program.partitions, ROUTE)
        if self._anchor is None:
            empty = self._session.createDataFrame([], routed.schema)
            self._anchor = empty.repartition(self._program.partitions, ROUTE).persist()
        return self._anchor.union(shuffled)


class _Work:
    """What all tasks of a run share, unpickled once per worker process."""

    def __init__(self, broadcast: Broadcast[bytes]) -> None:
        self.token = new_id()
        self._broadcast = broadcast

    def open(self) -> tuple[Program, Storage, Stores]:
        if self.token not in _opened:
            _opened.clear()
            _opened[self.token] = loads(self._broadcast.value)
        return _opened[self.token]


_opened: dict[str, tuple[Program, Storage, Stores]] = {}


def _task(work: _Work, job: Job) -> ArrowMap:
    def task(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        program, storage, stores = work.open()
        context = TaskContext.get()
        assert context is not None
        partition = context.partitionId()
        if job.span is None:
            chunks = program.source.chunks(batches)
        else:
            for _ in batches:  # the anchor's row says nothing
                pass
            chunks = program.source.read(partition, program.partitions, job.span)
        receipt = run_task(program, job, partition, chunks, storage, stores)
        yield pa.RecordBatch.from_pydict({"receipt": pa.array([pickle.dumps(receipt)], pa.binary())})

    return task


def routes(spark: SparkSession, partitions: int) -> list[int]:
    """For each partition an int that Spark's hash partitioning sends there."""
    from pyspark.sql import functions as F

    found: dict[int, int] = {}
    tried = 64 * partitions
    where = spark.range(tried).select(F.pmod(F.hash(F.col("id").cast("int")), F.lit(partitions)).alias("partition"))
    for route, row in enumerate(where.collect()):
        found.setdefault(row.partition, route)
    return [found[partition] for partition in range(partitions)]
