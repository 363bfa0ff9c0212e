"""The examples of the GroupState front door: each gives what a plain recomputation gives."""

from __future__ import annotations

import runpy
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def rows(
    request: pytest.FixtureRequest, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[Any, ...]]:
    """What the example that the test is named for gives."""
    monkeypatch.syspath_prepend(EXAMPLES)
    name = request.node.name.removeprefix("test_")
    program = runpy.run_path(str(EXAMPLES / f"spark_{name}.py"))
    return sorted((tuple(row) for row in program["main"](spark, tmp_path)), key=repr)


def at(hour: int, minute: int, second: int = 0) -> datetime:
    """A moment of the examples' day, as Spark gives it back: in local time."""
    return datetime(2024, 5, 1, hour, minute, second, tzinfo=UTC).astimezone().replace(tzinfo=None)


def test_running_total(rows: list[tuple[Any, ...]]) -> None:
    assert rows == [("ann", 17.5), ("ann", 7.5), ("bob", 7.5), ("cy", 1.0)]


def test_sessions(rows: list[tuple[Any, ...]]) -> None:
    assert rows == [("ann", at(9, 0), at(9, 45), 3), ("bob", at(9, 10), at(9, 10), 1)]


def test_sequences(rows: list[tuple[Any, ...]]) -> None:
    assert rows == [("ann", "conversion", at(9, 1))]


def test_active_users(rows: list[tuple[Any, ...]]) -> None:
    assert rows == [
        (user, status, seen)
        for user, seen in (("ann", at(9, 2)), ("bob", at(9, 1)))
        for status in ("active", "inactive")
    ]


def test_anomalies(rows: list[tuple[Any, ...]]) -> None:
    ((user, amount, score),) = rows
    before = [10.0, 11.0, 9.0, 10.5, 9.5, 10.0, 10.2]
    mean = sum(before) / len(before)
    deviation = (sum((x - mean) ** 2 for x in before) / len(before)) ** 0.5
    assert (user, amount, score) == ("ann", 250.0, pytest.approx((250.0 - mean) / deviation))


def test_running_stats(rows: list[tuple[Any, ...]]) -> None:
    assert [(user, stats.asDict()) for user, stats in rows] == [
        ("ann", {"count": 2, "sum": 7.5, "min": 2.5, "max": 5.0, "avg": 3.75}),
        ("ann", {"count": 3, "sum": 18.0, "min": 2.5, "max": 10.5, "avg": 6.0}),
        ("bob", {"count": 1, "sum": 7.5, "min": 7.5, "max": 7.5, "avg": 7.5}),
    ]


def test_state_expiry(rows: list[tuple[Any, ...]]) -> None:
    assert rows == [(user, status) for user in ("ann", "bob") for status in ("active", "expired")]


def test_bounded_history(rows: list[tuple[Any, ...]]) -> None:
    assert rows == [("ann", 1000), ("ann", 400), ("ann", 800)]


def test_an_example_runs_by_itself() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "spark_running_total.py")],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "Row(_1='ann', _2=17.5)",
        "Row(_1='ann', _2=7.5)",
        "Row(_1='bob', _2=7.5)",
        "Row(_1='cy', _2=1.0)",
    ]


def test_every_example_is_tested() -> None:
    names = {path.stem.removeprefix("spark_") for path in EXAMPLES.glob("spark_*.py")}
    assert names == {
        name.removeprefix("test_") for name in globals() if name.startswith("test_") and "example" not in name
    }
