"""The machines of the simulated world: disks that come back as they were before, executors that lose tasks or run them twice."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.errors import HoldfastError
from holdfast.log.manifest import AttemptId, InstanceId
from holdfast.runtime.exchange import Inbox, LostMailError, Mail, Outcome
from holdfast.runtime.job import Job
from holdfast.runtime.task import run_task
from holdfast.stores.base import DamagedStore, Mark, Store
from holdfast.stores.memory import MemoryStore
from holdfast.testing import Crash

if TYPE_CHECKING:
    from faulty_storage import FaultyStorage
    from world import World

# -- disks -----------------------------------------------------------------------------------------------------------


class Disk:
    """One slot of one partition on one host. Without a WAL: a kill leaves some version that was there before."""

    def __init__(self, store: MemoryStore | None = None) -> None:
        self.held = False
        self.store = store or MemoryStore()
        self.flushed: list[MemoryStore] = []
        self.damaged = False

    def remember(self) -> None:
        self.flushed = [*self.flushed[-3:], frozen(self.store)]


def frozen(store: MemoryStore) -> MemoryStore:
    kept = copy(store)
    kept._values = dict(store._values)
    return kept


class Stores:
    """The disks of the host that a task happens to run on."""

    def __init__(self, world: World, host: int) -> None:
        self._world = world
        self._disks = world.hosts[host]
        self._copies = world.copies[host]

    @contextmanager
    def open(self, instance: InstanceId, partition: int) -> Iterator[Store]:
        world = self._world
        slots = self._disks.setdefault((instance, partition), [])
        free = [disk for disk in slots if not disk.held]
        if not free:
            free = [Disk()]
            slots += free
        disk = max(free, key=lambda disk: disk.store.mark().version)
        if world.chance("store damaged", 0.5):
            disk.damaged = True
        disk.held = True
        try:
            yield DamagedOnce(disk) if disk.damaged else disk.store
        except Crash:
            if disk.flushed and world.random.random() < 0.5:
                world.faults["store rolled back by a kill"] += 1
                disk.store = frozen(world.random.choice(disk.flushed))
            raise
        finally:
            disk.held = False
        disk.remember()

    @contextmanager
    def scratch(self) -> Iterator[Store]:
        yield MemoryStore()

    def copy(self, instance: InstanceId, partition: int, store: Any, name: AttemptId) -> None:
        self._copies.copy(instance, partition, store, name)

    def copied(self, instance: InstanceId, partition: int, name: AttemptId) -> Path | None:
        return self._copies.copied(instance, partition, name)

    def check(self, copy: Path, mark: Mark, files: Iterable[str]) -> None:
        self._copies.check(copy, mark, files)

    def distrust(self, instance: InstanceId, partition: int) -> None:
        for disk in self._disks.get((instance, partition), ()):
            disk.damaged = True

    def forget(self, instance: InstanceId, partition: int, name: AttemptId) -> None:
        self._copies.forget(instance, partition, name)


class DamagedOnce:
    """A store whose files are broken: reading it is an error, wiping it mends it."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def mark(self) -> Any:
        if self._disk.damaged:
            raise DamagedStore("a local store is damaged")
        return self._disk.store.mark()

    def wipe(self) -> None:
        self._disk.damaged = False
        self._disk.store.wipe()

    def __getattr__(self, name: str) -> Any:
        if self._disk.damaged:
            raise DamagedStore("a local store is damaged")
        return getattr(self._disk.store, name)


# -- executors ---------------------------------------------------------------------------------------------------------


