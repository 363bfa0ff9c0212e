"""Timers, ends of values and the watermark: when they happen, to whom, and that they happen once."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from harnesses import head_of, is_due
from hypothesis import given
from hypothesis import strategies as st

from holdfast import Application, State, StreamingDataFrame
from holdfast.errors import FixTheRecord, InvalidPipeline, UnknownOption, UnsupportedKey, UnsupportedValue
from holdfast.plan.program import Watermark
from holdfast.runtime import processing
from holdfast.state import timers
from holdfast.state.timers import TimerIndex
from holdfast.stores.memory import MemoryStore
from holdfast.testing import Harness


def set_by_value(value: dict[str, Any], key: Any, timestamp: int, headers: Any, state: State) -> list[Any]:
    """What the record says: {"at": ms or None, "clock": …, "name": …}; None deletes."""
    name, clock = value.get("name", "t"), value.get("clock", "event")
    if value["at"] is None:
        state.delete_timer(name)
    else:
        state.set_timer(name, value["at"], clock=clock)
    return []


def tell(key: Any, name: str, state: State) -> list[Any]:
    return [[key, name]]


def timing(sdf: StreamingDataFrame) -> StreamingDataFrame:
    return sdf.apply(set_by_value, stateful=True, expand=True, metadata=True, on_timer=tell)


def harness(**options: Any) -> Harness:
    return Harness(timing, **{"watermark_delay": 0, **options})


# -- event time ---------------------------------------------------------------------------------------------------------------


def test_a_timer_fires_in_the_first_batch_whose_watermark_is_later() -> None:
    h = harness()
    h.feed(("a", {"at": 100}, 50))
    h.run()
    h.feed(("b", {"at": None}, 100))
    h.run()
    h.run()
    assert head_of(h).watermark_ms == 100
    assert h.values == [], "not at the threshold"
    h.feed(("b", {"at": None}, 101))
    h.run()
    assert h.values == [], "the watermark moves between batches"
    h.run()
    assert h.values == [["a", "t"]]
    h.run()
    assert h.values == [["a", "t"]], "once"


def test_the_delay_holds_the_watermark_back() -> None:
    h = harness(watermark_delay=timedelta(milliseconds=30))
    h.feed(("a", {"at": 100}, 125))
    h.run()
    h.run()
    assert head_of(h).watermark_ms == 95
    h.feed(("b", {"at": None}, 131))
    h.run()
    h.run()
    assert head_of(h).watermark_ms == 101
    assert h.values == [["a", "t"]]


def test_the_watermark_never_goes_back_and_survives_a_restart() -> None:
    h = harness()
    h.feed(("a", {"at": None}, 500))
    h.run()
    h.feed(("a", {"at": None}, 20))
    h.run()
    h.restart(lose_local=True)
    h.run()
    assert head_of(h).watermark_ms == 500
    assert head_of(h).event_ms == (500,)


def test_without_input_the_watermark_waits_unless_told_otherwise() -> None:
    h = harness()
    h.feed(("a", {"at": 100}, 60))
    h.run()
    h.now_ms = 1_000_000
    h.run()
    assert head_of(h).watermark_ms == 60
    idle = harness(idle_timeout=timedelta(seconds=10))
    idle.feed(("a", {"at": 5_000}, 60))
    idle.run()
    idle.now_ms = 10_000
    idle.run()
    assert head_of(idle).watermark_ms == 60
    idle.now_ms = 10_001
    idle.run()
    assert head_of(idle).watermark_ms == 10_061
    assert idle.values == [["a", "t"]]


def test_a_step_may_give_the_event_time() -> None:
    def build(sdf: StreamingDataFrame) -> StreamingDataFrame:
        return timing(sdf.set_timestamp(lambda value, key, timestamp, headers: value["time"]))

    h = Harness(build, watermark_delay=0)
    h.feed(("a", {"at": 100, "time": 10}, 5_000))
    h.run()
    h.run()
    assert head_of(h).watermark_ms == 10, "the source's time does not count then"
    h.feed(("b", {"at": None, "time": datetime.fromtimestamp(0.2, UTC)}, 0))
    h.run()
    h.run()
    assert h.values == [["a", "t"]]


def test_a_branch_beside_it_keeps_its_event_time() -> None:
    def show(value: Any, key: Any, timestamp: int, headers: Any) -> int:
        return timestamp

    def build(sdf: StreamingDataFrame) -> StreamingDataFrame:
        changed = sdf.set_timestamp(lambda value, key, timestamp, headers: timestamp + 1000)
        return changed.apply(show, metadata=True).concat(sdf.apply(show, metadata=True))

    h = Harness(build)
    h.feed(("a", None, 7))
    h.run()
    assert h.values == [1007, 7]


def test_what_is_no_time_is_an_error_of_the_record() -> None:
    h = Harness(lambda sdf: sdf.set_timestamp(lambda value, key, timestamp, headers: "soon"))
    h.feed(("a", 1))
    with pytest.raises(FixTheRecord, match="int of ms or a datetime"):
        h.run()


# -- processing time ----------------------------------------------------------------------------------------------------------


def test_a_timer_by_the_wall_clock_fires_without_input() -> None:
    h = harness()
    h.feed(("a", {"at": 100, "clock": "processing"}))
    h.run()
    h.now_ms = 100
    h.run()
    assert h.values == []
    h.now_ms = 101
    h.run()
    assert h.values == [["a", "t"]]


def test_a_timer_of_the_past_fires_in_the_next_batch() -> None:
    h = harness()
    h.now_ms = 1_000
    h.feed(("a", {"at": 5, "clock": "processing"}))
    h.run()
    assert h.values == []
    assert head_of(h).partitions[0].due_ms == 5
    h.run()
    assert h.values == [["a", "t"]]


def test_a_timer_that_sets_itself_again_fires_once_per_batch() -> None:
    def again(key: Any, name: str, state: State) -> list[Any]:
        state.set_timer(name, 0, clock="processing")
        return [name]

    h = Harness(
        lambda sdf: sdf.apply(set_by_value, stateful=True, expand=True, metadata=True, on_timer=again),
    )
    h.now_ms = 10
    h.feed(("a", {"at": 1, "clock": "processing"}))
    for _ in range(4):
        h.run()
        assert is_due(h), "a batch without input is run for it"
    assert h.values == ["t"] * 3


@pytest.mark.parametrize("spills", [False, True])
def test_a_timer_that_is_set_again_for_the_time_it_had_is_still_due(
    spills: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processing, "SPILL_AFTER", 0 if spills else 1000)

    def retry(key: Any, name: str, state: State) -> list[Any]:
        tries = state.get("tries", 0) + 1
        state.set("tries", tries)
        if tries < 3:
            state.set_timer(name, 1, clock="processing")
        return [tries]

    h = Harness(lambda sdf: sdf.apply(set_by_value, stateful=True, expand=True, metadata=True, on_timer=retry))
    h.feed(("a", {"at": 1, "clock": "processing"}), ("b", {"at": 500, "clock": "processing"}))
    h.run()
    h.now_ms = 10
    while is_due(h):
        h.run()
    assert h.values == [1, 2, 3]
    assert head_of(h).partitions[0].due_ms == 500


@pytest.mark.parametrize("is_staged", [False, True])
def test_a_timer_that_fires_without_records_is_as_quiet_as_what_its_batch_reads(
    is_staged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a state is rebuilt, what is out already is not sent again, also by partitions that have nothing to read."""

    def build(sdf: StreamingDataFrame) -> StreamingDataFrame:
        return timing(sdf.group_by("to", partitions=3) if is_staged else sdf)

    h = Harness(build, partitions=2)
    quiet, asked = [True], []

    def is_quiet(span: Any, lanes: slice) -> bool:
        asked.append(list(range(4))[lanes])
        return quiet[0]

    monkeypatch.setattr(h._program.source, "is_ordered", False)
    monkeypatch.setattr(h._program.source, "is_quiet", is_quiet, raising=False)
    for now, is_last in ((10, False), (20, True)):
        h.feed(("a", {"at": now + 1, "clock": "processing", "to": "a"}))
        h.run()
        asked.clear()
        quiet[0] = not is_last
        h.now_ms = now + 5
        h.run()
        assert (h.values == [["a", "t"]]) is is_last
    assert asked == ([[0, 2], [1, 3]] + [[0, 1, 2, 3]] * 3 if is_staged else [[0, 2], [1, 3]])


