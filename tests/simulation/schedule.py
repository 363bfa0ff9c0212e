"""A schedule: lives and mishaps as the seed says, then a calm life, then the check of everything."""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from pathlib import Path

from answer import check
from faulty_storage import land_delayed
from lives import live
from mishaps import between_lives, remove_stores_that_are_ahead
from world import ANY, Kind, World

from holdfast.kafka import cluster, publishing
from holdfast.log import manifest, pins


def simulate(seed: int, kind: Kind = ANY) -> Counter[str]:
    """One schedule from one seed; raises if anything is not exact. Returns the faults that happened."""
    random.seed(seed)
    world = World(seed, kind, live)
    entropy, manifest.entropy = manifest.entropy, world.random.randbytes
    clock = Clock()
    real = publishing.time, cluster.time, publishing.ThreadPoolExecutor, publishing._within
    memory = Path("/dev/shm")  # copies of stores are files; those on a disk would take most of the time
    tempdir, tempfile.tempdir = tempfile.tempdir, str(memory) if memory.is_dir() else None
    publishing.time = cluster.time = clock  # type: ignore[assignment]
    wall_clock, pins.now_ms = pins.now_ms, lambda: 0  # the drivers' clocks are near it
    publishing.ThreadPoolExecutor = OneByOne  # type: ignore[misc, assignment]
    publishing._within = lambda seconds, call: call()
    try:
        run_schedule(world)
    finally:
        manifest.entropy = entropy
        pins.now_ms = wall_clock
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
        live(world, batches=world.random.randrange(1, 6))
        between_lives(world)
    world.calm = True
    while world.delayed:
        land_delayed(world)
    while world.zombies:
        world.zombies.pop()()
    remove_stores_that_are_ahead(world)
    finished = False
    while not finished:
        finished = live(world, batches=50)
    check(world)
