"""The GroupState front door: what it takes, and what it refuses before anything runs. No JVM."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from operator import attrgetter
from typing import Any

import pytest
from pyspark.sql.types import DataType, DoubleType, StringType, StructField, StructType, TimestampType

import holdfast.spark
from holdfast.errors import FixTheProgram, InvalidPipeline, UnknownOption
from holdfast.spark import (
    DataStreamWriter,
    GroupedFrame,
    GroupState,
    GroupStateTimeout,
    Row,
    stateful,
)
from holdfast.spark.keys import KeyFunction, column_taken
from holdfast.spark.writing import _local
from holdfast.state.row import row_of


class Frame:
    """As much of a DataFrame as a declaration needs."""

    def __init__(self, *, streaming: bool = True, metadata: dict[str, Any] | None = None) -> None:
        self.isStreaming = streaming
        self.schema = StructType(
            [
                StructField("user", StringType()),
                StructField("amount", DoubleType()),
                StructField("at", TimestampType(), metadata=metadata),
            ]
        )
        self.columns = self.schema.names


def grouped(frame: Any = None, *, watermark: bool = False) -> GroupedFrame:
    wrapped = stateful(frame or Frame())
    if watermark:
        wrapped = wrapped.withWatermark("at", "10 minutes")
    return wrapped.groupByKey(lambda row: row.user.lower())


def one(key: Any, values: Iterator[Any], state: GroupState) -> Any:
    return key, 1


def many(key: Any, values: Iterator[Any], state: GroupState) -> Any:
    yield key, 1


def writer(mode: str = "append") -> DataStreamWriter:
    return grouped().flatMapGroupsWithState(many, mode).writeStream


def test_the_public_names_are_these() -> None:
    assert holdfast.spark.__all__ == [
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


@pytest.mark.parametrize("name", holdfast.spark.__all__)
def test_every_public_name_and_method_is_documented(name: str) -> None:
    thing = getattr(holdfast.spark, name)
    assert thing.__doc__
    for member, function in vars(thing).items() if isinstance(thing, type) else ():
        if not member.startswith("_") and (callable(function) or isinstance(function, property)):
            assert function.__doc__, member


# -- keys --------------------------------------------------------------------------------------------------------


def with_a_condition(row: Any) -> Any:
    user = row.user
    if user is None:
        return "nobody"
    return user


def named(row: Any) -> Any:
    return row.user


@pytest.mark.parametrize("function", [lambda row: row.user, lambda row: row["user"], lambda x: x.user, named])
def test_a_function_that_only_takes_a_column_is_that_column(function: Callable[[Any], Any]) -> None:
    assert column_taken(function) == "user"


@pytest.mark.parametrize(
    "function",
    [
        with_a_condition,
        lambda row: row.user or "nobody",
        lambda row: row.user.lower(),
        lambda row: row.user.name,
        lambda row: row.user + "x",
        lambda row: str(row.user),
        lambda row: f"{row.user}",
        lambda row: (row.user,),
        lambda row: (row.user, row.amount)[0],
        lambda row: (row.user, "nobody")[row.user is None],
        lambda row: row,
        lambda row: row[0],
        lambda row: "all",
        lambda row, suffix="": row.user,
        lambda *rows: rows[0].user,
        lambda row: NAMES[row.user],
        lambda row: -row.amount,
        lambda row: not row.user,
        lambda row: next(row.user for _ in range(1)),
        attrgetter("user"),
        str,
    ],
)
def test_any_other_function_stays_one(function: Callable[[Any], Any]) -> None:
    assert column_taken(function) is None


class SameName:
    def __getitem__(self, name: Any) -> Any:
        return name


NAMES = SameName()


def test_a_key_function_sees_a_row_and_a_row_as_a_key_is_a_tuple() -> None:
    value = {"user": "Ann", "amount": 3}
    assert KeyFunction(lambda row: row.user.lower() + row["user"], row_of)(value) == "annAnn"
    key = KeyFunction(lambda row: Row(a=row.user, b=1), row_of)(value)
    assert (key, type(key)) == (("Ann", 1), tuple)


def test_a_key_function_must_take_one_row() -> None:
    with pytest.raises(InvalidPipeline, match=r"groupByKey\(\): the function is called with \(row\)"):
        stateful(Frame()).groupByKey(lambda: 1)  # type: ignore[arg-type, misc]


# -- watermark ---------------------------------------------------------------------------------------------------


def test_only_a_streaming_frame_can_have_state() -> None:
    with pytest.raises(InvalidPipeline, match=r"spark\.readStream"):
        stateful(Frame(streaming=False))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("column", "delay", "said"),
    [
        ("when", "1 hour", "there is no column 'when'"),
        ("user", "1 hour", "event time is a timestamp, and this column is a string"),
        ("at", "-1 hour", "is negative"),
        ("at", "soon", "is no duration"),
    ],
)
def test_a_watermark_needs_a_timestamp_column_and_a_delay(column: str, delay: str, said: str) -> None:
    with pytest.raises(FixTheProgram, match=said):
        stateful(Frame()).withWatermark(column, delay)  # type: ignore[arg-type]


def test_there_is_one_watermark_and_spark_s_own_counts() -> None:
    frame = Frame(metadata={"spark.watermarkDelayMs": 5000})
    with pytest.raises(InvalidPipeline, match="there is a watermark already, on column 'at'"):
        stateful(frame).withWatermark("at", "1 hour")  # type: ignore[arg-type]
    grouped(frame).flatMapGroupsWithState(many, "append", GroupStateTimeout.EventTimeTimeout)


def test_event_time_timeouts_need_a_watermark() -> None:
    for verb in ("mapGroupsWithState", "flatMapGroupsWithState"):
        with pytest.raises(InvalidPipeline, match=rf"{verb}\(\): EventTimeTimeout needs a watermark"):
            getattr(grouped(), verb)(one, "update", GroupStateTimeout.EventTimeTimeout)
        getattr(grouped(watermark=True), verb)(one, "update", GroupStateTimeout.EventTimeTimeout)


@pytest.mark.parametrize("timeout", [GroupStateTimeout.NoTimeout, GroupStateTimeout.ProcessingTimeTimeout])
def test_a_watermark_does_no_harm_with_other_timeouts(timeout: GroupStateTimeout) -> None:
    result = grouped(watermark=True).flatMapGroupsWithState(many, "append", timeout)
    assert result._plan.timeout is timeout


# -- functions and output modes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["append", "complete", "", "all", None])
def test_map_is_only_in_update_mode(mode: Any) -> None:
    with pytest.raises(InvalidPipeline, match="it is update"):
        grouped().mapGroupsWithState(one, outputMode=mode)


@pytest.mark.parametrize("mode", ["complete", "", None])
def test_flat_map_is_in_append_or_update_mode(mode: Any) -> None:
    with pytest.raises(InvalidPipeline, match="it is append or update"):
        grouped().flatMapGroupsWithState(many, outputMode=mode)


def test_a_mode_may_be_written_in_any_case() -> None:
    result = grouped().mapGroupsWithState(one, outputMode="Update")
    assert result._plan.mode == "update"
    result.writeStream.outputMode("UPDATE")


@pytest.mark.parametrize(("mode", "other"), [("append", "update"), ("update", "append"), ("append", "complete")])
def test_the_query_has_the_mode_of_its_function(mode: str, other: str) -> None:
    writer(mode).outputMode(mode)
    with pytest.raises(InvalidPipeline, match=f"in {mode} mode cannot be written in {other} mode"):
        writer(mode).outputMode(other)


def test_a_generator_is_no_function_of_one_output() -> None:
    with pytest.raises(InvalidPipeline, match="use flatMapGroupsWithState"):
        grouped().mapGroupsWithState(many)


def test_a_function_must_take_key_values_and_state() -> None:
    with pytest.raises(InvalidPipeline, match=r"called with \(key, values, state\)"):
        grouped().mapGroupsWithState(lambda key, values: None)  # type: ignore[arg-type, misc]


def test_a_timeout_is_one_of_three() -> None:
    with pytest.raises(InvalidPipeline, match="it is one of NoTimeout, ProcessingTimeTimeout, EventTimeTimeout"):
        grouped().mapGroupsWithState(one, timeoutConf="Never")
    grouped().mapGroupsWithState(one, timeoutConf="ProcessingTimeTimeout")


def test_a_schema_is_read_when_it_is_given() -> None:
    with pytest.raises(InvalidPipeline, match="no type 'money'"):
        grouped().mapGroupsWithState(one, schema="user string, total money")


@pytest.mark.parametrize(
    ("initial", "said"), [([("a", 1)], "is a dict or a DataFrame, not list"), (Frame(), "is a streaming DataFrame")]
)
def test_an_initial_state_is_a_dict_or_a_frame_that_is_read_once(initial: Any, said: str) -> None:
    with pytest.raises(InvalidPipeline, match=said):
        grouped().mapGroupsWithState(one, initialState=initial)
    grouped().mapGroupsWithState(one, initialState={"ann": 1})
    grouped().mapGroupsWithState(one, initialState=Frame(streaming=False))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("key", "shown"),
    [
        (TimestampType(), "a timestamp cannot be one"),
        (
            StructType([StructField("a", StringType()), StructField("b", TimestampType())]),
            "a struct<a:string,b:timestamp>",
        ),
    ],
)
def test_the_keys_of_an_initial_state_must_have_a_type_of_keys(key: DataType, shown: str) -> None:
    frame = Frame(streaming=False)
    frame.schema = StructType([StructField("who", key), StructField("n", DoubleType())])
    frame.columns = frame.schema.names
    with pytest.raises(InvalidPipeline, match=f"its first column 'who' is the key, and {shown}"):
        grouped().mapGroupsWithState(one, initialState=frame)  # type: ignore[arg-type]
    frame.schema = StructType([StructField("who", StructType([StructField("a", StringType())])), *frame.schema[1:]])
    grouped().mapGroupsWithState(one, initialState=frame)  # type: ignore[arg-type]


def test_the_names_are_there_in_snake_case_too() -> None:
    wrapped = stateful(Frame()).with_watermark("at", timedelta(minutes=1))  # type: ignore[arg-type]
    frame = wrapped.group_by_key(lambda row: row.user.lower())
    assert frame.map_groups_with_state(
        one, output_mode="update", timeout_conf="NoTimeout", initial_state={}
    ).write_stream
    result = frame.flat_map_groups_with_state(many, output_mode="append", timeout_conf="EventTimeTimeout")
    result.write_stream.output_mode("append").query_name("q").foreach_batch(lambda df, version: None)
    stateful(Frame()).with_watermark(event_time="at", delay_threshold="1 minute")  # type: ignore[arg-type]


def test_keywords_are_there_in_snake_case_too_but_not_twice() -> None:
    writer().trigger(processing_time="1 minute").trigger(available_now=True)
    with pytest.raises(InvalidPipeline, match=r"trigger\(processingTime='-1 minute'\) is negative"):
        writer().trigger(processing_time="-1 minute")
    with pytest.raises(InvalidPipeline, match="cannot be written in update mode"):
        writer().start(output_mode="update")
    with pytest.raises(InvalidPipeline, match="takes a name"):
        writer().start(query_name=" ")
    for twice in (
        lambda: writer().trigger(availableNow=True, available_now=True),
        lambda: writer().trigger(processingTime="1 minute", processing_time="1 minute"),
        lambda: writer().start(outputMode="append", output_mode="append"),
        lambda: writer().start(queryName="q", query_name="q"),
    ):
        with pytest.raises(InvalidPipeline, match="is given twice"):
            twice()


# -- writing -----------------------------------------------------------------------------------------------------


def test_a_format_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(InvalidPipeline, match=r"one of memory, console, parquet, json, csv, orc; .*foreachBatch"):
        writer().format("delta")


def test_an_option_is_known_in_any_case_and_an_unknown_one_is_refused() -> None:
    writer().option("CHECKPOINTLOCATION", "x").options(numRows=3, truncate=False)
    with pytest.raises(UnknownOption, match="one of checkpointLocation, path, numRows, truncate"):
        writer().option("header", True)


@pytest.mark.parametrize(
    "trigger",
    [
        {},
        {"processingTime": "1 minute", "availableNow": True},
        {"availableNow": False},
        {"processingTime": "-1 minute"},
        {"processingTime": "now and then"},
    ],
)
def test_a_trigger_is_an_interval_or_what_is_there_now(trigger: dict[str, Any]) -> None:
    with pytest.raises(FixTheProgram):
        writer().trigger(**trigger)
    writer().trigger(processingTime="1 minute").trigger(availableNow=True)
    writer().trigger(processingTime="0 seconds")


@pytest.mark.parametrize(
    ("start", "said"),
    [
        (lambda: writer().format("memory").start(), "needs a name for its view"),
        (lambda: writer().format("parquet").start(), "needs a path"),
        (lambda: writer("update").start("out"), "files cannot be written in update mode"),
        (lambda: writer("update").toTable("t"), "files cannot be written in update mode"),
        (lambda: writer().format("console").toTable("t"), "give no other sink"),
        (lambda: writer().toTable("a/b"), r"for a path there is start\(path\)"),
        (lambda: writer().toTable("a b"), "letters, digits and '_'"),
        (lambda: writer().foreachBatch(lambda df, version: None).start("out"), "give no format and no path"),
        (lambda: writer().foreachBatch(lambda df: None), r"called with \(df, version\)"),
        (lambda: writer().option("numRows", "many").start(), "numRows is a number"),
        (lambda: writer().start(outputMode="update"), "cannot be written in update mode"),
        (lambda: writer().queryName(" "), "takes a name"),
    ],
)
def test_a_query_that_cannot_run_does_not_start(start: Callable[[], Any], said: str) -> None:
    with pytest.raises(FixTheProgram, match=said):
        start()


def test_a_checkpoint_in_an_object_store_is_refused_by_name() -> None:
    with pytest.raises(
        InvalidPipeline, match="the checkpoint of a query is a local path or a file:// URL, not s3://bucket/x"
    ):
        _local("s3://bucket/x", "the checkpoint of a query")
