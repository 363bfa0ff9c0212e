"""GroupState over a plain cell: each corner that Spark's documentation and tests pin down is a test here."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pyspark.sql import Row as SparkRow

from holdfast.errors import InvalidTimeout, NoState, NoWatermark, UnsupportedValue
from holdfast.state.cell import Clock
from holdfast.state.group import GroupFunction, GroupState, GroupStateTimeout
from holdfast.state.python_codec import PythonCodec
from holdfast.state.row import Row, row_of

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
    cell = PlainCell()
    state_of(cell, EVENT).set_timeout_timestamp(1, additional_duration="1 second")
    assert cell.timer == ("event", 1_001)


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


def test_rows_are_made_as_they_are_asked_for() -> None:
    made = []

    def to_row(value: dict[str, Any]) -> Row:
        made.append(value["n"])
        return row_of(value)

    group = GroupFunction(lambda key, values, state: [next(values)], flat=True, timeout=NO, to_row=to_row)
    group("k", iter([{"n": 1}, {"n": 2}]), PlainCell(), False)
    assert made == [1]
