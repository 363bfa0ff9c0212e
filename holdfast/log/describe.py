"""What a checkpoint is, in a few facts: whose, how far, how much, where.

All of it follows from the first and the last manifests and from the listings, so it costs the same at any size of state.
"""

from __future__ import annotations

import msgspec

from holdfast.errors import Damaged
from holdfast.log import paths
from holdfast.log.manifest import Chain, InstanceId, Manifest, Position, SparkBatch
from holdfast.log.storage import Storage

RECENT = 8
"""Versions that are looked at for sinks: only output tells of a sink without a schema."""


class Commit(msgspec.Struct, frozen=True):
    """Which version, when, and by whom."""

    version: int
    kind: str
    time_ms: int
    holder: str


class Stage(msgspec.Struct, frozen=True):
    name: str
    partitions: int
    stores: tuple[str, ...]
    keys: int
    bytes: int


class Partition(msgspec.Struct, frozen=True):
    partition: int
    stage: str
    keys: int
    bytes: int


class KeptStore(msgspec.Struct, frozen=True):
    name: str
    stage: str | None
    """None: of an earlier program; no stage of the last one has it."""
    partitions: int
    codec: str | None
    """None: nothing was written to it since the state was last empty."""
    keys: int | None
    """None: it shares its stage with other stores, and only their sum is known."""
    bytes: int | None
    changelog: str | None
    """The id of its changelog topic."""


class Sink(msgspec.Struct, frozen=True):
    id: str
    schema: str | None


class FileClass(msgspec.Struct, frozen=True):
    name: str
    files: int
    bytes: int


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint at its last version."""

    app: str
    instance: InstanceId
    first: Commit
    last: Commit
    commits: int
    base: int
    """The version at which the state was last empty."""
    source: str
    position: Position | None
    spark: SparkBatch | None
    watermark_ms: int | None
    event_ms: tuple[int | None, ...]
    """By source."""
    delivered: int | None
    """The last version that is marked as delivered; None: no version is."""
    is_waiting: bool
    """Whether the last version has output that is not marked as delivered."""
    keys: int
    bytes: int
    stages: tuple[Stage, ...]
    partitions: tuple[Partition, ...]
    stores: tuple[KeptStore, ...]
    sinks: tuple[Sink, ...]
    files: tuple[FileClass, ...]


def describe(storage: Storage) -> Description | None:
    """None: there is no checkpoint."""
    sizes = {
        name: {file: size for file, size in storage.sizes(prefix).items() if paths.is_named_well(file)}
        for name, prefix in paths.CLASSES.items()
    }
    marks = storage.names(paths.DELIVERED)  # before the head: a run that is alive adds to both
    chain = Chain(storage)
    head = chain.head()
    if head is None:
        return None
    first, commits = _first(chain, head)
    delivered = paths.version_of(marks[-1]) if marks else None
    has_output = head.published_by is not None or any(commit.outboxes for commit in head.partitions)
    return Description(
        app=head.app,
        instance=head.instance,
        first=_commit(first),
        last=_commit(head),
        commits=commits,
        base=head.base,
        source=head.source,
        position=head.position,
        spark=head.spark,
        watermark_ms=head.watermark_ms,
        event_ms=head.event_ms,
        delivered=delivered,
        is_waiting=has_output and (delivered is None or delivered < head.version),
        keys=sum(commit.keys for commit in head.partitions),
        bytes=sum(commit.bytes for commit in head.partitions),
        stages=stages_of(head),
        partitions=_partitions(head),
        stores=stores_of(head),
        sinks=_sinks(chain, head),
        files=tuple(FileClass(name, len(found), sum(found.values())) for name, found in sizes.items()),
    )


def stages_of(head: Manifest) -> tuple[Stage, ...]:
    found = []
    partitions = iter(head.partitions)
    for shape in head.stages:
        commits = [next(partitions) for _ in range(shape.partitions)]
        keys, size = sum(commit.keys for commit in commits), sum(commit.bytes for commit in commits)
        found.append(Stage(shape.name, shape.partitions, shape.stores, keys, size))
    return tuple(found)


def stores_of(head: Manifest) -> tuple[KeptStore, ...]:
    """Every store that has or may have state, in the order of the stages; last those of earlier programs."""
    stages = stages_of(head)
    known = {store for stage in stages for store in stage.stores}
    earlier = sorted(head.codecs.keys() - known)
    found = []
    for stage in stages:
        is_alone = len(stage.stores) == 1 and not (earlier and stage is stages[0])
        for store in stage.stores:
            found.append(
                KeptStore(
                    store,
                    stage.name,
                    stage.partitions,
                    head.codecs.get(store),
                    stage.keys if is_alone else None,
                    stage.bytes if is_alone else None,
                    head.changelogs.get(store),
                )
            )
    for store in earlier:
        found.append(KeptStore(store, None, stages[0].partitions, head.codecs[store], None, None, None))
    return tuple(found)


def _partitions(head: Manifest) -> tuple[Partition, ...]:
    names = [name for shape in head.stages for name in [shape.name] * shape.partitions]
    return tuple(
        Partition(commit.partition, name, commit.keys, commit.bytes)
        for commit, name in zip(head.partitions, names, strict=True)
    )


def _first(chain: Chain, head: Manifest) -> tuple[Manifest, int]:
    """The oldest manifest that there is, and how many there are."""
    names = chain.storage.names(paths.COMMITS)
    while True:
        version = paths.version_of(names[0]) if names else head.version
        try:
            return chain.read(version), len(names)
        except Damaged:
            before, names = names, chain.storage.names(paths.COMMITS)
            if names[:1] == before[:1]:
                raise


def _commit(manifest: Manifest) -> Commit:
    return Commit(manifest.version, manifest.kind, manifest.time_ms, manifest.holder)


def _sinks(chain: Chain, head: Manifest) -> tuple[Sink, ...]:
    ids = set(head.schemas)
    manifest = head
    for _ in range(RECENT):
        ids.update(sink for commit in manifest.partitions for sink in commit.outboxes)
        if manifest.version == 0 or manifest.parent is None:
            break
        try:
            manifest = chain.parent_of(manifest)
        except Damaged:  # what is wrong with older versions is not asked here
            break
    return tuple(Sink(sink, head.schemas.get(sink)) for sink in sorted(ids))
