"""Failpoints: named moments of the protocol at which a test may end the process or raise.

`reach` costs a comparison when nothing is armed. A process is armed from inside (`arm`, used by the simulation and
the test harness) or by its environment, which worker processes inherit:

    HOLDFAST_FAILPOINT=<name>@<version>,...   SIGKILL this process when it reaches <name> at <version>
    HOLDFAST_FAILPOINT_CLAIM=<directory>      only for who creates the file <name>@<version> there: once, and provably
    HOLDFAST_FAILPOINT_SIGNAL=SIGSTOP         another signal than SIGKILL
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

DRIVER_POINTS = (
    "batch.begin",
    "job.begin",
    "job.done",
    "commit.begin",
    "commit.done",
    "deliver.begin",
    "deliver.done",
    "batch.done",
)
TASK_POINTS = (
    "task.begin",
    "task.restored",
    "task.processed",
    "task.delta.durable",
    "task.outbox.durable",
)
PUBLISH_POINTS = (
    "publish.begin",
    "publish.opened",
    "publish.produced",
    "publish.marked",
    "publish.answered",
    "publish.committed",
)
SNAPSHOT_POINTS = (
    "task.copied",
    "upload.begin",
    "upload.file",
    "upload.done",
    "snapshot.begin",
    "snapshot.visible",
    "retention.begin",
    "retention.done",
)
RESTORE_POINTS = (
    "restore.file",
    "restore.fetched",
    "restore.emptied",
)
"""In the order in which a batch reaches them. `table.staged` and those of publishing lie between the two of delivery; the first
two of publishing are only reached where a producer has to be opened. Tasks reach them where tasks publish. Those of a
snapshot come with its version, those of retention with the floor; `task.copied` and those of an upload's files are reached in
tasks, the others on the driver, beside the batches. Those of a restore from a snapshot are reached in tasks, with the version
that the files hold."""

_hook: Callable[[str, int], None] | None = None


def reach(name: str, version: int) -> None:
    """The protocol is at `name`, working on `version`."""
    if _hook is not None:
        _hook(name, version)


def arm(hook: Callable[[str, int], None] | None) -> None:
    """Call `hook` at every failpoint of this process; None disarms."""
    global _hook
    _hook = hook


def _armed_by_environment() -> Callable[[str, int], None] | None:
    wanted = os.environ.get("HOLDFAST_FAILPOINT")
    if not wanted:
        return None
    moments = frozenset(wanted.split(","))
    claims = Path(os.environ["HOLDFAST_FAILPOINT_CLAIM"])
    number = signal.Signals[os.environ.get("HOLDFAST_FAILPOINT_SIGNAL", "SIGKILL")]

    def disturb(reached: str, at: int) -> None:
        moment = f"{reached}@{at}"
        if moment in moments:
            try:
                (claims / moment).touch(exist_ok=False)
            except FileExistsError:
                return
            os.kill(os.getpid(), number)

    return disturb


_hook = _armed_by_environment()
