"""What the README shows runs as it is written."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_programs_of_the_readme_run(tmp_path: Path) -> None:
    program, _, test = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "program.py").write_text(program + test)  # the one between them needs a broker: see tests/kafka
    outputs = []
    for _ in range(2):
        run = subprocess.run(
            [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120
        )
        assert run.returncode == 0, run.stderr
        outputs.append(sorted(run.stdout.splitlines()))
    assert outputs == [
        [
            "{'user': 'ann', 'amount': 3, 'total': 3}",
            "{'user': 'ann', 'amount': 4, 'total': 7}",
            "{'user': 'bob', 'amount': 5, 'total': 5}",
        ],
        [],
    ]


def test_the_demo_is_killed_and_ends_exactly(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, str(ROOT / "examples/demo.py")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "with SIGKILL" in run.stdout
    assert "equal a recomputation" in run.stdout
