"""Progress: one live line on a terminal, a log line now and then elsewhere."""

from __future__ import annotations

import io
import logging

import pytest
from msgspec.structs import replace

from holdfast.log.manifest import Chain, Manifest, SparkBatch
from holdfast.runtime import progress
from holdfast.runtime.background import Reports, StreamingQuery
from holdfast.runtime.progress import Progress
from holdfast.testing import Harness


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def manifest() -> Manifest:
    """Version 1: three records, two keys."""
    harness = Harness(lambda sdf: sdf.update(lambda value, state: state.set("x", value), stateful=True), partitions=2)
    harness.feed(("a", 1), ("b", 2), ("a", 3))
    harness.run()
    return Chain(harness.storage).read(1)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_terminal_has_one_line_that_is_written_over(
    manifest: Manifest, clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    stream = Terminal()
    live = Progress("orders", stream)
    for _ in range(2):
        clock[0] += 2
        live.batch(manifest, 0.25)
    text = stream.getvalue()
    assert "\n" not in text and text.count("\r") == 2
    size = sum(commit.bytes for commit in manifest.partitions)
    assert text.rpartition("\r")[2] == f"orders: 6 rows, 2 rows/s, batch 250 ms, 2 keys, {size} B, version 1"
    assert caplog.text == ""


def test_a_shorter_line_leaves_nothing_of_a_longer_one(manifest: Manifest, clock: list[float]) -> None:
    stream = Terminal()
    live = Progress("orders", stream)
    clock[0] += 0.000001
    live.batch(manifest, 1234.5)
    clock[0] += 60
    live.batch(manifest, 0.001)
    _, long, short = stream.getvalue().split("\r")
    assert len(short.rstrip()) < len(long) == len(short)


def test_the_line_ends_when_the_run_does(
    manifest: Manifest, clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    stream = Terminal()
    live = Progress("orders", stream)
    live.batch(manifest, 0.1)
    clock[0] += 3
    with caplog.at_level(logging.INFO, "holdfast"):
        live.end(manifest)
    assert stream.getvalue().endswith("\n")
    assert "orders: stopped at version 1 after 3 rows in 3.0 s" in caplog.text


def test_elsewhere_a_line_is_logged_every_few_seconds(
    manifest: Manifest, clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    stream = io.StringIO()
    quiet = Progress("orders", stream)
    with caplog.at_level(logging.INFO, "holdfast"):
        for _ in range(12):
            clock[0] += 1
            quiet.batch(manifest, 0.1)
    messages = [record.getMessage() for record in caplog.records]
    assert [message.split(",")[0] for message in messages] == ["orders: 15 rows", "orders: 30 rows"]
    assert all(", 3 rows/s, batch 100 ms, 2 keys, " in message for message in messages)
    assert stream.getvalue() == ""


@pytest.mark.parametrize(
    ("watermark_ms", "line", "report"),
    [
        (None, "", {}),
        (1_000_000_000_250, ", watermark 2001-09-09 01:46:40 UTC", {"watermark": "2001-09-09T01:46:40.250Z"}),
        (2**62, ", watermark 4,611,686,018,427,387,904 ms", {"watermark": "4,611,686,018,427,387,904 ms"}),
    ],
    ids=["none", "some", "any"],
)
def test_the_watermark_is_in_the_line_and_in_the_report(
    manifest: Manifest, clock: list[float], watermark_ms: int | None, line: str, report: dict[str, str]
) -> None:
    batch = SparkBatch("query", 0, "offsets")
    moved = replace(manifest, watermark_ms=watermark_ms, spark=batch)
    stream = Terminal()
    Progress("orders", stream).batch(moved, 0.1)
    assert stream.getvalue().endswith(f", version 1{line}")
    reports = Reports("orders", None, "operator", "source", "sink")
    reports.batch(moved, 0.1)
    query = StreamingQuery("orders", lambda: None, lambda: None, reports)
    assert query.lastProgress is not None
    assert query.lastProgress["eventTime"] == report


@pytest.mark.parametrize(
    ("count", "shown"), [(0, "0 B"), (999, "999 B"), (1500, "2 KB"), (2_000_000, "2 MB"), (3_210_000_000, "3.2 GB")]
)
def test_sizes_are_shown_for_people(manifest: Manifest, clock: list[float], count: int, shown: str) -> None:
    first, *_ = manifest.partitions
    stream = Terminal()
    Progress("orders", stream).batch(replace(manifest, partitions=(replace(first, bytes=count),)), 0.1)
    assert f" keys, {shown}, version 1" in stream.getvalue()


# -- reports of a query --------------------------------------------------------------------------------------------------


def test_a_report_has_what_a_monitoring_loop_asks_for(manifest: Manifest) -> None:
    reports = Reports("group-state", None, "mapGroupsWithState", "Spark", "console")
    for batch, began_ms in enumerate((10_000, 12_000)):
        spark = SparkBatch("q", batch, "digest")
        reports.batch(replace(manifest, spark=spark, time_ms=began_ms), 0.5, 0.1)
    first, second = reports.kept
    assert (first["name"], first["numInputRows"], first["batchId"]) == (None, 3, 0)
    assert [report["inputRowsPerSecond"] for report in (first, second)] == [0.0, 1.5]
    assert [report["processedRowsPerSecond"] for report in (first, second)] == [6.0, 6.0]
    assert second["durationMs"] == {"addBatch": 500, "triggerExecution": 500}
    (source,) = second["sources"]
    assert (source["numInputRows"], source["inputRowsPerSecond"], source["processedRowsPerSecond"]) == (3, 1.5, 6.0)
    assert Reports("group-state", "totals", "mapGroupsWithState", "Spark", "console").name == "totals"
