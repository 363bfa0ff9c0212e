"""One run: a streaming query whose every micro-batch goes through the driver's protocol.

Spark paces the batches and, for its own sources, plans them. For a ranged source it runs a stream of its own that always
has a next batch, and its checkpoint is a scratch directory of the run: positions are in the manifest chain, so there is
nothing in it to keep, to repair or to fight over. For a Spark source the checkpoint is kept, because only Spark knows
the position there: in a directory of ours or, if there is none, by files that every commit names.

Stopping: the batch in flight is finished and Spark's own commit awaited, then the query is stopped; a batch that must
not begin raises, because returning would log it as done.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from py4j.protocol import Py4JError
from pyspark.errors import StreamingQueryException

from holdfast.errors import Damaged, Fenced, SparkLost
from holdfast.log.files import FileRef
from holdfast.log.manifest import Manifest, Position, SparkBatch, new_id
from holdfast.log.storage import disk_error
from holdfast.plan.program import Program
from holdfast.runtime.batch import Driver, NotNowError, Proposal
from holdfast.runtime.locks import FileLock
from holdfast.runtime.progress import Progress
from holdfast.runtime.spark_files import SparkFiles
from holdfast.sources.base import Span
from holdfast.sources.spark import SparkSource

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

POLL_S = 0.004
IDLE_POLL_S = 0.05
"""How often to look for more: at first, and in the end."""

logger = logging.getLogger("holdfast")


class Limits(msgspec.Struct, frozen=True):
    """When a run ends by itself."""

    rows: int
    """Per batch, of a ranged source."""
    interval: float = 0.0
    """Seconds between two batches; of a ranged source, unless there are `rows` records."""
    count: int | None = None
    """Records to process in all."""
    timeout: float | None = None
    """Seconds without a record."""
    available_now: bool = False
    """What is there now, and no more."""


class Query:
    """A run in progress."""

    def __init__(
        self,
        spark: SparkSession,
        driver: Driver,
        program: Program,
        directory: Path,
        limits: Limits,
        progress: Progress,
        files: SparkFiles | None = None,
    ) -> None:
        self._spark = spark
        self._driver = driver
        self._program = program
        self._directory = directory
        self._limits = limits
        self._progress = progress
        self._stop = threading.Event()
        self._idle = threading.Condition()
        self._busy = False
        self._query_id: str | None = None
        self._last_batch = -1
        self._last_rows = time.monotonic()
        self._began = float("-inf")
        self._count = 0
        self._ranged = not isinstance(program.source, SparkSource)
        self._files = None if self._ranged else files
        """Carries Spark's checkpoint, if `directory` is not where it is kept."""
        self._batches = threading.Lock()
        """One batch at a time: Spark's, or one of ours that has no input."""
        self._error: BaseException | None = None

    def stop(self) -> None:
        """Ask the run to end after the batch in flight."""
        self._stop.set()

    @property
    def is_stopping(self) -> bool:
        return self._stop.is_set()

    def run(self) -> None:
        """Block until the run is over; raise what ended it, if it was an error."""
        if self._limits.available_now and self._ranged:
            self._program.source.until_now()
        if self._stop.is_set() or self._nothing_left(self._driver.head):
            return
        with self._checkpoint() as checkpoint:
            writer = self._frame().writeStream.foreachBatch(self._on_batch(checkpoint))
            writer = writer.option("checkpointLocation", str(checkpoint))
            if self._limits.available_now and not self._ranged:
                writer = writer.trigger(availableNow=True)
            elif self._limits.interval and not self._ranged:
                writer = writer.trigger(processingTime=f"{round(self._limits.interval * 1000)} milliseconds")
            query = self._start(writer)
            try:
                self._progress.started(query, self._is_settled)
                self._wait(query, checkpoint)
                query.stop()
            except (Py4JError, OSError) as error:
                self._error = self._error or SparkLost(
                    f"Spark's JVM is gone ({type(error).__name__}); start again: nothing is lost"
                )
        if self._error is not None:
            raise self._error

    def _start(self, writer: DataStreamWriter) -> StreamingQuery:
        try:
            return writer.start()
        except Exception as error:  # Spark's and py4j's have no root in common
            named = disk_error(str(error), self._directory)
            if named is None:
                raise
            raise named from None

    # -- what Spark plans ----------------------------------------------------------------------------------------

    def _frame(self) -> DataFrame:
        source = self._program.source
        if isinstance(source, SparkSource):
            return source.routed(self._program.partitions)
        return self._spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 1).load()

    @contextmanager
    def _checkpoint(self) -> Iterator[Path]:
        """Spark's checkpoint directory for this run."""
        if not self._ranged and self._files is None:
            yield self._directory
            return
        _collect_scratch(self._directory)
        scratch = self._directory / f"run-{new_id()}"
        lock = FileLock(scratch.with_suffix(".lock"))
        lock.acquire()
        try:
            if self._files is not None:
                self._files.bring(self._driver.head.spark_files, scratch)
            yield scratch
        finally:
            _remove_scratch(scratch, lock)

    # -- every micro-batch ---------------------------------------------------------------------------------------

    def _on_batch(self, checkpoint: Path) -> Any:
        def on_batch(rows: DataFrame, batch: int) -> None:
            try:
                proposal = self._proposal(checkpoint, rows, batch)
                with self._idle:
                    if self._stop.is_set():
                        raise NotNowError
                    self._busy = True
                with self._batches:
                    manifest = self._run_batch(proposal)
                self._last_batch = batch
                self._after(manifest, proposal)
            except NotNowError:
                raise
            except BaseException as error:
                self._error = error
                self._stop.set()
                raise _BatchFailedError(type(error).__name__) from None  # Spark's stack overflows at a long text
            finally:
                with self._idle:
                    self._busy = False
                    self._idle.notify_all()

        return on_batch

    def _run_batch(self, proposal: Proposal) -> Manifest:
        self._began = began = time.monotonic()
        manifest = self._driver.run_batch(proposal)
        self._progress.batch(manifest, time.monotonic() - began, self._driver.commit_seconds)
        return manifest

    def _is_settled(self) -> bool:
        with self._batches:
            return not self._driver.is_due()

    def _tick(self) -> None:
        """Where Spark plans the batches, it plans none without input: what is due is done in between."""
        if self._ranged or not self._driver.is_due() or not self._batches.acquire(blocking=False):
            return
        try:
            if self._driver.is_due() and self._error is None:
                self._run_batch(Proposal())
        except NotNowError:
            return
        except BaseException as error:
            self._error = error
            self._stop.set()
        finally:
            self._batches.release()

    def _proposal(self, checkpoint: Path, rows: DataFrame, batch: int) -> Proposal:
        """What Spark wrote down about a batch before it began."""
        if self._query_id is None:
            self._query_id = str(msgspec.json.decode((checkpoint / "metadata").read_bytes())["id"])
        _, _, *offsets = (checkpoint / "offsets" / str(batch)).read_text().split("\n")
        spark = SparkBatch(self._query_id, batch, _digest(checkpoint, offsets, batch))
        if not self._ranged:
            return Proposal(spark, rows=rows, spark_files=self._kept(checkpoint, batch))
        return Proposal(spark, end=self._next_end())

    def _kept(self, checkpoint: Path, batch: int) -> dict[str, FileRef] | None:
        if self._files is None:
            return None
        head = self._driver.head
        return self._files.keep(checkpoint, batch, head.version + 1, head.spark_files)

    def _next_end(self) -> Position:
        """Wait for something to read. A source that is idle makes no versions; `run(timeout=)` and `stop()` are heard."""
        limits, source, start = self._limits, self._program.source, self._driver.head.position
        assert start is not None
        rows = limits.rows if limits.count is None else min(limits.rows, limits.count - self._count)
        pause = POLL_S
        while not self._stop.is_set():
            end: Position = source.propose(start, rows)
            waiting = source.count(Span(start, end))
            if waiting >= rows or (waiting and time.monotonic() - self._began >= limits.interval):
                return end
            if not waiting and self._driver.is_due():
                return start
            self._stop.wait(pause)
            pause = min(pause * 1.3, IDLE_POLL_S)
        raise NotNowError

    def _after(self, manifest: Manifest, proposal: Proposal) -> None:
        """See whether this batch was the last one. A range that could not be read to its end was."""
        rows = sum(commit.rows_in for commit in manifest.partitions)
        self._count += rows
        if rows:
            self._last_rows = time.monotonic()
        if self._nothing_left(manifest, proposal.end):
            self._stop.set()

    def _nothing_left(self, manifest: Manifest, proposed: Position | None = None) -> bool:
        limits = self._limits
        if limits.count is not None and self._count >= limits.count:
            return True
        source = self._program.source
        if isinstance(source, SparkSource) or manifest.position is None:
            return False
        return bool(source.is_over(manifest.position, proposed)) and not self._driver.is_due()

    # -- stopping ------------------------------------------------------------------------------------------------

    def _wait(self, query: StreamingQuery, checkpoint: Path) -> None:
        timeout = self._limits.timeout
        while not self._stop.is_set():
            try:
                if query.awaitTermination(0.1):  # type: ignore[arg-type]
                    while self._error is None and not self._stop.is_set() and self._driver.is_due():
                        self._tick()
                    return
            except KeyboardInterrupt:
                self.stop()
            except StreamingQueryException as error:
                self._explain(error)
                return
            self._tick()
            if timeout is not None and not self._busy and time.monotonic() - self._last_rows > timeout:
                self.stop()
        with self._idle:
            self._idle.wait_for(lambda: not self._busy)
        if self._error is None and self._last_batch >= 0:
            _await(checkpoint / "commits" / str(self._last_batch), query)

    def _explain(self, error: StreamingQueryException) -> None:
        """A query that failed outside our code: what it means for the checkpoint."""
        if self._error is not None or self._stop.is_set():
            return
        text = str(error)
        named = disk_error(text, self._directory)
        if named is not None:
            self._error = named
        elif "CONCURRENT_STREAM_LOG_UPDATE" in text or "concurrently using" in text:
            self._error = Fenced(self._driver.head.version + 1, "another run that uses Spark's checkpoint")
        elif self._last_batch < 0 and not self._ranged:
            self._error = Damaged(
                f"Spark cannot go on from its checkpoint {self._directory}: {text.splitlines()[0]}. It alone knows the position of "
                "this source: put it back from a backup, or begin a new checkpoint",
                path=str(self._directory),
            )
        else:
            self._error = SparkLost(f"Spark ended the query: {text.splitlines()[0]}; start again: nothing is lost")
            self._error.__cause__ = error


