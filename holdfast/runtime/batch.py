"""The driver's half of the commit protocol. The numbers are those of the table.

    driver                                    tasks (one per state partition)
    1 replay? this batch is committed -> 5
    2 start the job ------------------------>  a-c in task.py
    3 collect one receipt per partition <----  d
    4 put manifest v+1 if absent       == THE COMMIT: one atomic put
    5 deliver: outbox -> sinks
    6 return: Spark logs the batch as done

Plain Python over two ports, a task runner and storage; it knows neither Spark nor clocks. What holds here:
- nothing but step 4 changes what is true, and it is one put;
- a version is committed only when the version before it is delivered, so at most the head is ever undelivered;
- the chain owns positions: a batch reads from the last commit's end, whatever anyone proposes as the start;
- a batch that is committed is never computed again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import msgspec

from holdfast.errors import (
    Damaged,
    Fenced,
    HoldfastError,
    IncompleteJob,
    InvalidPipeline,
    JobFailed,
    SourceMismatch,
    StopAndLook,
    UnsupportedValue,
    ZombieTask,
)
from holdfast.failpoints import reach
from holdfast.log import paths
from holdfast.log.files import FileRef, read_table
from holdfast.log.manifest import (
    Chain,
    InstanceId,
    Manifest,
    ManifestId,
    PartitionCommit,
    Position,
    SparkBatch,
    check_owner,
    empty_partitions,
    new_id,
)
from holdfast.log.recipe import Recipe, recipes_for
from holdfast.log.snapshot import may_be_removed
from holdfast.plan.program import Program, check_fits
from holdfast.plan.schema import arrow_schema, decided_schema, to_ddl
from holdfast.plan.sinks import check_rows, merged
from holdfast.runtime.delivery import Delivery, Publisher, Target
from holdfast.runtime.exchange import Outcome, gathered
from holdfast.runtime.job import Job, Receipt
from holdfast.runtime.snapshots import Snapshots
from holdfast.runtime.task import raise_failure
from holdfast.runtime.watermark import Silences, event_times, next_watermark
from holdfast.sources.base import Span
from holdfast.stores.base import DamagedStore

logger = logging.getLogger("holdfast")

JOB_TRIES = 4
"""How often a job is run that was lost with a worker or an executor."""


class NotNowError(Exception):
    """A batch that must not begin: the run is stopping."""


class Proposal(msgspec.Struct, frozen=True):
    """How far the next batch may read, and which micro-batch it is."""

    spark: SparkBatch | None = None
    end: Position | None = None
    """Of a ranged source."""
    rows: Any = None
    """Of a Spark source: the batch's DataFrame, for the runner; None: a batch without input."""
    spark_files: dict[str, FileRef] | None = None
    """What the commit will name of Spark's checkpoint; None: what the last one did."""


class Runner(Protocol):
    """Runs the tasks of a job, wherever that is."""

    def run(self, job: Job, rows: Any) -> list[Outcome]:
        """What the tasks of the last level returned. An exception means that the job was lost; it may be run again."""


Restore = Callable[[InstanceId, tuple[Recipe, ...]], None]
"""Brings the stores near to what the recipes want before the first job, and shows how far it is; the job does the rest.

It raises `NotNowError` if the run is asked to stop meanwhile."""


