"""Every random choice of a crash test comes from a printed seed; CRASH_SEED repeats one."""

from __future__ import annotations

import os
import random

import pytest


@pytest.fixture
def choice() -> random.Random:
    seed = int(os.environ.get("CRASH_SEED") or random.randrange(2**32))
    print(f"CRASH_SEED={seed}")
    return random.Random(seed)
