"""The executors of a cluster whose hosts are all this machine, as a task sees them: to freeze its own, or to kill another one."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

PATIENCE_S = 30.0


def mine() -> int:
    """The process id of the executor that this task runs in: an ancestor of its Python worker."""
    pid = os.getpid()
    while b"CoarseGrainedExecutorBackend" not in Path(f"/proc/{pid}/cmdline").read_bytes():
        pid = int(_stat(pid)[1])
    return pid


def kill_another(candidates: set[int]) -> int:
    """SIGKILL one of these executors that is not this task's own, and wait until it is gone; which it was."""
    victim = min(pid for pid in candidates - {mine()} if is_alive(pid))
    os.kill(victim, signal.SIGKILL)
    limit = time.monotonic() + PATIENCE_S
    while is_alive(victim):
        if time.monotonic() > limit:
            raise TimeoutError(f"executor {victim} does not die")
        time.sleep(0.005)
    return victim


def freeze_mine(until: Path) -> None:
    """SIGSTOP this task's own executor, and wait for a file: the task has outlived its executor, and nobody can tell it so."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # which it gets when the executor is ended
    os.kill(mine(), signal.SIGSTOP)
    limit = time.monotonic() + 2 * PATIENCE_S
    while not until.exists():
        if time.monotonic() > limit:
            raise TimeoutError(f"{until} does not appear")
        time.sleep(0.05)


def is_first(claim: Path) -> bool:
    """Whether nobody has called this before, of all tasks."""
    try:
        claim.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def is_alive(pid: int) -> bool:
    try:
        return _stat(pid)[0] not in "ZX"
    except OSError:
        return False


def _stat(pid: int) -> list[str]:
    """State and parent of a process, and more."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
