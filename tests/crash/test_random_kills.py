"""Twenty SIGKILLs at random moments of one long job, which is exact all the same; and some of one with three stages.

A life ends with a kill of the driver or of the JVM, some while the program starts, most while it works. Some lose their Python
workers before that, and go on by themselves.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from life import Life, commits, run_to_end
from program import BATCH
from truth import check_exact, check_stages_exact, taken

KILLS = 20
VICTIMS = {"driver": 9, "jvm": 3, "worker": 8}
STAGES_KILLS = 4
STAGES_VICTIMS = {"driver": 3, "worker": 1}


@pytest.mark.timeout(900)
def test_twenty_kills_at_random_moments_leave_no_trace(tmp_path: Path, choice: random.Random) -> None:
    assert kill_at_random(tmp_path, choice, VICTIMS, 0.5) == KILLS
    count = taken(tmp_path) + 3 * BATCH
    run_to_end(tmp_path, "--orders", count)
    check_exact(tmp_path, count)


@pytest.mark.timeout(600)
def test_four_kills_at_random_moments_of_three_stages_leave_no_trace(tmp_path: Path, choice: random.Random) -> None:
    assert kill_at_random(tmp_path, choice, STAGES_VICTIMS, 1.5, "--stages") == STAGES_KILLS
    count = taken(tmp_path) + 2 * BATCH
    assert count > 2 * BATCH, "every life ended before it had committed anything"
    run_to_end(tmp_path, "--stages", "--orders", count)
    check_stages_exact(tmp_path, count)


def kill_at_random(home: Path, choice: random.Random, times: dict[str, int], batch_s: float, *arguments: str) -> int:
    """One life after another, each killed while it starts or within about a batch after a commit; how many kills there were."""
    victims = [victim for victim, count in times.items() if victim != "worker" for _ in range(count)]
    choice.shuffle(victims)
    bereaved = set(choice.sample(range(len(victims)), times["worker"]))
    kills = 0
    for number, victim in enumerate(victims):
        with Life(home, *arguments, "--orders", 10**9) as life:
            if number in bereaved:
                life.wait_for_commits(choice.randint(2, 5))  # the first of all comes before there are workers
                pause(choice, batch_s)
                life.kill_youngest("pyspark.daemon")
                kills += 1
                life.wait_for_commits_from_now(2)
            elif victim == "driver" and choice.random() < 0.6:
                pause(choice, 4.0)  # from the start of the process
            else:
                life.wait_for_commits(choice.randint(1, 5))
            pause(choice, batch_s)
            if victim == "driver":
                life.kill()
            else:
                life.kill_youngest("java")
                assert life.end() != 0, life.said()
            kills += 1
        print(f"{'a worker and then the ' if number in bereaved else ''}{victim} killed after {commits(home)} commits")
    return kills


def pause(choice: random.Random, most: float) -> None:
    """Let a random time pass: the moment of the kill is what is random here."""
    time.sleep(choice.uniform(0, most))
