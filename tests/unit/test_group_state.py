"""GroupState over a plain cell: each corner that Spark's documentation and tests pin down is a test here."""

from __future__ import annotations

import pickle
from collections import namedtuple
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pyspark.sql import Row as SparkRow
from pyspark.sql.types import ArrayType, LongType, MapType, StringType, StructField, StructType

from holdfast.errors import InvalidTimeout, NoState, NoWatermark, UnknownOption, UnsupportedValue
from holdfast.plan.steps import Gather
from holdfast.state.cell import Clock
from holdfast.state.durations import duration_ms
from holdfast.state.group import GroupFunction, GroupState, GroupStateTimeout
from holdfast.state.python_codec import PythonCodec
from holdfast.state.row import Row, conversion, row_of
from holdfast.testing import Harness

NO, PROCESSING, EVENT = GroupStateTimeout
EACH_TIMEOUT = pytest.mark.parametrize("timeout", list(GroupStateTimeout))
codec = PythonCodec()
UNSET: Any = object()


class PlainCell:
    """A cell in memory, which keeps its value as bytes as the real one does."""

    def __init__(
        self,
        value: Any = UNSET,
        timer: tuple[Clock, int] | None = None,
        time_ms: int = 1000,
        watermark: int | None = None,
    ) -> None:
        self.stored = None if value is UNSET else codec.encode(value)
        self.timer = timer
        self.time_ms = time_ms
        self.watermark_ms = watermark

    @property
    def exists(self) -> bool:
        return self.stored is not None

    @property
    def value(self) -> Any:
        return None if self.stored is None else codec.decode(self.stored)

    def update(self, value: Any) -> None:
        self.stored = codec.encode(value)

    def remove(self) -> None:
        self.stored = None

    def set_timer(self, clock: Clock, due_ms: int) -> None:
        self.timer = (clock, due_ms)

    def clear_timer(self) -> None:
        self.timer = None


def state_of(cell: PlainCell, timeout: GroupStateTimeout = NO, timed_out: bool = False) -> GroupState:
    return GroupState(cell, timeout, timed_out)


# -- the state ---------------------------------------------------------------------------------------------------


def test_a_group_without_state_does_not_exist_and_get_is_an_error() -> None:
    state = state_of(PlainCell())
    assert (state.exists, state.getOption) == (False, None)
    with pytest.raises(NoState):
        _ = state.get


def test_what_was_updated_exists_and_can_be_got() -> None:
    state = state_of(PlainCell())
    state.update("")
    assert (state.exists, state.get, state.getOption) == (True, "", "")
    state.update("2")
    assert state.get == "2"


@pytest.mark.parametrize("value", [0, "", False, [], {}, 0.0, ()])
def test_a_state_that_is_false_exists(value: Any) -> None:
    state = state_of(PlainCell(value))
    assert (state.exists, state.get, state.getOption) == (True, value, value)


def test_a_removed_state_is_as_if_it_had_never_been() -> None:
    state = state_of(PlainCell(2))
    state.remove()
    assert (state.exists, state.getOption) == (False, None)
    with pytest.raises(NoState):
        _ = state.get


def test_removing_twice_is_no_error_and_an_update_after_it_counts() -> None:
    cell = PlainCell(2)
    state = state_of(cell)
    state.remove()
    state.remove()
    state.update(4)
    assert (state.exists, state.get, cell.value) == (True, 4, 4)


def test_none_is_no_state_and_leaves_the_state_as_it_was() -> None:
    state = state_of(PlainCell(2))
    with pytest.raises(UnsupportedValue, match=r"state\.remove\(\)"):
        state.update(None)
    assert state.get == 2


def test_a_type_that_cannot_be_kept_is_refused_and_leaves_the_state_as_it_was() -> None:
    state = state_of(PlainCell(2))
    with pytest.raises(UnsupportedValue, match="type complex"):
        state.update(1j)
    assert state.get == 2