# -- both ---------------------------------------------------------------------------------------------------------------------

CLOCKS = pytest.mark.parametrize("clock", ["event", "processing"])


def at(h: Harness, time: int) -> None:
    """Both clocks."""
    h.now_ms = time
    h.feed(("clock", {"at": None}, time))
    h.run()


@CLOCKS
def test_a_timer_can_be_moved_and_dropped(clock: str) -> None:
    h = harness()
    h.feed(*((key, {"at": 100, "clock": clock}) for key in "abc"))
    at(h, 10)
    h.feed(("a", {"at": 300, "clock": clock}), ("b", {"at": None}))
    at(h, 200)
    at(h, 201)
    assert h.values == [["c", "t"]]
    at(h, 301)
    at(h, 302)
    assert h.values == [["c", "t"], ["a", "t"]]


@CLOCKS
def test_a_key_may_have_several_timers(clock: str) -> None:
    h = harness()
    h.feed(*(("a", {"at": 30 - n, "clock": clock, "name": f"n{n}"}) for n in range(3)))
    at(h, 1)
    at(h, 30)
    at(h, 31)
    at(h, 32)
    assert h.values == [["a", "n2"], ["a", "n1"], ["a", "n0"]], "in the order of their times"


def test_many_timers_of_a_key_cost_their_number_and_not_its_square() -> None:
    def seconds(count: int) -> float:
        h = Harness(timing)
        h.feed(*(("a", {"at": n, "clock": "processing", "name": f"n{n}"}) for n in range(count)))
        began = time.process_time()
        h.run()
        h.now_ms = count
        h.run()
        assert h.values == [["a", f"n{n}"] for n in range(count)]
        return time.process_time() - began

    seconds(100)
    assert seconds(12_000) < 40 * seconds(1_000)


