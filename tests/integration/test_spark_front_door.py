"""GroupState on a real Spark: any streaming DataFrame in, Spark's sinks out, exactly once."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import IllegalArgumentException
from pyspark.sql import Row as SparkRow
from pyspark.sql import functions as F
from pyspark.sql.types import LongType, StringType, StructField, StructType

from holdfast.errors import Damaged, FixTheRecord, InvalidPipeline, UnknownOption, UnsupportedValue
from holdfast.spark import GroupState, GroupStateTimeout, StatefulResult, StreamingQuery, stateful
from holdfast.state.durations import duration_ms

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SCHEMA = "user string, amount double, at timestamp"


class Input:
    """A directory of JSON files as a stream; every `add` is a file, and every file a batch."""

    def __init__(self, spark: SparkSession, directory: Path) -> None:
        self.spark = spark
        self.directory = directory / "input"
        self.directory.mkdir()
        self._count = 0

    def add(self, *rows: tuple[Any, ...]) -> None:
        """Rows of (user, amount) or (user, amount, seconds since 1970)."""
        lines = [
            json.dumps({"user": user, "amount": amount, "at": datetime.fromtimestamp(sum(at), UTC).isoformat()})
            for user, amount, *at in rows
        ]
        self._count += 1
        draft = self.directory / f".{self._count}"
        draft.write_text("\n".join(lines) + "\n")
        os.utime(draft, (self._count, self._count))  # Spark takes files in the order of their times
        draft.rename(self.directory / f"{self._count:05}.json")

    def frame(self, schema: str = SCHEMA) -> DataFrame:
        return self.spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).json(str(self.directory))


@pytest.fixture
def given(spark: SparkSession, tmp_path: Path) -> Input:
    return Input(spark, tmp_path)


class Running:
    """A query into a list of (version, row)."""

    def __init__(self, result: StatefulResult, checkpoint: Path) -> None:
        self.got: list[tuple[Any, ...]] = []
        self._seen: dict[int, list[Any]] = {}

        def take(df: DataFrame, version: int) -> None:
            self._seen[version] = [tuple(row) for row in df.collect()]
            self.got = [row for number in sorted(self._seen) for row in self._seen[number]]

        self.query: StreamingQuery = (
            result.writeStream.foreachBatch(take).option("checkpointLocation", str(checkpoint)).start()
        )

    def new(self) -> list[tuple[Any, ...]]:
        """What came since the last time, sorted: there is no order between keys."""
        self.query.processAllAvailable()
        got, self.got = self.got, []
        self._seen.clear()
        return sorted(got, key=repr)

    def until(self, count: int) -> list[tuple[Any, ...]]:
        """Wait for so many rows."""
        limit = time.monotonic() + 60
        while len(self.got) < count and time.monotonic() < limit:
            assert self.query.isActive, self.query.exception()
            time.sleep(0.05)
        return self.new()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[[StatefulResult], Running]]:
    running: list[Running] = []

    def start(result: StatefulResult) -> Running:
        for one in running:
            one.query.stop()
        running.append(Running(result, tmp_path / "checkpoint"))
        return running[-1]

    yield start
    for one in running:
        one.query.stop()


def running_total(user: str, values: Iterator[Any], state: GroupState) -> Any:
    total = state.get if state.exists else 0
    for value in values:
        total += value.amount
    state.update(total)
    return (user, total)


TOTALS = "user string, total double"


# -- the state goes on -------------------------------------------------------------------------------------------


def test_a_running_total_goes_on_from_batch_to_batch_and_through_a_restart(
    given: Input, run: Callable[[StatefulResult], Running]
) -> None:
    given.add(("ann", 1), ("bob", 10), ("ann", 2))
    given.add(("ann", 4))
    frame = stateful(given.frame()).groupByKey(lambda row: row.user)
    result = frame.mapGroupsWithState(running_total, outputMode="update", timeoutConf=GroupStateTimeout.NoTimeout)
    first = run(result)
    assert first.new() == [("ann", 3.0), ("ann", 7.0), ("bob", 10.0)]
    first.query.stop()
    assert (first.query.isActive, first.query.exception()) == (False, None)
    given.add(("ann", 8), ("cy", 1))
    again = run(result)
    assert again.new() == [("ann", 15.0), ("cy", 1.0)]
    assert again.query.id == first.query.id
    assert again.query.runId != first.query.runId


@pytest.mark.parametrize(
    ("key", "keys"),
    [
        (lambda: "user", ["Ann", "Bob"]),
        (lambda: F.upper("user"), ["ANN", "BOB"]),
        (lambda: lambda row: row.user.lower(), ["ann", "bob"]),
        (lambda: lambda row: (row.user, row["amount"] > 5), [("Ann", False), ("Bob", True)]),
        (lambda: "amount", [1.5, 10.0]),
    ],
    ids=["column", "expression", "function", "tuple", "double"],
)
def test_groups_can_be_made_by_columns_expressions_and_functions(
    given: Input, run: Callable[[StatefulResult], Running], key: Callable[[], Any], keys: list[Any]
) -> None:
    def seen(key: Any, values: Iterator[Any], state: GroupState) -> Any:
        return {"key": repr(key), "rows": sum(1 for _ in values)}

    given.add(("Ann", 1.5), ("Bob", 10), ("Ann", 1.5))
    assert run(stateful(given.frame()).groupByKey(key()).mapGroupsWithState(seen)).new() == sorted(
        [(repr(keys[0]), 2), (repr(keys[1]), 1)], key=repr
    )


def test_a_key_column_of_another_type_or_that_is_not_there_is_refused(given: Input) -> None:
    frame = stateful(given.frame())
    with pytest.raises(InvalidPipeline, match="a key column of type timestamp is not supported"):
        frame.groupByKey(lambda row: row.at)
    for key in ("usr", lambda row: row.usr):
        with pytest.raises(InvalidPipeline, match="key='usr' is not a column"):
            frame.groupByKey(key)


def test_nested_columns_are_rows_and_maps_are_dicts(given: Input, run: Callable[[StatefulResult], Running]) -> None:
    def tally(user: str, values: Iterator[Any], state: GroupState) -> Any:
        history = state.getOption or []
        history += list(values)
        state.update(history)
        for row in history:
            yield user, row.where.city, row.where["tags"]["a"], [stop.name for stop in row.stops]

    frame = given.frame().select(
        "user",
        F.struct(F.lit("Rome").alias("city"), F.create_map(F.lit("a"), F.lit(1)).alias("tags")).alias("where"),
        F.array(F.struct(F.lit("x").alias("name"))).alias("stops"),
    )
    given.add(("ann", 1))
    given.add(("ann", 2))
    result = stateful(frame).groupByKey("user").flatMapGroupsWithState(tally, "append")
    assert run(result).new() == [("ann", "Rome", 1, ["x"])] * 3


# -- timeouts ----------------------------------------------------------------------------------------------------


def count_until_timeout(user: str, values: Iterator[Any], state: GroupState) -> Any:
    if state.hasTimedOut:
        assert list(values) == []
        state.remove()
        return iter([(user, -1)])
    count = (state.getOption or 0) + sum(1 for _ in values)
    state.update(count)
    state.setTimeoutDuration("1 second")
    return iter([(user, count)])


def test_a_group_times_out_by_processing_time_while_no_input_comes(
    given: Input, run: Callable[[StatefulResult], Running]
) -> None:
    given.add(("ann", 1), ("bob", 1), ("ann", 1))
    result = (
        stateful(given.frame())
        .groupByKey("user")
        .flatMapGroupsWithState(count_until_timeout, "update", GroupStateTimeout.ProcessingTimeTimeout)
    )
    running = run(result)
    assert running.until(4) == [("ann", -1), ("ann", 2), ("bob", -1), ("bob", 1)]
    (operator,) = running.query.lastProgress["stateOperators"]
    assert (operator["numRowsTotal"], operator["numRowsRemoved"]) == (0, 2)
    given.add(("ann", 1))
    assert running.until(2) == [("ann", -1), ("ann", 1)]


def latest(key: str, values: Iterator[Any], state: GroupState) -> Any:
    assert state.getCurrentProcessingTimeMs() > 0
    assert state.getCurrentWatermarkMs() >= 0
    if state.hasTimedOut:
        state.remove()
        return [(key, -1)]
    newest = max(*(int(value.at.timestamp()) for value in values), state.getOption or 0)
    state.update(newest)
    state.setTimeoutTimestamp(newest * 1000, "5 seconds")
    return [(key, newest)]


@pytest.mark.parametrize("whose", ["ours", "spark's"])
def test_groups_time_out_by_event_time_and_late_rows_are_dropped(
    given: Input, run: Callable[[StatefulResult], Running], whose: str
) -> None:
    frame = given.frame()
    late = (
        stateful(frame).withWatermark("at", "10 seconds")
        if whose == "ours"
        else stateful(frame.withWatermark("at", "10 seconds"))
    )
    running = run(late.groupByKey("user").flatMapGroupsWithState(latest, "update", "EventTimeTimeout"))
    given.add(("a", 0, 11), ("a", 0, 13), ("a", 0, 15))
    assert running.new() == [("a", 15)]
    given.add(("a", 0, 4), ("a", 0, 5))  # the watermark is at 5
    assert running.new() == []
    assert running.query.lastProgress["stateOperators"][0]["numRowsDroppedByWatermark"] == 2
    given.add(("a", 0, 10))
    assert running.new() == [("a", 15)]
    given.add(("b", 0, 30))  # the watermark comes to 20, which is not past a's timeout
    assert running.new() == [("b", 30)]
    given.add(("b", 0, 31))
    assert running.until(2) == [("a", -1), ("b", 31)]


def test_what_the_data_made_due_is_waited_for(given: Input, run: Callable[[StatefulResult], Running]) -> None:
    """The last rows move the watermark past a timeout: the batch for it has no data."""
    frame = stateful(given.frame()).withWatermark("at", "10 seconds").groupByKey("user")
    running = run(frame.flatMapGroupsWithState(latest, "update", "EventTimeTimeout"))
    for round_ in range(3):
        given.add((f"a{round_}", 0, 100 * round_ + 10))
        given.add(("b", 0, 100 * round_ + 50))
        assert (f"a{round_}", -1) in running.new()


def test_late_rows_are_kept_unless_timeouts_go_by_event_time(
    given: Input, run: Callable[[StatefulResult], Running]
) -> None:
    given.add(("ann", 1, 1000))
    given.add(("ann", 2, 1))
    frame = stateful(given.frame()).withWatermark("at", "10 seconds").groupByKey("user")
    assert run(frame.mapGroupsWithState(running_total)).new() == [("ann", 1.0), ("ann", 3.0)]


# -- initial state -----------------------------------------------------------------------------------------------


def counted(key: Any, values: Iterator[Any], state: GroupState) -> Any:
    rows = sum(1 for _ in values)
    assert rows or state.exists
    assert not state.hasTimedOut
    count = (state.getOption or 0) + rows
    if key != "unchanged":
        state.update(count)
    return (key, rows, count)


@pytest.mark.parametrize("by", ["column", "function"])
@pytest.mark.parametrize("form", ["dict", "frame"])
def test_groups_begin_with_their_initial_state_once(
    given: Input, run: Callable[[StatefulResult], Running], by: str, form: str
) -> None:
    states: Any = {"both": 2, "unchanged": 2, "state": 1}
    if form == "frame":
        states = given.spark.createDataFrame(list(states.items()), "name string, count int")
    key: Any = "user" if by == "column" else lambda row: row.user.lower()
    given.add(("data", 1), ("both", 1))
    result = stateful(given.frame()).groupByKey(key).mapGroupsWithState(counted, initialState=states)
    running = run(result)
    assert running.new() == [("both", 1, 3), ("data", 1, 1), ("state", 0, 1), ("unchanged", 0, 2)]
    given.add(("state", 1), ("unchanged", 1))
    assert run(result).new() == [("state", 1, 2), ("unchanged", 1, 3)]
    given.add(("state", 1))
    without = stateful(given.frame()).groupByKey(key).mapGroupsWithState(counted)
    assert run(without).new() == [("state", 1, 3)]


@pytest.mark.parametrize("form", ["dict", "frame"])
def test_an_initial_state_can_have_tuples_as_keys(
    given: Input, run: Callable[[StatefulResult], Running], form: str
) -> None:
    def show(key: Any, values: Iterator[Any], state: GroupState) -> Any:
        return repr(key), sum(1 for _ in values), state.getOption

    states: Any = {("ann", 1, (2.5, True)): 5}
    if form == "frame":
        schema = "who struct<user: string, n: int, more: struct<x: double, y: boolean>>, count int"
        states = given.spark.createDataFrame([(("ann", 1, (2.5, True)), 5)], schema)
    given.add(("ann", 1), ("bob", 1))
    grouped = stateful(given.frame()).groupByKey(lambda row: (row.user, int(row.amount), (2.5, True)))
    assert run(grouped.mapGroupsWithState(show, initialState=states)).new() == [
        ("('ann', 1, (2.5, True))", 1, 5),
        ("('bob', 1, (2.5, True))", 1, None),
    ]


def test_an_initial_state_with_tuples_does_not_fit_groups_by_a_column(given: Input) -> None:
    states = given.spark.createDataFrame([(("ann",), 5)], "who struct<user: string>, count int")
    grouped = stateful(given.frame()).groupByKey("user")
    with pytest.raises(InvalidPipeline, match="the groups are made by a string column"):
        grouped.mapGroupsWithState(counted, initialState=states).writeStream.start()


def test_an_initial_state_with_more_columns_is_a_row(given: Input, run: Callable[[StatefulResult], Running]) -> None:
    states = given.spark.createDataFrame([("ann", 1, "x")], "user string, n int, note string")

    def show(user: str, values: Iterator[Any], state: GroupState) -> Any:
        return user, state.get.n, state.get.note

    given.add(("ann", 1))
    assert run(stateful(given.frame()).groupByKey("user").mapGroupsWithState(show, initialState=states)).new() == [
        ("ann", 1, "x")
    ]


def test_an_initial_state_has_no_event_time(given: Input, run: Callable[[StatefulResult], Running]) -> None:
    given.add(("a", 0, 15), ("b", 0, 15))
    frame = stateful(given.frame()).withWatermark("at", "10 seconds").groupByKey("user")
    states = {f"user{n}": 1 for n in range(8)}
    running = run(frame.flatMapGroupsWithState(oldest, "update", "EventTimeTimeout", initialState=states))
    assert len(running.new()) == 10
    given.add(("a", 0, 10), ("b", 0, 5))  # the watermark is at 5
    assert running.new() == [("a", 2)]


def oldest(key: str, values: Iterator[Any], state: GroupState) -> Any:
    count = (state.getOption or 0) + sum(1 for _ in values)
    state.update(count)
    return [(key, count)]


def test_an_initial_state_with_a_key_twice_ends_the_query(
    given: Input, run: Callable[[StatefulResult], Running]
) -> None:
    states = given.spark.createDataFrame([("a", 1), ("a", 2)], "user string, n int")
    given.add(("a", 1))
    running = run(stateful(given.frame()).groupByKey("user").mapGroupsWithState(counted, initialState=states))
    with pytest.raises(FixTheRecord, match="more than once"):
        running.query.awaitTermination()


# -- what comes out ----------------------------------------------------------------------------------------------


def test_outputs_go_by_the_schema_as_ddl_or_struct_type(given: Input, run: Callable[[StatefulResult], Running]) -> None:
    schema = StructType([StructField("user", StringType()), StructField("rows", LongType())])

    def row(user: str, values: Iterator[Any], state: GroupState) -> Any:
        return SparkRow(rows=len(list(values)), user=user)

    given.add(("ann", 1))
    grouped = stateful(given.frame()).groupByKey("user")
    assert run(grouped.mapGroupsWithState(row, schema=schema)).new() == [("ann", 1)]


def test_without_a_schema_the_first_outputs_decide_and_a_later_one_must_fit(
    given: Input, run: Callable[[StatefulResult], Running]
) -> None:
    def changing(user: str, values: Iterator[Any], state: GroupState) -> Any:
        yield {"user": user, "note": "x" if user == "ann" else 5}

    given.add(("ann", 1))
    result = stateful(given.frame()).groupByKey("user").flatMapGroupsWithState(changing, "append")
    assert run(result).new() == [("ann", "x")]
    given.add(("bob", 1))
    with pytest.raises(UnsupportedValue, match="a int does not fit the column 'note' of type string") as caught:
        run(result).query.awaitTermination()
    assert caught.value.holdfast_place.key == "bob"  # type: ignore[attr-defined]


def test_the_error_of_a_function_comes_back_as_itself_and_the_mended_one_goes_on(
    given: Input, run: Callable[[StatefulResult], Running]
) -> None:
    def fragile(user: str, values: Iterator[Any], state: GroupState) -> Any:
        total = running_total(user, values, state)
        if total[1] > 5:
            raise LookupError("too much")
        return total

    grouped = stateful(given.frame()).groupByKey("user")
    running = run(grouped.mapGroupsWithState(fragile))
    given.add(("ann", 1))
    assert running.new() == [("ann", 1.0)]
    given.add(("ann", 10))
    with pytest.raises(LookupError, match="too much") as caught:
        running.query.processAllAvailable()
    assert running.query.exception() is caught.value
    assert not running.query.isActive
    with pytest.raises(LookupError):
        running.query.awaitTermination(1)
    assert run(grouped.mapGroupsWithState(running_total)).new() == [("ann", 11.0)]


# -- sinks -------------------------------------------------------------------------------------------------------


def appended(given: Input) -> StatefulResult:
    def totals(user: str, values: Iterator[Any], state: GroupState) -> Any:
        yield running_total(user, values, state)

    return stateful(given.frame()).groupByKey("user").flatMapGroupsWithState(totals, "append", schema=TOTALS)


def test_the_memory_sink_is_a_view_that_is_there_from_the_start_and_its_checkpoint_goes_with_it(
    given: Input, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    query = appended(given).writeStream.format("memory").queryName("in_memory").start()
    assert given.spark.table("in_memory").columns == ["user", "total"]
    given.add(("ann", 1))
    given.add(("ann", 2))
    query.processAllAvailable()
    assert sorted(map(tuple, given.spark.table("in_memory").collect())) == [("ann", 1.0), ("ann", 3.0)]
    assert query.name == "in_memory"
    assert len(list(tmp_path.glob("holdfast-*"))) == 1
    query.stop()
    assert list(tmp_path.glob("holdfast-*")) == []


def test_two_running_queries_cannot_have_one_name(given: Input) -> None:
    writer = appended(given).writeStream.format("memory").queryName("taken")
    query = writer.start()
    with pytest.raises(InvalidPipeline, match="a query of the name 'taken' is running"):
        writer.start()
    query.stop()
    writer.start().stop()


def test_the_console_shows_the_rows_of_a_batch(given: Input, capfd: pytest.CaptureFixture[str]) -> None:
    given.add(("ann", 1))
    query = appended(given).writeStream.trigger(availableNow=True).start()
    query.awaitTermination()
    assert "| ann|  1.0|" in capfd.readouterr().out


@pytest.mark.parametrize("kind", ["parquet", "json", "csv", "orc"])
def test_files_have_each_row_once_through_a_restart(given: Input, tmp_path: Path, kind: str) -> None:
    out = str(tmp_path / "out")
    for amount in (1, 2):
        given.add(("ann", amount))
        writer = appended(given).writeStream.format(kind).option("checkpointLocation", str(tmp_path / "checkpoint"))
        assert writer.trigger(availableNow=True).start(out).awaitTermination(120) is True
    rows = given.spark.read.format(kind).schema(TOTALS).load(out).select("user", "total").collect()
    assert sorted(map(tuple, rows)) == [("ann", 1.0), ("ann", 3.0)]


def test_a_table_is_in_the_catalog_of_the_session(given: Input, tmp_path: Path) -> None:
    given.add(("ann", 1))
    query = (
        appended(given)
        .writeStream.option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .toTable("front_door_totals")
    )
    query.awaitTermination()
    assert [tuple(row) for row in given.spark.table("front_door_totals").select("user", "total").collect()] == [
        ("ann", 1.0)
    ]


def test_files_need_a_checkpoint_and_the_session_s_setting_gives_one(given: Input, tmp_path: Path) -> None:
    writer = appended(given).writeStream.queryName("named").trigger(availableNow=True)
    with pytest.raises(InvalidPipeline, match="checkpointLocation"):
        writer.start(str(tmp_path / "out"))
    given.add(("ann", 1))
    given.spark.conf.set("spark.sql.streaming.checkpointLocation", str(tmp_path / "all"))
    try:
        writer.start(str(tmp_path / "out")).awaitTermination()
    finally:
        given.spark.conf.unset("spark.sql.streaming.checkpointLocation")
    assert (tmp_path / "all" / "named").is_dir()


# -- the query ---------------------------------------------------------------------------------------------------


def test_a_monitoring_loop_finds_what_it_looks_for(given: Input, run: Callable[[StatefulResult], Running]) -> None:
    given.add(("ann", 1), ("bob", 1))
    given.add(("ann", 1))
    query = run(stateful(given.frame()).groupByKey("user").mapGroupsWithState(running_total)).query
    query.processAllAvailable()
    progress = query.lastProgress
    assert progress and "stateOperators" in progress
    for operator in progress["stateOperators"]:
        assert (operator.get("numRowsTotal", 0), operator.get("numRowsUpdated", 0), operator["numRowsRemoved"]) == (
            2,
            1,
            0,
        )
        assert operator.get("memoryUsedBytes", 0) > 0
        assert operator["commitTimeMs"] >= 0
        assert operator["customMetrics"]["deltaBytes"] > 0
    assert [report["numInputRows"] for report in query.recentProgress] == [2, 1]
    assert [report["batchId"] for report in query.recentProgress] == [0, 1]
    assert (progress["id"], progress["runId"]) == (query.id, query.runId)
    assert set(query.status) == {"message", "isDataAvailable", "isTriggerActive"}
    assert query.awaitTermination(0.1) is False
    query.stop()
    assert query.status["message"] == "Stopped"
    assert query.awaitTermination(0.1) is True


def test_a_trigger_spaces_the_batches(given: Input, tmp_path: Path) -> None:
    for amount in range(3):
        given.add(("ann", amount))
    began = time.monotonic()
    query = appended(given).writeStream.format("memory").queryName("spaced").trigger(processingTime="3 seconds").start()
    query.processAllAvailable()
    assert time.monotonic() - began > 3
    assert len(query.recentProgress) == 3
    query.stop()


def test_a_query_that_cannot_go_on_from_its_checkpoint_does_not_start(
    given: Input, run: Callable[[StatefulResult], Running], tmp_path: Path
) -> None:
    given.add(("ann", 1))
    running = run(appended(given))
    running.new()
    running.query.stop()
    for manifest in (tmp_path / "checkpoint/commits").iterdir():
        manifest.write_bytes(manifest.read_bytes()[:-20])
    with pytest.raises(Damaged, match="its checksum is that of other bytes"):
        run(appended(given))


@pytest.mark.parametrize(
    "text",
    [
        "1 hour",
        "interval 2 days 3 hours",
        "-1 month 31 days 1 second",
        "1 month -31 day",
        "1  year",
        ".5 seconds",
        "5. seconds",
        "- 3 seconds",
        "+ 3 Seconds",
        "1.0005 second",
        "-1.0005 second",
        "1500 microseconds",
        "2 weeks",
        "1hour",
        "1.5 hours",
        "1 h",
        "interval",
        "one hour",
    ],
)
def test_spark_itself_reads_durations_so(spark: SparkSession, text: str) -> None:
    jvm: Any = spark._jvm
    intervals = jvm.org.apache.spark.sql.catalyst.util.IntervalUtils
    try:
        read = intervals.stringToInterval(jvm.org.apache.spark.unsafe.types.UTF8String.fromString(text))
    except IllegalArgumentException:
        with pytest.raises(UnknownOption, match="is no duration"):
            duration_ms(text)
    else:
        assert duration_ms(text) == intervals.getDuration(read, jvm.java.util.concurrent.TimeUnit.MILLISECONDS, 31)
