"""A real process is killed at every named moment of the protocol, and the next one makes good.

A failpoint of the driver ends the driver: the program is started again. One of a task ends a Python worker: the driver
runs the job again by itself.
"""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest
from life import Armed, Life, run_armed, run_to_end
from program import BATCH, inbox, worker_claim
from truth import check_exact, check_stages_exact, put_orders

from holdfast import failpoints

DRIVER_POINTS = (*failpoints.DRIVER_POINTS, "table.staged")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("points", [DRIVER_POINTS[0::2], DRIVER_POINTS[1::2]], ids="-".join)
def test_kills_of_the_driver_change_nothing_that_anyone_can_see(points: tuple[str, ...], tmp_path: Path) -> None:
    orders = (len(points) + 2) * BATCH
    for version, point in enumerate(points, start=2):
        code, said = run_armed(tmp_path, point, version, "--orders", orders)
        assert code == -signal.SIGKILL, said
    run_to_end(tmp_path, "--orders", orders)
    check_exact(tmp_path, orders)


def test_kills_of_workers_change_nothing_that_anyone_can_see(tmp_path: Path) -> None:
    """One after the other, in one life: it goes on by itself."""
    armed = [Armed(tmp_path, point, version) for version, point in enumerate(failpoints.TASK_POINTS, start=2)]
    environment = armed[0].environment | {"HOLDFAST_FAILPOINT": ",".join(one.moment for one in armed)}
    orders = (len(armed) + 2) * BATCH
    with Life(tmp_path, "--orders", orders, environment=environment) as life:
        assert life.end() == 0, life.said()
        for version, one in enumerate(armed, start=2):
            assert one.was_met(), f"nothing was killed at {one.moment}:\n{life.said()}"
            assert f"the job of version {version} was lost; running it again" in life.said()
    check_exact(tmp_path, orders)


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
