"""Persistence: where a checkpoint lives."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from datetime import timedelta
from pathlib import Path
from urllib.parse import unquote, urlsplit

from holdfast.errors import UnknownOption

_IN_MEMORY = Path("/dev/shm")


class Persistence:
    """A place for the checkpoint: a local path or a file:// URL.

    Parameters
    ----------
    snapshot_every
        How often the state is written down whole, so that a restore need not begin with the first change: a timedelta, or a
        number of batches. By default whenever the changes since the last time have become many or large.
    keep
        How many snapshots are kept, with everything that a restore from the oldest of them needs.

    Guaranteed: everything that a restart needs is there; local stores can be lost at any time.

    >>> Persistence("/data/orders").directory.name
    'orders'
    """

    def __init__(self, url: str | Path, *, snapshot_every: timedelta | int | None = None, keep: int = 2) -> None:
        if isinstance(snapshot_every, bool) or not isinstance(snapshot_every, timedelta | int | None):
            raise UnknownOption(f"Persistence(snapshot_every={snapshot_every!r}): a timedelta or a number of batches")
        amount = snapshot_every.total_seconds() if isinstance(snapshot_every, timedelta) else snapshot_every
        if amount is not None and amount <= 0:
            raise UnknownOption(f"Persistence(snapshot_every={snapshot_every!r}): it is positive")
        if type(keep) is not int or keep < 1:
            raise UnknownOption(f"Persistence(keep={keep!r}): it is a positive number of snapshots")
        self.snapshot_every = snapshot_every
        self.keep = keep
        text = str(url)
        parts = urlsplit(text)
        if parts.scheme not in ("", "file") or not text.strip():
            raise UnknownOption(f"Persistence({text!r}): a local path or a file:// URL is needed")
        self.directory = Path(unquote(parts.path) if parts.scheme else text).absolute()
        self.is_lasting = True
        """Whether what is there outlives the program."""

    @classmethod
    def none(cls) -> Persistence:
        """No place at all: for tests, and for programs that can begin anew each time. The fastest there is.

        Guaranteed: within a run everything is as exact as ever, also when a task or a worker is lost. Not guaranteed: anything
        after the program has ended, however it has; state and checkpoint are gone, and all output of another run is new.

        >>> Persistence.none().is_lasting
        False
        """
        parent = _IN_MEMORY if _IN_MEMORY.is_dir() else None
        place = cls(tempfile.mkdtemp(prefix="holdfast-", dir=parent))
        place.is_lasting = False
        weakref.finalize(place, shutil.rmtree, place.directory, ignore_errors=True)
        return place