def test_a_record_that_fails_leaves_the_timers_of_its_key_as_they_were() -> None:
    def change_and_fail(value: dict[str, Any], state: State) -> list[Any]:
        if value["fails"]:
            state.delete_timer("a")
            state.set_timer("b", 900, clock="processing")
            state.set_timer("c", 1, clock="processing")
            raise ValueError("no")
        for at, name in enumerate("ab"):
            state.set_timer(name, at, clock="processing")
        return []

    h = Harness(
        lambda sdf: sdf.apply(change_and_fail, stateful=True, expand=True, on_timer=tell),
        on_processing_error=lambda error, record, logger: True,
    )
    h.feed(("k", {"fails": True}), ("k", {"fails": False}), ("k", {"fails": True}), ("other", {"fails": True}))
    h.run()
    h.feed(("k", {"fails": True}))
    h.now_ms = 100
    h.run()
    assert h.values == [["k", "a"], ["k", "b"]]
    h.now_ms = 1_000
    h.run()
    assert h.values == [["k", "a"], ["k", "b"]]
    assert head_of(h).partitions[0].keys == 0


def test_a_timer_may_drop_or_move_the_one_after_it() -> None:
    def change_others(key: Any, name: str, state: State) -> list[Any]:
        state.delete_timer("b")
        state.set_timer("c", 500, clock="processing")
        return [name]

    h = Harness(lambda sdf: sdf.apply(set_by_value, stateful=True, expand=True, metadata=True, on_timer=change_others))
    h.feed(*(("k", {"at": n, "clock": "processing", "name": name}) for n, name in enumerate("abc")))
    h.run()
    h.now_ms = 100
    h.run()
    assert h.values == ["a"]
    h.now_ms = 501
    h.run()
    assert h.values == ["a", "c"]


