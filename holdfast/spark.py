"""The GroupState front door: Spark's `mapGroupsWithState` and `flatMapGroupsWithState`, in Python, on any streaming DataFrame.

    result = (stateful(df).groupByKey(lambda row: row.user_id)
        .mapGroupsWithState(running_total, schema="user_id string, total double"))
    query = result.writeStream.format("memory").queryName("totals").start()

It owns names and argument checks, never execution: a query is an `Application` on the session of the DataFrame, with the
checkpoint location as its place. Every name is also there in snake_case. docs/from-spark.md says what differs from Spark.
"""

# ruff: noqa: N802, N803  (the names are Spark's)

from __future__ import annotations

import dis
import inspect
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from holdfast.application import Application
from holdfast.dataframe import StreamingDataFrame
from holdfast.errors import InvalidPipeline, UnknownOption
from holdfast.persistence import Persistence
from holdfast.plan.functions import check_function
from holdfast.plan.schema import arrow_schema
from holdfast.plan.steps import Gather
from holdfast.runtime.background import Reports, StreamingQuery
from holdfast.runtime.context import Context
from holdfast.sinks.console import ConsoleTarget
from holdfast.sinks.memory import MemoryTarget
from holdfast.sinks.table import FORMATS, TableTarget, table_id
from holdfast.sources.initial import Seeded, check_initial, with_initial
from holdfast.sources.spark import SparkSource
from holdfast.state.durations import duration_ms
from holdfast.state.group import GroupFunction, GroupState, GroupStateTimeout
from holdfast.state.python_codec import PythonCodec
from holdfast.state.row import Row, conversion, row_of

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import StructType

__all__ = [
    "DataStreamWriter",
    "GroupState",
    "GroupStateTimeout",
    "GroupedFrame",
    "Row",
    "StatefulFrame",
    "StatefulResult",
    "StreamingQuery",
    "stateful",
]

NAME = "group-state"
"""Of every application that this front door makes: a checkpoint says by it whose it is."""

Function = Callable[[Any, Iterator[Any], GroupState], Any]


def stateful(df: DataFrame) -> StatefulFrame:
    """A streaming DataFrame whose groups can have state. A watermark that it has already counts."""
    if not getattr(df, "isStreaming", False):
        raise InvalidPipeline("stateful() takes a streaming DataFrame: one made by spark.readStream")
    return StatefulFrame(df, _watermark_of(df))


class StatefulFrame:
    """A streaming DataFrame on its way to state. Made by `stateful`."""

    def __init__(self, frame: DataFrame, watermark: tuple[str, int] | None) -> None:
        self._frame = frame
        self._watermark = watermark

    def withWatermark(self, eventTime: str, delayThreshold: str | int | timedelta) -> StatefulFrame:
        """Take event time from the timestamp column `eventTime`, and wait `delayThreshold` for rows that come late.

        Guaranteed: the watermark of a batch is the latest event time of the batches before it, less the delay; it never goes
        back, also after a restart.
        """
        if self._watermark is not None:
            raise InvalidPipeline(f"there is a watermark already, on column {self._watermark[0]!r}")
        _check_time_column(self._frame, eventTime)
        delay = duration_ms(delayThreshold)
        if delay < 0:
            raise InvalidPipeline(f"withWatermark(): the delay {delayThreshold!r} is negative")
        return StatefulFrame(self._frame, (eventTime, delay))

    def groupByKey(self, key: str | Column | Callable[[Any], Any]) -> GroupedFrame:
        """Make groups of the rows by a column, an expression or a function of the row.

        A function that only takes one column, such as `lambda row: row.user_id`, is that column; any other runs in Python before
        the shuffle. It returns a str, bytes, int, bool, float or a tuple of these; a row without a key is an error.
        """
        return GroupedFrame(self._frame, _key(self._frame, key), self._watermark)

    with_watermark = withWatermark
    group_by_key = groupByKey


