"""Application: settings, sources, `dataframe()` and `run()`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from holdfast import options
from holdfast.dataframe import StreamingDataFrame, frame_of
from holdfast.errors import InvalidPipeline, MissingSettings, RunIsAlive, UnknownOption
from holdfast.kafka.connection import ConnectionConfig, connection
from holdfast.kafka.topics import TimestampExtractor, Topic, TopicConfig, checked_topic_name
from holdfast.log import paths
from holdfast.log.manifest import Chain, Manifest, check_owner, cleared, this_process
from holdfast.log.object_storage import ObjectStorage
from holdfast.persistence import Persistence
from holdfast.plan.functions import check_function
from holdfast.plan.pipeline import Pipeline
from holdfast.plan.program import ErrorCallback, Program, check_idle_timeout, program_of, watermark_of
from holdfast.runtime.batch import Driver
from holdfast.runtime.context import Context
from holdfast.runtime.ladder import climb, held_marks
from holdfast.runtime.locks import FileLock
from holdfast.runtime.progress import Progress
from holdfast.runtime.query import Limits, Query
from holdfast.runtime.session import STREAM, build_session, check_session
from holdfast.runtime.signals import signals_to
from holdfast.runtime.snapshots import Places, Snapshots
from holdfast.runtime.spark_files import SparkFiles
from holdfast.runtime.view import StateView
from holdfast.sources.base import Source
from holdfast.sources.iterable import IterableSource
from holdfast.sources.spark import SparkSource
from holdfast.state.codecs import Codec, codec_for
from holdfast.state.options import RocksDBOptions
from holdfast.stores.slots import LocalStores
from holdfast.times import now_ms
from holdfast.vault import secrets_of

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from holdfast.kafka.feeding import TopicProducer
    from holdfast.kafka.link import Attachment, Link

GUARANTEES = ("exactly-once", "at-least-once")

logger = logging.getLogger("holdfast")


class Application:
    """A stateful streaming application.

    Parameters
    ----------
    name
        Names the application and its directory. `consumer_group` is another word for it, and in Kafka it is one.
    broker_address
        The Kafka cluster: "host:port", a `ConnectionConfig`, or a dict of librdkafka's settings. Given once, it serves source,
        sink, administration and changelog. Secrets in it are never shown, logged or written.
    auto_offset_reset
        Where a new application begins to read a topic: "latest" or "earliest".
    auto_create_topics
        Whether topics that do not exist are created when a run starts.
    use_changelog_topics
        Whether every store is followed by a compacted topic, from which state and position come back if the checkpoint is lost.
    processing_guarantee
        Of output to topics: "exactly-once", by transactions, or "at-least-once".
    commit_interval
        The least number of seconds between two batches of a topic, unless there are `max_batch_rows` records. 0: a batch begins
        as soon as there is a record.
    on_data_loss
        What to do if records of a topic were deleted before they were read: "fail", or "skip", which records the gap.
    dead_letter_topic
        A topic for records that failed and that no callback skipped: as they came, with headers that say where from and why.
    state_dir
        Where all durable files live: the checkpoint in `<state_dir>/<name>/checkpoint`, the local stores in
        `<state_dir>/<name>/local`.
    persistence
        Puts the checkpoint elsewhere, also into an object store; the local stores stay in `state_dir`.
    spark
        A session to run on; it must have been started with the settings that Holdfast needs. By default the application starts
        a quiet local one when it is first needed.
    partitions
        The number of state partitions, fixed when a checkpoint is begun. By default one per core.
    max_batch_rows
        The most rows that a batch reads of a source whose ranges Holdfast reads itself.
    watermark_delay
        How far the watermark stays behind the latest event time: a timedelta, ms, or words such as "10 minutes". Without it
        there is no watermark, and timers and `ttl=` by event time are refused. `dataframe(watermark_delay=)` does as well.
    idle_timeout
        After so long without a record the watermark goes on with the wall clock. By default it waits. Only time in which the
        run has looked and found nothing counts: records that wait, after a restart or an outage, are not passed over.
    rocksdb_options
        Another codec for the state.
    on_processing_error
        Called in the task with `(exception, record, logger)` when a step raises; something true skips the record, anything else
        ends the run. A skipped record leaves no trace in state or output.
    on_consumer_error
        The same for records that cannot be read, such as a value that is not JSON; without it they are `on_processing_error`'s.
    spark_config
        More settings for the session that the application starts, such as `spark.master` for a cluster. The checkpoint must then
        be on storage that all machines share, such as an object store.

    Guaranteed: state, output positions and source positions change together, exactly once, through crashes of any process;
    see docs/guarantees.md for what each sink adds. Not guaranteed: that user functions run only once per record.

    >>> import tempfile
    >>> app = Application("orders", state_dir=tempfile.mkdtemp())
    >>> sdf = app.dataframe(app.from_iterable([{"user": "ann", "amount": 3}], key="user"))
    """

    def __init__(
        self,
        name: str | None = None,
        *,
        consumer_group: str | None = None,
        broker_address: str | ConnectionConfig | Mapping[str, Any] | None = None,
        auto_offset_reset: Literal["latest", "earliest"] = "latest",
        auto_create_topics: bool = True,
        use_changelog_topics: bool = True,
        processing_guarantee: Literal["exactly-once", "at-least-once"] = "exactly-once",
        commit_interval: float = 0.0,
        on_data_loss: Literal["fail", "skip"] = "fail",
        dead_letter_topic: str | None = None,
        state_dir: str | Path = "state",
        persistence: Persistence | None = None,
        spark: SparkSession | None = None,
        partitions: int | None = None,
        max_batch_rows: int = 50_000,
        watermark_delay: timedelta | int | str | None = None,
        idle_timeout: timedelta | int | str | None = None,
        rocksdb_options: RocksDBOptions | None = None,
        on_processing_error: ErrorCallback | None = None,
        on_consumer_error: ErrorCallback | None = None,
        spark_ui: bool = False,
        spark_config: Mapping[str, str] | None = None,
        loglevel: str | int | None = "INFO",
        **unknown: Any,
    ) -> None:
        if unknown:
            known = [option for option in Application.__init__.__annotations__ if option not in ("return", "unknown")]
            raise options.unknown("Application()", next(iter(unknown)), known)
        self.name = _one_name(name, consumer_group)
        home = Path(state_dir).absolute() / self.name
        place = options.instance("persistence", persistence, Persistence) or Persistence(home / "checkpoint")
        if not place.is_lasting and place.directory is not None:
            home = place.directory / self.name
        self._persistence = place
        self._storage = place.storage
        self._run_directory = place.directory or home / "run"
        self._local = home / "local"
        self._warehouse = home / "tables"
        self._chain = Chain(self._storage)
        self._partitions = None if partitions is None else options.positive("partitions", partitions)
        self._max_batch_rows = options.positive("max_batch_rows", max_batch_rows)
        self._codec: Codec = codec_for(
            options.instance("rocksdb_options", rocksdb_options, RocksDBOptions) or RocksDBOptions()
        )
        self._on_error = _callback("on_processing_error=", on_processing_error)
        self._on_consumer_error = _callback("on_consumer_error=", on_consumer_error)
        self._interval = options.amount("commit_interval", commit_interval, "a number of seconds")
        self._idle = idle_timeout
        self._watermark = watermark_of(watermark_delay, idle_timeout)
        self._link = _link(
            broker_address,
            group=self.name,
            reset=options.one_of("auto_offset_reset", auto_offset_reset, "latest", "earliest"),
            create=auto_create_topics,
            use_changelogs=use_changelog_topics,
            exactly_once=options.one_of("processing_guarantee", processing_guarantee, *GUARANTEES) == GUARANTEES[0],
            on_data_loss=options.one_of("on_data_loss", on_data_loss, "fail", "skip"),
            dead_letter_topic=dead_letter_topic,
        )
        self._spark = spark
        self._spark_is_ours = spark is None
        if spark is not None:
            check_session(spark)
        self._spark_ui = spark_ui
        self._spark_config = dict(spark_config or {})
        self._iterables = 0
        self._pipeline: Pipeline | None = None
        self._query: Query | None = None
        self._stopping = False
        if loglevel is not None:
            _log_to_stderr(loglevel)

    # -- sources ----------------------------------------------------------------------------------------------------

    def from_iterable(
        self,
        records: Sequence[Any] | Callable[[], Iterable[Any]],
        *,
        key: str | Callable[[Any], Any] | None = None,
        timestamp: str | Callable[[Any], Any] | None = None,
    ) -> IterableSource:
        """A sequence, or a function that returns the same iterator again each time it is called; the run ends with it.

        `key` and `timestamp` are a field name or a function of the record; a timestamp is an int of ms or a datetime.

        Guaranteed: every record is processed exactly once across runs, by its position. That holds if the same position is the
        same record each time; more records may be added at the end between runs.
        """
        self._iterables += 1
        name = "iterable" if self._iterables == 1 else f"iterable-{self._iterables}"
        return IterableSource(records, key, timestamp, name)

    def from_spark(
        self,
        df: DataFrame,
        *,
        key: str | Column | Callable[[dict[str, Any]], Any] | None = None,
        timestamp: str | Column | Callable[[dict[str, Any]], Any] | None = None,
    ) -> SparkSource:
        """Any streaming DataFrame; its rows become dicts and are shuffled by key.

        `key` is a column, an expression or a function of the row; `timestamp` likewise, a timestamp or an integer of ms.

        Guaranteed: exactly once, if Spark's source can replay its batches. The position is in Spark's own checkpoint, which is
        part of ours; without it the run cannot go on. In an object store every commit holds what is needed of it.
        """
        return SparkSource(df, key, timestamp)

    def from_files(
        self,
        path: str | Path,
        *,
        format: str,
        schema: str | StructType,
        key: str | Column | Callable[[dict[str, Any]], Any] | None = None,
        timestamp: str | Column | Callable[[dict[str, Any]], Any] | None = None,
        files_per_batch: int = 8,
    ) -> SparkSource:
        """The files that are and will be in a directory, through Spark; `format` is json, parquet or csv."""
        if format not in ("json", "parquet", "csv"):
            raise InvalidPipeline(f"from_files(format={format!r}): it is one of json, parquet, csv")
        reader = self.spark.readStream.format(format).schema(schema).option("maxFilesPerTrigger", files_per_batch)
        return SparkSource(reader.load(str(path)), key, timestamp, name=f"files {path}")

    # -- topics -------------------------------------------------------------------------------------------------------

    def topic(
        self,
        name: str,
        *,
        value_deserializer: str | Callable[[bytes], Any] = "json",
        key_deserializer: str | Callable[[bytes], Any] = "bytes",
        value_serializer: str | Callable[[Any], bytes | None] = "json",
        key_serializer: str | Callable[[Any], bytes | None] = "bytes",
        config: TopicConfig | None = None,
        timestamp_extractor: TimestampExtractor | None = None,
    ) -> Topic:
        """A Kafka topic, to be read with `dataframe(topic)` or written with `to_topic(topic)`.

        See `Topic` for the parameters. Nothing is asked of the cluster before a run, which creates the topic if it does not
        exist. As a source: exactly once; a state partition is a topic partition, and the records of one are processed in
        the order of their offsets.

        >>> import tempfile
        >>> app = Application("orders", broker_address="localhost:9092", state_dir=tempfile.mkdtemp())
        >>> app.topic("orders", key_deserializer="string").name
        'orders'
        """
        topic = Topic(
            name,
            value_deserializer=value_deserializer,
            key_deserializer=key_deserializer,
            value_serializer=value_serializer,
            key_serializer=key_serializer,
            config=config,
            timestamp_extractor=timestamp_extractor,
        )
        return self._linked(f"topic({name!r})").topic(topic)

    def get_producer(self) -> TopicProducer:
        """A plain producer for this cluster, to feed topics by hand: `with app.get_producer() as producer: ...`

        It creates the topics that were declared so far. What it sends is not part of the application's guarantees.
        """
        from holdfast.kafka.feeding import TopicProducer

        return TopicProducer(self._linked("get_producer()"))

    def _linked(self, what: str) -> Link:
        if self._link is None:
            raise InvalidPipeline(f"{what} needs a Kafka cluster: give the application a broker_address=")
        return self._link

    def dataframe(
        self, source: Source | Topic, *, watermark_delay: timedelta | int | str | None = None
    ) -> StreamingDataFrame:
        """The stream of a topic or another source. A source is used once: branch its frame instead.

        An application can read several topics, or several iterables, and `concat` their frames; it commits all of them
        together. Topics must then have the same number of partitions. `watermark_delay` stands for the application's; of
        several sources the one that is furthest behind moves the watermark.
        """
        if isinstance(source, Topic):
            source = self._linked("dataframe(topic)").source(source)
        if not hasattr(source, "kind") or not hasattr(source, "name"):
            raise InvalidPipeline(
                f"dataframe() takes a source such as app.from_iterable(), not {type(source).__qualname__}"
            )
        if self._pipeline is None:
            self._pipeline = Pipeline(source)
            self._pipeline.watermark = self._watermark
        else:
            self._pipeline.add_source(source)
        if watermark_delay is not None:
            self._pipeline.delay(watermark_of(watermark_delay, self._idle))
        return frame_of(self._pipeline, source)

    # -- running ---------------------------------------------------------------------------------------------------

    @property
    def spark(self) -> SparkSession:
        """The session; started now if the application has none yet."""
        return self._session(only_plans=False)

    def _session(self, *, only_plans: bool) -> SparkSession:
        if self._spark is None:
            self._spark = build_session(
                self.name,
                master=self._spark_config.get("spark.master"),
                ui=self._spark_ui,
                warehouse=self._warehouse,
                extra=self._spark_config,
                only_plans=only_plans,
            )
        return self._spark

    def run(
        self,
        *,
        count: int | None = None,
        timeout: float | None = None,
        available_now: bool = False,
        recover: Literal["changelog", "beginning", "nothing"] | None = None,
    ) -> None:
        """Process until the source ends or the run is stopped.

        Parameters
        ----------
        count
            Stop after this many records; exactly for iterables and topics, at the end of a batch for Spark sources. 0 is
            no limit.
        timeout
            Stop after this many seconds without a record. 0 is no limit.
        available_now
            Process what is there now and stop.
        recover
            If the checkpoint is lost and Kafka holds traces of the application: "changelog" takes state and position back from
            the changelog topics; "beginning" builds the state again from the first record that the topic still has, and
            sends only what is not out yet, as far as that can be told of timers (docs/kafka.md); "nothing" begins anew. Without a
            word a run refuses to start then. With a checkpoint it changes nothing.

        Ctrl-C and SIGTERM let the batch in flight finish; any other end is safe too. A failing user function ends the run with
        its own exception, with the record's place attached as `holdfast_place`, and nothing of that batch is visible anywhere.
        """
        for name, limit in (("count", count), ("timeout", timeout)):
            if limit is not None:
                options.amount(name, limit, "a positive number")
        if recover is not None:
            options.one_of("recover", recover, "changelog", "beginning", "nothing")
            self._linked("run(recover=)")
        limits = Limits(self._max_batch_rows, self._interval, count or None, timeout or None, available_now)
        self._stopping = False
        with signals_to(self.stop, wanted=self._spark_is_ours):
            self._execute(limits, recover, Progress(self.name))

    def execute(self, progress: Progress, *, interval: float = 0.0, available_now: bool = False) -> None:
        """Run for a front door that reports in its own way, in any thread: without handlers for signals.

        `interval`: the least number of seconds between two batches.
        """
        self._execute(Limits(self._max_batch_rows, interval, available_now=available_now), None, progress)

    def _execute(
        self, limits: Limits, recover: Literal["changelog", "beginning", "nothing"] | None, progress: Progress
    ) -> None:
        if self._pipeline is None:
            raise InvalidPipeline("there is nothing to run: call app.dataframe(source) and add steps first")
        check_idle_timeout(self._idle, self._pipeline.watermark)
        alive = FileLock(self._run_lock)
        if not alive.acquire(shared=True):
            raise RunIsAlive(f"{self.name}: its state is being cleared; start again when that is done")
        try:
            self._run(self._pipeline, limits, recover, progress)
        finally:
            alive.release()

    def stop(self) -> None:
        """Ask a run in another thread to end after the batch in flight."""
        self._stopping = True
        if self._query is not None:
            self._query.stop()

    def _run(
        self,
        pipeline: Pipeline,
        limits: Limits,
        recover: Literal["changelog", "beginning", "nothing"] | None,
        progress: Progress,
    ) -> None:
        from holdfast.runtime.anchor import SparkRunner

        if isinstance(self._storage, ObjectStorage):
            self._storage.probe()
        head = self._chain.head()
        attachment = self._link.attach(pipeline, head) if self._link is not None else None
        program = self._program(pipeline, head, attachment)
        if attachment is not None:
            program = attachment.prepare(program)
            if head is None and recover is None:
                attachment.check_first_life()
        spark = self._session(only_plans=not isinstance(pipeline.source, SparkSource))
        for key, value in STREAM.items():
            spark.conf.set(key, value)
        context = Context(spark, self._warehouse)
        targets = {sink: target(context) for sink, target in pipeline.targets.items() if target is not None}
        secrets = secrets_of(self._storage) | (secrets_of(attachment.link.connection) if attachment is not None else {})
        with ExitStack() as closing:
            stores = LocalStores(self._local)
            runner = SparkRunner(spark, program, self._storage, stores, secrets)
            closing.callback(runner.close)
            runner.warm_up(None if head is None else held_marks(head.instance))
            station = (
                attachment.station(program, self._chain, runner, this_process()) if attachment is not None else None
            )
            if station is not None:
                closing.callback(station.close)
                if recover is not None:
                    station.recover(recover)
            snapshots = self._snapshots(runner)
            closing.callback(snapshots.close)
            driver = Driver(
                self._chain,
                program,
                runner,
                targets,
                publisher=station.publisher if station is not None else None,
                snapshots=snapshots,
                restore=lambda instance, recipes: climb(
                    self.name,
                    runner,
                    self._storage,
                    instance,
                    recipes,
                    runner.warmed_up(),
                    stores.kept(instance),
                    lambda: self._query is not None and self._query.is_stopping,
                ),
                clock=now_ms,
                holder=this_process(),
                look_ms=round(limits.interval * 1000) if isinstance(pipeline.source, SparkSource) else 0,
            )
            driver.start()
            if station is not None:
                station.backfill(driver)
            files = SparkFiles(self._storage) if isinstance(self._storage, ObjectStorage) else None
            self._query = Query(spark, driver, program, self._run_directory / paths.SPARK, limits, progress, files)
            if self._stopping:
                self._query.stop()
            try:
                self._query.run()
            finally:
                self._query = None
                progress.end(driver.head)

    def _snapshots(self, places: Places) -> Snapshots:
        every, keep = self._persistence.snapshot_every, self._persistence.keep
        return Snapshots(self._storage, places, every=every, keep=keep, clock=now_ms, holder=this_process())

    def _program(self, pipeline: Pipeline, head: Manifest | None, attachment: Attachment | None) -> Program:
        known = None if head is None else head.stages[0].partitions
        partitions = self._partitions or known or os.cpu_count() or 1
        if attachment is not None and attachment.partitions is not None:
            if self._partitions not in (None, attachment.partitions):
                raise UnknownOption(
                    f"partitions={self._partitions}: a topic decides the number of state partitions, and this one has "
                    f"{attachment.partitions}; leave it out"
                )
            partitions = attachment.partitions
        dead_letters = self._link.dead_letters(len(pipeline.targets)) if self._link is not None else None
        return program_of(
            self.name,
            pipeline,
            self._codec,
            partitions,
            self._on_error,
            self._on_consumer_error,
            dead_letters,
        )

    # -- state -----------------------------------------------------------------------------------------------------

    def state(self, store: str = "default") -> StateView:
        """The committed state of a store, to be read; also while the application runs, here or in another process."""
        paths.checked_name("store", store)
        return StateView(self._chain, store, self._codec, spark=lambda: self.spark)

    def clear_state(self) -> None:
        """Forget all state in one commit; the position in the source is kept.

        Guaranteed: all of it or nothing, whatever happens. Refused with `RunIsAlive` while a run is alive on this host.
        """
        alone = FileLock(self._run_lock)
        if not alone.acquire():
            raise RunIsAlive(f"{self.name} is running: stop it before its state is cleared")
        try:
            head = self._chain.head()
            if head is None:
                return
            check_owner(head, self.name)
            self._chain.commit(cleared(head))
        finally:
            alone.release()

    @property
    def _run_lock(self) -> Path:
        return self._run_directory / "run.lock"


def _one_name(name: str | None, consumer_group: str | None) -> str:
    if name is not None and consumer_group is not None and name != consumer_group:
        raise UnknownOption(
            f"name={name!r} and consumer_group={consumer_group!r} are two words for one thing: give one"
        )
    given = name if name is not None else consumer_group
    return paths.checked_name("application", "holdfast" if given is None else given)


def _callback(option: str, given: ErrorCallback | None) -> ErrorCallback | None:
    if given is not None:
        check_function(option, given, ["exception", "record", "logger"])
    return given


def _link(
    broker_address: str | ConnectionConfig | Mapping[str, Any] | None, *, dead_letter_topic: str | None, **settings: Any
) -> Link | None:
    """The application's link to Kafka, if it has one."""
    if broker_address is None:
        if dead_letter_topic is not None:
            raise UnknownOption("dead_letter_topic= needs a Kafka cluster: give broker_address=")
        return None
    try:
        from holdfast.kafka.link import Link
    except ModuleNotFoundError as error:
        if error.name != "confluent_kafka":
            raise
        raise MissingSettings("Kafka needs the package confluent-kafka: pip install 'holdfast[kafka]'") from None
    if dead_letter_topic is not None:
        checked_topic_name(dead_letter_topic)
    return Link(connection(broker_address), dead_letter_topic=dead_letter_topic, **settings)


def _log_to_stderr(level: str | int) -> None:
    """A handler of our own, unless the program has set up logging itself."""
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
        logger.addHandler(handler)
        logger.propagate = False
        logger.setLevel(level)
