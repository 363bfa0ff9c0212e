"""Twenty SIGKILLs at random moments of one long job, whose topics are exact all the same.

A life ends with its driver, some while the program starts, most while it works, and of these most have lost their workers
before. Who publishes changes from life to life, also by chance.
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
LIVES = {"starting": 6, "working": 2, "working and bereaved": 6}
KILLS = 20


@pytest.mark.timeout(900)
def test_twenty_kills_at_random_moments_leave_no_trace(stage: Stage, choice: random.Random) -> None:
    put_orders(stage, ORDERS)
    moments = [moment for moment, times in LIVES.items() for _ in range(times)]
    choice.shuffle(moments)
    kills = 0
    for moment in moments:
        publish = choice.choice(["driver", "tasks"])
        with stage.life(publish, batch=SMALL) as life:
            if moment != "starting":
                life.wait_for_commits(choice.randint(2, 4))  # the first of all comes before there are workers
            if moment == "working and bereaved":
                time.sleep(choice.uniform(0, 0.5))
                life.kill_youngest("pyspark.daemon")
                kills += 1
                life.wait_for_commits_from_now(2)
            time.sleep(choice.uniform(0.5, 6 if moment == "starting" else 2))
            life.kill()
            kills += 1
        print(f"killed while {moment}, published by {publish}, after {stage.commits()} commits")
    assert kills == KILLS
    stage.run_to_end(choice.choice(["driver", "tasks"]), batch=LARGE)
    check_all_taken(stage)
