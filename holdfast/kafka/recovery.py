"""Coming back from Kafka alone: the checkpoint is gone, and the changelog topics hold state and position.

Each partition is restored to the last version that its changelogs have, with the position that belongs to it: what was
published of a partition is one transaction, so nothing is counted twice or left out. A restore runs in rounds. A round
reads the next records of every changelog partition in tasks, puts them down as deltas and commits them as a version of
kind `restoring`, so memory is bounded and an interrupted restore goes on where it stopped. The last version is of kind
`restored`; only from such a one does processing start.

The new chain goes on with the instance of the old one and begins after its last version, so the notes in Kafka stay true.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Literal

import msgspec

from holdfast.errors import CodecMismatch, EarlierLife, IncompleteChangelog, TopicMismatch
from holdfast.kafka import names
from holdfast.kafka.changelog import Milestone
from holdfast.kafka.link import Attachment
from holdfast.kafka.publishing import Note, ledger
from holdfast.kafka.rounds import Lane, Round, last_milestone, ready_task, round_task
from holdfast.log.manifest import (
    AttemptId,
    Chain,
    InstanceId,
    Manifest,
    ManifestId,
    PartitionCommit,
    Position,
    empty_partitions,
    new_id,
)
from holdfast.log.recipe import recipes_for
from holdfast.plan.program import Program
from holdfast.runtime.restoring import RestoreLine
from holdfast.sinks.kafka import Tasks, surely_each

ROUND = 500_000
"""Records of a changelog partition that a round reads."""
Recover = Literal["changelog", "beginning", "nothing"]

_OTHER_WAYS = 'run(recover="beginning") builds the state again from the topic, run(recover="nothing") begins without it'

logger = logging.getLogger("holdfast")


class Traces(msgspec.Struct, frozen=True):
    """What Kafka still knows of an application."""

    notes: tuple[Note, ...]
    offsets: dict[int, int]
    """By lane of the source: its offset in the consumer group."""


def find_traces(attachment: Attachment) -> Traces:
    """What an earlier life of the application has left. Its transactions must be over."""
    link = attachment.link
    slots = range(attachment.known[names.notes(link.group)].partitions)
    notes = [note for note in ledger(link.connection, link.group).read(slots) if note is not None]
    return Traces(tuple(notes), _published_offsets(attachment))


def _published_offsets(attachment: Attachment) -> dict[int, int]:
    """By lane of the source: the offset in the consumer group, which is written with the output."""
    partitions, group = attachment.partitions or 0, attachment.link.group
    return {
        origin * partitions + partition: offset
        for origin, topic in enumerate(attachment.identities)
        for partition, offset in attachment.cluster.group_offsets(group, topic, partitions).items()
    }


def check_first_life(attachment: Attachment) -> None:
    """Without a checkpoint and without being told, begin only if Kafka knows nothing of the application either."""
    group, cluster = attachment.link.group, attachment.cluster
    notes = attachment.known[names.notes(group)]
    # Not stable: a run that was killed may have left them in the balance.
    versions = cluster.group_offsets(group, notes.name, notes.partitions, stable=False).values()
    filled = [
        topic
        for topic in attachment.changelogs.values()
        if any(cluster.written_offsets(topic, attachment.known[topic].partitions))
    ]
    if versions or filled:
        last = max(versions, default=0)
        where = f"changelog topics {', '.join(filled)}" if filled else f"consumer group {group}"
        raise EarlierLife(
            f"there is no checkpoint, but Kafka holds traces of an application of this name, up to version {last}: {where}. If the "
            'checkpoint is elsewhere, put it back or correct state_dir. If it is lost: run(recover="changelog") takes state and '
            'position back from Kafka; run(recover="beginning") reads the topic from its beginning and sends only what is not '
            'out yet; run(recover="nothing") forgets both and begins anew',
            version=last,
        )


class Restore:
    """One restore, from whatever there is of it already."""

    def __init__(self, attachment: Attachment, program: Program, chain: Chain, tasks: Tasks, holder: str) -> None:
        self._attachment = attachment
        self._program = program
        self._chain = chain
        self._tasks = tasks
        self._token = new_id()
        self._holder = holder

    def run(self, recover: Recover) -> None:
        """Make a chain whose head is `restored`."""
        head = self._chain.head()
        if recover != "changelog":
            self._begin_anew(head, rebuild=recover == "beginning")
            return
        stores = self._milestones()
        goal = self._goal(stores)
        link = (
            self._attachment.link
        )  # first the workers: else the time left would be wrong for as long as they need to start
        surely_each(self._tasks, "restore", ready_task(self._token, link.connection, link.group, goal.lanes))
        progress = RestoreLine(self._program.app, "the changelog topics", sum(goal.to) - sum(goal.since), "records")
        manifest = head if head is not None and _continues(head, goal) else self._chain.commit(self._first(goal, head))
        while True:
            at = _reached(manifest)
            if at == goal.to:
                break
            manifest = self._round(manifest, goal, at)
            progress.show(sum(_reached(manifest)) - sum(goal.since))
        self._finish(manifest, goal)
        progress.end()

    # -- what there is ------------------------------------------------------------------------------------------------

    def _last_milestones(self) -> dict[str, list[Milestone | None]]:
        """By store: the last milestone of each partition of its changelog."""
        attachment, link = self._attachment, self._attachment.link
        found: dict[str, list[Milestone | None]] = {}
        for store, topic in attachment.changelogs.items():
            first, last = attachment.cluster.both_offsets(topic, attachment.known[topic].partitions)
            found[store] = [
                last_milestone(link.connection, link.group, topic, partition, low, high)
                for partition, (low, high) in enumerate(zip(first, last, strict=True))
            ]
        return found

    def _milestones(self) -> dict[str, list[Milestone]]:
        """The same of the stores that the earlier life had; every partition must have one."""
        attachment, found = self._attachment, self._last_milestones()
        known = {name for stones in found.values() for stone in stones if stone is not None for name in stone.stores}
        whole: dict[str, list[Milestone]] = {}
        for store, stones in found.items():
            present = [stone for stone in stones if stone is not None]
            if store not in known and not present:
                continue
            if len(present) != len(stones):
                topic = attachment.changelogs[store]
                missing = [partition for partition, stone in enumerate(stones) if stone is None]
                raise IncompleteChangelog(
                    f"changelog topic {topic} has no milestone in partitions {missing}: it was emptied or never filled, so store "
                    f"{store} cannot be restored from it",
                    topic=topic,
                )
            whole[store] = present
        return whole

    def _goal(self, stores: dict[str, list[Milestone]]) -> _Goal:
        if not stores:
            self._check_is_stateless()
            return self._stateless_goal()
        attachment, program = self._attachment, self._program
        assert attachment.source is not None
        stones = self._stones_by_partition(stores)
        known = list(stones.values())
        if len({stone.instance for stone in known}) != 1 or any(stone.app != program.app for stone in known):
            raise IncompleteChangelog(
                "the partitions of the changelog were written by different applications or lives of one"
            )
        if any(stone.topics != attachment.identities for stone in known):
            raise TopicMismatch(
                f"topic {attachment.source.name} was deleted and created again since the changelog was written: its offsets mean "
                'nothing now; run(recover="nothing") begins anew',
                topic=attachment.source.name,
            )
        offsets, outs = self._positions(stones)
        self._check_is_not_behind(outs)
        lanes = tuple(
            Lane(store, attachment.changelogs[store], stage.first + local, local)
            for stage in program.stages
            for store in stage.stores
            if store in stores
            for local in range(stage.partitions)
        )
        ends = {
            topic: attachment.cluster.both_offsets(topic, attachment.known[topic].partitions)
            for topic in dict.fromkeys(lane.topic for lane in lanes)
        }
        position: Position = {"topics": attachment.identities, "offsets": offsets}
        if outs != offsets:
            position["quiet"] = outs
        partitions = range(program.all_partitions)
        return _Goal(
            instance=known[0].instance,
            version=max(stone.version for stone in known),
            cleared=tuple(stones[partition].cleared if partition in stones else 0 for partition in partitions),
            time_ms=max(stone.time_ms for stone in known),
            watermark_ms=max((stone.watermark_ms for stone in known if stone.watermark_ms is not None), default=None),
            event_ms=tuple(
                max((time for time in times if time is not None), default=None)
                for times in zip(*(stone.event_ms for stone in known), strict=True)
            ),
            position=position,
            sizes=[
                (stones[partition].keys, stones[partition].bytes) if partition in stones else (0, 0)
                for partition in partitions
            ],
            lanes=lanes,
            since=[ends[lane.topic][0][lane.local] for lane in lanes],
            to=[ends[lane.topic][1][lane.local] for lane in lanes],
        )

    def _stones_by_partition(self, stores: dict[str, list[Milestone]]) -> dict[int, Milestone]:
        """By state partition: its milestone, on which all changelogs that follow it must agree."""
        program = self._program
        found: dict[int, Milestone] = {}
        for stage in program.stages:
            for store in stage.stores:
                for local, stone in enumerate(stores.get(store, ())):
                    self._check_codec(store, stone)
                    one = found.setdefault(stage.first + local, stone)
                    if one.version != stone.version or one.instance != stone.instance:
                        raise IncompleteChangelog(
                            f"partition {local}: the changelogs of the stores {', '.join(stage.stores)} stand at different "
                            f"versions ({one.version} and {stone.version}), though written together: {store} was changed by "
                            "someone else",
                            store=store,
                            partition=local,
                        )
        versions = {stone.version for stone in found.values()}
        if len(program.stages) > 1 and len(versions) > 1:
            raise IncompleteChangelog(
                f"the changelogs of the stages stand at different versions ({min(versions)} and {max(versions)}), though written "
                f"together: one was changed by someone else; {_OTHER_WAYS}"
            )
        return found

    def _check_codec(self, store: str, stone: Milestone) -> None:
        asked = self._program.codec_of(store).name
        if stone.codec != asked:
            raise CodecMismatch(
                f"store {store!r} was written with codec {stone.codec}, the program uses {asked}",
                store=store,
                written=stone.codec,
                asked=asked,
            )

    def _positions(self, stones: dict[int, Milestone]) -> tuple[list[int], list[int]]:
        """Where the lanes of the source stand, and up to where their output is out."""
        topics, lanes = len(self._attachment.identities), len(self._attachment.identities) * self._program.partitions
        several = len(self._program.stages) > 1
        stone = next(iter(stones.values()))
        if len(stone.offsets) != (lanes if several else topics):
            raise IncompleteChangelog(
                f"the changelogs are of a program with other stages: {_OTHER_WAYS}", offsets=len(stone.offsets)
            )
        if several:
            return list(stone.offsets), list(stone.outs)
        own = [stones[partition] for partition in range(self._program.partitions)]
        return (
            [stone.offsets[topic] for topic in range(topics) for stone in own],
            [stone.outs[topic] for topic in range(topics) for stone in own],
        )

    def _check_is_stateless(self) -> None:
        attachment = self._attachment
        if attachment.stores:
            topics = ", ".join(attachment.changelogs.values())
            why = f"changelog topics {topics} hold nothing" if topics else "use_changelog_topics is off"
            raise IncompleteChangelog(
                f"{why}, so the state cannot be restored from Kafka; {_OTHER_WAYS}", stores=list(attachment.stores)
            )

    def _check_is_not_behind(self, outs: list[int]) -> None:
        """A changelog that was turned off for a while ends before the output does: what came after would be sent again."""
        out = _published_offsets(self._attachment)
        for lane, known in enumerate(outs):
            if out.get(lane, 0) > known:
                partition = lane % self._program.partitions
                raise IncompleteChangelog(
                    f"partition {partition}: the changelog has followed the state up to offset {known} of the source, but "
                    f"output is out up to offset {out[lane]}: changelog topics were off in between; {_OTHER_WAYS}",
                    partition=partition,
                    changelog=known,
                    out=out[lane],
                )

    def _stateless_goal(self) -> _Goal:
        """No state: the position is that of the consumer group."""
        attachment = self._attachment
        traces = find_traces(attachment)
        if not traces.notes or attachment.source is None:
            raise IncompleteChangelog(
                "Kafka holds no state and no position of this application: there is nothing to recover"
            )
        position = attachment.source.initial()
        for lane, offset in traces.offsets.items():
            position["offsets"][lane] = offset
        return _Goal(
            instance=traces.notes[0].instance,
            version=max(note.version for note in traces.notes),
            position=position,
            sizes=[(0, 0)] * self._program.all_partitions,
        )

    # -- the chain ----------------------------------------------------------------------------------------------------

    def _first(self, goal: _Goal, head: Manifest | None) -> Manifest:
        identity = ManifestId(new_id())
        version = 1 + max(goal.version, -1 if head is None else head.version)
        return Manifest(
            version=version,
            id=identity,
            parent=None if head is None else head.id,
            instance=InstanceId(goal.instance),
            app=self._program.app,
            holder=self._holder,
            kind="restoring",
            base=version,
            base_id=identity,
            time_ms=goal.time_ms,
            watermark_ms=goal.watermark_ms,
            event_ms=goal.event_ms,
            source="kafka",
            position=_progress_position(goal, goal.since),
            spark=None,
            codecs=self._program.codecs(),
            stages=self._program.shapes(),
            partitions=empty_partitions(self._program.all_partitions),
            cleared=max(goal.cleared),
            changelogs=self._program.changelogs,
        )

    def _round(self, manifest: Manifest, goal: _Goal, at: list[int]) -> Manifest:
        link, version = self._attachment.link, manifest.version + 1
        # the last round takes a little more: a round for a few records costs as much as one for many
        ends = [to if to - since < 1.2 * ROUND else since + ROUND for since, to in zip(at, goal.to, strict=True)]
        jobs = [
            Round(
                version,
                recipe,
                goal.cleared[partition],
                tuple(
                    (lane, since, end)
                    for lane, since, end in zip(goal.lanes, at, ends, strict=True)
                    if lane.partition == partition
                ),
            )
            for partition, recipe in enumerate(recipes_for(self._chain, manifest))
        ]
        commits: list[PartitionCommit] = surely_each(
            self._tasks,
            "restore",
            round_task(self._token, link.connection, link.group, manifest.instance, jobs),
        )
        return self._chain.commit(
            msgspec.structs.replace(
                manifest,
                version=version,
                id=ManifestId(new_id()),
                parent=manifest.id,
                holder=self._holder,
                position=_progress_position(goal, ends),
                partitions=tuple(
                    msgspec.structs.replace(
                        commit,
                        due_ms=before.due_ms if commit.due_ms is None else commit.due_ms,
                        event_due_ms=before.event_due_ms if commit.event_due_ms is None else commit.event_due_ms,
                    )
                    for before, commit in zip(manifest.partitions, commits, strict=True)
                ),
            )
        )

    def _finish(self, manifest: Manifest, goal: _Goal) -> None:
        self._chain.commit(
            msgspec.structs.replace(
                manifest,
                version=manifest.version + 1,
                id=ManifestId(new_id()),
                parent=manifest.id,
                holder=self._holder,
                kind="restored",
                position=goal.position,
                partitions=tuple(
                    PartitionCommit(
                        commit.partition,
                        AttemptId(new_id()),
                        keys=keys,
                        bytes=size,
                        due_ms=commit.due_ms,
                        event_due_ms=commit.event_due_ms,
                    )
                    for commit, (keys, size) in zip(manifest.partitions, goal.sizes, strict=True)
                ),
            )
        )

    def _begin_anew(self, head: Manifest | None, *, rebuild: bool) -> None:
        """An empty state after everything that the earlier life has published; with `rebuild`, to be filled again by
        reading the source from its beginning, without sending again what is out."""
        attachment = self._attachment
        traces = find_traces(attachment)
        found = self._last_milestones()
        stones = [stone for by_partition in found.values() for stone in by_partition if stone is not None]
        instances = {note.instance for note in traces.notes} | {stone.instance for stone in stones}
        last = max([note.version for note in traces.notes] + [stone.version for stone in stones], default=-1)
        position = self._program.source.initial()
        if rebuild:
            assert attachment.source is not None
            position = attachment.source.earliest()
            quiet = [traces.offsets.get(lane, 0) for lane in range(len(position["offsets"]))]  # it may have expired
            for by_partition in found.values():
                for local, stone in enumerate(by_partition):
                    if stone is not None and stone.topics == position["topics"]:
                        for lane, out in self._outs(local, stone):
                            quiet[lane] = max(quiet[lane], out)
            position["quiet"] = quiet
            logger.info("%s: rebuilding the state from the beginning of %s", self._program.app, attachment.source.name)
        goal = _Goal(
            instance=min(instances, default=new_id()),
            version=last,
            position=position,
        )
        first = self._first(goal, head)
        self._chain.commit(
            msgspec.structs.replace(first, kind="restored", position=goal.position, cleared=first.version)
        )

    def _outs(self, local: int, stone: Milestone) -> Iterator[tuple[int, int]]:
        """By lane: up to where the output is out, as far as a milestone of a partition tells."""
        topics, partitions = len(stone.topics), self._program.partitions
        if len(stone.outs) == topics * partitions:
            yield from enumerate(stone.outs)
        elif len(stone.outs) == topics and local < partitions:
            yield from ((topic * partitions + local, out) for topic, out in enumerate(stone.outs))


class _Goal(msgspec.Struct, frozen=True, kw_only=True):
    """Where a restore leads, and how far it is. Without stores there is nothing to read."""

    instance: str
    version: int
    position: Position
    time_ms: int = 0
    watermark_ms: int | None = None
    event_ms: tuple[int | None, ...] = ()
    cleared: tuple[int, ...] = (0,)
    """By partition."""
    sizes: list[tuple[int, int]] = []
    """By partition: documents and their bytes."""
    lanes: tuple[Lane, ...] = ()
    since: list[int] = []
    """Where they begin."""
    to: list[int] = []
    """Where they end."""


def _progress_position(goal: _Goal, at: list[int]) -> Position:
    return {"restoring": _topics(goal), "from": goal.position, "offsets": list(at)}


def _topics(goal: _Goal) -> list[str]:
    return list(dict.fromkeys(lane.topic for lane in goal.lanes))


def _continues(head: Manifest, goal: _Goal) -> bool:
    """Whether an unfinished restore is on its way to this very goal."""
    position = head.position or {}
    return (
        head.kind == "restoring"
        and head.instance == goal.instance
        and position.get("restoring") == _topics(goal)
        and position.get("from") == goal.position
    )


def _reached(manifest: Manifest) -> list[int]:
    assert manifest.position is not None
    return list(manifest.position["offsets"])
