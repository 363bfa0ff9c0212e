"""What stands around a driver: the table that it writes, the cluster that it publishes to, and Spark's offset log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from broker import OUTPUT
from machines import Executors
from staged import FIRED

from holdfast.errors import ForeignTarget
from holdfast.kafka.publishing import Route
from holdfast.log import paths
from holdfast.log.manifest import Chain, Manifest, SparkBatch
from holdfast.plan.sinks import decode_values
from holdfast.runtime.batch import Proposal
from holdfast.runtime.delivery import Outbox
from holdfast.sinks.kafka import KafkaPublisher
from holdfast.testing import Crash

if TYPE_CHECKING:
    from world import World


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
        is_last = self.done == len(self.planned) > 0  # it never goes back by two
        if is_last and self._is_remembered(self.done - 1) and world.chance("Spark replays a batch", 3):
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
            end = min(len(world.input), start + world.random.randrange(1, 9))
            if start >= len(world.input) and (head.position is None or head.position["taken"] >= len(world.input)):
                return None
            self.planned.append(end)
        end = self.planned[batch]
        start = self.planned[batch - 1] if batch else 0
        identity = SparkBatch(f"query-{self.query}", batch, f"{start}-{end}")
        if world.ranged:
            return batch, Proposal(identity, end={"taken": end})
        return batch, Proposal(identity, rows=world.input[start:end])
