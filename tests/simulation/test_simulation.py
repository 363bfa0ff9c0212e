"""Thousands of schedules of crashes, lost answers, zombies and lost disks; each must end exactly.

A failing schedule is run again with `simulate(seed)`: the seed is in the assertion's message.
"""

from __future__ import annotations

import os
import time
from collections import Counter

import pytest
from schedule import simulate
from world import FAULTS

SLICES = 3
SCHEDULES = 400
"""In each slice: so many show every fault."""
FIRST_SEED = int(os.environ.get("HOLDFAST_SEED", "0"))


@pytest.mark.parametrize("number", range(SLICES))
def test_every_schedule_of_faults_ends_exactly(number: int) -> None:
    first = FIRST_SEED + number * SCHEDULES
    began = time.process_time()  # of this process: what else the machine does says nothing
    happened: Counter[str] = Counter()
    for seed in range(first, first + SCHEDULES):
        try:
            happened += simulate(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}: simulate({seed}) shows it again")
            raise
    seconds = time.process_time() - began
    print(f"\n{SCHEDULES} schedules, seeds from {first}, {seconds:.0f} s")
    for fault in FAULTS:
        print(f"{happened[fault]:7,} {fault}")
    missing = [fault for fault in FAULTS if not happened[fault]]
    assert not missing, f"faults that never happened: {missing}"
    assert seconds < 60