@CLOCKS
def test_data_comes_before_timers(clock: str) -> None:
    h = harness()
    h.feed(("a", {"at": 100, "clock": clock}))
    at(h, 10)
    if clock == "event":
        at(h, 150)  # only the batch after it has this watermark
    h.feed(("a", {"at": 900, "clock": clock}))
    at(h, 151)
    at(h, 152)
    assert h.values == [], "the record has moved the timer that would have fired in its batch"


@CLOCKS
def test_timers_fire_on_every_partition_and_in_every_stage(clock: str) -> None:
    def build(sdf: StreamingDataFrame) -> StreamingDataFrame:
        return timing(sdf.group_by("to", partitions=3))

    h = Harness(build, partitions=2, watermark_delay=0)
    h.feed(*((str(n), {"at": 100, "clock": clock, "to": f"k{n}"}) for n in range(9)))
    h.run()
    h.now_ms = 200
    h.feed(("clock", {"at": None, "to": "clock"}, 200))
    h.run()
    h.run()
    assert sorted(h.values) == [[f"k{n}", "t"] for n in range(9)]


@CLOCKS
@given(
    st.lists(st.tuples(st.sampled_from("abcde"), st.none() | st.integers(0, 60)), max_size=30),
    st.lists(st.integers(0, 8), min_size=1, max_size=12),
)
def test_timers_are_what_a_plain_list_of_them_would_be(
    clock: str, sets: list[tuple[str, int | None]], steps: list[int]
) -> None:
    """Against a model: one timer per key, moved, dropped and fired at random moments, with lost disks between."""
    h = harness(partitions=2)
    pending: dict[str, int] = {}
    expected: list[str] = []
    now = 1
    waiting = list(sets)
    for step in steps:
        now += step
        h.now_ms = now
        threshold = now if clock == "processing" else (head_of(h).event_ms or (0,))[0] if h.storage.objects else 0
        for key, due in waiting[:4]:
            h.feed((key, {"at": due, "clock": clock}, now))
            if due is None:
                pending.pop(key, None)
            else:
                pending[key] = due
        changed = {key for key, due in waiting[:4] if due is not None}
        del waiting[:4]
        h.feed(("clock", {"at": None}, now))
        h.run()
        for key, due in sorted(pending.items()):
            # one that was set in this very batch may fire now or in the next one
            if due < threshold and (key not in changed or h.values.count([key, "t"]) > expected.count(key)):
                expected.append(key)
                del pending[key]
        assert sorted(key for key, _ in h.values) == sorted(expected)
        if step == 0:
            h.restart(lose_local=True)


def test_what_a_failing_timer_changed_is_undone_and_it_may_be_skipped() -> None:
    def fail(key: Any, name: str, state: State) -> list[Any]:
        state.set("touched", True)
        raise ValueError(key)

    def build(sdf: StreamingDataFrame) -> StreamingDataFrame:
        return sdf.apply(set_by_value, stateful=True, expand=True, metadata=True, on_timer=fail)

    h = Harness(build)
    h.feed(("a", {"at": 1, "clock": "processing"}))
    h.run()
    h.now_ms = 5
    with pytest.raises(ValueError, match="a") as caught:
        h.run()
    place = caught.value.holdfast_place  # type: ignore[attr-defined]
    assert (place.key, place.step) == ("a", "on_timer(fail)")
    skipping = Harness(build, on_processing_error=lambda error, record, logger: True)
    skipping.feed(("a", {"at": 1, "clock": "processing"}))
    skipping.run()
    skipping.now_ms = 5
    skipping.run()
    skipping.run()
    assert head_of(skipping).partitions[0].due_ms is None, "a timer that was skipped does not come again"
    assert dict(skipping.state().items()) == {}


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda state: state.set_timer(5, 1), UnsupportedKey, "str"),
        (lambda state: state.set_timer("x", 1, clock="sun"), UnsupportedValue, "event"),
        (lambda state: state.set_timer("x", "soon"), FixTheRecord, "int of ms"),
        (lambda state: state.set_timer("x", 2**63), UnsupportedValue, "range"),
        (lambda state: state.set("x", 1, ttl=timedelta(1), clock="sun"), UnsupportedValue, "event"),
        (lambda state: state.set_timer("x", 2**70), UnsupportedValue, "64 bits"),
    ],
)
def test_what_is_no_timer_is_refused(call: Callable[[State], None], error: type[Exception], message: str) -> None:
    h = Harness(
        lambda sdf: sdf.update(lambda value, state: call(state), stateful=True).apply(
            lambda value, state: value, stateful=True, on_timer=tell
        ),
        watermark_delay=0,
    )
    h.feed(("a", 1))
    with pytest.raises(error, match=message):
        h.run()