def test_a_value_that_is_changed_in_place_is_not_saved_until_it_is_updated() -> None:
    state = state_of(PlainCell({"n": 1}))
    value = state.get
    value["n"] = 2
    assert state.get == {"n": 1}
    state.update(value)
    assert state.get == {"n": 2}


def test_a_state_shows_itself() -> None:
    assert (repr(state_of(PlainCell())), repr(state_of(PlainCell(5)))) == ("GroupState(<undefined>)", "GroupState(5)")


def test_every_name_is_there_in_snake_case() -> None:
    state = state_of(PlainCell(5, watermark=7), PROCESSING, timed_out=True)
    assert (state.get_option, state.has_timed_out) == (5, True)
    assert (state.get_current_watermark_ms(), state.get_current_processing_time_ms()) == (7, 1000)
    state.set_timeout_duration(1)
    state_of(PlainCell(), EVENT).set_timeout_timestamp(1)


# -- the clocks --------------------------------------------------------------------------------------------------


@EACH_TIMEOUT
@pytest.mark.parametrize("time_ms", [0, 1000, 2000])
def test_the_processing_time_is_the_batch_s_whatever_the_timeout(timeout: GroupStateTimeout, time_ms: int) -> None:
    assert state_of(PlainCell(time_ms=time_ms), timeout).getCurrentProcessingTimeMs() == time_ms


@EACH_TIMEOUT
@pytest.mark.parametrize("watermark", [0, 1000, 2000])
def test_the_watermark_can_be_had_with_every_timeout(timeout: GroupStateTimeout, watermark: int) -> None:
    assert state_of(PlainCell(watermark=watermark), timeout).getCurrentWatermarkMs() == watermark


@EACH_TIMEOUT
def test_without_a_watermark_asking_for_it_is_an_error(timeout: GroupStateTimeout) -> None:
    with pytest.raises(NoWatermark, match="withWatermark"):
        state_of(PlainCell(), timeout).getCurrentWatermarkMs()


# -- timeouts: which calls are refused, and when -------------------------------------------------------------------

SET_DURATION: list[Callable[[GroupState], None]] = [
    lambda state: state.setTimeoutDuration(1000),
    lambda state: state.setTimeoutDuration("2 second"),
    lambda state: state.setTimeoutDuration(timedelta(seconds=2)),
]
SET_TIMESTAMP: list[Callable[[GroupState], None]] = [
    lambda state: state.setTimeoutTimestamp(2000),
    lambda state: state.setTimeoutTimestamp(2000, "1 second"),
    lambda state: state.setTimeoutTimestamp(datetime.fromtimestamp(2, UTC)),
    lambda state: state.setTimeoutTimestamp(datetime.fromtimestamp(2, UTC), "1 second"),
]


@pytest.mark.parametrize("value", [UNSET, 5])
@pytest.mark.parametrize("call", SET_DURATION + SET_TIMESTAMP)
def test_without_a_timeout_none_can_be_set(call: Callable[[GroupState], None], value: Any) -> None:
    cell = PlainCell(value)
    with pytest.raises(InvalidTimeout, match="the query has NoTimeout"):
        call(state_of(cell, NO))
    assert cell.timer is None


@pytest.mark.parametrize("call", SET_TIMESTAMP)
def test_a_timestamp_is_refused_with_processing_time(call: Callable[[GroupState], None]) -> None:
    cell = PlainCell(timer=("processing", 7))
    with pytest.raises(InvalidTimeout, match="needs timeoutConf=EventTimeTimeout"):
        call(state_of(cell, PROCESSING))
    assert cell.timer == ("processing", 7)


@pytest.mark.parametrize("call", SET_DURATION)
def test_a_duration_is_refused_with_event_time(call: Callable[[GroupState], None]) -> None:
    cell = PlainCell(timer=("event", 7), watermark=1000)
    with pytest.raises(InvalidTimeout, match="needs timeoutConf=ProcessingTimeTimeout"):
        call(state_of(cell, EVENT))
    assert cell.timer == ("event", 7)


