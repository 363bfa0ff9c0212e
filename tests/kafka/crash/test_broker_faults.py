"""A broker that is killed again and again, and does not answer for a minute: the run waits for it and goes on by itself.

Two applications at once, one published by its driver, one by its tasks. Neither process ends before it is asked to.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from broker import Broker
from stage import BATCH, Stage
from truth import check_exact, put_orders

KILLS = 5
PAUSE_S = 60
ORDERS = 200 * BATCH


@pytest.mark.timeout(600)
def test_a_broker_that_is_killed_five_times_and_stopped_for_a_minute_costs_nothing_but_time(
    tmp_path: Path, choice: random.Random
) -> None:
    def kill() -> None:
        broker.kill()
        time.sleep(choice.uniform(0, 2))
        broker.start()

    def pause() -> None:
        broker.pause()
        time.sleep(PAUSE_S)
        broker.resume()

    with Broker(tmp_path / "broker") as broker:
        survive(broker, tmp_path, choice, choice.sample([*[kill] * KILLS, pause], KILLS + 1))


def survive(broker: Broker, directory: Path, choice: random.Random, faults: list[Callable[[], None]]) -> None:
    stages = [Stage(broker, directory / publish) for publish in ("driver", "tasks")]
    for stage in stages:
        put_orders(stage, ORDERS)
    with ExitStack() as open_lives:
        lives = [open_lives.enter_context(stage.life(stage.directory.name)) for stage in stages]
        for fault in (*faults, lambda: None):
            for life in lives:
                life.wait_for_commits_from_now(2)
            time.sleep(choice.uniform(0, 1))  # about a batch
            fault()
        for life in lives:
            assert life.is_alive(), life.said()
            life.process.send_signal(signal.SIGTERM)
        for life in lives:
            assert life.end() == 0, life.said()
    for stage in stages:
        check_exact(stage)
