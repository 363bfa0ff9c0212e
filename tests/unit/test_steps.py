"""apply, update, filter, inspect and print, as Quix Streams documents them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from holdfast import Application, State, StreamingDataFrame
from holdfast.dataframe import frame_of
from holdfast.errors import FixTheRecord
from holdfast.log.manifest import Chain
from holdfast.plan.pipeline import Pipeline
from holdfast.plan.program import program_of
from holdfast.runtime.batch import Driver, Proposal
from holdfast.sources.iterable import IterableSource
from holdfast.state.codecs import JsonCodec
from holdfast.testing import Crash, Harness, LocalRunner, MemoryStorage, MemoryStores, run

# -- apply -------------------------------------------------------------------------------------------------------


def test_apply_replaces_the_value_by_what_the_function_returns() -> None:
    assert run(lambda sdf: sdf.apply(lambda n: n + 1), [1, 2]).values == [2, 3]


def test_apply_passes_none_on() -> None:
    assert run(lambda sdf: sdf.apply(lambda n: None).apply(lambda n: [n]), [1, 2]).values == [[None], [None]]


def test_apply_with_expand_passes_every_item_on() -> None:
    assert run(lambda sdf: sdf.apply(range, expand=True).apply(lambda n: n * 2), [2, 0, 3]).values == [0, 2, 0, 2, 4]


@pytest.mark.parametrize("items", [[1, 2], (1, 2), {1: None, 2: None}.keys(), iter([1, 2])])
def test_expand_takes_any_iterable_of_values(items: Any) -> None:
    assert run(lambda sdf: sdf.apply(lambda _: items, expand=True), [0]).values == [1, 2]


@pytest.mark.parametrize("result", [None, 5, "text", b"bytes", {"a": 1}])
def test_expand_refuses_what_is_no_collection_of_values(result: Any) -> None:
    with pytest.raises(FixTheRecord, match="must return a list or another iterable"):
        run(lambda sdf: sdf.apply(lambda _: result, expand=True), [0])


def test_expand_flattens_one_level_only() -> None:
    assert run(lambda sdf: sdf.apply(lambda _: [[1], [2, 3]], expand=True), [0]).values == [[1], [2, 3]]


# -- update and filter -------------------------------------------------------------------------------------------


def test_update_keeps_the_changed_value_and_drops_what_the_function_returns() -> None:
    def mark(value: dict[str, Any]) -> str:
        value["seen"] = True
        return "dropped"

    assert run(lambda sdf: sdf.update(mark), [{"id": 1}]).values == [{"id": 1, "seen": True}]


def test_filter_passes_on_what_the_function_calls_true() -> None:
    assert run(lambda sdf: sdf.filter(lambda n: n % 2), [0, 1, 2, 3]).values == [1, 3]


@pytest.mark.parametrize(("verdict", "passes"), [(1, True), ("x", True), ([], False), (None, False), (0, False)])
def test_filter_asks_for_truth_and_not_for_true(verdict: Any, passes: bool) -> None:
    assert run(lambda sdf: sdf.filter(lambda _: verdict), [7]).values == [7] * passes


def test_a_stateful_filter_decides_by_the_state_of_the_key() -> None:
    def first_two(value: Any, state: State) -> bool:
        state.set("n", state.get("n", 0) + 1)
        return bool(state.get("n") <= 2)

    harness = run(lambda sdf: sdf.filter(first_two, stateful=True), [("a", 1), ("a", 2), ("b", 3), ("a", 4)])
    assert harness.values == [1, 2, 3]


def test_a_stateful_update_writes_what_a_later_step_reads() -> None:
    harness = run(
        lambda sdf: sdf.update(lambda value, state: state.set("last", value), stateful=True).apply(
            lambda value, state: state.get("last") * 10, stateful=True
        ),
        [("a", 1), ("b", 2)],
    )
    assert harness.values == [10, 20]


# -- metadata ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["apply", "update", "filter"])
def test_metadata_is_value_key_timestamp_headers(verb: str) -> None:
    seen: list[Any] = []
    run(lambda sdf: getattr(sdf, verb)(lambda *all: seen.append(all), metadata=True), [("ann", 5, 1234)])
    assert seen == [(5, "ann", 1234, None)]


@pytest.mark.parametrize("verb", ["apply", "update", "filter"])
def test_the_state_comes_after_the_metadata(verb: str) -> None:
    seen: list[Any] = []

    def look(value: Any, key: Any, timestamp: Any, headers: Any, state: Any) -> None:
        seen.append((value, key, timestamp, headers, type(state)))

    run(lambda sdf: getattr(sdf, verb)(look, metadata=True, stateful=True), [("ann", 5, 1234)])
    assert seen == [(5, "ann", 1234, None, State)]


def test_the_key_and_time_of_a_record_stay_with_what_is_made_of_it() -> None:
    harness = run(
        lambda sdf: (
            sdf.apply(lambda n: [n, n + 1], expand=True)
            .filter(lambda n: n != 2)
            .apply(lambda *all: list(all[:3]), metadata=True)
        ),
        [("ann", 1, 10), ("bob", 5, 20)],
    )
    assert harness.values == [[1, "ann", 10], [5, "bob", 20], [6, "bob", 20]]


# -- branches ----------------------------------------------------------------------------------------------------


def test_branches_do_not_disturb_each_other_also_with_nested_values_changed_in_place() -> None:
    def build(sdf: StreamingDataFrame) -> StreamingDataFrame:
        sdf.update(lambda value: value["tags"].append("left")).inspect(print)
        sdf.update(lambda value: value["deep"]["list"].clear()).inspect(print)
        return sdf.update(lambda value: value["tags"].append("last"))

    harness = run(build, [{"tags": [], "deep": {"list": [1]}}])
    assert harness.rows["inspect"] == [{"tags": ["left"], "deep": {"list": [1]}}]
    assert harness.rows["inspect#2"] == [{"tags": [], "deep": {"list": []}}]
    assert harness.values == [{"tags": ["last"], "deep": {"list": [1]}}]


def test_a_flat_dict_is_not_shared_between_branches_either() -> None:
    def build(sdf: StreamingDataFrame) -> StreamingDataFrame:
        sdf.update(lambda value: value.clear())
        return sdf

    assert run(build, [{"a": 1}]).values == [{"a": 1}]


def test_what_a_sink_was_given_does_not_change_with_the_value_afterwards() -> None:
    def build(sdf: StreamingDataFrame) -> StreamingDataFrame:
        return sdf.to_table("before").update(lambda value: value.update(a=2))

    harness = run(build, [{"a": 1}])
    assert (harness.rows["table:before"], harness.values) == ([{"a": 1}], [{"a": 2}])


def test_one_object_that_is_passed_on_twice_is_two_rows() -> None:
    def bump(row: dict[str, int]) -> None:
        row["n"] = row.get("n", 0) + 1

    def build(sdf: StreamingDataFrame) -> None:
        sdf.apply(lambda row: [row, row], expand=True).update(bump).to_table("rows")

    assert run(build, [{}]).rows["table:rows"] == [{"n": 1}, {"n": 2}]


def test_values_may_be_of_a_class_that_pickle_cannot_name() -> None:
    @dataclass
    class Order:
        amount: int

    def build(sdf: StreamingDataFrame) -> StreamingDataFrame:
        sdf.update(lambda order: setattr(order, "amount", 0))
        return sdf.apply(lambda order: order.amount)

    assert run(build, [Order(3)]).values == [3]


def test_branches_are_taken_in_the_order_in_which_they_were_declared() -> None:
    seen: list[str] = []

    def build(sdf: StreamingDataFrame) -> None:
        sdf.update(lambda _: seen.append("first")).update(lambda _: seen.append("below first"))
        sdf.update(lambda _: seen.append("second"))

    run(build, [1])
    assert seen == ["first", "below first", "second"]


def test_branches_share_the_state_of_a_store() -> None:
    def build(sdf: StreamingDataFrame) -> StreamingDataFrame:
        sdf.update(lambda value, state: state.set("x", value), stateful=True)
        return sdf.apply(lambda value, state: state.get("x"), stateful=True)

    assert run(build, [("a", 1), ("a", 2)]).values == [1, 2]


# -- the source's records ----------------------------------------------------------------------------------------


def driven(
    source: IterableSource, build: Callable[[StreamingDataFrame], Any], storage: MemoryStorage | None = None
) -> Callable[[], Any]:
    """The pipeline with its real targets, started; what is returned runs everything that is there as one batch."""
    pipeline = Pipeline(source)
    build(frame_of(pipeline))
    storage = MemoryStorage() if storage is None else storage
    program = program_of("app", pipeline, JsonCodec(), 1)
    targets = {sink: target(None) for sink, target in pipeline.targets.items()}
    runner = LocalRunner(program, storage, MemoryStores())
    driver = Driver(Chain(storage), program, runner, targets, clock=lambda: 0, holder="test")
    driver.start()
    return lambda: driver.run_batch(Proposal(end=source.propose(driver.head.position or {}, 1000)))


def test_the_records_of_a_sequence_are_never_changed_by_the_steps(app: Application) -> None:
    records = [{"id": 1, "tags": ["a"]}, {"id": 2, "tags": []}]
    source = app.from_iterable(records, key="id")
    driven(source, lambda sdf: sdf.update(lambda r: r["tags"].append("x")).update(lambda r: r.update(id=0)))()
    assert records == [{"id": 1, "tags": ["a"]}, {"id": 2, "tags": []}]


def test_a_factory_is_read_on_from_where_the_last_batch_ended(app: Application) -> None:
    seen: list[int] = []
    source = app.from_iterable(lambda: (n for n in range(2500)), key=lambda n: n % 3)
    go = driven(source, lambda sdf: sdf.update(seen.append))
    for _ in range(4):
        go()
    assert seen == list(range(2500))


# -- inspect and print -------------------------------------------------------------------------------------------


def test_inspect_sees_every_value_once_and_passes_it_on(app: Application) -> None:
    seen: list[Any] = []
    driven(app.from_iterable([1, 2]), lambda sdf: sdf.inspect(seen.append).apply(lambda n: -n).inspect(seen.append))()
    assert sorted(seen) == [-2, -1, 1, 2]


def test_print_shows_every_value_on_a_line(app: Application, capsys: pytest.CaptureFixture[str]) -> None:
    driven(app.from_iterable([{"a": 1}, "text", None]), lambda sdf: sdf.print())()
    assert capsys.readouterr().out == "{'a': 1}\ntext\nNone\n"


def test_print_with_metadata_shows_key_and_time(app: Application, capsys: pytest.CaptureFixture[str]) -> None:
    driven(app.from_iterable([{"k": "ann", "t": 5}], key="k", timestamp="t"), lambda sdf: sdf.print(metadata=True))()
    assert capsys.readouterr().out == "{'value': {'k': 'ann', 't': 5}, 'key': 'ann', 'timestamp': 5}\n"


def test_nothing_is_shown_of_a_batch_that_fails(app: Application, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[int] = []
    with pytest.raises(ZeroDivisionError):
        driven(app.from_iterable([1, 0]), lambda sdf: sdf.print().inspect(seen.append).apply(lambda n: 1 // n))()
    assert (seen, capsys.readouterr().out) == ([], "")


@pytest.mark.parametrize(("point", "shown"), [("commit.begin", ""), ("commit.done", "1\n")])
def test_what_is_shown_was_committed_and_is_shown_after_a_crash(
    app: Application, capsys: pytest.CaptureFixture[str], point: str, shown: str
) -> None:
    storage = MemoryStorage()
    go = driven(app.from_iterable([1]), lambda sdf: sdf.print(), storage)
    Harness(lambda sdf: sdf.apply(str)).crash_at(point)
    with pytest.raises(Crash):
        go()
    assert capsys.readouterr().out == ""
    driven(app.from_iterable([1]), lambda sdf: sdf.print(), storage)
    assert capsys.readouterr().out == shown
