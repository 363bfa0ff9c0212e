"""Twenty SIGKILLs of the driver at random moments of one long job, whose topics are exact all the same.

Some while the program starts, most while it works; who publishes changes from life to life, also by chance.
"""

from __future__ import annotations

import random
import time

import pytest
from stage import Stage
from truth import check_all_taken, put_orders

ORDERS = 100_000
SMALL = 100  # a thousand batches: more than can be done between the kills
LARGE = 20_000
KILLS = {"starting": 8, "working": 12}


@pytest.mark.timeout(900)
def test_twenty_kills_at_random_moments_leave_no_trace(stage: Stage, choice: random.Random) -> None:
    put_orders(stage, ORDERS)
    moments = [moment for moment, times in KILLS.items() for _ in range(times)]
    choice.shuffle(moments)
    assert len(moments) == 20
    for moment in moments:
        publish = choice.choice(["driver", "tasks"])
        with stage.life(publish, batch=SMALL) as life:
            if moment == "working":
                life.wait_for_commits(1)
            time.sleep(choice.uniform(0.5, 6 if moment == "starting" else 2))
            life.kill()
        print(f"killed while {moment}, published by {publish}, after {stage.commits()} commits")
    stage.run_to_end(choice.choice(["driver", "tasks"]), batch=LARGE)
    check_all_taken(stage)