class GroupedFrame:
    """A streaming DataFrame in groups. Made by `StatefulFrame.groupByKey`."""

    def __init__(
        self, frame: DataFrame, key: str | Column | Callable[[Any], Any], watermark: tuple[str, int] | None
    ) -> None:
        self._frame = frame
        self._key = key
        self._watermark = watermark

    def mapGroupsWithState(
        self,
        func: Function,
        outputMode: str = "update",
        timeoutConf: GroupStateTimeout | str = GroupStateTimeout.NoTimeout,
        schema: str | StructType | None = None,
        initialState: Mapping[Any, Any] | DataFrame | None = None,
    ) -> StatefulResult:
        """Call `func(key, values, state)` for every group, in every batch in which it has rows or has timed out.

        Parameters
        ----------
        func
            Returns exactly one output: a tuple, a dict or a row. `values` is an iterator of rows in no particular order.
        outputMode
            "update", the only one that makes sense here.
        timeoutConf
            Which clock timeouts go by; `EventTimeTimeout` needs a watermark.
        schema
            Of the output, as DDL or a StructType. Without it the first outputs decide, and a later one that does not fit is
            an error.
        initialState
            What the state of a group is before its first call: a dict from key to state, or a DataFrame that is not streaming,
            with the key in its first column and the state in the second or, as a row, in all others. These groups are
            called in the first batch, also without rows.

        Guaranteed: state and output change together, exactly once. Not guaranteed: that `func` runs only once; a batch that was
        not committed is computed again.
        """
        if inspect.isgeneratorfunction(func):
            raise InvalidPipeline("mapGroupsWithState(): a generator makes many outputs: use flatMapGroupsWithState()")
        mode = _mode("mapGroupsWithState", outputMode, ("update",))
        return self._with_state("mapGroupsWithState", func, mode, timeoutConf, schema, initialState)

    def flatMapGroupsWithState(
        self,
        func: Function,
        outputMode: str,
        timeoutConf: GroupStateTimeout | str = GroupStateTimeout.NoTimeout,
        schema: str | StructType | None = None,
        initialState: Mapping[Any, Any] | DataFrame | None = None,
    ) -> StatefulResult:
        """As `mapGroupsWithState`, for a function that returns any number of outputs, as a list or an iterator.

        It may be a generator, which can change the state until its last output. `outputMode` is "append" or "update" and must
        be that of the query.
        """
        mode = _mode("flatMapGroupsWithState", outputMode, ("append", "update"))
        return self._with_state("flatMapGroupsWithState", func, mode, timeoutConf, schema, initialState)

    def map_groups_with_state(
        self,
        func: Function,
        output_mode: str = "update",
        timeout_conf: GroupStateTimeout | str = GroupStateTimeout.NoTimeout,
        schema: str | StructType | None = None,
        initial_state: Mapping[Any, Any] | DataFrame | None = None,
    ) -> StatefulResult:
        """`mapGroupsWithState`."""
        return self.mapGroupsWithState(func, output_mode, timeout_conf, schema, initial_state)

    def flat_map_groups_with_state(
        self,
        func: Function,
        output_mode: str,
        timeout_conf: GroupStateTimeout | str = GroupStateTimeout.NoTimeout,
        schema: str | StructType | None = None,
        initial_state: Mapping[Any, Any] | DataFrame | None = None,
    ) -> StatefulResult:
        """`flatMapGroupsWithState`."""
        return self.flatMapGroupsWithState(func, output_mode, timeout_conf, schema, initial_state)

    def _with_state(
        self,
        verb: str,
        func: Function,
        mode: str,
        timeout: GroupStateTimeout | str,
        schema: str | StructType | None,
        initial: Mapping[Any, Any] | DataFrame | None,
    ) -> StatefulResult:
        flat = verb.startswith("flat")
        check_function(f"{verb}()", func, ["key", "values", "state"], yields=flat)
        try:
            timeout = GroupStateTimeout(timeout)
        except ValueError:
            names = ", ".join(GroupStateTimeout)
            raise InvalidPipeline(f"{verb}(timeoutConf={timeout!r}): it is one of {names}") from None
        if timeout is GroupStateTimeout.EventTimeTimeout and self._watermark is None:
            raise InvalidPipeline(
                f"{verb}(): EventTimeTimeout needs a watermark: call withWatermark(column, delay) first"
            )
        if initial is not None:
            check_initial(verb, initial)
        columns = None if schema is None else tuple(arrow_schema(schema).names)
        to_row = conversion(self._frame.schema) or row_of
        function = GroupFunction(func, flat=flat, timeout=timeout, columns=columns, to_row=to_row)
        return StatefulResult(
            _Plan(self._frame, self._key, self._watermark, verb, _label(func), function, timeout, mode, schema, initial)
        )


@dataclass(frozen=True)
class _Plan:
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


class StatefulResult:
    """The outputs of a stateful function, to be written. Made by `GroupedFrame`."""

    def __init__(self, plan: _Plan) -> None:
        self._plan = plan

    @property
    def writeStream(self) -> DataStreamWriter:
        """Where the outputs go."""
        return DataStreamWriter(self._plan)

    write_stream = writeStream


