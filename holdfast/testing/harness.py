"""The harness: one pipeline, fed by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import msgspec
import pyarrow as pa

from holdfast import failpoints
from holdfast.dataframe import StreamingDataFrame, frame_of
from holdfast.errors import InvalidPipeline
from holdfast.kafka.topics import KafkaMessage
from holdfast.log.manifest import Chain, Manifest
from holdfast.plan.messages import MessageForm, unpacked
from holdfast.plan.pipeline import Pipeline
from holdfast.plan.program import ErrorCallback, Program, check_idle_timeout, program_of, watermark_of
from holdfast.plan.record import Chunk
from holdfast.plan.sinks import decode_values
from holdfast.runtime.batch import Driver, Proposal
from holdfast.runtime.delivery import Outbox
from holdfast.runtime.view import StateView
from holdfast.sources.iterable import IterableSource
from holdfast.state.codecs import codec_for
from holdfast.state.options import RocksDBOptions
from holdfast.stores.memory import MemoryStore
from holdfast.testing.memory import Crash, LocalRunner, MemoryStorage, MemoryStores

Build = Callable[[StreamingDataFrame], StreamingDataFrame | None]


class Harness:
    """Runs a pipeline in this process, with no JVM and no files.

    Parameters
    ----------
    build
        Declares the pipeline on the frame that it is given; the values of the frame that it returns are collected in `values`.
    partitions
        With more than one, the values of a batch come partition by partition.

    Guaranteed: the same plan, protocol, state and error code as in `Application.run()`; each `run()` is a batch of everything
    that was fed. Not covered: Spark, RocksDB and the files of real sinks; what a table or `foreach_batch` would get is in `rows`.
    """

    def __init__(
        self,
        build: Build,
        *,
        partitions: int = 1,
        rocksdb_options: RocksDBOptions | None = None,
        on_processing_error: ErrorCallback | None = None,
        watermark_delay: timedelta | int | str | None = None,
        idle_timeout: timedelta | int | str | None = None,
    ) -> None:
        self.values: list[Any] = []
        """What came out, in the order of delivery."""
        self.rows: dict[str, list[dict[str, Any]]] = {}
        """By sink, such as 'table:totals' or 'foreach_batch': the rows that it was given."""
        self.messages: dict[str, list[KafkaMessage]] = {}
        """By sink, such as 'topic:totals': the messages that `to_topic` sent, in bytes as Kafka would get them."""
        self.now_ms = 0
        """The clock: the processing time of the next batch."""
        self.storage = MemoryStorage()
        self._fed: list[_Fed] = []
        self._codec = codec_for(rocksdb_options or RocksDBOptions())
        self._stores = MemoryStores()
        self._watermark = watermark_of(watermark_delay, idle_timeout)
        check_idle_timeout(idle_timeout, self._watermark)
        self._program, self._targets = self._declared(build, partitions, on_processing_error)
        self._driver: Driver | None = None

    def feed(self, *records: Any) -> None:
        """Add records: a value, a tuple `(key, value)` or `(key, value, timestamp)`."""
        self._fed.extend(_fed(record) for record in records)

    def run(self) -> None:
        """Process everything that was fed and not yet processed, as one batch; start the application first if need be.

        With nothing new it is a batch without input: timers that are due fire.
        """
        if self._driver is None:
            self._driver = self._started()
        self._driver.run_batch(Proposal(end={"taken": len(self._fed)}))

    def restart(self, *, lose_local: bool = False) -> None:
        """Go on from what was persisted, as a new process would; with `lose_local`, on a machine with an empty disk."""
        failpoints.arm(None)
        if lose_local:
            self._stores = MemoryStores()
        self._driver = self._started()

    def crash_at(self, point: str) -> None:
        """Raise `Crash` when the next batch reaches a failpoint: one of `DRIVER_POINTS` or `TASK_POINTS`."""
        if point not in failpoints.DRIVER_POINTS + failpoints.TASK_POINTS:
            raise InvalidPipeline(
                f"no failpoint {point!r}; there are {failpoints.DRIVER_POINTS + failpoints.TASK_POINTS}"
            )

        def crash(reached: str, version: int) -> None:
            if reached == point:
                failpoints.arm(None)
                raise Crash(f"at {reached}, version {version}")

        failpoints.arm(crash)

    def state(self, store: str = "default") -> StateView:
        """The committed state."""
        return StateView(Chain(self.storage), store, self._codec, new_store=MemoryStore)

    def _started(self) -> Driver:
        runner = LocalRunner(self._program, self.storage, self._stores)
        driver = Driver(
            Chain(self.storage), self._program, runner, self._targets, clock=lambda: self.now_ms, holder="harness"
        )
        driver.start()
        return driver

    def _declared(
        self, build: Build, partitions: int, on_error: ErrorCallback | None
    ) -> tuple[Program, dict[str, _Collector]]:
        source = _FedSource(self._fed)
        pipeline = Pipeline(source)
        pipeline.watermark = self._watermark
        frame = frame_of(pipeline)
        end = build(frame)
        if end is not None:
            end.inspect(print)
        program = program_of("harness", pipeline, self._codec, partitions, on_error)
        last = list(pipeline.targets)[-1] if end is not None else None
        topics = {sink.id for sink in program.sinks if isinstance(sink.form, MessageForm)}
        return program, {sink: _Collector(self, sink, sink == last, sink in topics) for sink in pipeline.targets}


def run(build: Build, records: Iterable[Any], *, partitions: int = 1) -> Harness:
    """Run `records` through a pipeline in one batch and return the harness, for its values, rows and state.

    >>> run(lambda sdf: sdf.apply(str.upper), ["a", "b"]).values
    ['A', 'B']
    """
    harness = Harness(build, partitions=partitions)
    harness.feed(*records)
    harness.run()
    return harness


class _Collector:
    """A target that keeps what it is given; a version that comes again replaces itself."""

    def __init__(self, harness: Harness, sink: str, is_end: bool, is_topic: bool) -> None:
        self._harness = harness
        self._is_topic = is_topic
        self._sink = sink
        self._is_end = is_end
        self._versions: dict[int, list[Any]] = {}

    def prepare(self, head: Manifest) -> None:
        """There is nothing that could be someone else's."""

    def deliver(self, manifest: Manifest, outbox: Outbox) -> None:
        tables: list[pa.Table] = outbox.tables()
        got: list[Any]
        if self._is_topic:
            got = [message for table in tables for message in decode_messages(table)]
        elif outbox.schema is None:
            got = [value for table in tables for value, _, _ in decode_values(table)]
        else:
            got = [row for table in tables for row in table.to_pylist()]
        self._versions[manifest.version] = got
        everything = [value for version in sorted(self._versions) for value in self._versions[version]]
        if self._is_topic:
            self._harness.messages[self._sink] = everything
        elif self._is_end:
            self._harness.values[:] = everything
        else:
            self._harness.rows[self._sink] = everything


def decode_messages(table: pa.Table) -> list[KafkaMessage]:
    """The messages of an outbox."""
    return [
        KafkaMessage(key, value, None if headers is None else unpacked(headers), timestamp)
        for key, value, timestamp, headers in zip(*(column.to_pylist() for column in table.columns), strict=True)
    ]


class _Fed(msgspec.Struct):
    key: Any
    value: Any
    timestamp: int


def _fed(record: Any) -> _Fed:
    if type(record) is tuple and len(record) == 2:
        return _Fed(record[0], record[1], 0)
    if type(record) is tuple and len(record) == 3:
        return _Fed(*record)
    return _Fed(None, record, 0)


class _FedSource(IterableSource):
    """The records that were fed so far."""

    def __init__(self, fed: list[_Fed]) -> None:
        super().__init__(fed, lambda record: record.key, lambda record: record.timestamp, name="harness")

    def chunk(self, start: int, records: Sequence[Any], partition: int, partitions: int) -> Chunk:
        chunk = super().chunk(start, records, partition, partitions)
        chunk.values = [record.value for record in chunk.values]
        return chunk