def test_a_timer_needs_somebody_to_call_and_a_clock() -> None:
    h = Harness(lambda sdf: sdf.update(lambda value, state: state.set_timer("x", 1), stateful=True), watermark_delay=0)
    h.feed(("a", 1))
    with pytest.raises(InvalidPipeline, match="on_timer="):
        h.run()
    h = Harness(timing)
    h.feed(("a", {"at": 1}))
    with pytest.raises(InvalidPipeline, match=r"a timer by event time needs a watermark: .* watermark_delay="):
        h.run()


@pytest.mark.parametrize(("setter", "value"), [(State.set, 1), (State.set_bytes, b"1")])
def test_a_value_that_ends_by_event_time_needs_a_watermark(setter: Callable[..., None], value: Any) -> None:
    def remember(value: Any, state: State) -> None:
        setter(state, "x", value, ttl=timedelta(seconds=1), clock="event")

    h = Harness(lambda sdf: sdf.update(remember, stateful=True))
    h.feed(("a", value))
    with pytest.raises(InvalidPipeline, match=r"ttl= by event time needs a watermark: .* watermark_delay="):
        h.run()


def test_the_options_of_the_watermark_are_checked(tmp_path: Any) -> None:
    app = Application("app", state_dir=tmp_path, idle_timeout="1 minute")
    app.dataframe(app.from_iterable([1])).print()
    with pytest.raises(InvalidPipeline, match="watermark_delay"):
        app.run()
    with pytest.raises(InvalidPipeline, match="watermark_delay"):
        harness(watermark_delay=None, idle_timeout="1 minute")
    for wrong in ({"watermark_delay": -1}, {"idle_timeout": -1}):
        with pytest.raises(InvalidPipeline, match="negative"):
            Application("app", state_dir=tmp_path, **wrong)  # type: ignore[arg-type]
    with pytest.raises(UnknownOption, match="duration"):
        Application("app", state_dir=tmp_path, idle_timeout="soon")


def test_an_idle_timeout_goes_with_the_delay_of_a_frame(tmp_path: Any) -> None:
    app = Application("app", state_dir=tmp_path, idle_timeout="1 minute")
    app.dataframe(app.from_iterable([1]), watermark_delay="2 seconds").print()
    assert app._pipeline is not None
    assert app._pipeline.watermark == Watermark(2_000, 60_000)


def test_a_handler_may_yield_what_goes_on() -> None:
    def several(key: Any, name: str, state: State) -> Any:
        for n in range(3):
            state.set("n", n)
            yield [key, name, n]

    h = Harness(lambda sdf: sdf.apply(set_by_value, stateful=True, expand=True, metadata=True, on_timer=several))
    h.feed(("a", {"at": 1, "clock": "processing"}))
    h.run()
    h.now_ms = 5
    h.run()
    assert h.values == [["a", "t", n] for n in range(3)]
    assert h.state().get("a") == {"n": 2}


def test_two_steps_cannot_share_the_timers_of_a_store() -> None:
    def other(key: Any, name: str, state: State) -> None:
        """Another one."""

    with pytest.raises(InvalidPipeline, match="store of its own"):
        Harness(lambda sdf: timing(timing(sdf).filter(lambda value, state: True, stateful=True)).apply(
            lambda value, state: 1, stateful=True, on_timer=other
        ))  # fmt: skip


# -- values that end ------------------------------------------------------------------------------------------------------------


def with_an_end(value: dict[str, Any], state: State) -> Any:
    if "ttl" in value:
        state.set("x", value["ttl"], ttl=timedelta(milliseconds=value["ttl"]), clock=value["clock"])
    return state.get("x")


