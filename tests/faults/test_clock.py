"""The clock jumps by an hour, either way, once or at every batch.

Processing time never goes back, timers fire once, nothing is lost, snapshots neither stop nor come in a storm, and a reader
that holds a pin is protected or begins again.
"""

from __future__ import annotations

import random
from collections import Counter
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from machine import Machine, run_batch

from holdfast import State
from holdfast.log import paths
from holdfast.log.manifest import Manifest
from holdfast.log.pins import LEASE_MS, Lease, oldest_pin
from holdfast.log.snapshot import versions
from holdfast.testing import Harness, MemoryStorage

MINUTE = 60_000
HOUR = 60 * MINUTE
START = 1_700_000_000_000


class Clock:
    def __init__(self) -> None:
        self.now_ms = START

    def __call__(self) -> int:
        return self.now_ms


@pytest.mark.parametrize("jump", [HOUR, -HOUR], ids=["forward", "back"])
def test_a_jump_loses_nothing_and_snapshots_go_on_at_their_pace(home: Path, jump: int) -> None:
    clock = Clock()
    machine = Machine(home, every=timedelta(minutes=10), keep=99)
    machine.clock = clock
    manifests: list[Manifest] = []
    driver = machine.start()
    for number in range(30):
        clock.now_ms += 2 * MINUTE + (jump if number == 14 else 0)
        manifests.append(run_batch(driver))
    times = [manifest.time_ms for manifest in manifests]
    assert all(before <= after for before, after in pairwise(times)), "processing time went back"
    assert abs(clock.now_ms - START - jump) == 30 * 2 * MINUTE, "the clock has not jumped"
    taken = versions(machine.storage)
    before, after = [v for v in taken if v < 14], [v for v in taken if v >= 14]
    assert len(before) == 2
    assert 3 <= len(after) <= 4, f"a pause or a storm of snapshots: {taken}"
    machine.check_exact()
    machine.check_goes_on()


def test_a_clock_that_jumps_at_every_batch_and_restart_loses_nothing(home: Path, choice: random.Random) -> None:
    clock = Clock()
    machine = Machine(home, every=timedelta(minutes=10))
    machine.clock = clock
    jumps: Counter[int] = Counter()
    for _ in range(4):
        driver = machine.start()
        for _ in range(5):
            jump = choice.choice([-HOUR, HOUR])
            jumps[jump] += 1
            clock.now_ms += jump
            run_batch(driver)
    assert len(jumps) == 2
    machine.check_exact()


@pytest.mark.parametrize("jump", [HOUR, -HOUR], ids=["forward", "back"])
def test_a_timer_fires_once_and_not_before_its_time(jump: int) -> None:
    def remind(value: int, key: Any, timestamp: int, headers: Any, state: State) -> list[Any]:
        state.set_timer(f"{value}", clock.now_ms + 30 * MINUTE, clock="processing")
        state.set("short", value, ttl=timedelta(minutes=30))
        return []

    def fire(key: str, name: str, state: State) -> list[Any]:
        return [(name, harness.now_ms)]

    clock = Clock()
    harness = Harness(
        lambda sdf: sdf.apply(remind, stateful=True, metadata=True, expand=True, on_timer=fire).apply(tuple)
    )
    fired: Counter[str] = Counter()
    for number in range(40):
        clock.now_ms += 5 * MINUTE + (jump if number == 10 else 0)
        harness.now_ms = clock.now_ms
        if number < 20:
            harness.feed(("key", number))
        harness.run()
        if number == 10:
            harness.restart()
    fired = Counter(name for name, _ in harness.values)
    assert fired == Counter(map(str, range(20))), "a timer has fired twice or not at all"
    assert dict(harness.state().items()) == {}, "a value has outlived its end"


@pytest.mark.parametrize("jump", [HOUR, -HOUR], ids=["forward", "back"])
def test_a_reader_that_renews_its_pin_is_protected_after_a_jump(jump: int) -> None:
    clock = Clock()
    storage = MemoryStorage()
    lease = Lease(storage, 3, clock)
    clock.now_ms += jump
    assert oldest_pin(storage, clock.now_ms) is None  # of a time that is not now
    lease.renew()
    assert oldest_pin(storage, clock.now_ms) == 3
    clock.now_ms += LEASE_MS // 3
    lease.renew()
    assert oldest_pin(storage, clock.now_ms) == 3
    lease.end()
    assert not storage.names(paths.PINS)
