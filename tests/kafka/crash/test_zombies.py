"""Drivers that were asleep, JVM, workers and all, while others took over: awake again, they publish nothing more."""

from __future__ import annotations

import signal
from contextlib import ExitStack

import pytest
from life import Life
from stage import BATCH, Stage
from truth import check_all_taken, put_orders

ASLEEP_AT = (("driver", "deliver.begin"), ("driver", "publish.marked"), ("tasks", "publish.marked"))


@pytest.mark.timeout(600)
def test_whoever_wakes_up_after_its_successors_took_over_publishes_nothing_more(stage: Stage) -> None:
    put_orders(stage, 30 * BATCH)
    with ExitStack() as lives:
        zombies = []
        for version, (publish, point) in enumerate(ASLEEP_AT, start=1):
            failpoint = stage.armed(point, version, signal.SIGSTOP)
            zombie = lives.enter_context(stage.life(publish, failpoint=failpoint))
            zombie.wait_for(failpoint.was_met)
            zombie.freeze()
            zombies.append(zombie)
        with stage.life("driver") as successor:
            successor.wait_for_commits(3)
            check_ends_fenced(zombies[0])  # and the successor goes on
            assert successor.end() == 0, successor.said()
        check_all_taken(stage)
        ends = everything(stage)
        for zombie in zombies[1:]:
            check_ends_fenced(zombie)
        assert everything(stage) == ends
        check_all_taken(stage)


def check_ends_fenced(zombie: Life) -> None:
    zombie.thaw()
    assert zombie.end() == 1, zombie.said()
    assert "holdfast.errors.Fenced: version" in zombie.said(), zombie.said()


def everything(stage: Stage) -> list[list[int]]:
    """How many messages of the application there are, committed or not."""
    return [
        [len(messages) for messages in stage.read_partitions(topic, committed=False)]
        for topic in sorted(stage.topics())
    ]
