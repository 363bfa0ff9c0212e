"""A run in a thread of its own, and what can be asked about it: Spark's `StreamingQuery`, filled by our own engine.

Spark's progress knows nothing of our state, so the reports are made here, from the manifest of every batch.
"""

# ruff: noqa: N802  (the names are Spark's)

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from holdfast import words
from holdfast.errors import UnknownOption
from holdfast.log.manifest import Manifest
from holdfast.runtime.progress import Progress

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery as SparkQuery

KEPT = 100
"""Reports that are remembered."""
POLL_S = 0.02

logger = logging.getLogger("holdfast")


class Reports(Progress):
    """Makes a report of every batch of a query, which may have a name."""

    def __init__(self, app: str, name: str | None, operator: str, source: str, sink: str) -> None:
        super().__init__(name or app)
        self.name = name
        self.query: SparkQuery | None = None
        self.id: str | None = None
        self.run_id: str | None = None
        self.kept: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self.has_started = threading.Event()
        self.is_settled: Callable[[], bool] = lambda: True
        """Whether nothing is due; waits for the batch in flight."""
        self._last_ms: int | None = None
        """When the batch before began."""
        self._operator = operator
        self._source = source
        self._sink = sink

    def started(self, query: SparkQuery, is_settled: Callable[[], bool]) -> None:
        self.query = query
        self.is_settled = is_settled
        self.id, self.run_id = str(query.id), str(query.runId)
        self.has_started.set()

    def batch(self, manifest: Manifest, seconds: float, commit_seconds: float = 0.0) -> None:
        super().batch(manifest, seconds)
        self.kept.append(self._report(manifest, seconds, commit_seconds))

    def _report(self, manifest: Manifest, seconds: float, commit_seconds: float) -> dict[str, Any]:
        assert manifest.spark is not None
        commits = manifest.partitions
        rows = sum(commit.rows_in for commit in commits)
        took_ms = round(seconds * 1000)
        since_ms = None if self._last_ms is None else max(1, manifest.time_ms - self._last_ms)
        self._last_ms = manifest.time_ms
        speed = {
            "numInputRows": rows,
            "inputRowsPerSecond": 0.0 if since_ms is None else rows * 1000 / since_ms,
            "processedRowsPerSecond": rows / max(seconds, 1e-9),
        }
        return {
            "id": self.id,
            "runId": self.run_id,
            "name": self.name,
            "timestamp": _moment(manifest.time_ms),
            "batchId": manifest.spark.batch,
            "version": manifest.version,
            **speed,
            "durationMs": {"addBatch": took_ms, "triggerExecution": took_ms},
            "eventTime": {} if manifest.watermark_ms is None else {"watermark": _moment(manifest.watermark_ms)},
            "stateOperators": [
                {
                    "operatorName": self._operator,
                    "numRowsTotal": sum(commit.keys for commit in commits),
                    "numRowsUpdated": sum(commit.keys_updated for commit in commits),
                    "numRowsRemoved": sum(commit.keys_removed for commit in commits),
                    "memoryUsedBytes": sum(commit.bytes for commit in commits),
                    "numRowsDroppedByWatermark": sum(commit.late for commit in commits),
                    "numShufflePartitions": len(commits),
                    "commitTimeMs": round(commit_seconds * 1000),
                    "customMetrics": {
                        "deltaBytes": sum(commit.delta.length for commit in commits if commit.delta is not None),
                        "rowsSkipped": sum(commit.skipped for commit in commits),
                    },
                }
            ],
            "sources": [{"description": self._source, **speed}],
            "sink": {"description": self._sink, "numOutputRows": sum(commit.rows_out for commit in commits)},
        }


class StreamingQuery:
    """A query that runs in the background, with the names that Spark's has.

    Guaranteed: `exception()` and `awaitTermination()` give the error that ended it as itself, not as Spark's text. Not
    guaranteed: anything about the process's end: a query that nobody waits for ends with it, and goes on when it is
    started again. Every name is also there in snake_case.
    """

    def __init__(
        self, name: str | None, run: Callable[[], None], ask_to_stop: Callable[[], None], reports: Reports
    ) -> None:
        self._name = name
        self._run = run
        self._ask_to_stop = ask_to_stop
        self._reports = reports
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name=f"holdfast-{name or 'query'}", daemon=True)

    def begin(self) -> StreamingQuery:
        """Start it and wait until Spark runs it; raise what prevents that."""
        self._thread.start()
        self._reports.has_started.wait()
        if self._reports.query is None and self._error is not None:
            raise self._error
        return self

    def _work(self) -> None:
        try:
            self._run()
        except BaseException as error:
            self._error = error
            logger.error("the query %s ended with %s", self._name or "without a name", type(error).__name__)
        finally:
            self._reports.has_started.set()

    @property
    def id(self) -> str | None:
        """The query's id: the same each time that it goes on from its checkpoint."""
        return self._reports.id

    @property
    def runId(self) -> str | None:
        """The id of this run of it."""
        return self._reports.run_id

    @property
    def name(self) -> str | None:
        """What `queryName` said."""
        return self._name

    @property
    def isActive(self) -> bool:
        """Whether it runs."""
        return self._thread.is_alive()

    @property
    def status(self) -> dict[str, Any]:
        """What it is doing: `message`, `isDataAvailable`, `isTriggerActive`."""
        if self._reports.query is None or not self.isActive:
            return {"message": "Stopped", "isDataAvailable": False, "isTriggerActive": False}
        return dict(self._reports.query.status)

    @property
    def lastProgress(self) -> dict[str, Any] | None:
        """The report of the last batch, a plain dict; None before the first."""
        reports = self._reports.kept
        return reports[-1] if reports else None

    @property
    def recentProgress(self) -> list[dict[str, Any]]:
        """The reports of the last batches, at most 100, the oldest first."""
        return list(self._reports.kept)

    def exception(self) -> BaseException | None:
        """What ended the query, if it was an error."""
        return self._error

    def awaitTermination(self, timeout: float | None = None) -> bool | None:
        """Wait until the query has ended and raise what ended it, if it was an error.

        With `timeout`, in seconds, it says whether the query has ended by then.
        """
        if timeout is not None and (isinstance(timeout, bool) or not timeout > 0):
            raise UnknownOption(f"awaitTermination({timeout!r}): it is a positive number of seconds")
        self._thread.join(timeout)
        if self._error is not None and not self.isActive:
            raise self._error
        return None if timeout is None else not self.isActive

    def processAllAvailable(self) -> None:
        """Wait until everything that is there now is processed and delivered, with the timeouts that it made due.

        For tests: with a source or timeouts that never rest it may not return.
        """
        query = self._reports.query
        if query is not None and self.isActive:
            try:
                query.processAllAvailable()
            except Exception:  # Spark's text of what ended the query; we have the error itself
                self._thread.join()
            while self.isActive and not self._reports.is_settled():
                time.sleep(POLL_S)
        if self._error is not None:
            self._thread.join()
            raise self._error

    def stop(self) -> None:
        """Let the batch in flight finish, and end the query."""
        self._ask_to_stop()
        self._thread.join()

    run_id = runId
    is_active = isActive
    last_progress = lastProgress
    recent_progress = recentProgress
    await_termination = awaitTermination
    process_all_available = processAllAvailable


def _moment(time_ms: int) -> str:
    try:
        return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    except (ValueError, OverflowError):  # an event time can be anything
        return words.moment(time_ms)
