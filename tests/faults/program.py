"""A run that the fault tests kill: running totals over numbered orders, with snapshots and retention.

python program.py <home> --batches N
    --dies-at delete:3            SIGKILL at the third call of that verb of the storage
    --background                  uploads run beside the batches
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

from machine import Machine, run_batch

from holdfast.log.storage import LocalStorage
from holdfast.runtime.snapshots import _in_background


class Deadly(LocalStorage):
    """A storage whose n-th call of a verb is never answered: half of the calls are carried out before, half are not."""

    def __init__(self, root: Path, verb: str, number: int, claim: Path) -> None:
        super().__init__(root, durable=False)
        self._verb = verb
        self._left = number
        self._claim = claim

    def _count(self, verb: str) -> None:
        if verb == self._verb:
            self._left -= 1
            if self._left == 0:
                self._claim.touch()
                os.kill(os.getpid(), signal.SIGKILL)

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


def claim(home: Path) -> Path:
    """Is there once the process has died as it was told to."""
    return home / "claim-storage"


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("home", type=Path)
    arguments.add_argument("--batches", type=int, required=True)
    arguments.add_argument("--dies-at")
    arguments.add_argument("--background", action="store_true")
    given = arguments.parse_args()
    machine = Machine(given.home)
    if given.dies_at:
        verb, _, number = given.dies_at.partition(":")
        machine.storage = Deadly(machine.checkpoint, verb, int(number), claim(given.home))
    begin: Any = _in_background if given.background else None
    driver = machine.start(begin=begin)
    for _ in range(given.batches):
        run_batch(driver)


if __name__ == "__main__":
    main()