class Driver:
    """One run's hold on a checkpoint."""

    def __init__(
        self,
        chain: Chain,
        program: Program,
        runner: Runner,
        targets: Mapping[str, Target],
        *,
        publisher: Publisher | None = None,
        snapshots: Snapshots | None = None,
        restore: Restore | None = None,
        clock: Callable[[], int],
        holder: str,
        look_ms: int = 0,
    ) -> None:
        self._chain = chain
        self._program = program
        self._runner = runner
        self._delivery = Delivery(chain, targets, publisher, self._check_not_fenced)
        self._snapshots = snapshots
        self._restore = restore
        self._clock = clock
        self._holder = holder
        self._look_ms = look_ms
        """How long may pass until a source is looked at again."""
        self._silences = Silences(len(program.source.names))
        self._ranged = hasattr(program.source, "propose")
        self._recipes: tuple[Recipe, ...] = ()
        self.head: Manifest
        self.commit_seconds = 0.0
        """How long the last commit took, for people."""

    def start(self) -> Manifest:
        """Take up the checkpoint where it stands, or begin one; deliver what a crash left undelivered."""
        marks = self._chain.storage.names(paths.DELIVERED)  # before the head: a run that is alive adds to both
        head = self._chain.head()
        if head is None:
            head = self._chain.commit(self._first())
        check_owner(head, self._program.app)
        if head.kind == "restoring":
            raise StopAndLook(
                f'the checkpoint holds a restore that was interrupted at version {head.version}: run(recover="changelog") goes on '
                "with it",
                version=head.version,
            )
        _check_head_is_last(head, marks)
        check_fits(self._program, head)
        self._take(head)
        with self._fenced_rather_than_damaged():
            self._delivery.prepare(head)
            self._delivery.deliver_to(head)
        if self._snapshots is not None:
            self._snapshots.begin(head)
        return head

    def adopt(self, manifest: Manifest) -> None:
        """Commit a manifest that changes no state, and go on from it."""
        self._take(self._chain.commit(manifest))

    def run_batch(self, proposal: Proposal) -> Manifest:
        """One micro-batch, exactly once."""
        silent = self._silent(proposal)
        with self._fenced_rather_than_damaged():
            manifest = self._run_batch(proposal, silent)
        if silent is not None:
            self._silences.note(silent, self._now() + self._look_ms, manifest.watermark_ms)
        return manifest

    def _run_batch(self, proposal: Proposal, silent: Collection[int] | None) -> Manifest:
        head = self.head
        version = head.version + 1
        reach("batch.begin", version)
        if self._is_committed(proposal.spark):  # 1
            self._delivery.deliver_to(head)
            return head
        job = self._plan(proposal, version, silent)
        receipts = self._run(job, proposal.rows)  # 2, 3
        planned = self._manifest(job, proposal, receipts)
        reach("commit.begin", version)
        began = time.monotonic()
        manifest = self._chain.commit(planned)  # 4
        self.commit_seconds = time.monotonic() - began
        reach("commit.done", version)
        self._note(job, receipts, manifest)
        self._take(manifest)
        self._delivery.deliver(manifest, is_new=manifest is planned)  # 5
        reach("batch.done", version)
        return manifest  # 6

    # -- 1: is it a replay? -------------------------------------------------------------------------------------

    def _is_committed(self, batch: SparkBatch | None) -> bool:
        last = self.head.spark
        if batch is None:
            return False
        if last is not None and batch.query == last.query and batch.batch <= last.batch:
            if not self._ranged:
                self._check_same_rows(batch)
            return True
        if not self._ranged:
            expected = (batch.query, 0) if last is None else (last.query, last.batch + 1)
            if (batch.query, batch.batch) != expected:
                self._check_not_fenced()
                raise SourceMismatch(
                    f"Spark proposes batch {batch.batch} of query {batch.query}; the checkpoint continues with batch "
                    f"{expected[1]} of query {expected[0]}. Spark's checkpoint was lost, replaced or put back, and only it knows "
                    "the position of this source. Put it back as it was, or begin a new checkpoint",
                    proposed=batch.batch,
                    expected=expected[1],
                )
        return False

    def _check_same_rows(self, batch: SparkBatch) -> None:
        """A batch that Spark replays must hold the rows that were committed under its number."""
        manifest = self.head
        while manifest.spark is not None and manifest.spark.batch > batch.batch:
            try:
                manifest = self._chain.parent_of(manifest)
            except Damaged as damage:
                self._check_not_fenced()
                if not may_be_removed(self._chain.storage, manifest.version - 1):
                    raise
                raise SourceMismatch(
                    f"Spark replays batch {batch.batch}, which was committed so long ago that its manifest is gone: Spark's "
                    "checkpoint was put back from an older copy. Put the newest one back, or begin a new checkpoint",
                    batch=batch.batch,
                    version=manifest.version,
                ) from damage
        if manifest.spark != batch:
            self._check_not_fenced()
            raise SourceMismatch(
                f"Spark replays batch {batch.batch} with other offsets than version {manifest.version} was committed with: "
                "its offset log was changed. Put Spark's checkpoint back as it was, or begin a new checkpoint",
                batch=batch.batch,
                version=manifest.version,
            )

    def _check_not_fenced(self) -> None:
        """What looks like a mismatch or a zombie of ours may be another run's progress."""
        latest = self._chain.head()
        if latest is not None and latest.version > self.head.version:
            raise Fenced(self.head.version + 1, latest.holder) from None

    @contextmanager
    def _fenced_rather_than_damaged(self) -> Iterator[None]:
        """A file that is missing may be gone because another run went on and cleared up behind itself."""
        try:
            yield
        except Damaged:
            self._check_not_fenced()
            raise

    # -- 2 and 3: the job --------------------------------------------------------------------------------------

    def _plan(self, proposal: Proposal, version: int, silent: Collection[int] | None) -> Job:
        head = self.head
        time_ms = self._now()
        return Job(
            version=version,
            instance=head.instance,
            time_ms=time_ms,
            watermark_ms=self._watermark(silent, time_ms),
            span=self._span(proposal) if self._ranged else None,
            recipes=self._recipes,
            schemas=head.schemas,
            copies=self._snapshots is not None and self._snapshots.is_due(head),
        )

    def _span(self, proposal: Proposal) -> Span:
        assert self.head.position is not None and proposal.end is not None
        return Span(self.head.position, proposal.end)

    def _now(self) -> int:
        return max(self._clock(), self.head.time_ms)

    def _watermark(self, silent: Collection[int] | None, now_ms: int) -> int | None:
        return next_watermark(self._program.watermark, self.head, now_ms, self._silences.of(silent or ()))

    def _silent(self, proposal: Proposal) -> Collection[int] | None:
        """The sources that were looked at and give this batch nothing; None: it does not matter."""
        rule = self._program.watermark
        if rule is None or rule.idle_ms is None:
            return None
        if self._ranged:
            found: Collection[int] = self._program.source.silent(self._span(proposal))
            return found
        return (0,) if proposal.rows is None else ()

    def _run(self, job: Job, rows: Any) -> list[Receipt]:
        if self._restore is not None:
            self._restore(job.instance, job.recipes)
            self._restore = None
        for attempt in range(1, JOB_TRIES + 1):
            reach("job.begin", job.version)
            try:
                receipts = gathered(self._runner.run(job, rows))
                break
            except Exception as error:
                if isinstance(error, HoldfastError) and not isinstance(error, DamagedStore):
                    raise
                if attempt == JOB_TRIES:
                    raise JobFailed(
                        f"the job of version {job.version} was lost {attempt} times; the last time: {error}",
                        version=job.version,
                    ) from error
                logger.warning("the job of version %d was lost; running it again", job.version)
                logger.debug("lost with", exc_info=error)
        reach("job.done", job.version)
        failed = min((r for r in receipts if r.failure), key=lambda receipt: receipt.partition, default=None)
        if failed is not None and failed.failure is not None:
            try:
                raise_failure(failed.failure)
            except ZombieTask:
                self._check_not_fenced()
                raise
        self._check_complete(job, receipts)
        _tell_restored(self._program.app, receipts)
        return sorted(receipts, key=lambda receipt: receipt.partition)

    def is_due(self) -> bool:
        """Whether a batch without input would have something to do: a timer is due, or something has expired."""
        head = self.head
        now = self._now()
        silent = self._silent(Proposal(end=head.position))
        if silent is not None:
            self._silences.note(silent, now + self._look_ms, head.watermark_ms)
        watermark = self._watermark(silent, now)
        return any(
            (commit.due_ms is not None and commit.due_ms < now)
            or (commit.event_due_ms is not None and watermark is not None and commit.event_due_ms < watermark)
            for commit in head.partitions
        )

    def _check_complete(self, job: Job, receipts: list[Receipt]) -> None:
        """Exactly one receipt per partition, for this version and this range, and all came to the same end."""
        partitions = sorted(receipt.partition for receipt in receipts)
        if partitions != list(range(self._program.all_partitions)):
            raise IncompleteJob(
                f"version {job.version}: {self._program.all_partitions} partitions, but receipts from {partitions}",
                version=job.version,
            )
        if any(receipt.version != job.version or receipt.span != job.span for receipt in receipts):
            raise IncompleteJob(f"version {job.version}: a task worked on another range", version=job.version)
        ends = [receipt.end for receipt in receipts if receipt.partition < self._program.partitions]
        if any(end != ends[0] for end in ends):
            raise IncompleteJob(
                f"version {job.version}: the partitions read {self._program.source.name} to different ends {ends}: "
                "it must give the same records each time it is read",
                version=job.version,
            )

    # -- 4: the commit ---------------------------------------------------------------------------------------

    def _first(self) -> Manifest:
        """Version 0 fixes where the application begins, before anything is read."""
        identity = ManifestId(new_id())
        source = self._program.source
        return Manifest(
            version=0,
            id=identity,
            parent=None,
            instance=InstanceId(new_id()),
            app=self._program.app,
            holder=self._holder,
            kind="start",
            base=0,
            base_id=identity,
            time_ms=self._clock(),
            source=source.kind,
            position=source.initial() if self._ranged else None,
            spark=None,
            codecs=self._program.codecs(),
            changelogs=self._program.changelogs,
            stages=self._program.shapes(),
            partitions=empty_partitions(self._program.all_partitions),
        )

    def _manifest(self, job: Job, proposal: Proposal, receipts: list[Receipt]) -> Manifest:
        head = self.head
        return msgspec.structs.replace(
            head,
            version=job.version,
            id=ManifestId(new_id()),
            parent=head.id,
            holder=self._holder,
            kind="batch",
            time_ms=job.time_ms,
            watermark_ms=head.watermark_ms if job.watermark_ms is None else job.watermark_ms,
            event_ms=event_times(head, [receipt.events for receipt in receipts], len(self._program.source.names)),
            position=receipts[0].end if self._ranged else None,
            spark=proposal.spark or head.spark,
            spark_files=head.spark_files if proposal.spark_files is None else proposal.spark_files,
            stages=self._program.shapes(),
            codecs={**head.codecs, **self._program.codecs()},
            schemas={**head.schemas, **self._new_schemas(receipts)},
            partitions=tuple(
                PartitionCommit(
                    partition=receipt.partition,
                    attempt=receipt.attempt,
                    delta=receipt.delta,
                    outboxes=receipt.outboxes,
                    rows_in=receipt.rows_in,
                    rows_out=receipt.rows_out,
                    skipped=receipt.skipped,
                    late=receipt.late,
                    keys_updated=receipt.keys_updated,
                    keys_removed=receipt.keys_removed,
                    due_ms=receipt.due_ms,
                    event_due_ms=receipt.event_due_ms,
                    keys=before.keys + receipt.keys_grown,
                    bytes=before.bytes + receipt.bytes_grown,
                )
                for before, receipt in zip(head.partitions, receipts, strict=True)
            ),
            published_by=self._delivery.way(_rows_written(receipts), head),
            changelogs=self._program.changelogs,
        )

    def _new_schemas(self, receipts: list[Receipt]) -> dict[str, str]:
        """The schema of each sink that got its first rows."""
        schemas: dict[str, str] = {}
        for sink in {name for receipt in receipts for name in receipt.schemas}:
            found = [(receipt, arrow_schema(receipt.schemas[sink])) for receipt in receipts if sink in receipt.schemas]
            try:
                common = decided_schema(merged([schema for _, schema in found]))
                for receipt, schema in found:
                    if schema != common:  # else delivery might never succeed
                        check_rows(sink, common, read_table(self._chain.storage, receipt.outboxes[sink], kind="outbox"))
                schemas[sink] = to_ddl(common)
                arrow_schema(schemas[sink])  # two columns of one name
            except (TypeError, ValueError, UnsupportedValue, InvalidPipeline):  # Arrow's derive from the first two
                raise UnsupportedValue(
                    f"{sink}: its rows have no schema in common: {[to_ddl(schema) for _, schema in found]}; give schema="
                ) from None
        return schemas

    def _note(self, job: Job, receipts: list[Receipt], manifest: Manifest) -> None:
        """After the commit: the copies that the tasks have kept of the version before it become a snapshot."""
        if self._snapshots is None:
            return
        if job.copies:
            marks = [recipe.target for recipe in self._recipes]
            self._snapshots.take(
                self.head, marks, [receipt.attempt if receipt.copied else None for receipt in receipts]
            )
        self._snapshots.committed(manifest)

    def _take(self, manifest: Manifest) -> None:
        self._recipes = recipes_for(self._chain, manifest, self._recipes)
        self.head = manifest