@pytest.mark.parametrize(
    ("duration", "due"),
    [
        (500, 1500),
        ("2 second", 3000),
        ("1  hour", 3_601_000),
        (timedelta(minutes=5), 301_000),
        ("-1 month 31 days 1 second", 2000),
        ("1 month", 31 * 86_400_000 + 1000),
        ("1 year", 372 * 86_400_000 + 1000),
    ],
)
def test_a_duration_counts_from_the_batch_s_processing_time(duration: Any, due: int) -> None:
    cell = PlainCell()
    state_of(cell, PROCESSING).setTimeoutDuration(duration)
    assert cell.timer == ("processing", due)


@pytest.mark.parametrize(
    "duration",
    [
        0,
        -1000,
        "-2 second",
        "-1 month",
        "1 month -31 day",
        "0 seconds",
        "500 microseconds",
        timedelta(0),
        timedelta(seconds=-1),
        "soon",
        "1 fortnight",
        "",
        1.5,
        True,
        None,
    ],
)
def test_a_duration_that_is_none_or_not_positive_is_refused(duration: Any) -> None:
    cell = PlainCell(5)
    with pytest.raises(InvalidTimeout):
        state_of(cell, PROCESSING).setTimeoutDuration(duration)
    assert cell.timer is None


@pytest.mark.parametrize(
    ("arguments", "due"),
    [
        ((5000,), 5000),
        ((datetime.fromtimestamp(20, UTC),), 20_000),
        ((datetime.fromtimestamp(20.0005, UTC),), 20_000),
        ((datetime.fromtimestamp(20),), 20_000),
        ((5000, "1 hour"), 3_605_000),
        ((5000, timedelta(seconds=1)), 6000),
        ((5000, 1), 5001),
        ((5000, "0 seconds"), 5000),
        ((0, "1 hour"), 3_600_000),
    ],
)
def test_a_timestamp_is_taken_as_it_is_and_more_is_added(arguments: tuple[Any, ...], due: int) -> None:
    cell = PlainCell(watermark=1000)
    state_of(cell, EVENT).setTimeoutTimestamp(*arguments)
    assert cell.timer == ("event", due)


@pytest.mark.parametrize(
    "arguments",
    [
        (-10_000,),
        (0,),
        (10_000, "-3 second"),
        (10_000, "-1 month"),
        (10_000, "1 month -32 day"),
        (datetime.fromtimestamp(-10, UTC),),
        (datetime.fromtimestamp(-10, UTC), "3 second"),
        ("noon",),
        (1.5,),
        (True,),
        (10_000, "soon"),
    ],
)
def test_a_timestamp_that_is_none_or_not_positive_is_refused(arguments: tuple[Any, ...]) -> None:
    cell = PlainCell(5, watermark=0)
    with pytest.raises(InvalidTimeout):
        state_of(cell, EVENT).setTimeoutTimestamp(*arguments)
    assert cell.timer is None


def test_a_timestamp_before_the_watermark_is_refused_and_one_at_it_is_not() -> None:
    cell = PlainCell(5, watermark=1000)
    with pytest.raises(InvalidTimeout, match="999 ms is before the watermark, which is at 1000 ms"):
        state_of(cell, EVENT).setTimeoutTimestamp(999)
    assert cell.timer is None
    state_of(cell, EVENT).setTimeoutTimestamp(1000)
    assert cell.timer == ("event", 1000)


def test_only_the_sum_with_the_additional_duration_has_to_reach_the_watermark() -> None:
    cell = PlainCell(watermark=1000)
    state_of(cell, EVENT).setTimeoutTimestamp(500, "1 second")
    assert cell.timer == ("event", 1500)


def test_a_timeout_needs_no_state_and_outlives_update_and_remove() -> None:
    cell = PlainCell()
    state = state_of(cell, PROCESSING)
    state.setTimeoutDuration(500)
    assert (cell.timer, cell.exists) == (("processing", 1500), False)
    state.update(5)
    assert cell.timer == ("processing", 1500)
    state.remove()
    assert cell.timer == ("processing", 1500)
    state.setTimeoutDuration(700)
    assert cell.timer == ("processing", 1700)


