"""What happens to machines, and what people do, while nothing runs."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

from answer import check_newest_snapshot, check_view_is_right_or_refuses, committed_records
from lives import live
from machines import Disk, frozen
from readers import read_asleep

from holdfast.errors import ForeignTarget, HoldfastError, ZombieTask
from holdfast.log import paths
from holdfast.log.manifest import Chain, cleared
from holdfast.testing import MemoryStores

if TYPE_CHECKING:
    from world import World


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
    if world.random.random() < 0.2 * world.readers:
        read_asleep(world)
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
            live(world, batches=1)
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