def test_a_value_ends_by_event_time_for_every_later_record() -> None:
    h = Harness(lambda sdf: sdf.apply(with_an_end, stateful=True), watermark_delay=1000)
    h.feed(("a", {"ttl": 50, "clock": "event"}, 100), ("a", {}, 149), ("a", {}, 150), ("a", {}, 120))
    h.run()
    assert h.values == [50, 50, None, 50]


def test_an_end_that_does_not_fit_is_an_error_of_its_record() -> None:
    h = Harness(lambda sdf: sdf.apply(with_an_end, stateful=True), watermark_delay=0)
    h.feed(("a", {"ttl": 50, "clock": "event"}, 2**63 - 10))
    with pytest.raises(UnsupportedValue, match="ttl= is out of range"):
        h.run()


@CLOCKS
def test_a_value_that_has_ended_is_removed_by_itself(clock: str) -> None:
    h = Harness(lambda sdf: sdf.apply(with_an_end, stateful=True), watermark_delay=0)
    h.feed(("a", {"ttl": 50, "clock": clock}, 1), ("b", {}, 1))
    h.run()
    assert head_of(h).partitions[0].keys == 1
    h.now_ms = 200
    h.feed(("c", {}, 200))
    h.run()
    h.run()
    assert h.state().get("a") is None
    assert head_of(h).partitions[0].keys == 0
    assert (head_of(h).partitions[0].due_ms, head_of(h).partitions[0].event_due_ms) == (None, None)


def test_the_index_is_empty_when_nothing_is_due_any_more() -> None:
    h = harness()
    h.feed(*((f"k{n}", {"at": n, "clock": "processing"}) for n in range(50)))
    h.run()
    h.now_ms = 100
    h.run()
    assert len(h.values) == 50
    h.run()
    (store,) = h._stores.stores.values()
    assert list(store.scan(b"t", b"u")) == []


# -- the index ------------------------------------------------------------------------------------------------------------------


def test_what_is_not_due_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    h = harness()
    h.feed(*((f"k{n}", {"at": 10_000 + n, "clock": "processing"}) for n in range(3_000)))
    h.run()
    looked: list[int] = []
    scan = MemoryStore.scan

    def counted(self: MemoryStore, start: bytes, end: bytes | None) -> Any:
        for entry in scan(self, start, end):
            looked.append(1)
            yield entry

    monkeypatch.setattr(MemoryStore, "scan", counted)
    h.now_ms = 50
    h.run()
    assert h.values == []
    assert len(looked) <= 4
    assert head_of(h).partitions[0].due_ms == 10_000


def test_times_are_in_order_also_before_1970() -> None:
    index = TimerIndex(MemoryStore(), "s")
    for due in (5, -5, 0, -(2**40), 2**40):
        index.move(b"k%d" % due, None, [due, None])
    keys = [key for key, _ in index.changes()]
    assert [index._place("processing", key).due for key in keys] == [-(2**40), -5, 0, 5, 2**40]


def test_an_early_answer_is_good_enough_among_many_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timers, "LOOK", 10)
    h = harness()
    h.feed(*((f"k{n}", {"at": 100 + n, "clock": "processing"}) for n in range(50)))
    h.run()
    h.feed(*((f"k{n}", {"at": 1000 + n, "clock": "processing"}) for n in range(50)))
    h.run()
    due = head_of(h).partitions[0].due_ms
    assert due is not None and due <= 1000
    h.now_ms = 999
    h.run()
    assert h.values == []
    h.now_ms = 5_000
    h.run()
    assert len(h.values) == 50


def test_timers_survive_a_batch_that_needs_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processing, "SPILL_AFTER", 3)
    h = harness()
    h.feed(*((f"k{n}", {"at": 100 + n, "clock": "processing"}) for n in range(20)))
    h.run()
    h.feed(*((f"k{n}", {"at": None}) for n in range(10)))
    h.run()
    h.now_ms = 1_000
    h.run()
    assert sorted(h.values) == sorted([f"k{n}", "t"] for n in range(10, 20))
