"""A process that drives the application, from its start to its end, whatever that is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from faulty_storage import FaultyStorage
from machines import Executors
from surroundings import SimulatedPublisher, TableTarget

from holdfast.errors import (
    BrokerAway,
    Fenced,
    ForeignTarget,
    IncompleteJob,
    JobFailed,
    StorageFailed,
    ZombieTask,
)
from holdfast.log.manifest import Chain, Manifest
from holdfast.runtime.batch import Driver, Proposal
from holdfast.runtime.snapshots import Snapshots
from holdfast.testing import Crash

if TYPE_CHECKING:
    from world import World


class WatchedChain(Chain):
    """Remembers what it has called committed."""

    def __init__(self, world: World, storage: FaultyStorage) -> None:
        super().__init__(storage, pause=lambda seconds: None)
        self._world = world

    def commit(self, manifest: Manifest, *, tries: int = 5) -> Manifest:
        committed = super().commit(manifest, tries=tries)
        self._world.promised.append((committed.version, committed.id))
        return committed


def live(world: World, batches: int) -> bool:
    """Run up to `batches` batches; whether the input is finished."""
    storage = FaultyStorage(world)
    world.spark.restart()
    chain = WatchedChain(world, storage)
    executors = Executors(world, storage)
    publisher = None if world.kafka is None else SimulatedPublisher(world, chain, executors)
    targets = {sink.id: TableTarget(world, sink.id) for sink in world.program.sinks}
    driver = Driver(
        chain, world.program, executors, targets if publisher is None else {},
        publisher=publisher, snapshots=_snapshots(world, storage, executors),
        clock=lambda: world.random.randrange(1000), holder="sim",
    )  # fmt: skip
    try:
        driver.start()
        for _ in range(batches):
            if driver.is_due() and world.random.random() < 0.5:
                driver.run_batch(Proposal(end=driver.head.position))
            planned = world.spark.next(driver.head)
            if planned is None:
                return _fire_the_rest(world, driver)
            number, proposal = planned
            driver.run_batch(proposal)
            world.spark.log_done(number)
    except Crash:
        return False
    except (Fenced, ZombieTask, IncompleteJob, JobFailed, StorageFailed, ForeignTarget, BrokerAway):
        if world.calm:
            raise
    return False


def _snapshots(world: World, storage: FaultyStorage, executors: Executors) -> Snapshots:
    def start(work: Callable[[], None]) -> None:
        def upload() -> None:
            try:
                work()
            except Crash:
                world.faults["upload crashed"] += 1

        if world.chance("upload delayed", world.delay):
            world.zombies.append(upload)
        else:
            upload()

    return Snapshots(
        storage, executors, every=world.snapshot_every, keep=world.keep,
        clock=lambda: world.random.randrange(1000), holder="sim", start=start,
    )  # fmt: skip


def _fire_the_rest(world: World, driver: Driver) -> bool:
    """The input is at its end: go on until nothing is due."""
    for _ in range(20):
        if not driver.is_due():
            return True
        driver.run_batch(Proposal(end=driver.head.position))
    assert not world.calm, "something is due for ever"
    return False