def test_the_last_timeout_that_a_call_sets_counts() -> None:
    cell = PlainCell(watermark=0)
    state = state_of(cell, EVENT)
    for timestamp in (10_000, 20_000, 5000):
        state.setTimeoutTimestamp(timestamp)
    assert cell.timer == ("event", 5000)


def test_spark_s_own_names_of_the_timeouts_are_taken() -> None:
    from pyspark.sql.streaming.state import GroupStateTimeout as Sparks

    names = (Sparks.NoTimeout, Sparks.ProcessingTimeTimeout, Sparks.EventTimeTimeout)
    assert [GroupStateTimeout(name) for name in names] == [NO, PROCESSING, EVENT]


# -- a call ------------------------------------------------------------------------------------------------------


def called(
    function: Callable[[Any, Iterator[Any], GroupState], Any],
    cell: PlainCell,
    *values: dict[str, Any],
    timeout: GroupStateTimeout = NO,
    timed_out: bool = False,
    flat: bool = True,
    columns: tuple[str, ...] | None = None,
) -> list[dict[str, Any]]:
    group = GroupFunction(function, flat=flat, timeout=timeout, columns=columns)
    return group("k", iter(values), cell, timed_out)


def nothing(key: Any, values: Any, state: GroupState) -> list[Any]:
    return []


def test_a_call_that_does_nothing_leaves_the_state_as_it_was() -> None:
    cell = PlainCell(0)
    assert called(nothing, cell, {"n": 1}) == []
    assert (cell.value, cell.timer) == (0, None)


@pytest.mark.parametrize(("timeout", "clock"), [(PROCESSING, "processing"), (EVENT, "event")])
@pytest.mark.parametrize("value", [UNSET, 0])
def test_a_call_with_data_begins_without_the_timeout_that_was_set_before(
    timeout: GroupStateTimeout, clock: Clock, value: Any
) -> None:
    cell = PlainCell(value, timer=(clock, 2000), watermark=1000)
    called(nothing, cell, {"n": 1}, timeout=timeout)
    assert (cell.timer, cell.exists) == (None, value is not UNSET)


def test_an_update_or_a_removal_does_not_bring_the_timeout_back() -> None:
    for change in (lambda state: state.update(5), lambda state: state.remove()):
        cell = PlainCell(0, timer=("processing", 2000))
        called(lambda key, values, state, change=change: [change(state)][1:], cell, {"n": 1}, timeout=PROCESSING)
        assert cell.timer is None


def test_a_refused_timeout_that_the_function_catches_leaves_none() -> None:
    def function(key: Any, values: Any, state: GroupState) -> list[Any]:
        state.update(5)
        with pytest.raises(InvalidTimeout):
            state.setTimeoutTimestamp(999)
        return []

    cell = PlainCell(0, timer=("event", 2000), watermark=1000)
    called(function, cell, {"n": 1}, timeout=EVENT)
    assert (cell.value, cell.timer) == (5, None)


def test_a_call_with_data_has_not_timed_out() -> None:
    seen = []
    called(lambda key, values, state: seen.append((key, list(values), state.hasTimedOut)) or [], PlainCell(), {"n": 1})
    assert seen == [("k", [Row(n=1)], False)]


def test_a_timed_out_call_has_no_values_and_its_state_and_may_set_a_new_timeout() -> None:
    def function(key: Any, values: Any, state: GroupState) -> list[Any]:
        assert (list(values), state.hasTimedOut, state.get) == ([], True, 5)
        state.setTimeoutDuration(2000)
        return [{"key": key, "late": True}]

    cell = PlainCell(5)
    assert called(function, cell, timeout=PROCESSING, timed_out=True) == [{"key": "k", "late": True}]
    assert (cell.value, cell.timer) == (5, ("processing", 3000))


