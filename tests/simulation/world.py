"""A simulated world for the commit protocol: one seed, one schedule of faults, one exact answer.

Everything is real but the machine: the driver, the tasks, the log, the recipes and the plan are the library's own;
storage, disks, executors, sinks, Spark's offset log and time are simulated, and fail as the seed says. At the end the last
life runs without faults, and state and output are compared with a plain fold over the input.

The simulated sink has the contract of a table: a version once, with the commit's id. The user function is random on purpose: its
first committed result must be the only one that is ever seen.
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec
from broker import OUTPUT, SimulatedBroker
from machines import Disk, Executors, frozen
from staged import FIRED, add_stages, check_stages

from holdfast.application import cleared
from holdfast.errors import (
    BrokerAway,
    Damaged,
    Fenced,
    ForeignTarget,
    HoldfastError,
    IncompleteJob,
    JobFailed,
    StorageFailed,
    ZombieTask,
)
from holdfast.kafka import cluster, publishing
from holdfast.kafka.publishing import Route
from holdfast.log import manifest, paths
from holdfast.log.files import checksum
from holdfast.log.manifest import Chain, Manifest, SparkBatch
from holdfast.log.recipe import bring, recipe_for
from holdfast.log.snapshot import newest_snapshot
from holdfast.log.storage import Exists
from holdfast.log.verify import Verification
from holdfast.plan.messages import MessageForm
from holdfast.plan.pipeline import Pipeline
from holdfast.plan.program import Program, program_of
from holdfast.plan.record import Chunk
from holdfast.plan.sinks import decode_values
from holdfast.plan.steps import Call
from holdfast.runtime.batch import Driver, Outbox, Proposal
from holdfast.runtime.snapshots import Snapshots
from holdfast.runtime.view import StateView
from holdfast.sinks.kafka import KafkaPublisher
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
    rate: float | None = None
    """Of all faults."""


ANY = Kind()


class World:
    """Everything that outlives a process."""

    def __init__(self, seed: int, kind: Kind = ANY) -> None:
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
            self.kafka = SimulatedBroker(self.chance, Crash, self._maybe_pause)
        self.staged = _given(kind.staged, self.random.random() < 0.2)
        """Whether the program changes the key twice, with timers and ends of values on the way."""
        self.spark = OffsetLog(self)
        self.tables = {"table": Table(), "fired": Table()}
        self.cleared_at: list[int] = []
        self.attic: list[tuple[tuple[str, int], MemoryStore]] = []
        """Local stores of a time line that was abandoned when a checkpoint was put back."""
        self.backup: Any = None
        self.input = [
            {"key": f"k{self.random.randrange(KEYS)}", "n": n, "amount": self.random.randrange(1, 100)}
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

    def _maybe_pause(self) -> None:
        if self.nesting == 0 and self.chance("zombie driver", 0.4):
            pause_and_let_another_run(self)

    def _program(self) -> Program:
        source = IterableSource(self.input, "key", None) if self.ranged else RowsSource()
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

    def joined(self, other: Any) -> NoReturn:
        raise NotImplementedError

    def chunks(self, rows: list[dict[str, Any]], partition: int) -> Iterator[Chunk]:
        mine = [row for row in rows if partition_of(encode_key(row["key"]), PARTITIONS) == partition]
        for start in range(0, len(mine), CHUNK):
            some = mine[start : start + CHUNK]
            positions = range(start, start + len(some))
            yield Chunk([row["key"] for row in some], [dict(row) for row in some], None, positions, None, {})


# -- storage ---------------------------------------------------------------------------------------------------------


class FaultyStorage:
    """The world's storage as one process sees it. Whatever a call does, the process may not live to hear of it."""

    def __init__(self, world: World) -> None:
        self._world = world

    def put(self, name: str, data: bytes) -> None:
        world = self._world
        self._before(pause=4 if name.startswith(paths.COMMITS) else 1)
        if world.chance("put refused", 0.5):
            raise StorageFailed("no answer")
        if not name.startswith(paths.COMMITS) and world.chance("torn write", 0.5):
            world.storage.objects[name] = data[: len(data) // 2]
            raise Crash("torn write")
        if world.chance("delayed write", 0.5):
            world.delayed.append((name, data))
            raise Crash("delayed write")
        world.storage.put(name, data)
        if name.startswith(paths.SNAPSHOTS) and not world.calm:
            world.faults["snapshot taken"] += 1
        if world.chance("answer lost"):
            raise StorageFailed("the answer was lost")
        self._after()

    def get(self, name: str) -> bytes:
        self._before()
        return self._world.storage.get(name)

    def put_file(self, name: str, path: Path) -> None:
        self.put(name, path.read_bytes())

    def get_file(self, name: str, path: Path) -> None:
        path.write_bytes(self.get(name))

    def names(self, prefix: str) -> list[str]:
        return sorted(self.sizes(prefix))

    def sizes(self, prefix: str) -> dict[str, int]:
        self._before()
        return self._world.storage.sizes(prefix)

    def delete(self, name: str) -> None:
        world = self._world
        self._before()
        if name.startswith(paths.COMMITS) and name in world.storage.objects:
            if not world.calm:
                world.faults["cleared up"] += 1
            world.removed.setdefault(paths.version_of(name), world.storage.objects[name])
        world.storage.delete(name)
        self._after()

    def _before(self, *, pause: int = 1) -> None:
        world = self._world
        land_delayed(world)
        if world.zombies and world.random.random() < 0.1:
            world.zombies.pop(world.random.randrange(len(world.zombies)))()
        if world.nesting == 0 and world.chance("zombie driver", 0.4 * pause):
            pause_and_let_another_run(world)
        if world.chance("crash before a storage call"):
            raise Crash("before")

    def _after(self) -> None:
        if self._world.chance("crash after a storage call"):
            raise Crash("after")


def land_delayed(world: World) -> None:
    """A write that was on its way when its process died arrives now, or never."""
    if world.delayed and world.random.random() < 0.2:
        name, data = world.delayed.pop()
        if world.random.random() < 0.7:
            with suppress(Exists):
                world.storage.put(name, data)


def pause_and_let_another_run(world: World) -> None:
    """The process stands still here, like one that got SIGSTOP, while another driver takes over; then it goes on."""
    world.nesting += 1
    try:
        for _ in range(world.sleep):
            Life(world).live(batches=world.random.randrange(0, 4))
    finally:
        world.nesting -= 1


# -- sink and Spark ------------------------------------------------------------------------------------------------------


class Table:
    """The contract of holdfast/sinks/table.py without its files."""

    def __init__(self) -> None:
        self.owner: str | None = None
        self.versions: dict[int, tuple[str, list[dict[str, Any]]]] = {}

    def rows(self) -> list[dict[str, Any]]:
        return [row for version in sorted(self.versions) for row in self.versions[version][1]]


class TableTarget:
    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self._name = name

    def prepare(self, head: Manifest) -> None:
        table = self._world.tables[self._name]
        if table.owner not in (None, head.instance) or max(table.versions, default=0) > head.version:
            raise ForeignTarget("the table is ahead or another's")
        table.owner = head.instance

    def deliver(self, manifest: Manifest, outbox: Outbox) -> None:
        world = self._world
        if world.chance("crash before a storage call"):
            raise Crash("before delivery")
        rows = [value for table in outbox.tables() for value, _, _ in decode_values(table)]
        known = world.tables[self._name].versions.setdefault(manifest.version, (manifest.id, rows))
        if known[0] != manifest.id:
            world.wrong.append("two commits of one version were delivered")
        if world.chance("crash after a storage call"):
            raise Crash("after delivery")


class SimulatedPublisher(KafkaPublisher):
    """The library's own, on a simulated cluster; who publishes is random."""

    def __init__(self, world: World, chain: Chain, executors: Executors) -> None:
        program = world.program
        route = Route(
            connection=world.kafka,  # type: ignore[arg-type]
            group="sim",
            sources=(),
            topics={"output": OUTPUT, "fired": FIRED} if world.staged else {"output": OUTPUT},
            changelogs={store: f"changelog of {store}" for store in program.stores},
            homes={store: (stage.first, stage.partitions) for stage in program.stages for store in stage.stores},
            codecs=program.codecs(),
            exactly_once=True,
            largest=1 << 20,
        )
        super().__init__(route, chain, executors, program.all_partitions, several=world.staged)
        self._world = world

    def way(self, rows: int, head: Manifest) -> Any:
        return "driver" if self._several else self._world.random.choice(("driver", "tasks"))


class OffsetLog:
    """Spark's side: offsets are planned and written down, then the batch runs, then it is logged as done."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.query = 0
        self.planned: list[int] = []
        self.done = 0

    def forget(self) -> None:
        """A new checkpoint, so a new query that begins where the chain stands."""
        self.query += 1
        self.planned, self.done = [], 0

    def restart(self) -> None:
        """What a new driver finds. Entries that were never synced may be gone, for a source that can bear it."""
        world = self._world
        if world.ranged and self.planned and world.chance("Spark's last offset lost", 3):
            self.planned.pop()
            self.done = min(self.done, len(self.planned))
        if world.ranged and world.chance("Spark's checkpoint deleted", 3):
            self.forget()
        if self.done and self._is_remembered(self.done - 1) and world.chance("Spark replays a batch", 3):
            self.done -= 1

    def _is_remembered(self, batch: int) -> bool:
        """Spark replays the last batch, which is never so old that its manifest is gone."""
        names = self._world.storage.names(paths.COMMITS)
        first = Chain(self._world.storage).read(paths.version_of(names[0])) if names else None
        return first is None or first.spark is None or first.spark.batch <= batch

    def log_done(self, batch: int) -> None:
        """The batch returned. A zombie may say so of a log that has been replaced meanwhile."""
        self.done = min(max(self.done, batch + 1), len(self.planned))

    def next(self, head: Manifest) -> tuple[int, Proposal] | None:
        """The next batch to run; None at the end of the input."""
        world = self._world
        batch = self.done
        if batch == len(self.planned):
            start = self.planned[-1] if self.planned else (head.position or {"taken": 0})["taken"]
            end = min(RECORDS, start + world.random.randrange(1, 9))
            if start >= RECORDS and (head.position is None or head.position["taken"] >= RECORDS):
                return None
            self.planned.append(end)
        end = self.planned[batch]
        start = self.planned[batch - 1] if batch else 0
        identity = SparkBatch(f"query-{self.query}", batch, f"{start}-{end}")
        if world.ranged:
            return batch, Proposal(identity, end={"taken": end})
        return batch, Proposal(identity, rows=world.input[start:end])


# -- lives -----------------------------------------------------------------------------------------------------------------


class WatchedChain(Chain):
    """Remembers what it has called committed."""

    def __init__(self, world: World, storage: FaultyStorage) -> None:
        super().__init__(storage, pause=lambda seconds: None)
        self._world = world

    def commit(self, manifest: Manifest, *, tries: int = 5) -> Manifest:
        committed = super().commit(manifest, tries=tries)
        self._world.promised.append((committed.version, committed.id))
        return committed


class Life:
    """One process: a driver from its start to its end, whatever that is."""

    def __init__(self, world: World) -> None:
        self._world = world

    def live(self, batches: int) -> bool:
        """Run up to `batches` batches; whether the input is finished."""
        world = self._world
        storage = FaultyStorage(world)
        world.spark.restart()
        chain = WatchedChain(world, storage)
        executors = Executors(world, storage)
        publisher = None if world.kafka is None else SimulatedPublisher(world, chain, executors)
        targets = {sink.id: TableTarget(world, sink.id) for sink in world.program.sinks}
        driver = Driver(
            chain, world.program, executors, targets if publisher is None else {},
            publisher=publisher, snapshots=self._snapshots(storage, executors),
            clock=lambda: world.random.randrange(1000), holder="sim",
        )  # fmt: skip
        try:
            driver.start()
            for _ in range(batches):
                if driver.is_due() and world.random.random() < 0.5:
                    driver.run_batch(Proposal(end=driver.head.position))
                planned = world.spark.next(driver.head)
                if planned is None:
                    return self._fire_the_rest(driver)
                number, proposal = planned
                driver.run_batch(proposal)
                world.spark.log_done(number)
        except Crash:
            return False
        except (Fenced, ZombieTask, IncompleteJob, JobFailed, StorageFailed, ForeignTarget, BrokerAway):
            if world.calm:
                raise
        return False

    def _snapshots(self, storage: FaultyStorage, executors: Executors) -> Snapshots:
        world = self._world

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

    def _fire_the_rest(self, driver: Driver) -> bool:
        """The input is at its end: go on until nothing is due."""
        for _ in range(20):
            if not driver.is_due():
                return True
            driver.run_batch(Proposal(end=driver.head.position))
        assert not self._world.calm, "something is due for ever"
        return False


def between_lives(world: World) -> None:
    """What happens to machines, and what people do, while nothing runs."""
    check_newest_snapshot(world)
    if world.chance("disk lost", 3):
        host = world.random.randrange(len(world.hosts))
        world.hosts[host].clear()
        world.copies[host] = MemoryStores()
    if world.chance("disk put back from a backup", 20 * world.regret if world.attic else 3):
        put_disks_back(world)
    if world.chance("state cleared", 2):
        clear(world)
    if world.chance("file damaged", 3):
        damage_and_mend(world)
    if world.backup is None and world.random.random() < 0.5 and not world.delayed:
        world.backup = take_backup(world)
    elif world.backup is not None and world.chance("checkpoint put back from a backup", 6 * world.regret):
        put_back(world)


def put_disks_back(world: World) -> None:
    """Old local stores return: of this chain, or of one that was abandoned."""
    for disks in world.hosts:
        for disk in (disk for slots in disks.values() for disk in slots):
            if disk.flushed:
                disk.store = frozen(disk.flushed[0])
    head = Chain(world.storage).head()
    for name, store in sorted(world.attic, key=lambda kept: kept[1].mark().version):
        if head is not None and store.mark().version <= head.version:
            for disks in world.hosts:
                disks[name] = [Disk(frozen(store))]


def remove_stores_that_are_ahead(world: World) -> None:
    """What `ZombieTask` tells people to do after a checkpoint was put back."""
    head = Chain(world.storage).head()
    for disks in world.hosts:
        for slots in disks.values():
            slots[:] = [disk for disk in slots if head is not None and disk.store.mark().version <= head.version]


def clear(world: World) -> None:
    chain = Chain(world.storage)
    head = chain.head()
    if head is not None:
        chain.commit(cleared(head))
        world.cleared_at.append(len(committed_records(world)))


def take_backup(world: World) -> Any:
    return deepcopy(
        (
            world.storage.objects,
            world.tables,
            world.spark.query,
            world.spark.planned,
            world.spark.done,
            world.cleared_at,
        )
    ), (None if world.kafka is None else deepcopy((world.kafka.topics, world.kafka.offsets)))


def put_back(world: World) -> None:
    """Someone puts the checkpoint back but not the table and the local disks: it must be noticed. Then they do it right."""
    (objects, tables, query, planned, done, cleared_at), cluster = world.backup
    ahead = world.last_delivered() > max(
        (paths.version_of(n) for n in objects if n.startswith(paths.COMMITS)), default=-1
    )
    world.delayed.clear()
    world.zombies.clear()
    abandoned, world.storage.objects = world.storage.objects, dict(objects)
    if ahead:
        calm, world.calm = world.calm, True
        try:
            Life(world).live(batches=1)
        except (ForeignTarget, ZombieTask):
            pass
        else:
            raise AssertionError("a checkpoint that is older than the table was accepted")
        finally:
            world.calm = calm
    world.storage.objects = dict(objects)
    last = max((paths.version_of(name) for name in objects if name.startswith(paths.COMMITS)), default=-1)
    world.removed = {version: data for version, data in world.removed.items() if version <= last}
    world.promised = [(version, identity) for version, identity in world.promised if version <= last]
    if world.random.random() < 0.5:  # they forget two directories
        for name in abandoned:
            if name.startswith((paths.SNAPSHOTS, paths.SNAPSHOT_FILES)) and name not in objects:
                world.storage.objects[name] = abandoned[name]
                world.faults["snapshots of another time line"] += 1
    world.tables = deepcopy(tables)
    if world.kafka is not None:
        world.kafka.topics, world.kafka.offsets = deepcopy(cluster)
        world.kafka.open.clear()
    world.spark.query, world.spark.planned, world.spark.done = query, list(planned), done
    world.cleared_at = list(cleared_at)
    for disks in world.hosts:
        world.attic += [
            (name, store) for name, slots in disks.items() for disk in slots for store in (disk.store, *disk.flushed)
        ]
        disks.clear()
    world.backup = None


def damage_and_mend(world: World) -> None:
    """A file is damaged: a life that reads it must say so and change nothing; then the file is mended."""
    names = world.storage.names(paths.DELTAS) + world.storage.names(paths.COMMITS)
    snapshots = world.storage.names(paths.SNAPSHOTS) + world.storage.names(paths.SNAPSHOT_FILES)
    if snapshots and world.random.random() < 0.8:
        names = snapshots
        world.faults["snapshot damaged"] += 1
    if not names:
        return
    name = world.random.choice(names)
    whole = world.storage.objects[name]
    kind = world.random.randrange(3)
    before = dict(world.storage.objects)
    if kind == 0 or not whole:
        del world.storage.objects[name]
    elif kind == 1:
        world.storage.objects[name] = whole[: world.random.randrange(len(whole))]
    else:
        at = world.random.randrange(len(whole))
        world.storage.objects[name] = (
            whole[:at] + bytes([whole[at] ^ (1 << world.random.randrange(8))]) + whole[at + 1 :]
        )
    for disks in world.hosts:
        disks.clear()
    if not name.startswith(paths.COMMITS):
        check_view_is_right_or_refuses(world)
    else:
        try:
            Chain(world.storage).read(paths.version_of(name))
        except HoldfastError:
            pass
        else:
            assert world.storage.objects.get(name) == whole, f"damage in {name} was not noticed"
    world.storage.objects = before


def check_newest_snapshot(world: World) -> None:
    """What a restore would begin with is whole."""
    if not world.storage.names(paths.COMMITS):
        return
    newest = newest_snapshot(world.storage)
    for file in (file for part in newest.partitions for file in part.files) if newest is not None else ():
        assert file.name in world.storage.objects, "the newest snapshot names a file that is not there"
        assert checksum(world.storage.objects[file.name]) == file.checksum, "the newest snapshot names another file"


def check_view_is_right_or_refuses(world: World) -> None:
    try:
        state = dict(StateView(Chain(world.storage), "default", JsonCodec(), new_store=MemoryStore).items())
    except Damaged:
        return
    expected, _ = fold(world, committed_records(world))
    assert totals(state) == expected, "a damaged delta gave a wrong value"


# -- the answer ------------------------------------------------------------------------------------------------------------


def committed_records(world: World) -> list[dict[str, Any]]:
    head = Chain(world.storage).head()
    assert head is not None
    if world.ranged:
        return world.input[: head.position["taken"]]  # type: ignore[index]
    return world.input[: 0 if head.spark is None else int(head.spark.offsets.split("-")[1])]


def fold(world: World, records: list[dict[str, Any]]) -> tuple[dict[str, int], list[tuple[str, int, int]]]:
    """State and output as they must be: the plainest program that could compute them."""
    state: dict[str, int] = {}
    output = []
    for n, record in enumerate(records):
        if n in world.cleared_at:
            state.clear()
        state[record["key"]] = state.get(record["key"], 0) + record["amount"]
        output.append((record["key"], record["n"], state[record["key"]]))
    if len(records) in world.cleared_at:
        state.clear()
    return state, output


def totals(state: dict[str, Any]) -> dict[str, int]:
    return {key: document["total"] for key, document in state.items()}


def check_changelog(world: World, chain: Chain) -> None:
    """The changelogs add up to the state at the last version, partition by partition."""
    if world.kafka is None:
        return
    head = chain.head()
    assert head is not None
    for stage in world.program.stages:
        for local, partition in enumerate(stage.range):
            store = MemoryStore()
            bring(store, world.storage, recipe_for(chain, head, partition))
            found: dict[bytes, bytes] = {}
            for name in stage.stores:
                milestone, documents = world.kafka.changelog(name, local)
                assert milestone is not None and milestone.version == head.version
                found |= documents
            assert found == dict(store.scan(b"d", b"e")), "the changelog holds another state"


def check_verification(world: World) -> None:
    """Nothing is wrong with a checkpoint that has come through everything, but for what harms nobody: a mark may be torn, and
    a snapshot damaged or of a time line that was abandoned."""
    damage = [finding.name for finding in Verification(world.storage).findings() if finding.kind == "damage"]
    harmless = (paths.DELIVERED, paths.SNAPSHOTS, paths.SNAPSHOT_FILES)
    assert not [name for name in damage if not name.startswith(harmless)], f"said to be damaged: {damage}"


def simulate(seed: int, kind: Kind = ANY) -> Counter[str]:
    """One schedule from one seed; raises if anything is not exact. Returns the faults that happened."""
    random.seed(seed)
    world = World(seed, kind)
    entropy, manifest.entropy = manifest.entropy, world.random.randbytes
    clock = Clock()
    real = publishing.time, cluster.time, publishing.ThreadPoolExecutor, publishing._within
    memory = Path("/dev/shm")  # copies of stores are files; those on a disk would take most of the time
    tempdir, tempfile.tempdir = tempfile.tempdir, str(memory) if memory.is_dir() else None
    publishing.time = cluster.time = clock  # type: ignore[assignment]
    publishing.ThreadPoolExecutor = OneByOne  # type: ignore[misc, assignment]
    publishing._within = lambda seconds, call: call()
    try:
        run_schedule(world)
    finally:
        manifest.entropy = entropy
        tempfile.tempdir = tempdir
        publishing.time, cluster.time, publishing.ThreadPoolExecutor, publishing._within = real  # type: ignore[misc]
    return world.faults


class OneByOne:
    """A pool without threads: a schedule is the same each time."""

    def __init__(self, workers: int) -> None:
        self.map = map

    def __enter__(self) -> OneByOne:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is left to do."""


class Clock:
    """Time passes only for those who wait."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def run_schedule(world: World) -> None:
    for _ in range(world.random.randrange(2, 8)):
        Life(world).live(batches=world.random.randrange(1, 6))
        between_lives(world)
    world.calm = True
    while world.delayed:
        land_delayed(world)
    while world.zombies:
        world.zombies.pop()()
    remove_stores_that_are_ahead(world)
    finished = False
    while not finished:
        finished = Life(world).live(batches=50)
    check(world)


def check(world: World) -> None:
    chain = Chain(world.storage)
    state = dict(StateView(chain, "default", JsonCodec(), new_store=MemoryStore).items())
    expected_state, expected_output = fold(world, world.input)
    assert len(committed_records(world)) == RECORDS
    check_newest_snapshot(world)
    assert totals(state) == expected_state
    rows = world.rows()
    assert sorted((row["key"], row["n"], row["total"]) for row in rows) == sorted(expected_output)
    for key in expected_state:
        mine = [row for row in rows if row["key"] == key]
        assert [row["n"] for row in mine] == sorted(row["n"] for row in mine), "out of order"
        assert state[key]["nonce"] == mine[-1]["nonce"], "state and output are of different attempts"
    check_changelog(world, chain)
    if world.staged:
        check_stages(world)
    check_verification(world)
    assert not world.wrong, world.wrong
    manifests = all_manifests(world)
    assert sum(commit.rows_in for one in manifests for commit in one.partitions) == RECORDS
    identities = {one.version: one.id for one in manifests}
    assert all(identities[version] == identity for version, identity in world.promised), "a commit has come to nothing"


def all_manifests(world: World) -> list[Manifest]:
    """The whole chain, from what is there and what retention has removed; each checked to continue the one before it."""
    chain = Chain(world.storage)
    head = chain.head()
    assert head is not None
    found = [head]
    while found[-1].version > 0:
        version = found[-1].version - 1
        name = paths.manifest(version)
        data = world.removed.get(version) or world.storage.objects[name]
        found.append(manifest.decode(name, data))
        assert found[-1].id == found[-2].parent, "the chain is broken"
    return found
