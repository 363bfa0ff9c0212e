"""A real process is killed at every named moment of the protocol, and the next one makes good.

A failpoint of the driver ends the driver: the program is started again. One of a task ends a Python worker: the driver
runs the job again by itself.
"""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest
from life import run_armed, run_to_end
from program import BATCH, inbox, worker_claim
from truth import check_exact, check_stages_exact, put_orders

from holdfast import failpoints

DRIVER_POINTS = (*failpoints.DRIVER_POINTS, "table.staged")
ORDERS = 250  # five batches
KILLED_AT = 3


@pytest.mark.parametrize("points", [DRIVER_POINTS[0::3], DRIVER_POINTS[1::3], DRIVER_POINTS[2::3]], ids="-".join)
def test_kills_of_the_driver_change_nothing_that_anyone_can_see(points: tuple[str, ...], tmp_path: Path) -> None:
    for version, point in enumerate(points, start=2):
        code, said = run_armed(tmp_path, point, version, "--orders", ORDERS)
        assert code == -signal.SIGKILL, said
    run_to_end(tmp_path, "--orders", ORDERS)
    check_exact(tmp_path, ORDERS)


@pytest.mark.parametrize("point", failpoints.TASK_POINTS)
def test_a_kill_of_a_worker_changes_nothing_that_anyone_can_see(point: str, tmp_path: Path) -> None:
    code, said = run_armed(tmp_path, point, KILLED_AT, "--orders", ORDERS)
    assert code == 0, said
    assert f"the job of version {KILLED_AT} was lost; running it again" in said
    check_exact(tmp_path, ORDERS)


def test_a_spark_source_replays_what_was_not_committed_and_skips_what_was(
    tmp_path: Path, choice: random.Random
) -> None:
    put_orders(inbox(tmp_path), files=4)
    for version, point in ((2, "commit.begin"), (3, choice.choice(["commit.done", "batch.done"]))):
        code, said = run_armed(tmp_path, point, version, "--files")
        assert code == -signal.SIGKILL, said
    run_to_end(tmp_path, "--files")
    check_exact(tmp_path, 4 * BATCH)


def test_three_stages_and_their_timers_bear_a_kill_of_the_driver_and_of_a_worker_in_each(tmp_path: Path) -> None:
    orders = 6 * BATCH
    for version, point in ((2, "commit.begin"), (3, "commit.done"), (4, "deliver.begin")):
        code, said = run_armed(tmp_path, point, version, "--stages", "--orders", orders)
        assert code == -signal.SIGKILL, said
    last = ("--stages", "--orders", orders, "--worker-dies-at", orders - 1)  # which is counted in the third stage
    code, said = run_armed(tmp_path, "task.outbox.durable", 5, *last)
    assert code == 0, said
    assert worker_claim(tmp_path).exists(), "no worker of the third stage has died"
    assert "the job of version 5 was lost; running it again" in said
    assert "the job of version 7 was lost; running it again" in said
    check_stages_exact(tmp_path, orders)