class DataStreamWriter:
    """Says where outputs go and how often, and starts the query. Every method but `start` and `toTable` returns the writer.

    Without a format and without a path the rows are shown on the console; with a path they are parquet files. The output mode
    is that of the function unless it is given, and must be the same then.
    """

    def __init__(self, plan: _Plan) -> None:
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
        mode = _mode("writeStream.outputMode", outputMode, ("append", "update", "complete"))
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
        self, *, processingTime: str | timedelta | None = None, availableNow: bool | None = None
    ) -> DataStreamWriter:
        """`processingTime`: a batch at most that often. `availableNow`: process what is there now, and end."""
        if (processingTime is None) == (availableNow is None):
            raise InvalidPipeline("trigger() takes one of processingTime= and availableNow=True")
        if availableNow is not None and availableNow is not True:
            raise InvalidPipeline("trigger(availableNow=) is True")
        if processingTime is not None:
            interval = duration_ms(processingTime)
            if interval < 0:
                raise InvalidPipeline(f"trigger(processingTime={processingTime!r}) is negative")
            self._interval_s = interval / 1000
        self._available_now = availableNow is True
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
        **options: Any,
    ) -> StreamingQuery:
        """Start the query in the background; raise what prevents it from starting.

        Without a checkpoint location, by option or by the setting `spark.sql.streaming.checkpointLocation`, the state of
        memory, console and foreachBatch queries is in a temporary directory and gone when the query ends; files need one.
        """
        for method, given in (
            (self.format, format),
            (self.outputMode, outputMode),
            (self.queryName, queryName),
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
        reports = Reports(self._name or NAME, plan.verb, "Spark", sink.description)

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
            return Persistence(given).directory, False
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
        warehouse = Persistence(context.spark.conf.get("spark.sql.warehouse.dir") or "").directory
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


# -- what an application is told ---------------------------------------------------------------------------------


def _declared(app: Application, plan: _Plan, location: Path) -> StreamingDataFrame:
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


def _watermark_of(frame: DataFrame) -> tuple[str, int] | None:
    """The watermark that Spark's own `withWatermark` has noted in the schema."""
    for field in frame.schema.fields:
        delay = field.metadata.get("spark.watermarkDelayMs")
        if delay is not None:
            return field.name, int(delay)
    return None


def _check_time_column(frame: DataFrame, column: str) -> None:
    if not isinstance(column, str) or column not in frame.columns:
        raise InvalidPipeline(f"withWatermark(): there is no column {column!r}; the columns are {frame.columns}")
    kind = frame.schema[column].dataType.simpleString()
    if not kind.startswith("timestamp"):
        raise InvalidPipeline(f"withWatermark({column!r}): event time is a timestamp, and this column is a {kind}")


def _mode(verb: str, given: str, allowed: tuple[str, ...]) -> str:
    mode = given.lower() if isinstance(given, str) else given
    if mode not in allowed:
        raise InvalidPipeline(f"{verb}(outputMode={given!r}): it is {' or '.join(allowed)}")
    return mode


def _label(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


# -- keys --------------------------------------------------------------------------------------------------------


def _key(frame: DataFrame, key: Any) -> Any:
    """What a `SparkSource` takes as the key."""
    from pyspark.sql import Column

    if callable(key) and not isinstance(key, Column):
        check_function("groupByKey()", key, ["row"])
        column = column_taken(key)
        if column is None:
            return KeyFunction(key, conversion(frame.schema) or row_of)
        key = column
    if isinstance(key, str) and key in frame.columns:
        kind = frame.schema[key].dataType.simpleString()
        if kind in ("boolean", "float", "double"):
            return KeyFunction(_Taken(key), row_of)
    SparkSource(frame, key, None)  # refuses what cannot be a key
    return key


class KeyFunction:
    """The user's function of a row, as one of the dict that the source has. A row as a key is the tuple of its values."""

    def __init__(self, function: Callable[[Any], Any], to_row: Callable[[Any], Any]) -> None:
        self._function = function
        self._to_row = to_row

    def __call__(self, value: dict[str, Any]) -> Any:
        key = self._function(self._to_row(value))
        return tuple(key) if isinstance(key, Row | tuple) else key


_PLAIN_STEPS = frozenset(
    ("RESUME", "LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_CONST", "LOAD_ATTR", "BINARY_SUBSCR", "RETURN_VALUE")
)


def column_taken(function: Any) -> str | None:
    """The column of a function that does nothing but take one, by attribute or item: `lambda row: row.user_id`.

    Its code says so: no condition, no call, no other name. Trying it on an object that notes what it is asked for says
    which. (Trying alone would not do: `None if row.a is None else row.a` gives that object back, too.)

    >>> column_taken(lambda row: row.user_id), column_taken(lambda row: row["user_id"]), column_taken(lambda row: row.a or "b")
    ('user_id', 'user_id', None)
    """
    if type(function) is not FunctionType or function.__code__.co_argcount != 1:
        return None
    if not _PLAIN_STEPS.issuperset(step.opname for step in dis.get_instructions(function)):
        return None
    try:
        taken = function(_Probe())
    except Exception:  # whatever a function may do with what is no row
        return None
    return taken.column if type(taken) is _Taken else None


class _Probe:
    """Stands for a row whose columns are not known."""

    def __getattr__(self, name: str) -> Any:
        return _Taken(name)

    def __getitem__(self, name: Any) -> Any:
        return _Taken(name) if isinstance(name, str) else None


class _Taken:
    """A column that was asked for; and, called with a row, what takes it."""

    def __init__(self, column: str) -> None:
        self.column = column

    def __call__(self, row: Any) -> Any:
        return row[self.column]
