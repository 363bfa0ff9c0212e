"""The harness: crash a pipeline at every point of the protocol, restart it, and nothing is lost or doubled."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from holdfast import KafkaMessage, State, StreamingDataFrame, Topic, failpoints
from holdfast.testing import DRIVER_POINTS, TASK_POINTS, Crash, Harness, run

RECORDS = [(f"user {n % 7}", n) for n in range(40)]


def total(value: int, state: State) -> dict[str, int]:
    state.set("total", state.get("total", 0) + value)
    return {"value": value, "total": state.get("total")}


def build(sdf: StreamingDataFrame) -> StreamingDataFrame:
    totals = sdf.apply(total, stateful=True)
    totals.to_table("totals")
    return totals


def folded(records: list[tuple[str, int]]) -> tuple[dict[str, dict[str, int]], list[tuple[int, int]]]:
    """State and output, by a plain loop."""
    totals: dict[str, int] = defaultdict(int)
    output = []
    for user, value in records:
        totals[user] += value
        output.append((value, totals[user]))
    return {user: {"total": n} for user, n in totals.items()}, sorted(output)


def assert_exact(harness: Harness) -> None:
    state, output = folded(RECORDS)
    assert dict(harness.state().items()) == state
    for delivered in (harness.values, harness.rows["table:totals"]):
        assert sorted((row["value"], row["total"]) for row in delivered) == output


@pytest.mark.parametrize("lose_local", [False, True], ids=["same disk", "empty disk"])
@pytest.mark.parametrize("point", DRIVER_POINTS + TASK_POINTS)
def test_a_crash_at_any_point_changes_nothing_of_the_result(point: str, lose_local: bool) -> None:
    harness = Harness(build, partitions=3)
    for start in range(0, len(RECORDS), 10):
        harness.feed(*RECORDS[start : start + 10])
        harness.crash_at(point)
        with pytest.raises(Crash, match=point):
            harness.run()
        harness.restart(lose_local=lose_local)
        harness.run()
    assert_exact(harness)


@pytest.mark.parametrize("point", [*DRIVER_POINTS[: DRIVER_POINTS.index("commit.done")], *TASK_POINTS])
def test_a_batch_that_crashes_again_and_again_before_its_commit_is_computed_until_it_is_done(point: str) -> None:
    harness = Harness(build, partitions=2)
    harness.feed(*RECORDS)
    for _ in range(3):
        harness.crash_at(point)
        with pytest.raises(Crash, match=point):
            harness.run()
        harness.restart()
    harness.run()
    assert_exact(harness)


def test_every_failpoint_is_reached_in_its_order() -> None:
    reached: list[str] = []
    harness = Harness(build)
    harness.feed(*RECORDS)
    failpoints.arm(lambda name, version: reached.append(name))
    harness.run()
    order = [*DRIVER_POINTS[:2], *TASK_POINTS, *DRIVER_POINTS[2:]]
    assert reached == order


def test_a_committed_batch_is_never_computed_again() -> None:
    calls: list[int] = []
    harness = Harness(lambda sdf: sdf.apply(lambda n: calls.append(n) or n))
    harness.feed(1, 2)
    harness.crash_at("commit.done")
    with pytest.raises(Crash):
        harness.run()
    assert harness.values == []
    harness.restart()
    assert (harness.values, calls) == ([1, 2], [1, 2])
    harness.run()
    assert (harness.values, calls) == ([1, 2], [1, 2])


def test_a_crash_that_never_came_leaves_the_next_pipeline_alone() -> None:
    harness = Harness(lambda sdf: sdf.apply(str))
    harness.crash_at("commit.done")
    harness.restart()
    harness.feed(1)
    harness.run()
    assert harness.values == ["1"]


def test_an_empty_batch_is_a_version_too() -> None:
    harness = Harness(build)
    harness.run()
    harness.run()
    assert len(harness.storage.names("commits/")) == 3
    assert harness.values == []


def test_records_are_values_pairs_or_triples() -> None:
    seen: list[Any] = []
    run(lambda sdf: sdf.update(lambda *all: seen.append(all), metadata=True), [1, ("a", 2), ("b", 3, 30), ["c", 4]])
    assert seen == [(1, None, 0, None), (2, "a", 0, None), (3, "b", 30, None), (["c", 4], None, 0, None)]


def test_the_records_of_a_key_keep_their_order_whatever_the_partitions() -> None:
    for partitions in (1, 2, 5):
        harness = run(lambda sdf: sdf.apply(lambda v, k, t, h: [k, v], metadata=True), RECORDS, partitions=partitions)
        for user in {user for user, _ in RECORDS}:
            got = [value for key, value in harness.values if key == user]
            assert got == [value for key, value in RECORDS if key == user]


def test_time_is_the_clock_of_the_harness_and_never_goes_back() -> None:
    times: list[int] = []
    harness = Harness(lambda sdf: sdf.update(lambda _, state: None, stateful=True))
    for now in (100, 50, 200):
        harness.now_ms = now
        harness.run()
        times.append(harness._driver.head.time_ms)  # type: ignore[union-attr]
    assert times == [100, 100, 200]


def test_messages_to_a_topic_are_collected_as_bytes() -> None:
    topic = Topic("totals", key_serializer="string")
    harness = Harness(lambda sdf: sdf.to_topic(topic).to_topic(topic, key=lambda value: value["other"]))
    harness.feed(("ann", {"n": 1, "other": "bob"}, 5))
    harness.run()
    assert harness.values == [{"n": 1, "other": "bob"}]
    value = b'{"n":1,"other":"bob"}'
    assert harness.messages == {
        "topic:totals": [KafkaMessage(b"ann", value, None, 5)],
        "topic:totals#2": [KafkaMessage(b"bob", value, None, 5)],
    }
