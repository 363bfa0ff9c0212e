"""Progress for people: one live line on a terminal, a log line every few seconds elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

from holdfast import words
from holdfast.log.manifest import Manifest

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

EVERY_S = 5.0
logger = logging.getLogger("holdfast")


class Progress:
    """Says how a run is doing."""

    def __init__(self, app: str, stream: TextIO | None = None) -> None:
        self._app = app
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._began = self._said = time.monotonic()
        self._rows = self._rows_said = 0
        self._line = ""

    def started(self, query: StreamingQuery, is_settled: Callable[[], bool]) -> None:
        """Spark runs it now. `is_settled` waits for the batch in flight and says whether nothing is due after it."""

    def batch(self, manifest: Manifest, seconds: float, commit_seconds: float = 0.0) -> None:
        """A batch was committed and delivered."""
        self._rows += sum(commit.rows_in for commit in manifest.partitions)
        now = time.monotonic()
        since = now - self._said
        if not self._live and since < EVERY_S:
            return
        rate = (self._rows - self._rows_said) / max(since, 1e-9)
        line = (
            f"{self._app}: {self._rows:,} rows, {rate:,.0f} rows/s, batch {seconds * 1000:,.0f} ms, "
            f"{sum(commit.keys for commit in manifest.partitions):,} keys, "
            f"{_size(sum(commit.bytes for commit in manifest.partitions))}, version {manifest.version}"
        )
        if manifest.watermark_ms is not None:
            line += f", watermark {words.moment(manifest.watermark_ms)}"
        self._said, self._rows_said = now, self._rows
        if self._live:
            self._stream.write("\r" + line.ljust(len(self._line)))
            self._stream.flush()
            self._line = line
        else:
            logger.info(line)

    def end(self, manifest: Manifest) -> None:
        """The run is over."""
        if self._line:
            self._stream.write("\n")
        seconds = time.monotonic() - self._began
        logger.info(
            "%s: stopped at version %d after %s rows in %.1f s", self._app, manifest.version, f"{self._rows:,}", seconds
        )


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
