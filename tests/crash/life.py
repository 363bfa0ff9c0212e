"""One life of the program: a real process that a test starts, watches and ends.

Whoever waits here waits for something that can be seen from outside: a commit, a file, an exit.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import program
import pytest

ROOT = Path(__file__).parents[2]
PATIENCE_S = 120.0


class Life:
    """A process of the program, in a session of its own. Leaving the block ends it, if it has not ended."""

    def __init__(self, home: Path, *arguments: object, environment: dict[str, str] | None = None) -> None:
        self.home = home
        self.number = len(list(home.glob("life-*")))
        self._stderr = home / f"life-{self.number}.stderr"
        self._commits_before = commits(home)
        home.mkdir(parents=True, exist_ok=True)
        with self._stderr.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, program.__file__, str(home), *map(str, arguments)],
                cwd=home,
                env=os.environ | {"PYTHONPATH": str(ROOT), "HOLDFAST_CLASS_ARCHIVE": "use"} | (environment or {}),
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
                start_new_session=True,
            )

    def __enter__(self) -> Life:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    # -- watching --------------------------------------------------------------------------------------------------

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def said(self) -> str:
        """What this life wrote to stdout and stderr."""
        return self._stderr.read_text()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Until `condition` holds; fails with what the process said if it ends before."""
        limit = time.monotonic() + PATIENCE_S
        while not condition():
            assert self.is_alive(), f"life {self.number} ended too early:\n{self.said()}"
            assert time.monotonic() < limit, f"life {self.number} waited in vain:\n{self.said()}"
            time.sleep(0.005)

    def wait_for_commits(self, count: int = 1) -> None:
        """Until this life has seen `count` commits that were not there when it began."""
        self.wait_for(lambda: commits(self.home) >= self._commits_before + count)

    def descendants(self) -> Iterator[tuple[int, str]]:
        """(pid, command line) of the JVM, the Python daemon, its workers: whatever descends from the process."""
        children: dict[int, list[int]] = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                parent = int(stat.read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue  # it has just gone
            children.setdefault(parent, []).append(int(stat.parent.name))
        todo = [self.process.pid]
        while todo:
            for child in children.get(todo.pop(), []):
                todo.append(child)
                try:
                    yield child, Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                except OSError:
                    continue

    # -- ending ----------------------------------------------------------------------------------------------------

    def kill(self) -> None:
        """SIGKILL, provably of a living process: a crash test that never crashed shows nothing."""
        self.process.kill()
        assert self.process.wait() == -signal.SIGKILL, f"ended before it could be killed:\n{self.said()}"

    def end(self) -> int:
        """Its exit code, when it has ended by itself."""
        try:
            return self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"life {self.number} does not end:\n{self.said()}")


def run_to_end(home: Path, *arguments: object) -> None:
    """A life that nobody disturbs."""
    with Life(home, *arguments) as life:
        assert life.end() == 0, life.said()
        assert not life.said(), life.said()


def commits(home: Path) -> int:
    """How many versions are committed."""
    directory = home / program.NAME / "checkpoint" / "commits"
    return sum(not name.startswith(".") for name in os.listdir(directory)) if directory.exists() else 0  # noqa: PTH208