def test_a_timed_out_call_that_sets_no_timeout_has_none_and_may_update_or_remove() -> None:
    cell = PlainCell(5)
    called(lambda key, values, state: [state.update(6)][1:], cell, timeout=PROCESSING, timed_out=True)
    assert (cell.value, cell.timer) == (6, None)
    called(lambda key, values, state: [state.remove()][1:], cell, timeout=PROCESSING, timed_out=True)
    assert (cell.exists, cell.timer) == (False, None)


def test_a_group_may_time_out_without_state() -> None:
    seen = []
    cell = PlainCell()
    called(
        lambda key, values, state: seen.append((state.exists, state.hasTimedOut)) or [],
        cell,
        timeout=EVENT,
        timed_out=True,
    )
    assert seen == [(False, True)]


def test_a_timeout_of_an_earlier_program_does_not_call_a_function_without_timeouts() -> None:
    assert called(lambda key, values, state: 1 / 0, PlainCell(5), timeout=NO, timed_out=True) == []


def test_a_generator_may_change_the_state_until_its_last_output() -> None:
    def function(key: Any, values: Any, state: GroupState) -> Iterator[Any]:
        for _ in values:
            count = (state.getOption or 0) + 1
            if count == 3:
                state.remove()
            else:
                state.update(count)
                yield key, count

    cell = PlainCell()
    rows = [{"n": n} for n in range(4)]
    assert called(function, cell, *rows, columns=("key", "count")) == [
        {"key": "k", "count": 1},
        {"key": "k", "count": 2},
        {"key": "k", "count": 1},
    ]
    assert cell.value == 1


# -- what comes out ----------------------------------------------------------------------------------------------

Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("output", "columns", "row"),
    [
        (("ann", 3), ("user", "total"), {"user": "ann", "total": 3}),
        (("ann", 3), None, {"_1": "ann", "_2": 3}),
        ({"total": 3}, ("user", "total"), {"total": 3}),
        (SparkRow(total=3, user="ann"), ("user", "total"), {"user": "ann", "total": 3}),
        (SparkRow("ann", 3), ("user", "total"), {"user": "ann", "total": 3}),
        (Row(total=3, user="ann"), ("user", "total"), {"user": "ann", "total": 3}),
        (Point(1, 2), ("x", "y"), {"x": 1, "y": 2}),
        (({"n": 1, "rows": [Row(a=SparkRow(b=(1, 2)))]},), None, {"_1": {"n": 1, "rows": [{"a": {"b": (1, 2)}}]}}),
    ],
)
@pytest.mark.parametrize("flat", [True, False])
def test_tuples_go_by_position_dicts_and_rows_by_name(output: Any, columns: Any, row: Any, flat: bool) -> None:
    result = called(lambda *_: [output] if flat else output, PlainCell(), {}, flat=flat, columns=columns)
    assert result == [row]


@pytest.mark.parametrize("result", [None, "text", b"bytes", {"a": 1}, Row(a=1), 5])
def test_flat_map_needs_an_iterable_of_outputs(result: Any) -> None:
    with pytest.raises(UnsupportedValue, match="must return an iterator or a list of outputs"):
        called(lambda *_: result, PlainCell(), {})


def test_flat_map_that_returns_one_tuple_is_told_so() -> None:
    with pytest.raises(UnsupportedValue, match="an output must be a tuple, a dict or a row, not str"):
        called(lambda *_: ("ann", 3), PlainCell(), {})


@pytest.mark.parametrize("result", [None, "text", 5, [("ann", 3)], iter(())])
def test_map_needs_exactly_one_output(result: Any) -> None:
    with pytest.raises(UnsupportedValue, match="mapGroupsWithState returns exactly one"):
        called(lambda *_: result, PlainCell(), {}, flat=False)


def test_map_needs_an_output_of_a_timed_out_call_too() -> None:
    with pytest.raises(UnsupportedValue, match="exactly one"):
        called(lambda *_: None, PlainCell(5), timeout=PROCESSING, timed_out=True, flat=False)