def _rows_written(receipts: list[Receipt]) -> int:
    """Changes and output."""
    files = [file for one in receipts for file in (one.delta, *one.outboxes.values()) if file is not None]
    return sum(file.rows for file in files)


def _tell_restored(app: str, receipts: list[Receipt]) -> None:
    """What the tasks had to restore themselves, where nobody saw it: of a lost executor, a later stage, a damaged store."""
    found = [(receipt.restored, receipt.partition) for receipt in receipts if receipt.restored is not None]
    if not found:
        return
    longest, partition = max(found, key=lambda pair: pair[0].seconds)
    logger.info(
        "%s: %d partitions were restored in their tasks, %.1f MB; the longest was %d: %s, %.1f MB in %.1f s",
        app,
        len(found),
        sum(restored.length for restored, _ in found) / 1e6,
        partition,
        longest.what,
        longest.length / 1e6,
        longest.seconds,
    )


def _check_head_is_last(head: Manifest, marks: list[str]) -> None:
    """What was delivered was committed: a mark after the head means that manifests are gone."""
    if marks and paths.version_of(marks[-1]) > head.version:
        name = paths.manifest(paths.version_of(marks[-1]))
        raise Damaged(
            f"{name} is missing, though {marks[-1]} says that its output was delivered; restore the last commits from a backup",
            name=name,
        )
