"""A run that the fault tests kill: running totals over numbered orders, with snapshots and retention.

python program.py <home> --batches N
    --every N --keep N            snapshots
    --dies-at delete:3            SIGKILL at the third call of that verb of the storage, or at the third time at a failpoint;
                                  "write" is when a file is written and not yet under its name
    --disturbed SEED              the storage is slow, fails and loses answers, and the clock jumps; uploads run beside the
                                  batches
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from machine import Machine, run_batch

from holdfast import failpoints
from holdfast.errors import StorageFailed
from holdfast.log.storage import LocalStorage
from holdfast.runtime.snapshots import _in_background

HOUR_MS = 3_600_000
SLOW, FAILS, LOST, JUMPS = 0.02, 0.003, 0.003, 0.02
"""How often a call of the storage, or of the clock, is disturbed."""


class Deadly(LocalStorage):
    """A storage whose n-th call of a verb is the last: of two calls, one is counted before and one after it is carried out."""

    def __init__(self, root: Path, verb: str, number: int, home: Path) -> None:
        super().__init__(root, durable=False)
        self._verb = verb
        self._left = number
        self._home = home

    def _count(self, verb: str) -> None:
        if verb == self._verb:
            self._left -= 1
            if self._left == 0:
                die(self._home)

    def _create(self, name: str, write: Callable[[BinaryIO], object]) -> None:
        def deadly(file: BinaryIO) -> None:
            write(file)
            self._count("write")

        super()._create(name, deadly)

    def put(self, name: str, data: bytes) -> None:
        self._count("put")
        super().put(name, data)
        self._count("put")

    def put_file(self, name: str, path: Path) -> None:
        self._count("put_file")
        super().put_file(name, path)
        self._count("put_file")

    def delete(self, name: str) -> None:
        self._count("delete")
        super().delete(name)
        self._count("delete")


class Disturbed(LocalStorage):
    """A storage that is slow, fails before it has done anything, or fails after it has done it."""

    def __init__(self, root: Path, choice: random.Random, home: Path) -> None:
        super().__init__(root, durable=False)
        self._choice = choice
        self._home = home

    def _before(self) -> None:
        drawn = self._choice.random()
        if drawn < SLOW:
            note(self._home, "slow storage")
            time.sleep(self._choice.uniform(0.01, 0.2))
        elif drawn < SLOW + FAILS:
            note(self._home, "failing storage")
            raise StorageFailed("no answer")

    def _after(self) -> None:
        if self._choice.random() < LOST:
            note(self._home, "lost answer")
            raise StorageFailed("no answer")

    def put(self, name: str, data: bytes) -> None:
        self._before()
        super().put(name, data)
        self._after()

    def put_file(self, name: str, path: Path) -> None:
        self._before()
        super().put_file(name, path)
        self._after()

    def get(self, name: str) -> bytes:
        self._before()
        return super().get(name)

    def get_file(self, name: str, path: Path) -> None:
        self._before()
        super().get_file(name, path)

    def delete(self, name: str) -> None:
        self._before()
        super().delete(name)
        self._after()


class JumpingClock:
    """Now and then an hour before or after the time."""

    def __init__(self, choice: random.Random, home: Path) -> None:
        self._choice = choice
        self._home = home
        self._off_ms = 0

    def __call__(self) -> int:
        if self._choice.random() < JUMPS:
            note(self._home, "clock jump")
            self._off_ms = self._choice.choice([-HOUR_MS, HOUR_MS, 0])
        return time.time_ns() // 1_000_000 + self._off_ms


def note(home: Path, kind: str) -> None:
    """A fault has happened."""
    with (home / "happened").open("a") as file:
        file.write(f"{kind}\n")


def claim(home: Path) -> Path:
    """Is there once the process has died as it was told to."""
    return home / "claim-death"


def die(home: Path) -> None:
    claim(home).touch()
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(point: str, number: int, home: Path) -> None:
    """Arm this process to die when it comes to a failpoint for the n-th time."""
    left = [number]

    def hook(reached: str, _: int) -> None:
        if reached == point:
            left[0] -= 1
            if left[0] == 0:
                die(home)

    failpoints.arm(hook)


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("home", type=Path)
    arguments.add_argument("--batches", type=int, required=True)
    arguments.add_argument("--every", type=int, default=3)
    arguments.add_argument("--keep", type=int, default=1)
    arguments.add_argument("--dies-at")
    arguments.add_argument("--disturbed", type=int)
    given = arguments.parse_args()
    machine = Machine(given.home, every=given.every, keep=given.keep)
    begin: Any = None
    if given.disturbed is not None:
        choice = random.Random(given.disturbed)
        machine.storage = Disturbed(machine.checkpoint, choice, given.home)
        machine.clock = JumpingClock(choice, given.home)
        begin = _in_background
    if given.dies_at:
        what, _, number = given.dies_at.partition(":")
        if "." in what:
            die_at(what, int(number), given.home)
        else:
            machine.storage = Deadly(machine.checkpoint, what, int(number), given.home)
    driver = machine.start(begin=begin)
    for _ in range(given.batches):
        run_batch(driver)


if __name__ == "__main__":
    main()
