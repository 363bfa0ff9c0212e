"""From a streaming DataFrame to groups with state: names and argument checks."""

# ruff: noqa: N802, N803  (the names are Spark's)

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from holdfast.errors import InvalidPipeline
from holdfast.plan.functions import check_function
from holdfast.plan.schema import arrow_schema
from holdfast.sources.initial import check_initial
from holdfast.state.durations import duration_ms
from holdfast.state.group import GroupFunction, GroupState, GroupStateTimeout
from holdfast.state.row import conversion, row_of

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import StructType
from holdfast.spark.keys import key_of
from holdfast.spark.writing import DataStreamWriter, Plan, checked_mode

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
        return GroupedFrame(self._frame, key_of(self._frame, key), self._watermark)

    def with_watermark(self, event_time: str, delay_threshold: str | int | timedelta) -> StatefulFrame:
        """`withWatermark`."""
        return self.withWatermark(event_time, delay_threshold)

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
            Of the output, as DDL or a StructType. Without it the first outputs decide. The checkpoint keeps it: a later output
            that does not fit is an error, and so is another schema at a later start.
        initialState
            What the state of a group is before its first call: a dict from key to state, or a DataFrame that is not streaming,
            with the key in its first column (a struct for a tuple) and the state in the second or, as a row, in all others.
            These groups are called in the first batch, also without rows.

        Guaranteed: state and output change together, exactly once. Not guaranteed: that `func` runs only once; a batch that was
        not committed is computed again.
        """
        if inspect.isgeneratorfunction(func):
            raise InvalidPipeline("mapGroupsWithState(): a generator makes many outputs: use flatMapGroupsWithState()")
        mode = checked_mode("mapGroupsWithState", outputMode, ("update",))
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
        mode = checked_mode("flatMapGroupsWithState", outputMode, ("append", "update"))
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
            Plan(self._frame, self._key, self._watermark, verb, _label(func), function, timeout, mode, schema, initial)
        )


class StatefulResult:
    """The outputs of a stateful function, to be written. Made by `GroupedFrame`."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    @property
    def writeStream(self) -> DataStreamWriter:
        """Where the outputs go."""
        return DataStreamWriter(self._plan)

    write_stream = writeStream


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


def _label(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))
