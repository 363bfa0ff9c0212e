"""Persistence: where a checkpoint lives."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

from holdfast.errors import UnknownOption
from holdfast.log.location import directory_at, storage_at

_IN_MEMORY = Path("/dev/shm")


class Persistence:
    """A place for the checkpoint: a local path or file:// URL, or s3://bucket/prefix, gs://bucket/prefix, az://container/prefix.

    Parameters
    ----------
    storage_options
        Settings of an object store, such as access_key_id, secret_access_key, endpoint and region; the names are those of
        obstore. What is not given comes from the environment (AWS_..., GOOGLE_..., AZURE_...), as usual for that store.
        They are never shown, logged or written.
    snapshot_every
        How often the state is written down whole, so that a restore need not begin with the first change: a timedelta, or a
        number of batches. By default whenever the changes since the last time have become many or large.
    keep
        How many snapshots are kept, with everything that a restore from the oldest of them needs.

    Guaranteed: everything that a restart needs is there; local stores can be lost at any time. An object store must honour
    conditional writes; a run finds out before it begins.

    >>> Persistence("/data/orders").storage
    LocalStorage('/data/orders')
    >>> Persistence("s3://bucket/orders", storage_options={"access_key_id": "ann", "secret_access_key": "hunter2"}).storage
    ObjectStorage('s3://bucket/orders')
    """

    def __init__(
        self,
        url: str | Path,
        *,
        storage_options: Mapping[str, str] | None = None,
        snapshot_every: timedelta | int | None = None,
        keep: int = 2,
    ) -> None:
        if isinstance(snapshot_every, bool) or not isinstance(snapshot_every, timedelta | int | None):
            raise UnknownOption(f"Persistence(snapshot_every={snapshot_every!r}): a timedelta or a number of batches")
        amount = snapshot_every.total_seconds() if isinstance(snapshot_every, timedelta) else snapshot_every
        if amount is not None and amount <= 0:
            raise UnknownOption(f"Persistence(snapshot_every={snapshot_every!r}): it is positive")
        if type(keep) is not int or keep < 1:
            raise UnknownOption(f"Persistence(keep={keep!r}): it is a positive number of snapshots")
        self.snapshot_every = snapshot_every
        self.keep = keep
        self.directory = directory_at(url)
        """None: it is in an object store."""
        self.storage = storage_at(url, storage_options)
        self.is_lasting = True
        """Whether what is there outlives the program."""

    @classmethod
    def none(cls) -> Persistence:
        """No place at all: for tests, and for programs that can begin anew each time. The fastest there is.

        Guaranteed: within a run everything is as exact as ever, also when a task or a worker is lost. Not guaranteed: anything
        after the program has ended, however it has; state and checkpoint are gone, and all output of another run is new. They
        are gone from memory and disk, too, when the program ends or nobody holds this object any more; only a program that is
        killed leaves its directory, `holdfast-*` in /dev/shm or else in the temporary directory, for you to remove.

        >>> Persistence.none().is_lasting
        False
        """
        parent = _IN_MEMORY if _IN_MEMORY.is_dir() else None
        directory = tempfile.mkdtemp(prefix="holdfast-", dir=parent)
        place = cls(directory)
        place.is_lasting = False
        place.storage = storage_at(directory, durable=False)
        weakref.finalize(place, shutil.rmtree, directory, ignore_errors=True)
        return place
