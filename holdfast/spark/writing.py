"""`writeStream`: where outputs go, how often, and the query that is started."""

# ruff: noqa: N802, N803  (the names are Spark's)

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from holdfast.application import Application
from holdfast.dataframe import StreamingDataFrame
from holdfast.errors import InvalidPipeline, UnknownOption
from holdfast.log.location import directory_at
from holdfast.persistence import Persistence
from holdfast.plan.functions import check_function
from holdfast.plan.schema import arrow_schema
from holdfast.plan.steps import Gather
from holdfast.runtime.background import Reports, StreamingQuery
from holdfast.runtime.context import Context
from holdfast.sinks.console import ConsoleTarget
from holdfast.sinks.memory import MemoryTarget
from holdfast.sinks.table import FORMATS, TableTarget, table_id
from holdfast.sources.initial import Seeded, with_initial
from holdfast.state.durations import duration_ms
from holdfast.state.group import GroupFunction, GroupStateTimeout
from holdfast.state.python_codec import PythonCodec

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import StructType

NAME = "group-state"
"""Of every application that this front door makes: a checkpoint says by it whose it is."""


@dataclass(frozen=True)
class Plan:
    """What a query will do, but for where its output goes."""

    frame: DataFrame
    key: str | Column | Callable[[Any], Any]
    watermark: tuple[str, int] | None
    """Column and delay in ms."""
    verb: str
    label: str
    function: GroupFunction
    timeout: GroupStateTimeout
    mode: str
    schema: str | StructType | None
    initial: Mapping[Any, Any] | DataFrame | None


