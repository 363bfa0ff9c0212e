"""The programs of people who know `stateful_map`: each runs as it is written."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import accumulate
from pathlib import Path

ROOT = Path(__file__).parents[2]


def said(example: str, directory: Path, *arguments: str) -> list[str]:
    run = subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{example}.py"), *arguments],
        cwd=directory, capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert not list(directory.iterdir()), "nothing is left of a program without persistence"
    return run.stdout.splitlines()


def test_the_running_sum_under_one_key(tmp_path: Path) -> None:
    assert said("map_running_sum", tmp_path) == [str(total) for total in accumulate(range(100))]


def test_the_sums_by_parity(tmp_path: Path) -> None:
    printed = [int(line) for line in said("map_sums_by_parity", tmp_path)]
    even, odd = list(accumulate(range(0, 100, 2))), list(accumulate(range(1, 100, 2)))
    assert sorted(printed) == sorted(even + odd)
    assert [total for total in printed if total in even] == even, "the even ones in their order"


def test_a_program_that_fails_and_is_started_again_adds_every_integer_once(tmp_path: Path) -> None:
    *printed, last = said("map_restarts", tmp_path, "0.1", "8000")
    found = re.fullmatch(r"the sum is (\d+), that of all integers is (\d+)", last)
    assert found is not None, last
    total, expected = map(int, found.groups())
    assert total == expected == sum(range(8_000))
    panic = re.compile(r"oh no! The sum was (\d+), of which (\d+) is committed; starting again")
    panics = [tuple(map(int, found.groups())) for line in printed if (found := panic.fullmatch(line))]
    assert len(panics) >= 2, "it hardly failed"
    assert all(reached > committed for reached, committed in panics), "no work was lost"
    assert any(committed > 0 for _, committed in panics), "it never went on from a commit"
    totals = set(accumulate(range(8_000)))
    assert {int(line) for line in printed if not panic.fullmatch(line)} == totals, "nothing is shown that is not true"
