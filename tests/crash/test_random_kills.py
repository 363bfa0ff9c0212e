"""Twenty SIGKILLs at random moments of one long job, which is exact all the same; and some of one with three stages.

A life ends with a kill of the driver or of the JVM, some while the program starts, most while it works. Most lose Python workers
before that, and go on by themselves.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from life import Life, commits, run_to_end
from program import BATCH
from truth import check_exact, check_stages_exact, taken

Death = tuple[str, int | None]
"""Who is killed in the end, and how many workers before that; None: at once, while the program starts."""

TWENTY: list[Death] = [
    *[("driver", None)] * 3,
    ("driver", 0),
    ("driver", 1),
    *[("driver", 2)] * 4,
    ("jvm", 1),
]
FOUR_OF_STAGES: list[Death] = [("driver", 2), ("driver", 0)]


@pytest.mark.timeout(900)
def test_twenty_kills_at_random_moments_leave_no_trace(tmp_path: Path, choice: random.Random) -> None:
    assert kill_at_random(tmp_path, choice, TWENTY, 0.5) == 20
    count = taken(tmp_path) + 3 * BATCH
    run_to_end(tmp_path, "--orders", count)
    check_exact(tmp_path, count)


@pytest.mark.timeout(600)
def test_four_kills_at_random_moments_of_three_stages_leave_no_trace(tmp_path: Path, choice: random.Random) -> None:
    assert kill_at_random(tmp_path, choice, FOUR_OF_STAGES, 1.5, "--stages") == 4
    count = taken(tmp_path) + 2 * BATCH
    assert count > 2 * BATCH, "every life ended before it had committed anything"
    run_to_end(tmp_path, "--stages", "--orders", count)
    check_stages_exact(tmp_path, count)


def kill_at_random(home: Path, choice: random.Random, deaths: list[Death], batch_s: float, *arguments: str) -> int:
    """One life after another, each killed while it starts or within about a batch after a commit; how many kills there were."""
    kills = 0
    for victim, workers in choice.sample(deaths, len(deaths)):
        with Life(home, *arguments, "--orders", 10**9) as life:
            if workers is None:
                pause(choice, 4.0)
            else:
                life.wait_for_commits(choice.randint(2, 4))  # the first of all comes before there are workers
            for _ in range(workers or 0):
                pause(choice, batch_s)
                life.kill_youngest("pyspark.worker")
                kills += 1
                life.wait_for_commits_from_now(choice.randint(2, 3))
            pause(choice, batch_s)
            if victim == "driver":
                life.kill()
            else:
                life.kill_youngest("java")
                assert life.end() != 0, life.said()
            kills += 1
        print(f"{workers or 0} workers and then the {victim} killed after {commits(home)} commits")
    return kills


def pause(choice: random.Random, most: float) -> None:
    """Let a random time pass: the moment of the kill is what is random here."""
    time.sleep(choice.uniform(0, most))