class DataStreamWriter:
    """Says where outputs go and how often, and starts the query. Every method but `start` and `toTable` returns the writer.

    Without a format and without a path the rows are shown on the console; with a path they are parquet files. The output mode
    is that of the function unless it is given, and must be the same then.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._format: str | None = None
        self._options: dict[str, str] = {}
        self._name: str | None = None
        self._function: Callable[[DataFrame, int], Any] | None = None
        self._interval_s = 0.0
        self._available_now = False

    def format(self, source: str) -> DataStreamWriter:
        """memory, console, parquet, json, csv or orc."""
        if source not in ("memory", "console", *FORMATS):
            raise InvalidPipeline(
                f"writeStream.format({source!r}): it is one of memory, console, {', '.join(FORMATS)}; for anything else use "
                "foreachBatch()"
            )
        self._format = source
        return self

    def outputMode(self, outputMode: str) -> DataStreamWriter:
        """The mode that was given to the function: nothing else makes sense."""
        mode = checked_mode("writeStream.outputMode", outputMode, ("append", "update", "complete"))
        if mode != self._plan.mode:
            raise InvalidPipeline(f"{self._plan.verb} in {self._plan.mode} mode cannot be written in {mode} mode")
        return self

    def option(self, key: str, value: Any) -> DataStreamWriter:
        """checkpointLocation and path; for the console numRows and truncate."""
        known = {name.lower(): name for name in _OPTIONS}
        if not isinstance(key, str) or key.lower() not in known:
            raise UnknownOption(f"writeStream.option({key!r}): it is one of {', '.join(_OPTIONS)}", option=key)
        self._options[known[key.lower()]] = str(value)
        return self

    def options(self, **options: Any) -> DataStreamWriter:
        """Several of them."""
        for key, value in options.items():
            self.option(key, value)
        return self

    def trigger(
        self,
        *,
        processingTime: str | timedelta | None = None,
        availableNow: bool | None = None,
        processing_time: str | timedelta | None = None,
        available_now: bool | None = None,
    ) -> DataStreamWriter:
        """`processingTime`: a batch at most that often. `availableNow`: process what is there now, and end."""
        every = _either("processingTime", processingTime, processing_time)
        now = _either("availableNow", availableNow, available_now)
        if (every is None) == (now is None):
            raise InvalidPipeline("trigger() takes one of processingTime= and availableNow=True")
        if now is not None and now is not True:
            raise InvalidPipeline("trigger(availableNow=) is True")
        if every is not None:
            interval = duration_ms(every)
            if interval < 0:
                raise InvalidPipeline(f"trigger(processingTime={every!r}) is negative")
            self._interval_s = interval / 1000
        self._available_now = now is True
        return self

    def foreachBatch(self, func: Callable[[DataFrame, int], Any]) -> DataStreamWriter:
        """Call `func(df, version)` on the driver for every batch that has outputs.

        Guaranteed: in order, and none is left out. Not guaranteed: that a version comes only once: after a crash it may come
        again, with the same rows and the same number.
        """
        check_function("foreachBatch()", func, ["df", "version"])
        self._function = func
        return self

    def queryName(self, queryName: str) -> DataStreamWriter:
        """What the query is called, and the view that the memory sink makes."""
        if not isinstance(queryName, str) or not queryName.strip():
            raise InvalidPipeline("queryName() takes a name")
        self._name = queryName
        return self

    def toTable(self, tableName: str) -> StreamingQuery:
        """Start the query and write its rows to a table of the session's catalog, as parquet unless the format says otherwise."""
        if self._format in ("memory", "console") or self._function is not None or "path" in self._options:
            raise InvalidPipeline("toTable() writes files: give no other sink and no path")
        if not isinstance(tableName, str) or "/" in tableName:
            raise InvalidPipeline(f"toTable({tableName!r}) takes the name of a table; for a path there is start(path)")
        table_id(tableName)
        self._check_appends()
        return self._start(_table(tableName, self._format or "parquet"))

    def start(
        self,
        path: str | None = None,
        format: str | None = None,
        outputMode: str | None = None,
        queryName: str | None = None,
        output_mode: str | None = None,
        query_name: str | None = None,
        **options: Any,
    ) -> StreamingQuery:
        """Start the query in the background; raise what prevents it from starting.

        Without a checkpoint location, by option or by the setting `spark.sql.streaming.checkpointLocation`, the state of
        memory, console and foreachBatch queries is in a temporary directory and gone when the query ends; files need one.
        """
        for method, given in (
            (self.format, format),
            (self.outputMode, _either("outputMode", outputMode, output_mode)),
            (self.queryName, _either("queryName", queryName, query_name)),
        ):
            if given is not None:
                method(given)
        if path is not None:
            options["path"] = path
        self.options(**options)
        return self._start(self._sink())

    output_mode = outputMode
    foreach_batch = foreachBatch
    query_name = queryName
    to_table = toTable

    def _sink(self) -> _Sink:
        path = self._options.get("path")
        if self._function is not None:
            if self._format is not None or path is not None:
                raise InvalidPipeline("foreachBatch() is a sink of its own: give no format and no path")
            return _function(self._function)
        kind = self._format or ("console" if path is None else "parquet")
        if kind == "memory":
            if self._name is None:
                raise InvalidPipeline("the memory sink needs a name for its view: call queryName()")
            return _memory(self._name)
        if kind == "console":
            return _console(self._options)
        if path is None:
            raise InvalidPipeline(f"writeStream.format({kind!r}) needs a path: start(path)")
        self._check_appends()
        return _files(path, kind)

    def _check_appends(self) -> None:
        mode = self._plan.mode
        if mode != "append":
            raise InvalidPipeline(f"files cannot be written in {mode} mode: they only grow. Use foreachBatch()")

    def _start(self, sink: _Sink) -> StreamingQuery:
        plan = self._plan
        spark = plan.frame.sparkSession
        running = _active.get(self._name or "")
        if running is not None and running.isActive:
            raise InvalidPipeline(f"a query of the name {self._name!r} is running: stop it, or take another name")
        location, is_temporary = self._location(sink)
        app = Application(NAME, persistence=Persistence(location), state_dir=location, spark=spark, loglevel=None)
        sink.add(_declared(app, plan, location), plan.schema)
        reports = Reports(NAME, self._name, plan.verb, "Spark", sink.description)

        def run() -> None:
            try:
                app.execute(reports, interval=self._interval_s, available_now=self._available_now)
            finally:
                if is_temporary:
                    shutil.rmtree(location)

        query = StreamingQuery(self._name, run, app.stop, reports).begin()
        if self._name is not None:
            _active[self._name] = query
        return query

    def _location(self, sink: _Sink) -> tuple[Path, bool]:
        """Where the checkpoint is, and whether it goes with the query."""
        given = self._options.get("checkpointLocation")
        if given is None:
            root = self._plan.frame.sparkSession.conf.get("spark.sql.streaming.checkpointLocation", None)
            if root is not None and self._name is not None:
                given = f"{root}/{self._name}"
        if given is not None:
            return _local(given, "the checkpoint of a query"), False
        if sink.is_durable:
            raise InvalidPipeline('the query needs a checkpoint: .option("checkpointLocation", "...")')
        return Path(tempfile.mkdtemp(prefix="holdfast-")), True


