"""A task that finishes after its successor: it writes its delta, makes its copy or ends its upload late."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from life import Armed, Life
from machine import BATCH, Machine, run_batch

from holdfast import failpoints
from holdfast.errors import ZombieTask
from holdfast.log.snapshot import versions
from holdfast.runtime.batch import Driver, Proposal
from holdfast.runtime.job import Job, Receipt
from holdfast.runtime.task import raise_failure
from holdfast.stores.slots import LocalStores


class Zombie:
    """A task, or an upload, in a thread of its own, that sleeps when it reaches `point` until it is woken."""

    def __init__(self, point: str, work: Any) -> None:
        self.result: Any = None
        self._point = point
        self._asleep = threading.Event()
        self._woken = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)

    def _run(self, work: Any) -> None:
        self.result = work()

    def _hook(self, reached: str, _: int) -> None:
        if reached == self._point and threading.current_thread() is self._thread and not self._asleep.is_set():
            self._asleep.set()
            assert self._woken.wait(60)

    @contextmanager
    def asleep(self) -> Iterator[None]:
        failpoints.arm(self._hook)
        try:
            self._thread.start()
            assert self._asleep.wait(60), f"it never came to {self._point}"
            yield
            assert self._thread.is_alive()
        finally:
            self._woken.set()
            self._thread.join(60)
            failpoints.arm(None)
        assert not self._thread.is_alive()


def started(machine: Machine, *, batches: int) -> Driver:
    driver = machine.start()
    for _ in range(batches):
        run_batch(driver)
    return driver


def next_job(driver: Driver) -> Job:
    """What the driver will run next, for an attempt that is overtaken."""
    assert driver.head.position is not None
    end = {"taken": driver.head.position["taken"] + BATCH}
    return driver._plan(Proposal(end=end), driver.head.version + 1, silent=None)


def attempt_of(machine: Machine, job: Job) -> Callable[[], Any]:
    """The task of partition 0."""
    runner = machine.runner
    return lambda: runner.task(job, 0, [])


def receipt_of(outcomes: Any) -> Receipt:
    ((receipt,),) = (outcome.receipts for outcome in outcomes)
    return cast("Receipt", receipt)


@pytest.mark.parametrize("point", ["task.restored", "task.processed", "task.delta.durable"])
def test_a_task_that_ends_after_its_successor_leaves_nothing_but_garbage(home: Path, point: str) -> None:
    machine = Machine(home, every=3)
    driver = started(machine, batches=4)
    zombie = Zombie(point, attempt_of(machine, next_job(driver)))
    with zombie.asleep():
        run_batch(driver)
        machine.check_exact()
    late = receipt_of(zombie.result)
    assert late.delta is not None and late.delta.name in machine.orphans(), "the zombie has written nothing"
    machine.check_exact()
    for _ in range(6):
        run_batch(driver)
    machine.check_exact()
    assert not machine.orphans()


def test_a_task_of_a_version_long_ago_finds_its_store_ahead_and_leaves_it_alone(home: Path) -> None:
    machine = Machine(home, every=50)
    driver = started(machine, batches=5)
    failure = receipt_of(attempt_of(machine, machine.jobs[1])()).failure
    assert failure is not None
    with pytest.raises(ZombieTask, match="a newer run owns the partition"):
        raise_failure(failure)
    run_batch(driver)
    machine.check_exact()
    assert not machine.orphans()


def test_a_task_of_a_version_long_ago_on_another_disk_leaves_nothing_but_garbage(home: Path) -> None:
    machine = Machine(home, every=50)
    driver = started(machine, batches=5)
    machine.runner.stores = LocalStores(home / "another disk")
    late = receipt_of(attempt_of(machine, machine.jobs[1])())
    machine.runner.stores = LocalStores(machine.local)
    assert late.delta is not None and late.delta.name in machine.orphans()
    run_batch(driver)
    machine.check_exact()


def test_a_late_copy_takes_the_place_of_its_successors_and_only_a_snapshot_is_missed(home: Path) -> None:
    machine = Machine(home, every=3)
    uploads: list[Any] = []
    driver = started(machine, batches=3)
    driver._snapshots._start = uploads.append  # type: ignore[union-attr, assignment]
    zombie = Zombie("task.restored", attempt_of(machine, next_job(driver)))
    with zombie.asleep():
        run_batch(driver)
        assert len(uploads) == 1
    uploads.pop()()
    assert versions(machine.storage) == []
    machine.check_goes_on(5)
    assert versions(machine.storage)


@pytest.mark.parametrize("point", ["upload.begin", "upload.file", "upload.done", "snapshot.begin"])
def test_an_upload_that_ends_after_newer_snapshots_changes_nothing(home: Path, point: str) -> None:
    machine = Machine(home, every=3)
    uploads: list[Any] = []
    driver = started(machine, batches=3)
    driver._snapshots._start = uploads.append  # type: ignore[union-attr, assignment]
    run_batch(driver)
    zombie = Zombie(point, uploads.pop())
    with zombie.asleep():
        machine.run(7)
        before = versions(machine.storage)
        assert min(before) > 3
    assert versions(machine.storage) == before
    machine.check_goes_on(5)
    assert not machine.orphans()


def test_two_processes_that_want_one_partition_take_a_slot_each(home: Path) -> None:
    failpoint = Armed(home, "task.processed", 5, signal.SIGSTOP)
    home.mkdir()
    with Life(home, "--batches", 9, environment=failpoint.environment) as sleeper:
        sleeper.wait_for(failpoint.was_met)
        machine = Machine(home)
        machine.check_goes_on(2)
        assert list(machine.local.glob("*/0/slot-1")), "nobody was in the way"
        sleeper.thaw()
        assert sleeper.end() == 1
        assert "holdfast.errors.Fenced: version 5" in sleeper.said(), sleeper.said()
    machine.check_goes_on(2)
    assert len(list(machine.local.glob("*/0/slot-[0-9]"))) == 1