def test_a_tuple_of_another_length_than_the_schema_is_refused_without_showing_it() -> None:
    with pytest.raises(UnsupportedValue, match="an output has 1 values, the schema has 2 columns: a, b") as caught:
        called(lambda *_: [("a secret",)], PlainCell(), {}, columns=("a", "b"))
    assert "secret" not in str(caught.value)


def test_an_output_does_not_change_with_the_row_that_it_came_from() -> None:
    row = Row(a=1)
    (output,) = called(lambda *_: [row], PlainCell(), {})
    output["a"] = 2
    assert row.a == 1


# -- rows --------------------------------------------------------------------------------------------------------


def test_a_row_reads_as_spark_s_does() -> None:
    ours, sparks = Row(user="ann", amount=3), SparkRow(user="ann", amount=3)
    for row in (ours, sparks):
        user, amount = row
        assert (user, amount, row.user, row["amount"], row[0], row[-1], row[:1]) == (
            *sparks,
            "ann",
            3,
            "ann",
            3,
            ("ann",),
        )
        assert (len(row), "user" in row, "x" in row, row.asDict()) == (2, True, False, {"user": "ann", "amount": 3})
    assert repr(ours) == repr(sparks)
    assert ours == sparks
    assert hash(ours) == hash(sparks)
    assert ours != Row(user="bob", amount=3)
    assert ours == ("ann", 3)
    assert ours != ["ann", 3]


def test_a_column_wins_over_a_method_of_its_name() -> None:
    assert (Row(count=1, asDict=2).count, Row(asDict=2).asDict) == (1, 2)


def test_a_column_that_is_not_there_is_named_with_those_that_are() -> None:
    row = Row(user="a secret", amount=3)
    with pytest.raises(AttributeError, match=r"no column 'usr'; it has user, amount") as by_attribute:
        _ = row.usr
    with pytest.raises(KeyError, match=r"no column 'usr'; it has user, amount") as by_item:
        _ = row["usr"]
    assert "secret" not in f"{by_attribute.value}{by_item.value}"


def test_a_row_cannot_be_changed() -> None:
    row = Row(a=1)
    with pytest.raises(AttributeError, match="cannot be changed"):
        row.a = 2
    with pytest.raises(AttributeError, match="cannot be changed"):
        del row.a
    assert row.a == 1


def test_a_row_survives_pickling() -> None:
    assert pickle.loads(pickle.dumps(Row(a=1, b=[Row(c=2)]))) == Row(a=1, b=[Row(c=2)])


def test_rows_inside_become_dicts_if_that_is_wanted() -> None:
    row = Row(a=Row(b=1), c=[Row(d=2)])
    assert row.asDict()["a"] == Row(b=1)
    assert row.asDict(recursive=True) == {"a": {"b": 1}, "c": [{"d": 2}]}


def test_structs_and_maps_of_arrow_become_what_spark_makes_of_them() -> None:
    inner = StructType([StructField("n", LongType()), StructField("tags", MapType(StringType(), LongType()))])
    schema = StructType(
        [StructField("user", StringType()), StructField("one", inner), StructField("many", ArrayType(inner))]
    )
    to_row = conversion(schema)
    assert to_row is not None
    value = {"user": "ann", "one": {"n": 1, "tags": [("a", 1)]}, "many": [{"n": 2, "tags": None}, None]}
    assert pickle.loads(pickle.dumps(to_row))(value) == Row(
        user="ann", one=Row(n=1, tags={"a": 1}), many=[Row(n=2, tags=None), None]
    )
    assert to_row({"user": None, "one": None, "many": None}) == Row(user=None, one=None, many=None)


def test_plain_columns_need_no_conversion() -> None:
    assert conversion(StringType()) is None
    assert conversion(ArrayType(LongType())) is None


