"""Manifests: the commit record of a version.

A version exists if and only if its manifest exists. Writing it is the commit, so it is a put-if-absent, and
everything that it names is already durable. Each manifest names its parent, so the versions form one chain; the chain
owns state, output and source positions.

Layout: commits/<version, 20 digits>.json, format 1. The last field of every format is `checksum`, over every byte before
it: a manifest that was changed is `Damaged`, also where it is still JSON.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from collections.abc import Callable
from typing import Any, Literal, NewType

import msgspec

from holdfast.errors import (
    Damaged,
    Fenced,
    ForeignCheckpoint,
    StorageFull,
    StorageReadOnly,
    StorageRefused,
    UnsafeStorage,
)
from holdfast.log import paths
from holdfast.log.files import FileRef
from holdfast.log.sealed import sealed, unsealed
from holdfast.log.storage import Exists, Missing, Storage

FORMAT = 1
InstanceId = NewType("InstanceId", str)
ManifestId = NewType("ManifestId", str)
AttemptId = NewType("AttemptId", str)
Position = dict[str, Any]
"""Where a source stands, in the source's own words; plain JSON."""

logger = logging.getLogger("holdfast")


class SparkBatch(msgspec.Struct, frozen=True):
    """Which micro-batch of which streaming query a version holds."""

    query: str
    batch: int
    offsets: str
    """Checksum of the source lines of Spark's offset entry."""


class PartitionCommit(msgspec.Struct, frozen=True):
    """What the winning attempt of one partition wrote."""

    partition: int
    attempt: AttemptId
    delta: FileRef | None = None
    """None: nothing changed."""
    outboxes: dict[str, FileRef] = {}
    """By sink."""
    rows_in: int = 0
    rows_out: int = 0
    skipped: int = 0
    """Records that the error callback skipped."""
    late: int = 0
    """Records that were left out because they came after the watermark."""
    keys_updated: int = 0
    """Documents that this version wrote."""
    keys_removed: int = 0
    """Documents that it removed."""
    due_ms: int | None = None
    """When a document has next to be looked at, by processing time, or earlier; None: never."""
    event_due_ms: int | None = None
    """The same by event time."""
    keys: int = 0
    """Documents in the partition after this version."""
    bytes: int = 0
    """Their size: keys and values."""


class StageShape(msgspec.Struct, frozen=True):
    """A stage, as far as the place of its state depends on it."""

    name: str
    partitions: int
    stores: tuple[str, ...] = ()


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """One commit. See docs/formats.md for every field."""

    format: int = FORMAT
    version: int
    id: ManifestId
    parent: ManifestId | None
    instance: InstanceId
    """Minted with version 0; in every lock, marker and local store."""
    app: str
    holder: str
    """Who committed: host and process, for people."""
    kind: Literal["start", "batch", "clear", "restoring", "restored", "backfilled"]
    """`restoring`, `restored`: state that came back from changelog topics, as yet in part, and whole. `backfilled`: all of the
    state is in its changelog topics from here on."""
    base: int
    """The version at which the state was last empty: a restore begins there."""
    base_id: ManifestId
    """The id of that version's manifest."""
    time_ms: int
    """The processing time of the batch; never before its parent's."""
    watermark_ms: int | None = None
    """The watermark of the batch, or its parent's if the program has none; never before that."""
    event_ms: tuple[int | None, ...] = ()
    """By source: the latest event time so far, from which the next watermark follows."""
    source: str
    """The kind of source that the positions belong to."""
    position: Position | None
    """The end of what was read; None where Spark owns the position."""
    spark: SparkBatch | None
    spark_files: dict[str, FileRef] = {}
    """By path in Spark's checkpoint: what Spark needs to begin this batch again. Only where that is not in a directory of ours."""
    codecs: dict[str, str] = {}
    """By store."""
    schemas: dict[str, str] = {}
    """By sink: the schema that its rows were first written with."""
    stages: tuple[StageShape, ...]
    partitions: tuple[PartitionCommit, ...]
    """Stage by stage."""
    published_by: Literal["driver", "tasks"] | None = None
    """Who publishes this version to Kafka: fixed here, so that two drivers never do it in two ways."""
    cleared: int = 0
    """The version at which the state was last emptied on purpose: what a changelog topic has from before is void."""
    changelogs: dict[str, str] = {}
    """By store: the id of the changelog topic that has followed it since the store was empty."""


entropy: Callable[[int], bytes] = secrets.token_bytes
"""Where ids come from; the simulation has its own, so that a seed is a schedule."""


def new_id() -> str:
    """128 random bits: two of them never meet."""
    return entropy(16).hex()


