"""A machine for the fault tests: a checkpoint, a local disk and a sink, and runs on them without Spark.

Storage, local stores, snapshots and retention are the real ones, so that processes can be killed and files damaged. Only the
tasks run in this process, and nothing waits for a disk to sync: what dies here is a process, never the kernel.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
from orders import Orders, fold, running_total

from holdfast.dataframe import frame_of
from holdfast.log.files import FileRef
from holdfast.log.manifest import Chain, Manifest
from holdfast.log.storage import LocalStorage, Storage
from holdfast.log.verify import Finding, Verification
from holdfast.plan.pipeline import Pipeline
from holdfast.plan.program import Program, program_of
from holdfast.runtime.batch import Driver, Proposal
from holdfast.runtime.delivery import Outbox
from holdfast.runtime.job import Job
from holdfast.runtime.snapshots import Snapshots
from holdfast.runtime.spark_files import SparkFiles
from holdfast.runtime.view import StateView
from holdfast.sources.iterable import IterableSource
from holdfast.state.codecs import JsonCodec
from holdfast.stores.slots import LocalStores
from holdfast.testing import LocalRunner

NAME = "orders"
BATCH = 50
PARTITIONS = 2


class Machine:
    """What outlives the runs, and how they are started."""

    def __init__(
        self,
        home: Path,
        *,
        checkpoint: Path | None = None,
        local: Path | None = None,
        every: timedelta | int = 3,
        keep: int = 1,
    ) -> None:
        self.checkpoint = checkpoint or home / NAME / "checkpoint"
        self.local = local or home / NAME / "local"
        self.shelf = Shelf(home / "shelf")
        self.storage: Storage = LocalStorage(self.checkpoint, durable=False)
        self.clock: Callable[[], int] = lambda: time.time_ns() // 1_000_000
        self.begin: Callable[[Callable[[], None]], Any] = lambda work: work()
        """How an upload is started; here it is over before the next batch."""
        self.jobs: list[Job] = []
        """Those of the last run."""
        self._every = every
        self._keep = keep

    @property
    def chain(self) -> Chain:
        return Chain(self.storage)

    @property
    def taken(self) -> int:
        """How many orders the last commit has taken."""
        head = self.chain.head()
        return 0 if head is None or head.position is None else int(head.position["taken"])

    def start(self, *, begin: Any = None) -> Driver:
        """A new run, as after a restart of everything; `begin`: how it starts an upload."""
        program = _program()
        self.jobs = []
        runner = Recording(program, self.storage, LocalStores(self.local), self.jobs)
        self.runner = runner
        snapshots = Snapshots(
            self.storage,
            runner,
            every=self._every,
            keep=self._keep,
            clock=self.clock,
            holder="a test",
            start=begin or self.begin,
        )
        driver = Driver(
            self.chain, program, runner, {"shelf": self.shelf}, snapshots=snapshots, clock=self.clock, holder="a test"
        )
        head = driver.start()
        with tempfile.TemporaryDirectory() as scratch:  # as a run on a Spark source begins
            SparkFiles(self.storage).bring(head.spark_files, Path(scratch))
        return driver

    def run(self, batches: int) -> None:
        driver = self.start()
        for _ in range(batches):
            run_batch(driver)

    # -- what is there -------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, int]:
        """As a reader of the checkpoint sees it."""
        view = StateView(self.chain, "default", JsonCodec())
        return {user: document["total"] for user, document in view.items()}

    def check_exact(self) -> None:
        """State and output are those of a fold over what was taken, and the checkpoint verifies."""
        totals, rows = fold(self.taken)
        assert self.state() == totals
        assert sorted(self.shelf.rows(), key=lambda row: row["n"]) == rows
        assert not self.damage()

    def check_goes_on(self, batches: int = 1) -> None:
        """Some more batches, and everything is as if nothing had happened."""
        before = self.taken
        self.run(batches)
        assert self.taken == before + batches * BATCH
        self.check_exact()

    def damage(self) -> list[Finding]:
        return [finding for finding in Verification(self.storage).findings() if finding.kind == "damage"]

    def orphans(self) -> list[str]:
        return [finding.name for finding in Verification(self.storage).findings() if finding.kind == "orphan"]


class Recording(LocalRunner):
    """Keeps the jobs that it runs."""

    def __init__(self, program: Program, storage: Storage, stores: LocalStores, jobs: list[Job]) -> None:
        super().__init__(program, storage, stores)
        self._jobs = jobs

    def run(self, job: Job, rows: Any) -> list[Any]:
        self._jobs.append(job)
        return super().run(job, rows)


class Shelf:
    """A sink with a file per version, which replaces itself when it comes again."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def rows(self) -> list[dict[str, Any]]:
        return [row for file in self._directory.glob("*.json") for row in msgspec.json.decode(file.read_bytes())]

    def prepare(self, head: Manifest) -> None:
        self._directory.mkdir(exist_ok=True)

    def deliver(self, manifest: Manifest, outbox: Outbox) -> None:
        rows = [row for table in outbox.tables() for row in table.to_pylist()]
        (self._directory / f"{manifest.version}.json").write_bytes(msgspec.json.encode(rows))


def run_batch(driver: Driver, spark_files: dict[str, FileRef] | None = None) -> Manifest:
    assert driver.head.position is not None
    end = {"taken": driver.head.position["taken"] + BATCH}
    return driver.run_batch(Proposal(end=end, spark_files=spark_files))


def _program() -> Program:
    pipeline = Pipeline(IterableSource(Orders(), "user", None))
    frame = frame_of(pipeline).apply(running_total, stateful=True)
    pipeline.add_sink(frame._node, "shelf", "rows", lambda _: None)
    return program_of(NAME, pipeline, JsonCodec(), PARTITIONS)
