"""The ports of the protocol in memory: storage, local stores and a task runner, all in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from holdfast.log.manifest import InstanceId
from holdfast.log.storage import Exists, Missing, Storage
from holdfast.plan.program import Program
from holdfast.runtime.job import Job, Receipt
from holdfast.runtime.task import Stores, run_task
from holdfast.stores.base import Store
from holdfast.stores.memory import MemoryStore


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

    def names(self, prefix: str) -> list[str]:
        return sorted(name for name in self.objects if name.startswith(prefix))

    def delete(self, name: str) -> None:
        self.objects.pop(name, None)


class MemoryStores:
    """The local stores of a host that keeps them in memory."""

    def __init__(self) -> None:
        self.stores: dict[tuple[InstanceId, int], MemoryStore] = {}

    @contextmanager
    def open(self, instance: InstanceId, partition: int) -> Iterator[Store]:
        yield self.stores.setdefault((instance, partition), MemoryStore())

    @contextmanager
    def scratch(self) -> Iterator[Store]:
        yield MemoryStore()


class LocalRunner:
    """Runs the tasks of a job one after the other, here."""

    def __init__(self, program: Program, storage: Storage, stores: Stores) -> None:
        self.program = program
        self.storage = storage
        self.stores = stores

    def run(self, job: Job, rows: Any) -> list[Receipt]:
        return [self.task(job, partition) for partition in range(self.program.partitions)]

    def task(self, job: Job, partition: int) -> Receipt:
        assert job.span is not None
        chunks = self.program.source.read(partition, self.program.partitions, job.span)
        return run_task(self.program, job, partition, chunks, self.storage, self.stores)
