"""One question, three ways to ask it: sessions of events that come out of order, against a plain recomputation."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from holdfast import Application, State
from holdfast.spark import GroupStateTimeout, stateful

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MINUTE = 60_000
GAP = 30 * MINUTE
DISORDER = 20 * MINUTE
"""No event comes later than this after one with a later time."""
END = 10_000 * MINUTE
"""Long after everything: an event of every user at this time closes their last session."""

Session = tuple[str, int, int, int]
"""(user, start, end, number of events)"""


def events(seed: int) -> list[dict[str, Any]]:
    chance = random.Random(seed)
    times = sorted(chance.randrange(3_000 * MINUTE) for _ in range(600))
    arrivals = sorted((time + chance.randrange(DISORDER), time) for time in times)
    found = [{"user": f"u{chance.randrange(8)}", "time": time} for _, time in arrivals]
    return found + [{"user": f"u{n}", "time": END} for n in range(8)]


@pytest.fixture
def seeds() -> tuple[int, int]:
    """One that is always the same, and one of chance; SESSIONS_SEED repeats it."""
    seed = int(os.environ.get("SESSIONS_SEED") or random.randrange(2**32))
    print(f"SESSIONS_SEED={seed}")
    return 1, seed


def recomputed(found: Iterable[dict[str, Any]]) -> list[Session]:
    sessions: dict[str, list[list[int]]] = {}
    for event in sorted(found, key=lambda event: event["time"]):
        mine = sessions.setdefault(event["user"], [])
        if mine and event["time"] - mine[-1][1] <= GAP:
            mine[-1][1:] = [event["time"], mine[-1][2] + 1]
        else:
            mine.append([event["time"], event["time"], 1])
    return sorted((user, *session) for user, mine in sessions.items() for session in mine if session[1] < END)  # type: ignore[misc]


def with_event(sessions: list[list[int]], time: int) -> list[list[int]]:
    """Open sessions and one more event, which may join two of them."""
    joined, rest = [time, time, 1], []
    for start, end, count in sessions:
        if time - GAP <= end and start <= time + GAP:
            joined = [min(joined[0], start), max(joined[1], end), joined[2] + count]
        else:
            rest.append([start, end, count])
    return sorted([*rest, joined])


def closed(sessions: list[list[int]], watermark: int) -> tuple[list[list[int]], list[list[int]]]:
    """Those to which nothing can be added any more, and the others."""
    return [s for s in sessions if s[1] + GAP < watermark], [s for s in sessions if s[1] + GAP >= watermark]


# -- (a) State and a timer ------------------------------------------------------------------------------------------------


def note(event: dict[str, Any], state: State) -> list[Any]:
    sessions = with_event(state.get("open", []), event["time"])
    state.set("open", sessions)
    for session in sessions:
        state.set_timer(str(session[0]), session[1] + GAP)
    return []


def close(user: str, name: str, state: State) -> list[Any]:
    sessions = state.get("open", [])
    over = [session for session in sessions if str(session[0]) == name]
    state.set("open", [session for session in sessions if session not in over])
    return [[user, *session] for session in over]


def test_state_and_timers(spark: SparkSession, tmp_path: Path, seeds: tuple[int, int]) -> None:
    for seed in seeds:
        given, found = events(seed), []
        app = Application(
            f"app{seed}", state_dir=tmp_path, spark=spark, watermark_delay="20 minutes", max_batch_rows=60, partitions=2
        )
        source = app.from_iterable(given, key="user", timestamp="time")
        app.dataframe(source).apply(note, stateful=True, expand=True, on_timer=close).inspect(found.append)
        app.run()
        assert sorted(map(tuple, found)) == recomputed(given), f"seed {seed}"


# -- (b) stateful_flat_map ------------------------------------------------------------------------------------------------


def fold(user: str, event: dict[str, Any], state: tuple[int, list[list[int]]]) -> tuple[list[Any], Any]:
    """The user's own latest time stands for the watermark."""
    latest = max(state[0], event["time"])
    over, rest = closed(with_event(state[1], event["time"]), latest - DISORDER)
    return [[user, *session] for session in over], (latest, rest)


def test_stateful_flat_map(spark: SparkSession, tmp_path: Path, seeds: tuple[int, int]) -> None:
    for seed in seeds:
        given, found = events(seed), []
        app = Application(f"app{seed}", state_dir=tmp_path, spark=spark, max_batch_rows=60, partitions=2)
        frame = app.dataframe(app.from_iterable(given)).key_by(lambda event: event["user"])
        frame.stateful_flat_map("sessions", fold, default=(0, [])).inspect(found.append)
        app.run()
        assert sorted(map(tuple, found)) == recomputed(given), f"seed {seed}"


# -- (c) GroupState -------------------------------------------------------------------------------------------------------


def detect(user: str, rows: Iterator[Any], state: Any) -> Iterator[dict[str, Any]]:
    sessions = state.get if state.exists else []
    for row in rows:
        sessions = with_event(sessions, round(row.at.timestamp() * 1000))
    over, rest = closed(sessions, state.getCurrentWatermarkMs())
    if rest:
        state.update(rest)
        state.setTimeoutTimestamp(max(min(end for _, end, _ in rest) + GAP, state.getCurrentWatermarkMs()))
    elif state.exists:
        state.remove()
    return iter([{"user": user, "start": start, "end": end, "events": count} for start, end, count in over])


def test_group_state(spark: SparkSession, tmp_path: Path, seeds: tuple[int, int]) -> None:
    for seed in seeds:
        given = events(seed)
        assert sessions_of(spark, given, tmp_path / str(seed)) == recomputed(given), f"seed {seed}"


def sessions_of(spark: SparkSession, given: list[dict[str, Any]], directory: Path) -> list[Session]:
    (directory / "input").mkdir(parents=True)
    for number in range(0, len(given), 150):
        lines = [json.dumps(event) for event in given[number : number + 150]]
        file = directory / "input" / f"{number:05d}.json"
        file.write_text("\n".join(lines))
        os.utime(file, (number, number))  # Spark takes the oldest first
    df = spark.readStream.schema("user string, time bigint").option("maxFilesPerTrigger", 1)
    rows = df.json(str(directory / "input")).selectExpr("user", "timestamp_millis(time) AS at")
    found: list[Session] = []
    query = (
        stateful(rows)
        .withWatermark("at", "20 minutes")
        .groupByKey(lambda row: row.user)
        .flatMapGroupsWithState(
            detect,
            outputMode="append",
            timeoutConf=GroupStateTimeout.EventTimeTimeout,
            schema="user string, start bigint, end bigint, events int",
        )
        .writeStream.option("checkpointLocation", str(directory / "checkpoint"))
        .foreachBatch(lambda frame, batch: found.extend(tuple(row) for row in frame.collect()))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return sorted(found)