class _BatchFailedError(Exception):
    """A batch failed; the run keeps the error itself."""


def _digest(checkpoint: Path, offsets: list[str], batch: int) -> str:
    """What identifies the rows of a batch: its offsets and, for files, whose offset is only a number, their list."""
    digest = hashlib.blake2b("\n".join(offsets).encode(), digest_size=16)
    for entry in sorted(checkpoint.glob(f"sources/*/{batch}")) + sorted(checkpoint.glob(f"sources/*/{batch}.compact")):
        digest.update(entry.read_bytes())
    return digest.hexdigest()


def _await(path: Path, query: StreamingQuery, patience: float = 5.0) -> None:
    """Wait until Spark has logged the last batch as done; if it does not, the next start copes with that."""
    limit = time.monotonic() + patience
    while not path.exists() and query.isActive and time.monotonic() < limit:
        time.sleep(0.005)


def _collect_scratch(directory: Path) -> None:
    """Remove what runs that were killed left behind."""
    for scratch in directory.glob("run-*[0-9a-f]"):
        lock = FileLock(scratch.with_suffix(".lock"))
        if lock.acquire():
            _remove_scratch(scratch, lock)


def _remove_scratch(scratch: Path, lock: FileLock) -> None:
    """Remove a run's directory and its lock: the name was random and will not be used again."""
    if scratch.exists():
        shutil.rmtree(scratch)
    scratch.with_suffix(".lock").unlink(missing_ok=True)
    lock.release()
