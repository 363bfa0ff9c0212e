"""Twenty SIGKILLs at random moments of one long job, whose topics are exact all the same.

A life ends with its driver, some while the program starts, most while it works, and of these most have lost workers before.
Who publishes changes from life to life, also by chance.
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
LIVES = [None, None, None, 0, 1, 1, 2, 2, 2, 2]
"""How many workers each of them loses while it works; None: its driver is killed while it starts."""
KILLS = 20


@pytest.mark.timeout(900)
def test_twenty_kills_at_random_moments_leave_no_trace(stage: Stage, choice: random.Random) -> None:
    put_orders(stage, ORDERS)
    kills = 0
    for workers in choice.sample(LIVES, len(LIVES)):
        publish = choice.choice(["driver", "tasks"])
        with stage.life(publish, batch=SMALL) as life:
            if workers is None:
                time.sleep(choice.uniform(0, 4))
            else:
                life.wait_for_commits(choice.randint(2, 4))  # the first of all comes before there are workers
            for _ in range(workers or 0):
                time.sleep(choice.uniform(0, 0.5))
                life.kill_youngest("pyspark.worker")
                kills += 1
                life.wait_for_commits_from_now(2)
            time.sleep(choice.uniform(0.5, 2))
            life.kill()
            kills += 1
        print(f"{workers or 0} workers and the driver killed, published by {publish}, after {stage.commits()} commits")
    assert kills == KILLS
    stage.run_to_end(choice.choice(["driver", "tasks"]), batch=LARGE)
    check_all_taken(stage)
