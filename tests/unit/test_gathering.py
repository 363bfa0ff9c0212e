"""GroupState in the engine: which calls come when, and what is left of those that fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from holdfast.plan.steps import Gather
from holdfast.state.group import GroupFunction, GroupState, GroupStateTimeout
from holdfast.state.python_codec import PythonCodec
from holdfast.testing import Harness

NO, PROCESSING, EVENT = GroupStateTimeout


def engine(
    function: Callable[[Any, Iterator[Any], GroupState], Any], timeout: GroupStateTimeout, **options: Any
) -> Harness:
    """A harness that runs one group function, on values `{"n": ...}`."""
    group = GroupFunction(function, flat=True, timeout=timeout)
    step = Gather(group, "default", "flatMapGroupsWithState", PythonCodec(), timeout is EVENT)
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
