"""Twenty SIGKILLs at random moments of one long job, which is exact all the same; and some of one with three stages.

Most hit the driver, some the JVM or a Python worker; some while the program starts, most while it works.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
from life import Life, commits, run_to_end
from program import BATCH
from truth import check_exact, check_stages_exact, taken

KILLS = 20
VICTIMS = {"driver": 14, "jvm": 3, "worker": 3}
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
    """One life after another, each killed while it starts or within about a batch after a commit; how many were."""
    victims = [victim for victim, count in times.items() for _ in range(count)]
    choice.shuffle(victims)
    for victim in victims:
        with Life(home, *arguments, "--orders", 10**9) as life:
            if victim == "driver" and choice.random() < 0.4:
                pause(choice, 4.0)  # from the start of the process
            else:
                least = 2 if victim == "worker" else 1  # the first of all commits comes before there are workers
                life.wait_for_commits(choice.randint(least, 5))
                pause(choice, batch_s)
            if victim == "driver":
                life.kill()
            elif victim == "jvm":
                kill(life, "java")
                assert life.end() != 0, life.said()
            else:
                kill(life, "pyspark.daemon")
                life.wait_for_commits(2)  # it goes on by itself
                life.kill()
        print(f"{victim} killed after {commits(home)} commits")
    return len(victims)


def pause(choice: random.Random, most: float) -> None:
    """Let a random time pass: the moment of the kill is what is random here."""
    time.sleep(choice.uniform(0, most))


def kill(life: Life, command: str) -> None:
    """SIGKILL the youngest descendant with this in its command line; fails if there is none alive."""
    found = sorted(pid for pid, line in life.descendants() if command in line)
    assert found, f"no {command} to kill"
    os.kill(found[-1], signal.SIGKILL)
