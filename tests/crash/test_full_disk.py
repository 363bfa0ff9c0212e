"""A disk that is full or read-only: a named error, the last commit untouched, and exact when it is mended.

Needs to mount a small file system, which takes root.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from disks import NoMount, full, small_disk
from inprocess import Machine
from life import Life, run_to_end
from program import BATCH, application
from truth import chain, check_exact, fold, state, taken

from holdfast.errors import StorageFull, StorageReadOnly

MEGABYTES = 24


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small disk of its own."""
    try:
        with small_disk(tmp_path / "disk", MEGABYTES) as home:
            yield home
    except NoMount as reason:
        pytest.skip(f"mounting a small disk is not permitted: {reason}")


@contextmanager
def read_only(disk: Path) -> Iterator[None]:
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    try:
        yield
    finally:
        subprocess.run(["mount", "-o", "remount,rw", disk], check=True)


def check(machine: Machine, home: Path) -> None:
    totals, rows = fold(taken(home))
    assert state(home) == totals
    assert sorted(machine.sink.rows(), key=lambda row: row["n"]) == rows


@pytest.mark.parametrize("spare_pages", [0, 1, 2, 4, 8, 16, 32, 64])
def test_a_full_disk_is_named_wherever_it_is_met_and_nothing_is_lost(
    disk: Path, tmp_path: Path, spare_pages: int
) -> None:
    machine = Machine(disk, shelf=tmp_path / "shelf")
    machine.run(2)
    with full(disk, spare_pages):
        with pytest.raises(StorageFull, match=str(disk)):
            machine.run(30)
        reached = len(chain(disk))
    assert len(chain(disk)) == reached
    machine.run(1)
    check(machine, disk)


def test_a_read_only_disk_is_named_before_anything_is_changed(disk: Path, tmp_path: Path) -> None:
    machine = Machine(disk, shelf=tmp_path / "shelf")
    machine.run(2)
    with read_only(disk):
        with pytest.raises(StorageReadOnly, match=str(disk)):
            machine.run(1)
        app = application(disk)
        app.dataframe(app.from_iterable([1], key=str)).print()
        with pytest.raises(StorageReadOnly, match=str(disk)):
            app.run()  # it does not even start Spark
        assert len(chain(disk)) == 3
    machine.run(1)
    check(machine, disk)


def test_a_disk_that_fills_up_under_a_run_ends_it_by_name(disk: Path) -> None:
    with Life(disk, "--orders", 10**9) as life:
        life.wait_for_commits(3)
        with full(disk):
            assert life.end() == 1
        assert "holdfast.errors.StorageFull: " in life.said(), life.said()
    count = taken(disk) + 2 * BATCH
    run_to_end(disk, "--orders", count)
    check_exact(disk, count)