class Chain:
    """The manifests of one checkpoint, in order."""

    def __init__(self, storage: Storage, pause: Callable[[float], None] = time.sleep) -> None:
        self.storage = storage
        self._pause = pause

    def head(self) -> Manifest | None:
        """The last commit, or None in an empty checkpoint."""
        names = self.storage.names(paths.COMMITS)
        while names:
            try:
                return self.read(paths.version_of(names[-1]))
            except Damaged:
                before, names = names[-1], self.storage.names(paths.COMMITS)
                if not names or names[-1] <= before:
                    raise
        return None

    def first(self) -> int:
        """The oldest version that is there: the first one, or the floor of retention."""
        return paths.version_of(self.storage.names(paths.COMMITS)[0])

    def read(self, version: int) -> Manifest:
        name = paths.manifest(version)
        try:
            data = self.storage.get(name)
        except Missing:
            raise Damaged(f"{name} is missing: the chain of commits is broken there", name=name) from None
        manifest = decode(name, data)
        if manifest.version != version:
            raise Damaged(f"{name} is the manifest of version {manifest.version}; restore it from a backup", name=name)
        return manifest

    def parent_of(self, child: Manifest) -> Manifest:
        """The manifest before `child`, checked to be the one that `child` was built on."""
        parent = self.read(child.version - 1)
        if parent.id != child.parent:
            name = paths.manifest(parent.version)
            raise Damaged(f"{name} is not the commit that version {child.version} continues", name=name)
        return parent

    def commit(self, manifest: Manifest, *, tries: int = 5) -> Manifest:
        """Put `manifest` if its version is free. The put decides.

        After any outcome but clean success the stored manifest is read back: ours means that the commit happened, another's
        that this run is fenced, none that it may be tried again. A run that was overtaken long ago may find the name free
        again; it is fenced, too.
        """
        name = paths.manifest(manifest.version)
        data = encode(manifest)
        for attempt in range(1, tries + 1):
            try:
                self.storage.put(name, data)
                break
            except (StorageFull, StorageReadOnly, StorageRefused, UnsafeStorage):
                raise
            except Exception as error:
                try:
                    stored = decode(name, self.storage.get(name))
                except Missing:
                    newest = self.head() if isinstance(error, Exists) else None
                    if newest is not None and newest.version > manifest.version:  # retention has passed it since
                        raise Fenced(manifest.version, newest.holder) from None
                    if attempt == tries or isinstance(error, Exists):
                        raise error from None
                    logger.warning("commit of version %d failed (%s); trying again", manifest.version, error)
                    self._pause(0.05 * 2**attempt)
                    continue
                if stored.id != manifest.id:
                    raise Fenced(manifest.version, stored.holder) from None
                manifest = stored
                break
        self._check_not_overtaken(manifest, tries)
        return manifest

    def _check_not_overtaken(self, manifest: Manifest, tries: int) -> None:
        """The name was free, but perhaps because retention has passed it: then the manifest before it is gone, too. The first
        version has none before it, but then there are later ones.

        What was put stays: it may also be that it was in time, and that others went on from it and cleared up since.
        """
        for attempt in range(1, tries + 1):
            try:
                if self._has_parent(manifest):
                    return
                newest = self.head()
                if newest is None or newest.version == manifest.version:
                    return  # it was lost in another way, which whoever needs it will say
                raise Fenced(manifest.version + 1, newest.holder)
            except (Fenced, Damaged):
                raise
            except Exception as error:
                if attempt == tries:
                    raise
                logger.warning("after the commit of version %d: %s; looking again", manifest.version, error)
                self._pause(0.05 * 2**attempt)

    def _has_parent(self, manifest: Manifest) -> bool:
        if manifest.parent is None:
            return False
        try:
            self.storage.get(paths.manifest(manifest.version - 1))
        except Missing:
            return False
        return True


def encode(manifest: Manifest) -> bytes:
    return sealed(manifest)


def decode(name: str, data: bytes) -> Manifest:
    return unsealed(name, data, Manifest, "manifest", FORMAT)


def check_owner(manifest: Manifest, app: str) -> None:
    if manifest.app != app:
        raise ForeignCheckpoint(
            f"this checkpoint belongs to application {manifest.app!r}, not to {app!r}: "
            "give the application its own state_dir or persistence",
            owner=manifest.app,
            app=app,
        )


def empty_partitions(count: int) -> tuple[PartitionCommit, ...]:
    return tuple(PartitionCommit(partition, AttemptId("")) for partition in range(count))


def cleared(head: Manifest) -> Manifest:
    """The manifest that empties the state after `head` and inherits everything else."""
    identity = ManifestId(new_id())
    version = head.version + 1
    return msgspec.structs.replace(
        head,
        version=version,
        id=identity,
        parent=head.id,
        holder=this_process(),
        kind="clear",
        base=version,
        base_id=identity,
        cleared=version,
        published_by=None,
        codecs={},
        partitions=empty_partitions(len(head.partitions)),
    )


def this_process() -> str:
    """Who commits, for people."""
    return f"{socket.gethostname()}:{os.getpid()}"
