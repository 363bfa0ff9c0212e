"""File locks between processes of one host. Held until they are released or their process dies, however it dies.

They tell who is alive; what keeps a checkpoint exact is the put of the manifest alone. Lock files are never deleted: two
processes could then hold the same name.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from holdfast.log.storage import raise_as_storage_error


class FileLock:
    """An flock on `path`; `shared` ones go together, an exclusive one goes with nobody."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def acquire(self, *, shared: bool = False) -> bool:
        """Whether the lock could be had at once."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise_as_storage_error(error, self._path)
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        self._descriptor = descriptor
        return True

    def release(self) -> None:
        if self._descriptor is not None:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # a forked child shares it: closing is not enough
            os.close(self._descriptor)
            self._descriptor = None
