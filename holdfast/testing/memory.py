"""The ports of the protocol in memory: storage, local stores and a task runner, all in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from holdfast.log.manifest import AttemptId, InstanceId
from holdfast.log.storage import Exists, Missing, Storage
from holdfast.pickling import dumps, loads
from holdfast.plan.program import Program
from holdfast.runtime.exchange import Inbox, Mail, Outcome
from holdfast.runtime.job import Job
from holdfast.runtime.task import Stores, run_task
from holdfast.stores.base import DamagedStore, Mark, Store
from holdfast.stores.memory import MemoryStore, TemporaryPlace


class Crash(BaseException):
    """The process is gone: nothing that runs in it may catch this."""


class MemoryStorage:
    """A checkpoint in a dict."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def put(self, name: str, data: bytes) -> None:
        if name in self.objects:
            raise Exists(name)
        self.objects[name] = data

    def get(self, name: str) -> bytes:
        try:
            return self.objects[name]
        except KeyError:
            raise Missing(name) from None

    def put_file(self, name: str, path: Path) -> None:
        self.put(name, path.read_bytes())

    def get_file(self, name: str, path: Path) -> None:
        path.write_bytes(self.get(name))

    def names(self, prefix: str) -> list[str]:
        return sorted(self.sizes(prefix))

    def sizes(self, prefix: str) -> dict[str, int]:
        below = {name: len(data) for name, data in self.objects.items() if name.startswith(prefix)}
        return {name: size for name, size in below.items() if "/" not in name[len(prefix) :]}

    def delete(self, name: str) -> None:
        self.objects.pop(name, None)

    def delete_all(self, names: Sequence[str]) -> None:
        for name in names:
            self.delete(name)

    def sweep(self, prefix: str) -> list[int]:
        return []


class MemoryStores:
    """The local stores of a host that keeps them in memory."""

    def __init__(self) -> None:
        self.stores: dict[tuple[InstanceId, int], MemoryStore] = {}
        self._copies: dict[tuple[InstanceId, int], tuple[AttemptId, TemporaryPlace]] = {}

    @contextmanager
    def open(self, instance: InstanceId, partition: int) -> Iterator[Store]:
        yield self.stores.setdefault((instance, partition), MemoryStore())

    @contextmanager
    def scratch(self) -> Iterator[Store]:
        yield MemoryStore()

    def copy(self, instance: InstanceId, partition: int, store: Store, name: AttemptId) -> None:
        place = TemporaryPlace()
        store.checkpoint(place.path / name)
        self._copies[instance, partition] = name, place

    def copied(self, instance: InstanceId, partition: int, name: AttemptId) -> Path | None:
        found, place = self._copies.get((instance, partition), (None, None))
        return place.path / name if place is not None and found == name else None

    def check(self, copy: Path, mark: Mark, files: Iterable[str]) -> None:
        held = MemoryStore.open(copy).mark()
        if held != mark:
            raise DamagedStore(f"{copy} holds {held}, not {mark}", path=copy)

    def distrust(self, instance: InstanceId, partition: int) -> None:
        self.stores.pop((instance, partition), None)

    def forget(self, instance: InstanceId, partition: int, name: AttemptId) -> None:
        if self.copied(instance, partition, name) is not None:
            del self._copies[instance, partition]


class LocalRunner:
    """Runs the tasks of a job one after the other, here."""

    def __init__(self, program: Program, storage: Storage, stores: Stores) -> None:
        self.program = program
        self.storage = storage
        self.stores = stores

    def run(self, job: Job, rows: Any) -> list[Outcome]:
        mail: dict[int, list[Mail]] = {}
        outcomes: list[Outcome] = []
        for level in self.program.levels:
            for partition in level:
                for item in self.task(job, partition, mail.pop(partition, [])):
                    if isinstance(item, Outcome):
                        outcomes.append(item)
                    else:
                        target, sent = item
                        mail.setdefault(target, []).append(loads(dumps(sent)))
        return outcomes

    def at(self, partition: int, function: Callable[[int, Storage, Stores], Any]) -> Any:
        """Run `function(partition, storage, stores)`."""
        return function(partition, self.storage, self.stores)

    def each(self, function: Callable[[int, Storage, Stores], Any]) -> list[Any]:
        """The same for every partition."""
        return [self.at(partition, function) for partition in range(self.program.all_partitions)]

    def task(self, job: Job, partition: int, mail: list[Mail]) -> list[tuple[int, Mail] | Outcome]:
        program = self.program
        level = program.stage_of(partition).level
        chunks: Any
        if level == 0:
            assert job.span is not None
            chunks = program.source.read(partition, program.partitions, job.span)
        else:
            chunks = Inbox(program.levels[level - 1], mail, in_order=program.in_order)
        return run_task(program, job, partition, chunks, self.storage, self.stores)
