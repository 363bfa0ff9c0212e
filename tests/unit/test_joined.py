"""Several sources in one application: read in the same batches, committed together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.dataframe import StreamingDataFrame, frame_of
from holdfast.errors import FixTheRecord, PlanMismatch
from holdfast.log.manifest import Chain
from holdfast.plan.pipeline import Pipeline
from holdfast.plan.program import program_of, watermark_of
from holdfast.runtime.batch import Driver, Proposal
from holdfast.runtime.view import StateView
from holdfast.sources.base import Span
from holdfast.sources.iterable import IterableSource
from holdfast.sources.joined import JoinedSource
from holdfast.state.codecs import JsonCodec
from holdfast.stores.memory import MemoryStore
from holdfast.testing import LocalRunner, MemoryStorage, MemoryStores

Build = Callable[..., StreamingDataFrame]


class Scene:
    """An application that reads several iterables, without Spark."""

    def __init__(self, build: Build, *records: Any, partitions: int = 2, delay: int | None = None) -> None:
        self.sources = [
            IterableSource(given, "key", "at", f"source-{number}") for number, given in enumerate(records, 1)
        ]
        self._build = build
        self._partitions = partitions
        self._watermark = None if delay is None else watermark_of(delay, 1_000)
        self.storage = MemoryStorage()
        self._stores = MemoryStores()
        self.now = 0
        self.restart()

    def restart(self, *, lose_local: bool = False) -> None:
        if lose_local:
            self._stores = MemoryStores()
        pipeline = Pipeline(self.sources[0])
        for source in self.sources[1:]:
            pipeline.add_source(source)
        pipeline.watermark = self._watermark
        self._build(*(frame_of(pipeline, source) for source in self.sources))
        self.source: Any = pipeline.source
        program = program_of("joined", pipeline, JsonCodec(), self._partitions)
        runner = LocalRunner(program, self.storage, self._stores)
        self.driver = Driver(Chain(self.storage), program, runner, {}, clock=lambda: self.now, holder="test")
        self.driver.start()

    def run(self, rows: int = 1_000) -> int:
        """One batch, as a run makes it; how many records it had."""
        position = self.driver.head.position
        assert position is not None
        end = self.source.propose(position, rows)
        manifest = self.driver.run_batch(Proposal(end=end))
        self.source.is_over(manifest.position, end)
        return sum(commit.rows_in for commit in manifest.partitions)


def record(key: str, at: int = 0) -> dict[str, Any]:
    return {"key": key, "at": at}


def noted(seen: list[Any]) -> Callable[[Any, Any], Any]:
    def note(value: Any, state: Any) -> Any:
        count = state.get("count", 0) + 1
        state.set("count", count)
        seen.append((value["key"], count))
        return value

    return note


def test_frames_of_two_sources_share_the_state_of_what_comes_after() -> None:
    seen: list[Any] = []
    scene = Scene(
        lambda one, other: one.concat(other).apply(noted(seen), stateful=True),
        [record("a"), record("b")],
        [record("a"), record("a")],
    )
    assert scene.run() == 4
    assert sorted(seen) == [("a", 1), ("a", 2), ("a", 3), ("b", 1)]


def test_a_frame_has_only_the_records_of_its_source() -> None:
    first: list[Any] = []
    second: list[Any] = []
    scene = Scene(
        lambda one, other: (
            one.apply(noted(first), stateful=True, store="one"),
            other.apply(noted(second), stateful=True, store="other"),
        ),
        [record("a")],
        [record("a"), record("b")],
    )
    scene.run()
    assert (sorted(first), sorted(second)) == ([("a", 1)], [("a", 1), ("b", 1)])


def test_a_step_before_the_join_sees_one_source_and_a_step_after_it_both() -> None:
    before: list[Any] = []
    after: list[Any] = []
    scene = Scene(
        lambda one, other: (
            one.apply(noted(before), stateful=True).concat(other).apply(noted(after), stateful=True, store="both")
        ),
        [record("a")],
        [record("a")],
    )
    scene.run()
    assert (before, sorted(after)) == ([("a", 1)], [("a", 1), ("a", 2)])


def test_a_batch_is_shared_out_and_the_rest_goes_to_who_has_more() -> None:
    scene = Scene(lambda one, other: one.concat(other).apply(dict), [record("a")] * 3, [record("b")] * 20)
    ends = []
    for _ in range(3):
        scene.run(8)
        ends.append([part["taken"] for part in scene.driver.head.position["sources"]])  # type: ignore[index]
    assert ends == [[3, 5], [3, 13], [3, 20]]
    assert scene.source.is_over(scene.driver.head.position)


def test_a_function_that_has_ended_leaves_its_share_to_the_others() -> None:
    scene = Scene(
        lambda one, other: one.concat(other).apply(dict),
        lambda: iter([record("a")] * 2),
        lambda: iter([record("b")] * 9),
    )
    batches = 0
    while True:
        start = scene.driver.head.position
        assert start is not None
        end = scene.source.propose(start, 4)
        scene.driver.run_batch(Proposal(end=end))
        batches += 1
        if scene.source.is_over(scene.driver.head.position, end):
            break
    assert scene.driver.head.position == {"sources": [{"taken": 2}, {"taken": 9}]}
    assert batches <= 5


def test_one_record_at_a_time_reaches_every_source() -> None:
    scene = Scene(
        lambda one, other: one.concat(other).apply(dict), lambda: iter([record("a")]), lambda: iter([record("b")] * 2)
    )
    assert sum(scene.run(1) for _ in range(6)) == 3


FUNCTIONS = (lambda: iter([record("a")] * 4), lambda: iter([record("b")] * 4))


def test_asking_how_far_a_batch_may_go_changes_nothing() -> None:
    scene = Scene(lambda one, other: one.concat(other).apply(dict), *FUNCTIONS)
    start = scene.driver.head.position
    first, second = scene.source.propose(start, 8), scene.source.propose(start, 8)
    assert first == second == {"sources": [{"taken": 4}, {"taken": 4}]}
    assert not scene.source.is_over(start)
    assert scene.run(8) == 8


def test_a_batch_that_failed_ends_no_source() -> None:
    broken = [True]

    def fail_once(value: Any) -> Any:
        if broken.pop() if broken else False:
            raise FixTheRecord("no")
        return value

    scene = Scene(lambda one, other: one.concat(other).apply(fail_once), *FUNCTIONS)
    with pytest.raises(FixTheRecord):
        scene.run(4)
    assert [scene.run(4) for _ in range(3)] == [4, 4, 0]
    assert scene.source.is_over(scene.driver.head.position, {"sources": [{"taken": 5}, {"taken": 5}]})


def test_a_new_run_looks_again_for_records_of_a_function_that_had_ended() -> None:
    source = JoinedSource(*(IterableSource(given, "key", None) for given in FUNCTIONS))
    position = {"sources": [{"taken": 4}, {"taken": 4}]}
    assert source.is_over(position, source.propose(position, 2))
    assert source.propose(position, 2) == position
    assert not source.is_over(position), "asked when a run begins"
    assert source.propose(position, 2) == {"sources": [{"taken": 5}, {"taken": 5}]}


def test_the_place_of_a_failing_record_names_its_source() -> None:
    def fail(value: Any) -> Any:
        raise FixTheRecord("no")

    for by_key in (False, True):
        scene = Scene(
            lambda one, other, by_key=by_key: (
                one.concat(other).group_by("key") if by_key else one.concat(other)
            ).apply(fail),
            [],
            [record("a")],
            partitions=1,
        )
        with pytest.raises(FixTheRecord) as caught:
            scene.run()
        assert caught.value.holdfast_place.source == "source-2"  # type: ignore[attr-defined]


def test_the_watermark_is_that_of_the_source_which_is_furthest_behind() -> None:
    scene = Scene(
        lambda one, other: one.concat(other).apply(dict), [record("a", 900)], [record("b", 300)] * 2, delay=100
    )
    scene.run(1)  # of the first source
    scene.run(1)
    assert (scene.driver.head.event_ms, scene.driver.head.watermark_ms) == ((900, 300), 0)
    scene.run(1)
    assert scene.driver.head.watermark_ms == 200


def test_a_source_without_a_record_is_waited_for_until_it_is_idle() -> None:
    scene = Scene(lambda one, other: one.concat(other).apply(dict), [record("a", 900)], [], delay=100)
    scene.run()
    scene.now = 500
    scene.run()
    assert scene.driver.head.watermark_ms == 0
    scene.now = 1_200
    scene.run()
    assert scene.driver.head.watermark_ms == 900 + 1_200 - 100


def test_of_several_sources_those_with_records_in_the_batch_are_not_idle() -> None:
    busy = [record("a", 900 + n) for n in range(3)]
    scene = Scene(lambda one, other: one.concat(other).apply(dict), busy, [record("b", 300)], delay=0)
    scene.run(2)
    scene.now = 5_000
    scene.run(1)
    assert scene.driver.head.watermark_ms == 900, "the other one is idle, and goes on with the wall clock"


def timed(value: Any, key: Any, timestamp: int, headers: Any) -> int:
    return timestamp + 1_000


@pytest.mark.parametrize("is_later", [False, True])
def test_a_step_that_gives_times_to_one_source_leaves_the_others_theirs(is_later: bool) -> None:
    def build(one: StreamingDataFrame, other: StreamingDataFrame) -> None:
        one.apply(dict)
        (other.group_by("key", name="later") if is_later else other).set_timestamp(timed).apply(dict)

    scene = Scene(build, [record("a", 900)], [record("b", 300)], delay=0)
    scene.run()
    scene.run()
    assert (scene.driver.head.event_ms, scene.driver.head.watermark_ms) == ((900, 1_300), 900)


def test_a_checkpoint_of_one_source_is_not_one_of_two() -> None:
    scene = Scene(lambda one, other: one.concat(other).apply(dict), [record("a")], [record("b")])
    scene.run()
    scene.sources.pop()
    scene._build = lambda one: one.apply(dict)
    with pytest.raises(PlanMismatch, match="iterable\\+iterable"):
        scene.restart()


@given(
    st.lists(st.lists(st.sampled_from("abc"), max_size=12), min_size=2, max_size=4),
    st.lists(st.integers(1, 7), min_size=1, max_size=12),
    st.sets(st.integers(0, 12)),
)
def test_whatever_the_batches_and_restarts_every_record_of_every_source_counts_once(
    keys: list[list[str]], sizes: list[int], restarts: set[int]
) -> None:
    def build(*frames: StreamingDataFrame) -> StreamingDataFrame:
        return frames[0].union(*frames[1:]).apply(noted([]), stateful=True)

    scene = Scene(build, *([record(key) for key in given] for given in keys))
    for number, size in enumerate([*sizes, 100]):
        if number in restarts:
            scene.restart(lose_local=number % 2 == 0)
        scene.run(size)
    counted = Counter(key for given in keys for key in given)
    assert _counts(scene) == counted


def _counts(scene: Scene) -> Counter[str]:
    view = StateView(Chain(scene.storage), "default", JsonCodec(), new_store=MemoryStore)
    return Counter({key: document["count"] for key, document in view.items()})


def test_a_span_counts_the_records_of_all() -> None:
    members: Sequence[Any] = [IterableSource([1, 2], None, None), IterableSource([3], None, None)]
    joined = JoinedSource(*members)
    start = joined.initial()
    assert joined.count(Span(start, joined.propose(start, 10))) == 3
