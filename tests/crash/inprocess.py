"""The program of the crash tests without Spark: the driver's protocol with its tasks in this process.

Storage and local stores are the real ones, on disk, so that files can be damaged between two runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from program import BATCH, NAME, orders, running_total

from holdfast.dataframe import frame_of
from holdfast.errors import HoldfastError
from holdfast.log.manifest import Chain, Manifest
from holdfast.log.storage import LocalStorage
from holdfast.plan.pipeline import Pipeline
from holdfast.plan.program import Program, program_of
from holdfast.runtime.batch import Driver, Proposal
from holdfast.runtime.delivery import Outbox
from holdfast.runtime.exchange import Mail, Outcome
from holdfast.runtime.job import Job
from holdfast.sources.iterable import IterableSource
from holdfast.state.codecs import JsonCodec
from holdfast.stores.slots import LocalStores
from holdfast.testing import LocalRunner

PARTITIONS = 2


class Machine:
    """A checkpoint, local stores and a sink, that outlive the runs on them."""

    def __init__(self, home: Path, shelf: Path | None = None) -> None:
        self.checkpoint = home / NAME / "checkpoint"
        self.local = home / NAME / "local"
        self.sink = Shelf(shelf or home / "shelf")
        self._storage = LocalStorage(self.checkpoint)

    def start(self) -> Driver:
        """A new run, as after a restart of everything."""
        program = _program()
        runner = InProcess(program, self._storage, LocalStores(self.local))
        driver = Driver(Chain(self._storage), program, runner, {"shelf": self.sink}, clock=lambda: 0, holder="a test")
        driver.start()
        return driver

    def run(self, batches: int) -> None:
        driver = self.start()
        for _ in range(batches):
            run_batch(driver)


def run_batch(driver: Driver) -> Manifest:
    assert driver.head.position is not None
    return driver.run_batch(Proposal(end={"taken": driver.head.position["taken"] + BATCH}))


class InProcess(LocalRunner):
    """A `Runner` that is honest about what a lost task looks like: the exception arrives as text."""

    def task(self, job: Job, partition: int, mail: list[Mail]) -> list[tuple[int, Mail] | Outcome]:
        try:
            return super().task(job, partition, mail)
        except HoldfastError as lost:
            raise RuntimeError(str(lost)) from None


class Shelf:
    """A sink with a file per version, so that it outlives a run; it can be closed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.closed = False

    def rows(self) -> list[dict[str, Any]]:
        return [row for file in self._directory.glob("*.json") for row in msgspec.json.decode(file.read_bytes())]

    def has(self, version: int) -> bool:
        return self._file(version).exists()

    def prepare(self, head: Manifest) -> None:
        self._directory.mkdir(exist_ok=True)

    def deliver(self, manifest: Manifest, outbox: Outbox) -> None:
        if self.closed:
            raise ConnectionError("the shelf is closed")
        rows = [row for table in outbox.tables() for row in table.to_pylist()]
        self._file(manifest.version).write_bytes(msgspec.json.encode(rows))

    def _file(self, version: int) -> Path:
        return self._directory / f"{version}.json"


def _program() -> Program:
    pipeline = Pipeline(IterableSource(lambda: orders(10**9), "user", None))
    frame = frame_of(pipeline).apply(running_total, stateful=True)
    pipeline.add_sink(frame._node, "shelf", "rows", lambda _: None)
    return program_of(NAME, pipeline, JsonCodec(), PARTITIONS)