def test_rows_are_made_as_they_are_asked_for() -> None:
    made = []

    def to_row(value: dict[str, Any]) -> Row:
        made.append(value["n"])
        return row_of(value)

    group = GroupFunction(lambda key, values, state: [next(values)], flat=True, timeout=NO, to_row=to_row)
    group("k", iter([{"n": 1}, {"n": 2}]), PlainCell(), False)
    assert made == [1]


# -- in the engine -------------------------------------------------------------------------------------------------


def engine(
    function: Callable[[Any, Iterator[Any], GroupState], Any], timeout: GroupStateTimeout, **options: Any
) -> Harness:
    """A harness that runs one group function, on values `{"n": ...}`."""
    group = GroupFunction(function, flat=True, timeout=timeout)
    step = Gather(group, "default", "flatMapGroupsWithState", codec, timeout is EVENT)
    return Harness(lambda sdf: sdf._after(sdf._pipeline.add_gather(sdf._stage, sdf._node, step)), **options)


def outputs(harness: Harness) -> list[tuple[Any, ...]]:
    """What came out in this batch."""
    before = len(harness.values)
    harness.run()
    return [tuple(value.values()) for value in harness.values[before:]]


def count_for_a_second(key: Any, values: Iterator[Any], state: GroupState) -> Any:
    rows = [row.n for row in values]
    if state.hasTimedOut:
        known = state.getOption
        state.remove()
        return [(key, "timed out", known, rows)]
    state.update((state.getOption or 0) + len(rows))
    state.setTimeoutDuration("1 second")
    return [(key, "data", state.get, rows)]


def test_a_group_is_called_once_per_batch_with_all_its_rows() -> None:
    harness = engine(count_for_a_second, PROCESSING)
    harness.feed(("a", {"n": 1}), ("b", {"n": 2}), ("a", {"n": 3}))
    assert outputs(harness) == [("a", "data", 2, [1, 3]), ("b", "data", 1, [2])]
    harness.feed(("b", {"n": 4}))
    assert outputs(harness) == [("b", "data", 2, [4])]


def test_a_timeout_is_due_when_the_clock_is_past_it_and_then_once() -> None:
    harness = engine(count_for_a_second, PROCESSING)
    harness.now_ms = 5000
    harness.feed(("a", {"n": 1}))
    harness.run()
    harness.now_ms = 6000
    assert outputs(harness) == []
    harness.now_ms = 6001
    assert outputs(harness) == [("a", "timed out", 1, [])]
    harness.now_ms = 9000
    assert outputs(harness) == []


def test_rows_come_before_timeouts_and_put_off_that_of_their_group() -> None:
    harness = engine(count_for_a_second, PROCESSING)
    harness.feed(("a", {"n": 1}), ("b", {"n": 2}))
    harness.run()
    harness.now_ms = 1500
    harness.feed(("b", {"n": 3}), ("c", {"n": 4}))
    assert outputs(harness) == [("b", "data", 2, [3]), ("c", "data", 1, [4]), ("a", "timed out", 1, [])]
    harness.now_ms = 2501
    assert sorted(outputs(harness)) == [("b", "timed out", 2, []), ("c", "timed out", 1, [])]


def test_state_and_timeouts_outlive_a_restart_on_another_machine() -> None:
    harness = engine(count_for_a_second, PROCESSING, partitions=2)
    harness.feed(("a", {"n": 1}))
    harness.run()
    harness.restart(lose_local=True)
    harness.feed(("a", {"n": 2}))
    assert outputs(harness) == [("a", "data", 2, [2])]
    harness.restart(lose_local=True)
    harness.now_ms = 1001
    assert outputs(harness) == [("a", "timed out", 2, [])]


def until_the_watermark(key: Any, values: Iterator[Any], state: GroupState) -> Any:
    rows = [row.n for row in values]
    if state.hasTimedOut:
        return [(key, "timed out", state.getCurrentWatermarkMs(), rows)]
    state.setTimeoutTimestamp(2000)
    return [(key, "data", state.getCurrentWatermarkMs(), rows)]


