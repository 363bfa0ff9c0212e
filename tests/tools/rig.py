"""A pipeline that counts by key on a checkpoint of any kind, without Spark, with snapshots that are taken at once."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any

from holdfast import State
from holdfast.dataframe import frame_of
from holdfast.log.manifest import Chain, Manifest
from holdfast.log.snapshot import Snapshot, newest_snapshot
from holdfast.log.storage import Storage
from holdfast.plan.pipeline import Pipeline
from holdfast.plan.program import Program, program_of
from holdfast.runtime.batch import Driver, Proposal
from holdfast.runtime.snapshots import Snapshots
from holdfast.runtime.task import Stores
from holdfast.runtime.view import StateView
from holdfast.sources.iterable import IterableSource
from holdfast.state.codecs import JsonCodec
from holdfast.stores.memory import MemoryStore
from holdfast.testing import LocalRunner, MemoryStorage, MemoryStores

KEYS = 10


def count(record: dict[str, Any], state: State) -> None:
    state.set("n", state.get("n", 0) + 1)
    state.set("last", record["n"])
    state.set("pad", record["pad"])


class Rig:
    """One application; each batch reads `KEYS` records, of as many keys."""

    def __init__(
        self,
        storage: Storage | None = None,
        stores: Stores | None = None,
        *,
        every: timedelta | int | None = 2,
        keep: int = 2,
        partitions: int = 2,
        keys: int = KEYS,
        pad: int = 0,
    ) -> None:
        self.storage: Any = storage or MemoryStorage()
        self.chain = Chain(self.storage)
        self.stores = stores or MemoryStores()
        self.now_ms = 0
        self.later: list[Any] | None = None
        """If it is a list, uploads wait in it."""
        self.in_background = False
        """Whether runs that are started from now on upload beside their batches, as those of an application do."""
        self._every = every
        self._keep = keep
        self._keys = keys
        self._program = _program(partitions, keys, pad)
        self.runner = LocalRunner(self._program, self.storage, self.stores)
        self.snapshots: Snapshots
        self.driver: Driver
        self.start()

    @property
    def head(self) -> Manifest:
        return self.driver.head

    def start(self) -> None:
        """Go on as a new process."""
        self.runner.stores = self.stores
        self.snapshots = Snapshots(
            self.storage, self.runner, every=self._every, keep=self._keep, clock=lambda: self.now_ms, holder="a test",
            **({} if self.in_background else {"start": self._begin}),
        )  # fmt: skip
        self.driver = Driver(
            self.chain,
            self._program,
            self.runner,
            {},
            snapshots=self.snapshots,
            clock=lambda: self.now_ms,
            holder="a test",
        )
        self.driver.start()

    def run(self, batches: int = 1) -> None:
        for _ in range(batches):
            assert self.head.position is not None
            self.now_ms += 1_000
            self.driver.run_batch(Proposal(end={"taken": self.head.position["taken"] + KEYS}))

    def lose_disks(self) -> None:
        self.stores = MemoryStores()
        self.start()

    def counts(self) -> dict[Any, int]:
        """As a view sees it."""
        new_store = MemoryStore if isinstance(self.stores, MemoryStores) else None
        view = StateView(self.chain, "default", JsonCodec(), new_store=new_store)
        return {key: document["n"] for key, document in view.items()}

    def assert_exact(self) -> None:
        assert self.head.position is not None
        assert self.counts() == Counter(f"k{n % self._keys}" for n in range(self.head.position["taken"]))

    def _begin(self, work: Any) -> None:
        if self.later is None:
            work()
        else:
            self.later.append(work)


def _program(partitions: int, keys: int, pad: int) -> Program:
    records = [{"key": f"k{n % keys}", "n": n, "pad": "x" * pad} for n in range(30_000)]
    pipeline = Pipeline(IterableSource(records, "key", None))
    frame_of(pipeline).update(count, stateful=True)
    return program_of("counting", pipeline, JsonCodec(), partitions)


def newest(rig: Rig) -> Snapshot:
    found = newest_snapshot(rig.storage)
    assert found is not None
    return found
