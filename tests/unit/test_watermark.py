"""The watermark: what moves it, what does not, and that it never passes records that are waiting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from harnesses import head_of, is_due
from msgspec.structs import replace

from holdfast import State, StreamingDataFrame
from holdfast.dataframe import frame_of
from holdfast.errors import BrokerAway, UnsupportedValue
from holdfast.kafka.topics import Topic
from holdfast.log.manifest import Chain, ManifestId, new_id
from holdfast.plan.pipeline import Pipeline
from holdfast.plan.program import ErrorCallback, Program, program_of, watermark_of
from holdfast.plan.record import Chunk
from holdfast.runtime.batch import Driver, Proposal
from holdfast.runtime.exchange import Outcome
from holdfast.runtime.job import Job
from holdfast.runtime.task import run_task
from holdfast.sources.base import Span
from holdfast.sources.kafka import KafkaSource
from holdfast.state.codecs import JsonCodec
from holdfast.testing import Harness, MemoryStorage, MemoryStores

GAP = 60_000
Build = Callable[[StreamingDataFrame], Any]


def gap(value: Any, key: Any, timestamp: int, headers: Any, state: State) -> list[Any]:
    state.set_timer("gap", timestamp + GAP)
    return []


def closed(key: Any, name: str, state: State) -> list[Any]:
    return [key]


def sessions(sdf: StreamingDataFrame) -> StreamingDataFrame:
    return sdf.apply(gap, stateful=True, expand=True, metadata=True, on_timer=closed)


def impatient(**options: Any) -> Harness:
    return Harness(sessions, **{"watermark_delay": 0, "idle_timeout": "10 seconds", **options})


def test_a_program_without_a_watermark_leaves_it_where_it_was() -> None:
    h = Harness(lambda sdf: sdf.apply(str), watermark_delay=0)
    h.feed(("a", 1, 500))
    h.run()
    h.run()
    rule = h._program.watermark
    for watermark in (None, rule):
        h._program = replace(h._program, watermark=watermark)
        h.restart()
        h.feed(("a", 1, 100))
        h.run()
        assert head_of(h).watermark_ms == 500


# -- a source is silent ---------------------------------------------------------------------------------------------------------


def test_what_came_while_nothing_ran_is_not_passed_over() -> None:
    h = impatient()
    h.feed(("a", 1, 0), ("b", 1, 0))
    h.run()
    h.restart()
    h.now_ms = 3_600_000
    h.feed(("b", 1, 10_000))
    h.run()
    h.feed(("a", 1, 20_000))
    h.run()
    assert head_of(h).watermark_ms == 10_000
    assert h.values == []


def test_batches_that_are_far_apart_do_not_make_a_source_idle() -> None:
    h = impatient()
    for n in range(5):
        h.now_ms = 30_000 * n
        h.feed(("a", 1, 1_000 * n))
        h.run()
    assert head_of(h).watermark_ms == 3_000, "the latest event time before the batch"


def test_a_long_batch_is_no_silence() -> None:
    def slow(value: Any) -> Any:
        h.now_ms += 30_000
        return value

    h = Harness(lambda sdf: sessions(sdf.apply(slow)), watermark_delay=0, idle_timeout="10 seconds")
    h.feed(("a", 1, 100))
    h.run()
    h.now_ms = 40_000
    assert not is_due(h)
    h.run()
    assert head_of(h).watermark_ms == 100
    h.now_ms = 40_001
    h.run()
    assert head_of(h).watermark_ms == 10_101


def test_a_silence_begins_with_the_run_at_the_earliest() -> None:
    h = impatient()
    h.feed(("a", 1, 0))
    h.run()
    h.now_ms = 3_600_000
    h.restart()
    assert not is_due(h)
    h.run()
    assert head_of(h).watermark_ms == 0
    h.now_ms += GAP + 1
    assert is_due(h)
    h.run()
    assert head_of(h).watermark_ms == GAP + 1
    assert h.values == ["a"]


def test_after_a_restart_an_idle_source_goes_on_from_where_the_watermark_stood() -> None:
    h = impatient()
    h.feed(("a", 1, 100))
    h.run()
    h.now_ms = 50_000
    h.run()
    assert head_of(h).watermark_ms == 50_100
    h.now_ms = 70_000
    h.restart()
    h.run()
    h.now_ms += 10_000
    h.run()
    assert head_of(h).watermark_ms == 50_100
    h.now_ms += 1
    h.run()
    assert head_of(h).watermark_ms == 60_101


def test_records_after_a_silence_count_again() -> None:
    h = impatient()
    h.feed(("a", 1, 100))
    h.run()
    h.now_ms = 20_000
    h.run()
    assert head_of(h).watermark_ms == 20_100
    h.feed(("a", 1, 15_000), ("a", 1, 20_200))
    h.run()
    h.now_ms = 30_000
    h.run()
    assert head_of(h).watermark_ms == 20_200, "the silence has only begun"
    h.now_ms = 30_001
    h.run()
    assert head_of(h).watermark_ms == 30_201


def test_is_due_says_what_a_batch_without_input_would_do() -> None:
    h = impatient(watermark_delay=1_000)
    h.feed(("a", 1, 1_000))
    h.run()
    for now in (0, 10_001, GAP, GAP + 1_000, GAP + 1_001, GAP + 1_002):
        h.now_ms = now
        due, fired = is_due(h), len(h.values)
        h.run()
        assert (len(h.values) > fired) == due, now
    assert h.values == ["a"]


# -- records that fail ----------------------------------------------------------------------------------------------------------


def skip(error: Exception, record: Any, logger: Any) -> bool:
    return True


def refuse(value: Any) -> Any:
    if value == "bad":
        raise ValueError("bad")
    return value


def given_time(value: Any, key: Any, timestamp: int, headers: Any) -> Any:
    return value if type(value) is int else 10**13


def test_a_record_that_is_skipped_does_not_move_the_watermark() -> None:
    h = Harness(lambda sdf: sdf.apply(refuse), watermark_delay=0, on_processing_error=skip)
    h.feed(("a", "good", 100), ("a", "bad", 10**13), ("a", "good", 200))
    h.run()
    assert head_of(h).event_ms == (200,)
    h.feed(("a", "bad", 10**13))
    h.run()
    assert head_of(h).event_ms == (200,)


def test_a_time_that_a_step_gave_to_a_record_that_is_skipped_later_does_not_count() -> None:
    def build(sdf: StreamingDataFrame) -> StreamingDataFrame:
        return sdf.set_timestamp(given_time).apply(refuse)

    h = Harness(build, watermark_delay=0, on_processing_error=skip)
    h.feed(("a", 100), ("a", "bad"), ("a", 50))
    h.run()
    h.run()
    assert head_of(h).watermark_ms == 100


def test_of_several_times_that_steps_give_to_a_record_the_latest_counts() -> None:
    def build(sdf: StreamingDataFrame) -> StreamingDataFrame:
        earlier = sdf.set_timestamp(lambda value, key, timestamp, headers: value - 50)
        return sdf.set_timestamp(given_time).concat(earlier)

    h = Harness(build, watermark_delay=0)
    h.feed(("a", 100))
    h.run()
    assert head_of(h).event_ms == (100,)


def test_a_record_that_could_not_be_made_does_not_move_the_watermark() -> None:
    driver = rows_driver(sessions, on_error=skip)
    unreadable = chunk([100, 10**13], 1, None, faults={1: ValueError("no JSON")})
    assert driver.run_batch(Proposal(rows=unreadable)).event_ms == (100,)
    assert driver.run_batch(Proposal(rows=chunk([10**13], None, faults={0: ValueError("no JSON")}))).event_ms == (100,)


def test_the_time_of_a_batch_counts_for_records_without_one_unless_all_fail() -> None:
    now = 50
    driver = rows_driver(lambda sdf: sdf.apply(refuse), lambda: now, skip)
    assert driver.run_batch(Proposal(rows=chunk(None, "bad", "good"))).event_ms == (50,)
    now = 70
    assert driver.run_batch(Proposal(rows=chunk(None, "bad"))).event_ms == (50,)


def test_a_record_that_fails_leaves_its_time_to_nobody() -> None:
    seen: list[int] = []

    def note(value: Any, key: Any, timestamp: int, headers: Any) -> None:
        seen.append(timestamp)

    def build(sdf: StreamingDataFrame) -> None:
        sdf.update(note, metadata=True).set_timestamp(given_time).apply(refuse)

    rows_driver(build, lambda: 7, skip).run_batch(Proposal(rows=chunk(None, 1, "bad", 1)))
    assert seen == [7, 7, 7]


@pytest.mark.parametrize("time", [2**63, -(2**63) - 1, 2**70])
def test_a_time_that_does_not_fit_is_an_error_of_its_record(time: int) -> None:
    def build(sdf: StreamingDataFrame) -> StreamingDataFrame:
        return sdf.set_timestamp(lambda value, key, timestamp, headers: value).group_by(lambda value: "b", name="b")

    h = Harness(build, watermark_delay=0)
    h.feed(("a", time))
    with pytest.raises(UnsupportedValue, match="64 bits") as caught:
        h.run()
    assert caught.value.holdfast_place.key == "a"  # type: ignore[attr-defined]
    h = Harness(build, watermark_delay=0, on_processing_error=skip)
    h.feed(("a", time), ("a", 2**63 - 1), ("a", 5))
    h.run()
    assert h.values == [2**63 - 1, 5]
    assert head_of(h).event_ms == (2**63 - 1,)


# -- a source that Spark reads --------------------------------------------------------------------------------------------------


class Rows:
    """A source whose rows come with the batch."""

    kind = "spark"
    name = "rows"
    names: tuple[str, ...] = ("rows",)


class RowsRunner:
    """Runs the one task of a program whose batches are chunks."""

    def __init__(self, program: Program, storage: MemoryStorage) -> None:
        self._program = program
        self._storage = storage
        self._stores = MemoryStores()

    def run(self, job: Job, rows: Chunk | None) -> list[Outcome]:
        chunks = [] if rows is None else [rows]
        done = run_task(self._program, job, 0, chunks, self._storage, self._stores)
        return [item for item in done if isinstance(item, Outcome)]


def rows_driver(
    build: Build, clock: Callable[[], int] = lambda: 0, on_error: ErrorCallback | None = None, **options: Any
) -> Driver:
    pipeline = Pipeline(Rows())
    pipeline.watermark = watermark_of(0, "10 seconds")
    build(frame_of(pipeline))
    program = program_of("rows", pipeline, JsonCodec(), 1, on_error)
    storage = MemoryStorage()
    driver = Driver(Chain(storage), program, RowsRunner(program, storage), {}, clock=clock, holder="test", **options)
    driver.start()
    return driver


def chunk(times: list[int | None] | None, *values: Any, **more: Any) -> Chunk:
    return Chunk(["a"] * len(values), list(values), times, range(len(values)), **more)


def test_where_spark_reads_a_batch_without_rows_is_silent_once_spark_has_had_time_to_look() -> None:
    now = 0
    driver = rows_driver(sessions, lambda: now, look_ms=30_000)
    driver.run_batch(Proposal(rows=chunk([100], 1)))
    now = 100_000
    assert driver.run_batch(Proposal(rows=chunk([200], 1))).watermark_ms == 100, "there are rows"
    now = 140_000
    assert driver.run_batch(Proposal()).watermark_ms == 200
    now = 140_001
    assert driver.run_batch(Proposal()).watermark_ms == 10_201
    assert not driver.is_due()
    now = 130_000 + GAP + 1
    assert driver.is_due()


# -- a topic --------------------------------------------------------------------------------------------------------------------


class Topics:
    """A cluster of two topics with two partitions each, which may be away."""

    def __init__(self) -> None:
        self.ends = {"one": [0, 0], "two": [0, 0]}
        self.is_away = False

    def both_offsets(self, topic: str, partitions: int) -> tuple[list[int], list[int]]:
        if self.is_away:
            raise BrokerAway("the cluster does not answer; mend it")
        return [0] * partitions, list(self.ends[topic])

    def first_offsets(self, topic: str, partitions: int) -> list[int]:
        return [0] * partitions

    def renew(self) -> None:
        """There is no client."""


@pytest.fixture
def cluster() -> Topics:
    return Topics()


@pytest.fixture
def topics(cluster: Topics) -> KafkaSource:
    source = KafkaSource([Topic("one"), Topic("two")], None, "group", "earliest", "fail")  # type: ignore[arg-type]
    source.connect(cluster, 2, {"one": "1", "two": "2"})  # type: ignore[arg-type]
    return source


def at(*offsets: int) -> dict[str, Any]:
    return {"topics": {"one": "1", "two": "2"}, "offsets": list(offsets)}


def test_a_topic_is_silent_when_all_of_it_was_read(cluster: Topics, topics: KafkaSource) -> None:
    start = at(0, 0, 0, 0)
    assert list(topics.silent(Span(start, start))) == [], "nobody has looked yet"
    cluster.ends["two"] = [0, 3]
    end = topics.propose(start, 10)
    assert list(topics.silent(Span(start, end))) == [0]
    topics.propose(end, 10)
    assert list(topics.silent(Span(end, end))) == [0, 1]


def test_a_topic_whose_records_did_not_fit_into_the_batch_is_not_silent(cluster: Topics, topics: KafkaSource) -> None:
    cluster.ends = {"one": [5, 5], "two": [5, 5]}
    start = at(0, 0, 0, 0)
    end = topics.propose(start, 2)
    assert end["offsets"] == [1, 1, 0, 0]
    assert list(topics.silent(Span(start, end))) == []


def test_a_topic_that_cannot_be_looked_at_is_not_silent(cluster: Topics, topics: KafkaSource) -> None:
    start = at(0, 0, 0, 0)
    topics.propose(start, 10)
    assert list(topics.silent(Span(start, start))) == [0, 1]
    cluster.is_away = True
    assert topics.propose(start, 10) == start
    assert list(topics.silent(Span(start, start))) == []
    cluster.is_away = False
    topics.propose(start, 10)
    assert list(topics.silent(Span(start, start))) == [0, 1]


def test_time_in_which_nobody_could_look_is_no_silence(cluster: Topics, topics: KafkaSource) -> None:
    pipeline = Pipeline(topics)
    pipeline.watermark = watermark_of(0, "10 seconds")
    sessions(frame_of(pipeline))
    program = program_of("kafka", pipeline, JsonCodec(), 2)
    now = 0
    driver = Driver(Chain(MemoryStorage()), program, None, {}, clock=lambda: now, holder="test")  # type: ignore[arg-type]
    first = driver.start()
    waiting = tuple(replace(commit, event_due_ms=5_000) for commit in first.partitions)
    identity = ManifestId(new_id())
    driver.adopt(
        replace(first, version=1, id=identity, parent=first.id, kind="batch", event_ms=(0, 0), partitions=waiting)
    )

    def looked() -> bool:
        assert first.position is not None
        topics.propose(first.position, 10)
        return driver.is_due()

    assert not looked()
    now = 9_000
    assert not looked()
    cluster.is_away = True
    now = 3_600_000
    assert not looked()
    cluster.is_away = False
    now = 3_610_000
    assert not looked()
    now = 3_610_001
    assert looked()