def test_the_watermark_is_that_of_the_batches_before_and_a_timeout_without_state_is_due_past_it() -> None:
    harness = engine(until_the_watermark, EVENT, watermark_delay=1000)
    harness.feed(("a", {"n": 1}, 1500))
    assert outputs(harness) == [("a", "data", 0, [1])]
    harness.feed(("b", {"n": 2}, 3000))
    assert outputs(harness) == [("b", "data", 500, [2])]
    assert outputs(harness) == []  # the watermark is at 2000
    harness.feed(("b", {"n": 3}, 3001))
    assert outputs(harness) == [("b", "data", 2000, [3])]
    assert sorted(outputs(harness)) == [("a", "timed out", 2001, []), ("b", "timed out", 2001, [])]


def test_rows_that_are_not_later_than_the_watermark_are_dropped_and_only_with_event_time() -> None:
    for timeout, kept in ((EVENT, [3]), (NO, [1, 2, 3])):
        harness = engine(lambda key, values, state: [(key, [row.n for row in values])], timeout, watermark_delay=1000)
        harness.feed(("a", {"n": 0}, 3000))
        harness.run()
        harness.feed(("a", {"n": 1}, 1999), ("a", {"n": 2}, 2000), ("a", {"n": 3}, 2001))
        assert outputs(harness) == [("a", kept)]


def test_a_group_whose_rows_are_all_late_is_not_called() -> None:
    harness = engine(until_the_watermark, EVENT, watermark_delay=0)
    harness.feed(("b", {"n": 0}, 1000))
    harness.run()
    harness.feed(("a", {"n": 1}, 1000))
    assert outputs(harness) == []


def test_a_call_that_fails_leaves_neither_state_nor_timeout_nor_output() -> None:
    def fragile(key: Any, values: Iterator[Any], state: GroupState) -> Iterator[Any]:
        yield from count_for_a_second(key, values, state)
        if state.getOption == 2 and broken:
            raise LookupError("two")

    broken = [True]

    harness = engine(fragile, PROCESSING)
    harness.feed(("a", {"n": 1}))
    harness.run()
    harness.feed(("a", {"n": 2}))
    with pytest.raises(LookupError, match="two") as caught:
        harness.run()
    assert caught.value.holdfast_place.key == "a"  # type: ignore[attr-defined]
    assert len(harness.values) == 1
    broken.clear()
    harness.restart()
    assert outputs(harness) == [("a", "data", 2, [2])]


def test_rows_can_be_kept_as_state() -> None:
    def last(key: Any, values: Iterator[Any], state: GroupState) -> Any:
        before = state.getOption
        for row in values:
            state.update(row)
        return [(key, None if before is None else before.n)]

    harness = engine(last, NO)
    harness.feed(("a", {"n": 1}))
    assert outputs(harness) == [("a", None)]
    harness.feed(("a", {"n": 2}))
    assert outputs(harness) == [("a", 1)]


# -- durations ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "ms"),
    [
        ("1 hour", 3_600_000),
        ("INTERVAL 1 Day", 86_400_000),
        ("  2 minutes 30 seconds ", 150_000),
        ("1 week", 604_800_000),
        (".5 seconds", 500),
        ("5. seconds", 5000),
        ("1.0005 second", 1000),
        ("-1.0005 second", -1000),
        ("+ 3 seconds", 3000),
        ("- 3 seconds", -3000),
        ("1500 microseconds", 1),
        (timedelta(microseconds=-1500), -1),
        (7, 7),
    ],
)
def test_durations_are_read_as_spark_reads_them(given: Any, ms: int) -> None:
    assert duration_ms(given) == ms


@pytest.mark.parametrize(
    "given", ["", "interval", "1hour", "1.5 hours", "one hour", "1 h", "1", "hour", "1 hour,", "1 hour 2"]
)
def test_what_spark_does_not_read_as_a_duration_is_refused(given: str) -> None:
    with pytest.raises(UnknownOption, match="is no duration"):
        duration_ms(given)
