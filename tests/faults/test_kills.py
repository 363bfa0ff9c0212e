"""A real process is killed at every named moment of a snapshot, an upload, retention and a restore, and at random calls of the
storage.

The next run goes on exactly, with the local disk that the killed one left and with an empty one.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
from pathlib import Path

import pytest
from life import Life, run_armed
from machine import NAME, Machine
from program import claim

from holdfast import failpoints
from holdfast.log.snapshot import read_snapshot, versions
from holdfast.log.storage import LocalStorage

FIRST, SECOND = 3, 6
"""The versions of the first snapshots; retention runs after each, and has something to remove after the second."""


def go_on(home: Path) -> None:
    """A run on the disk that is there, and one on an empty disk, both long after; each takes another snapshot."""
    for half in halves(home):
        os.utime(half, (0, 0))
    elsewhere = Path(shutil.copytree(home, home.with_name("elsewhere")))
    if (elsewhere / NAME / "local").exists():  # unless it was killed at its first write
        shutil.rmtree(elsewhere / NAME / "local")
    for place in (elsewhere, home):
        machine = Machine(place)
        newest = max(versions(machine.storage), default=0)
        machine.check_goes_on(5)
        assert max(versions(machine.storage)) > newest
        assert not machine.orphans(), "what the killed run left was not cleared up"
        assert not list(machine.local.glob("*/*/copy-*"))
        assert not halves(place)
    shutil.rmtree(Machine(home).local)
    Machine(home).check_goes_on()


def halves(home: Path) -> list[Path]:
    """Files of the checkpoint that are not under their names."""
    return list(Machine(home).checkpoint.glob("*/.*"))


@pytest.mark.parametrize("snapshot", [FIRST, SECOND])
@pytest.mark.parametrize("point", failpoints.SNAPSHOT_POINTS)
def test_a_kill_beside_the_batches_changes_nothing_that_anyone_can_see(home: Path, point: str, snapshot: int) -> None:
    version = snapshot + 1 if point.startswith("task.") else snapshot
    code, said = run_armed(home, point, version, "--batches", 9)
    assert code == -signal.SIGKILL, said
    go_on(home)


@pytest.mark.parametrize("point", failpoints.RESTORE_POINTS)
def test_a_restore_that_is_killed_goes_on_where_it_stopped(home: Path, point: str) -> None:
    machine = Machine(home)
    machine.run(FIRST + 2)
    wanted = {file.path for file in read_snapshot(machine.storage, FIRST).partitions[0].files}
    shutil.rmtree(machine.local)
    code, said = run_armed(home, point, FIRST, "--batches", 1)
    assert code == -signal.SIGKILL, said
    there = {path.name for path in machine.local.glob("*/0/slot-0.restore/*")}
    assert there == wanted if point != "restore.file" else len(there) == 1
    machine.storage = storage = Fetching(machine.checkpoint)
    machine.check_goes_on(2)
    assert {path.name for path in storage.fetched if path.match(f"{machine.local}/*/0/*/*")} == wanted - there
    assert not list(machine.local.glob("*/*/*.restore"))


class Fetching(LocalStorage):
    """Remembers which files it has written."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, durable=False)
        self.fetched: list[Path] = []

    def get_file(self, name: str, path: Path) -> None:
        self.fetched.append(path)
        super().get_file(name, path)


@pytest.mark.parametrize(("verb", "most"), [("put", 60), ("put_file", 24), ("delete", 40), ("write", 40)])
@pytest.mark.parametrize("time", range(2))
def test_a_kill_at_any_call_of_the_storage_changes_nothing_that_anyone_can_see(
    home: Path, choice: random.Random, verb: str, most: int, time: int
) -> None:
    number = choice.randint(1, most)
    with Life(home, "--batches", 15, "--dies-at", f"{verb}:{number}") as life:
        assert life.end() == -signal.SIGKILL, f"{verb} was not called {number} times: {life.said()}"
    assert claim(home).exists()
    assert halves(home) or verb != "write"  # at other verbs an upload may be writing beside it
    go_on(home)
