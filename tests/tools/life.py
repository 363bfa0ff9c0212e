"""One life of the program: a real process that a test starts, watches and ends.

The program is `program.py` of the suite that runs. Whoever waits here waits for something that can be seen from outside:
a commit, a file, an exit.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import program
import pytest

ROOT = Path(__file__).parents[2]
PATIENCE_S = 120.0


class Life:
    """A process of the program, in a session of its own. Leaving the block ends it, if it has not ended.

    What descends from it ends by itself a moment later, unless it is stopped: then it is killed.
    """

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
        _signal(self._session(only_stopped=True), signal.SIGKILL)

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
            assert self.is_alive(), f"life {self.number} ended too early ({self.process.returncode}):\n{self.said()}"
            assert time.monotonic() < limit, f"life {self.number} waited in vain:\n{self.said()}"
            time.sleep(0.02)

    def wait_for_commits(self, count: int = 1) -> None:
        """Until this life has seen `count` commits that were not there when it began."""
        self.wait_for(lambda: commits(self.home) >= self._commits_before + count)

    def wait_for_commits_from_now(self, count: int) -> None:
        goal = commits(self.home) + count
        self.wait_for(lambda: commits(self.home) >= goal)

    def descendants(self) -> Iterator[tuple[int, str]]:
        """(pid, command line) of the JVM, the Python daemon, its workers: whatever descends from the process."""
        for pid in self._session():
            if pid != self.process.pid:
                try:
                    yield pid, Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                except OSError:
                    continue  # it has just gone

    def _session(self, *, only_stopped: bool = False) -> Iterator[int]:
        """The processes of the session, also after the death of the one that began it."""
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                state, _, _, session = stat.read_text().rpartition(")")[2].split()[:4]
            except OSError:
                continue
            if int(session) == self.process.pid and (state == "T" or not only_stopped):
                yield int(stat.parent.name)

    # -- disturbing ------------------------------------------------------------------------------------------------

    def freeze(self) -> None:
        """SIGSTOP for the process and all that descends from it."""
        self.process.send_signal(signal.SIGSTOP)
        _signal(self._session(), signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT, provably of a process that has not ended."""
        assert self.is_alive(), f"life {self.number} ended too early:\n{self.said()}"
        _signal(self._session(), signal.SIGCONT)

    # -- ending ----------------------------------------------------------------------------------------------------

    def kill(self) -> None:
        """SIGKILL, provably of a living process: a crash test that never crashed shows nothing."""
        self.process.kill()
        assert self.process.wait() == -signal.SIGKILL, f"ended before it could be killed:\n{self.said()}"

    def kill_youngest(self, command: str) -> None:
        """SIGKILL the youngest descendant with this in its command line; fails if there is none alive."""
        found = sorted(pid for pid, line in self.descendants() if command in line)
        assert found, f"no {command} to kill"
        os.kill(found[-1], signal.SIGKILL)

    def end(self) -> int:
        """Its exit code, when it has ended by itself."""
        try:
            return self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"life {self.number} does not end:\n{self.said()}")


def _signal(pids: Iterator[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def run_to_end(home: Path, *arguments: object) -> None:
    """A life that nobody disturbs."""
    with Life(home, *arguments) as life:
        assert life.end() == 0, life.said()
        assert not life.said(), life.said()


class Armed:
    """A failpoint that is met once: whoever reaches it is killed there, or stopped."""

    def __init__(self, home: Path, point: str, version: int, number: signal.Signals = signal.SIGKILL) -> None:
        self.moment = f"{point}@{version}"
        self._claim = home / self.moment
        self.environment = {
            "HOLDFAST_FAILPOINT": self.moment,
            "HOLDFAST_FAILPOINT_CLAIM": str(home),
            "HOLDFAST_FAILPOINT_SIGNAL": number.name,
        }

    def was_met(self) -> bool:
        return self._claim.exists()


def run_armed(home: Path, point: str, version: int, *arguments: object) -> tuple[int, str]:
    """A life in which someone is killed at `point`: its exit code and what it said."""
    failpoint = Armed(home, point, version)
    with Life(home, *arguments, environment=failpoint.environment) as life:
        code = life.end()
        assert failpoint.was_met(), f"nothing was killed at {point}:\n{life.said()}"
        return code, life.said()


def commits(home: Path) -> int:
    """How many versions are committed."""
    directory = next(home.glob("*/checkpoint/commits"), None)
    return sum(not name.startswith(".") for name in os.listdir(directory)) if directory is not None else 0  # noqa: PTH208