class Executors:
    """Runs tasks on random hosts; loses some, runs some twice, and leaves zombies behind."""

    def __init__(self, world: World, storage: FaultyStorage) -> None:
        self._world = world
        self._storage = storage

    def run(self, job: Job, rows: Any) -> list[Outcome]:
        world = self._world
        outcomes: list[Outcome] = []
        mail: dict[int, list[Mail]] = {}
        for level, partitions in enumerate(world.program.levels):
            sent: dict[int, list[Mail]] = {}
            order = list(partitions)
            world.random.shuffle(order)
            for partition in order:
                if world.chance("task lost"):
                    raise RuntimeError("an executor was lost")
                if level > 0 and world.chance("stage computed again", 2):
                    self._compute_again(job, level - 1, rows, mail)
                results = self._task(job, partition, rows, mail.get(partition, []))
                if world.chance("task run twice", 2):
                    other = self._task(job, partition, rows, mail.get(partition, []))
                    results = world.random.choice((results, other))
                if world.chance("zombie task", 2):
                    inbox = mail.get(partition, [])
                    world.zombies.append(lambda one=partition, inbox=inbox: self._zombie(job, one, rows, inbox))
                outcomes += [result for result in results if isinstance(result, Outcome)]
                _post(results, sent)
                if outcomes and world.chance("receipt returned twice", 0.3):
                    outcomes.append(outcomes[-1])
                if outcomes and world.chance("receipt lost", 0.3):
                    outcomes.pop()
            mail = sent
        return outcomes

    def _compute_again(self, job: Job, level: int, rows: Any, mail: dict[int, list[Mail]]) -> None:
        """The output of a task was lost after somebody has used it: whoever comes later gets that of another attempt."""
        if level > 0:
            return  # its own input is gone in this world
        partition = self._world.random.choice(self._world.program.levels[level])
        for inbox in mail.values():
            inbox[:] = [item for item in inbox if item.sender != partition]
        _post(self._task(job, partition, rows, []), mail)

    def each(self, function: Callable[..., Any]) -> list[Any]:
        """Run a function of ours once per partition; lose some, and leave some to be run again long after."""
        world = self._world
        for partition in range(self._world.program.all_partitions):
            if world.chance("task lost"):
                raise RuntimeError("an executor was lost")
            if world.chance("zombie publisher", 2):
                world.zombies.append(lambda partition=partition: self._late(function, partition))
            function(partition, self._storage, None)
        return []

    def at(self, partition: int, function: Callable[..., Any]) -> Any:
        """Run a function of ours for one partition, usually on the host that had it last."""
        world = self._world
        if world.chance("task lost"):
            raise RuntimeError("an executor was lost")
        hosts = list(range(len(world.hosts)))
        world.random.shuffle(hosts)
        result = function(partition, self._storage, Stores(world, hosts[0]))
        if result is None and world.random.random() < 0.8:
            result = function(partition, self._storage, Stores(world, hosts[1]))
        return result

    def _late(self, function: Callable[..., Any], partition: int) -> None:
        try:
            function(partition, self._storage, None)
        except (Crash, HoldfastError):
            return

    def _task(self, job: Job, partition: int, rows: Any, mail: list[Mail]) -> list[Any]:
        world = self._world
        source = world.program.source
        level = world.program.stage_of(partition).level
        if level > 0:
            mixed = list(mail)
            world.random.shuffle(mixed)
            chunks: Any = Inbox(world.program.levels[level - 1], mixed, in_order=world.program.in_order)
        elif job.span is None:
            chunks = [] if rows is None else source.chunks(rows, partition)
        else:
            chunks = source.read(partition, world.program.partitions, job.span)
        stores = Stores(world, world.random.randrange(len(world.hosts)))
        return run_task(world.program, job, partition, chunks, self._storage, stores)

    def _zombie(self, job: Job, partition: int, rows: Any, mail: list[Mail]) -> None:
        """A task of long ago wakes up. It may fail in any way; it must not change what anyone sees."""
        try:
            self._task(job, partition, rows, mail)
        except (Crash, HoldfastError, LostMailError):
            return


def _post(results: list[Any], mail: dict[int, list[Mail]]) -> None:
    for result in results:
        if not isinstance(result, Outcome):
            mail.setdefault(result[0], []).append(pickle.loads(pickle.dumps(result[1])))
