"""A simulated world for the commit protocol: one seed, one schedule of faults, one exact answer.

Everything is real but the machine: the driver, the tasks, the log, the recipes and the plan are the library's own;
storage, disks, executors, sinks, Spark's offset log and time are simulated, and fail as the seed says. At the end the last
life runs without faults, and state and output are compared with a plain fold over the input.

The simulated sink has the contract of a table: a version once, with the commit's id. The user function is random on purpose: its
first committed result must be the only one that is ever seen.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec
from broker import OUTPUT, SimulatedBroker
from machines import Disk
from staged import FIRED, add_stages, event_time
from surroundings import OffsetLog, Table

from holdfast.plan.messages import MessageForm
from holdfast.plan.pipeline import Pipeline
from holdfast.plan.program import Program, program_of
from holdfast.plan.record import Chunk
from holdfast.plan.steps import Call
from holdfast.sources.iterable import IterableSource
from holdfast.state.codecs import JsonCodec
from holdfast.state.keys import encode_key, partition_of
from holdfast.stores.memory import MemoryStore
from holdfast.testing import Crash, MemoryStorage, MemoryStores

FAULTS = (
    "crash before a storage call",
    "crash after a storage call",
    "answer lost",
    "put refused",
    "torn write",
    "delayed write",
    "task lost",
    "task run twice",
    "receipt returned twice",
    "receipt lost",
    "stage computed again",
    "zombie task",
    "zombie driver",
    "disk lost",
    "disk put back from a backup",
    "store damaged",
    "store rolled back by a kill",
    "checkpoint put back from a backup",
    "file damaged",
    "Spark's last offset lost",
    "Spark's checkpoint deleted",
    "Spark replays a batch",
    "state cleared",
    "crash before a call of Kafka",
    "crash after a commit of Kafka",
    "Kafka does not answer",
    "Kafka's answer lost",
    "zombie publisher",
    "snapshot taken",
    "upload delayed",
    "upload crashed",
    "cleared up",
    "snapshots of another time line",
    "snapshot damaged",
    "reader slept",
    "reader began again",
)
T = TypeVar("T")
RECORDS = 36
KEYS = 5
PARTITIONS = 2
CHUNK = 2
"""Rows that a task is given at a time, where Spark reads."""


class Kind(msgspec.Struct, frozen=True):
    """What a schedule is about; None: as the seed says."""

    staged: bool | None = None
    kafka: bool | None = None
    ranged: bool | None = None
    snapshot_every: int | None = None
    keep: int | None = None
    delay: int | None = None
    """How likely an upload is to be late."""
    sleep: int | None = None
    """How many lives others live while a process stands still."""
    regret: int | None = None
    """How many times as often as else a checkpoint is put back from a backup."""
    readers: int | None = None
    """How many times as often as else somebody reads the state while others go on."""
    rate: float | None = None
    """Of all faults."""


ANY = Kind()


class World:
    """Everything that outlives a process."""

    def __init__(self, seed: int, kind: Kind, live: Callable[[World, int], bool]) -> None:
        self._live = live
        self.random = random.Random(seed)
        self.faults: Counter[str] = Counter()
        self.calm = False
        """The last life: nothing fails any more."""
        self.storage = MemoryStorage()
        self.hosts: list[dict[tuple[str, int], list[Disk]]] = [{}, {}]
        self.copies = [MemoryStores(), MemoryStores()]
        """By host: copies of stores on their way to a snapshot."""
        self.snapshot_every = _given(kind.snapshot_every, self.random.choice((1, 1, 2, 4)))
        self.keep = _given(kind.keep, self.random.choice((1, 2)))
        self.delay = _given(kind.delay, self.random.choice((3, 10)))
        self.sleep = _given(kind.sleep, self.random.choice((1, 1, 1, 4)))
        self.regret = _given(kind.regret, self.random.choice((1, 1, 1, 10)))
        self.readers = _given(kind.readers, 1)
        self.removed: dict[int, bytes] = {}
        """The manifests that retention has removed, by version."""
        self.promised: list[tuple[int, str]] = []
        """What a driver was told is committed: version and manifest."""
        self.wrong: list[str] = []
        """What no driver may do, seen where it could take an exception for something else."""
        self.delayed: list[tuple[str, bytes]] = []
        self.zombies: list[Callable[[], Any]] = []
        self.nesting = 0
        self.ranged = _given(kind.ranged, self.random.random() < 0.6)
        self.kafka: SimulatedBroker | None = None
        if _given(kind.kafka, self.random.random() < 0.5):
            self.kafka = SimulatedBroker(self.chance, Crash, self.maybe_pause)
        self.staged = _given(kind.staged, self.random.random() < 0.2)
        """Whether the program changes the key twice, with timers and ends of values on the way."""
        self.spark = OffsetLog(self)
        self.tables = {"table": Table(), "fired": Table()}
        self.cleared_at: list[int] = []
        self.attic: list[tuple[tuple[str, int], MemoryStore]] = []
        """Local stores of a time line that was abandoned when a checkpoint was put back."""
        self.backup: Any = None
        self.input = [
            {
                "key": f"k{self.random.randrange(KEYS)}",
                "n": n,
                "amount": self.random.randrange(1, 100),
                "at": event_time(n),
            }
            for n in range(RECORDS)
        ]
        self.program = self._program()
        self.rate = _given(kind.rate, self.random.choice((0.01, 0.03, 0.08)))

    def chance(self, fault: str, weight: float = 1.0) -> bool:
        """Whether `fault` happens now; counts it."""
        if self.calm or self.random.random() >= self.rate * weight:
            return False
        self.faults[fault] += 1
        return True

    def rows(self) -> list[dict[str, Any]]:
        """What was delivered."""
        return self.tables["table"].rows() if self.kafka is None else self.kafka.rows(OUTPUT)

    def fired(self) -> list[dict[str, Any]]:
        """What timers have sent."""
        return self.tables["fired"].rows() if self.kafka is None else self.kafka.rows(FIRED)

    def last_delivered(self) -> int:
        if self.kafka is not None:
            return self.kafka.last_version()
        return max((version for table in self.tables.values() for version in table.versions), default=-1)

    def maybe_pause(self, weight: float = 1.0) -> None:
        """The process stands still here, like one that got SIGSTOP, while another driver takes over; then it goes on."""
        if self.nesting or not self.chance("zombie driver", 0.4 * weight):
            return
        self.nesting += 1
        try:
            for _ in range(self.sleep):
                self._live(self, self.random.randrange(0, 4))
        finally:
            self.nesting -= 1

    def _program(self) -> Program:
        source = IterableSource(self.input, "key", "at") if self.ranged else RowsSource()
        pipeline = Pipeline(source)
        first = pipeline.stages[0]
        node = pipeline.add_call(first, first.entry, Call("apply", running_total, stateful=True))
        if self.kafka is not None:
            pipeline.add_sink(node, "output", MessageForm(OUTPUT, str.encode, msgspec.json.encode), None)
        else:
            pipeline.add_sink(node, "table", "values", lambda context: None)
        if self.staged:
            add_stages(pipeline, node, None if self.kafka is None else MessageForm(FIRED, str, msgspec.json.encode))
        return program_of("sim", pipeline, JsonCodec(), PARTITIONS)


def _given(chosen: T | None, drawn: T) -> T:
    return drawn if chosen is None else chosen


def running_total(order: dict[str, Any], state: Any) -> dict[str, Any]:
    total = state.get("total", 0) + order["amount"]
    nonce = random.random()
    state.set("total", total)
    state.set("nonce", nonce)
    return {"key": order["key"], "n": order["n"], "total": total, "nonce": nonce}


class RowsSource:
    """A source that Spark reads: rows come with the batch."""

    kind = "spark"
    name = "rows"
    names: tuple[str, ...] = ("rows",)

    def chunks(self, rows: list[dict[str, Any]], partition: int) -> Iterator[Chunk]:
        mine = [row for row in rows if partition_of(encode_key(row["key"]), PARTITIONS) == partition]
        for start in range(0, len(mine), CHUNK):
            some = mine[start : start + CHUNK]
            positions = range(start, start + len(some))
            yield Chunk(
                [row["key"] for row in some], [dict(row) for row in some], [row["at"] for row in some], positions
            )