_OPTIONS = ("checkpointLocation", "path", "numRows", "truncate")
_active: WeakValueDictionary[str, StreamingQuery] = WeakValueDictionary()
"""By name."""


# -- sinks ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sink:
    """Where outputs go."""

    description: str
    add: Callable[[StreamingDataFrame, Any], Any]
    """Adds it to a frame, with the schema of the output."""
    is_durable: bool = False
    """Whether its rows outlive the query, which then needs a checkpoint that does, too."""


def _function(function: Callable[[DataFrame, int], Any]) -> _Sink:
    return _Sink("foreachBatch", lambda frame, schema: frame.foreach_batch(function, schema=schema))


def _files(path: str, kind: str) -> _Sink:
    place = path if "/" in path else f"./{path}"
    return _Sink(
        f"{kind} {path}", lambda frame, schema: frame.to_table(place, format=kind, schema=schema), is_durable=True
    )


def _table(name: str, kind: str) -> _Sink:
    def target(context: Context) -> TableTarget:
        warehouse = _local(context.spark.conf.get("spark.sql.warehouse.dir") or "", "the warehouse of toTable()")
        return TableTarget(Context(context.spark, warehouse), name, kind, overwrite=False)

    return _Sink(f"table {name}", lambda frame, schema: _tap(frame, table_id(name), target, schema), is_durable=True)


def _memory(view: str) -> _Sink:
    def add(frame: StreamingDataFrame, schema: Any) -> None:
        known = None if schema is None else arrow_schema(schema)
        _tap(frame, "memory", lambda context: MemoryTarget(context, view, known), schema)

    return _Sink(f"memory {view}", add)


def _console(options: Mapping[str, str]) -> _Sink:
    rows, truncate = options.get("numRows", "20"), options.get("truncate", "true").lower()
    if not rows.isdecimal() or truncate not in ("true", "false"):
        raise UnknownOption("writeStream.option(): numRows is a number, truncate is True or False")

    def target(context: Context) -> ConsoleTarget:
        return ConsoleTarget(context, int(rows), truncate == "true")

    return _Sink("console", lambda frame, schema: _tap(frame, "console", target, schema))


def _local(url: str, what: str) -> Path:
    directory = directory_at(url)
    if directory is None:
        raise InvalidPipeline(f"{what} is a local path or a file:// URL, not {url}")
    return directory


def _declared(app: Application, plan: Plan, location: Path) -> StreamingDataFrame:
    """The plan as a frame of `app`."""
    frame, key, function = plan.frame, plan.key, plan.function
    joined = with_initial(frame, key, plan.initial, location)
    step: Any = function
    if joined is not None:
        (frame, key), step = joined, Seeded(function)
    time, delay = plan.watermark if plan.watermark is not None else (None, None)
    source = app.from_spark(frame, key=key, timestamp=time)
    drop_late = plan.timeout is GroupStateTimeout.EventTimeTimeout
    gather = Gather(step, "default", f"{plan.verb}({plan.label})", PythonCodec(), drop_late)
    rows = app.dataframe(source, watermark_delay=delay)
    return rows._after(rows._pipeline.add_gather(rows._stage, rows._node, gather))


def _tap(frame: StreamingDataFrame, name: str, target: Callable[[Context], Any], schema: Any) -> None:
    """Send the rows at `frame` to a sink."""
    frame._pipeline.add_sink(frame._node, name, "rows", target, schema)


def _either(name: str, given: Any, twin: Any) -> Any:
    """What was given under Spark's name or in snake_case."""
    if given is not None and twin is not None:
        raise InvalidPipeline(f"{name}= is given twice, once in snake_case: leave one of them out")
    return twin if given is None else given


def checked_mode(verb: str, given: str, allowed: tuple[str, ...]) -> str:
    mode = given.lower() if isinstance(given, str) else given
    if mode not in allowed:
        raise InvalidPipeline(f"{verb}(outputMode={given!r}): it is {' or '.join(allowed)}")
    return mode
