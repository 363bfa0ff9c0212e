"""Kafka topics as a source: a state partition is a topic partition, and the task that owns it reads its range itself.

Topics that are read together have the same number of partitions, and the task of partition 3 reads partition 3 of each. The
position is {"topics": {name: id of the topic}, "offsets": [next offsets]}, with the offsets of all partitions of the first
topic, then of the second, in the order of their names. While the state is rebuilt from the beginning it also has "quiet":
[offsets up to which the output is out already]. Such a place in the list is called a lane here.

A range is done when the client has come to its end, not when so many records have: transactions leave gaps. The driver plans
with the same isolation level as the tasks read with, so a range never ends beyond what they can see.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from holdfast.errors import BrokerAway, HoldfastError, InvalidPipeline, NoTopic, OffsetsLost, TopicMismatch
from holdfast.kafka.connection import Connection
from holdfast.kafka.cursors import Cursor, cursor
from holdfast.kafka.topics import Topic
from holdfast.log.manifest import Position, new_id
from holdfast.plan.record import Chunk, Headers
from holdfast.sources.base import Span, fair_shares
from holdfast.times import milliseconds

if TYPE_CHECKING:
    from confluent_kafka import Message

    from holdfast.kafka.cluster import Cluster

IDENTITY_S = 10.0
"""How often the driver makes sure that the topic is still the same one."""
RENEW_S = 3.0
"""How often a client that gets no answer is replaced."""
DOUBT_S = 20.0
"""How long a topic may look changed before it is believed."""

logger = logging.getLogger("holdfast")


class KafkaSource:
    """See `Application.topic`."""

    kind = "kafka"

    def __init__(
        self, topics: Iterable[Topic], connection: Connection, group: str, reset: str, on_data_loss: str
    ) -> None:
        self._topics = sorted(topics, key=lambda topic: topic.name)
        self.names = tuple(topic.name for topic in self._topics)
        self.name = ", ".join(self.names)
        self._connection = connection
        self._group = group
        self._reset = reset
        self._on_data_loss = on_data_loss
        self._token = new_id()
        self._planner: _Planner | None = None

    def joined(self, other: Any) -> KafkaSource:
        if not isinstance(other, KafkaSource):
            raise InvalidPipeline(
                f"{self.name} and {other.name} cannot be read by one application: their keys lie in different partitions"
            )
        topics = [*self._topics, *other._topics]
        return KafkaSource(topics, self._connection, self._group, self._reset, self._on_data_loss)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_planner": None}

    # -- on the driver -----------------------------------------------------------------------------------------------

    def connect(self, cluster: Cluster, partitions: int, identities: dict[str, str]) -> None:
        """Plan with this cluster; the topics were just found to have these ids."""
        self._planner = _Planner(cluster, partitions, {name: identities[name] for name in self.names})

    def initial(self) -> Position:
        return self._planning.edge(first=self._reset == "earliest")

    def latest(self) -> Position:
        """Where the topic ends now."""
        return self._planning.edge(first=False)

    def earliest(self) -> Position:
        """Where the topic begins now."""
        return self._planning.edge(first=True)

    def propose(self, start: Position, rows: int) -> Position:
        return self._planning.propose(start, rows, skip=self._on_data_loss == "skip")

    def count(self, span: Span) -> int:
        return sum(span.end["offsets"]) - sum(span.start["offsets"])

    def silent(self, span: Span) -> list[int]:
        return self._planning.silent(span)

    def until_now(self) -> None:
        self._planning.stop_at = self.latest()["offsets"]

    def is_over(self, position: Position, proposed: Position | None = None) -> bool:
        stop_at = self._planning.stop_at
        return stop_at is not None and all(at >= end for at, end in zip(position["offsets"], stop_at, strict=True))

    @property
    def _planning(self) -> _Planner:
        assert self._planner is not None, "connect() comes first"
        return self._planner

    # -- in a task -----------------------------------------------------------------------------------------------------

    def is_quiet(self, span: Span, lanes: slice) -> bool:
        """Whether the state is being rebuilt and the output of all of `span` is out already, in these lanes."""
        quiet = span.start.get("quiet")
        if quiet is None:
            return False
        return all(end <= out for end, out in zip(span.end["offsets"][lanes], quiet[lanes], strict=True))

    def read(self, partition: int, partitions: int, span: Span) -> KafkaReading:
        return KafkaReading(self, partition, partitions, span)

    def cursor(self, origin: int, partition: int) -> Cursor:
        """This process's consumer of a partition of a topic."""
        return cursor(self._token, self._connection, self._group, self.names[origin], partition)

    def chunk(self, origin: int, messages: Sequence[Message]) -> Chunk:
        """Records of messages of a topic; one whose bytes cannot be read is a fault of its own."""
        topic = self._topics[origin]
        offsets: list[int] = [message.offset() for message in messages]  # type: ignore[misc]
        raw_headers = [message.headers() for message in messages]
        headers: list[Headers | None] | None = raw_headers if any(raw_headers) else None  # type: ignore[assignment]
        try:
            values = topic.value_deserializer.many([message.value() for message in messages])
            keys = topic.key_deserializer.many([message.key() for message in messages])
            times = _times(topic, messages, values)
        except Exception:  # some record is at fault: find out which
            return _careful_chunk(topic, messages, offsets, headers)
        return Chunk(keys, values, times, offsets, headers=headers, raw=messages)


def _times(topic: Topic, messages: Sequence[Message], values: Sequence[Any]) -> list[int | None]:
    if topic.timestamp_extractor is None:
        return [message.timestamp()[1] for message in messages]
    return [_time(topic, message, value) for message, value in zip(messages, values, strict=True)]


def _time(topic: Topic, message: Message, value: Any) -> int:
    kind, time_ms = message.timestamp()
    extract = topic.timestamp_extractor
    return time_ms if extract is None else milliseconds(extract(value, message.headers(), time_ms, kind))


def _careful_chunk(
    topic: Topic, messages: Sequence[Message], offsets: list[int], headers: list[Headers | None] | None
) -> Chunk:
    chunk = Chunk([], [], [], offsets, None, {}, headers, messages)
    assert chunk.timestamps is not None
    for index, message in enumerate(messages):
        key, value, time_ms = None, None, message.timestamp()[1]
        try:
            key = topic.key_deserializer(message.key())
            value = topic.value_deserializer(message.value())
            time_ms = _time(topic, message, value)
        except Exception as error:
            chunk.faults[index] = error
        chunk.keys.append(key)
        chunk.values.append(value)
        chunk.timestamps.append(time_ms)
    return chunk


class KafkaReading:
    """The chunks of one range of one partition, topic by topic."""

    def __init__(self, source: KafkaSource, partition: int, partitions: int, span: Span) -> None:
        self.end = span.end
        self._source = source
        self._partition = partition
        self._partitions = partitions
        self._span = span

    def __iter__(self) -> Iterator[Chunk]:
        for origin in range(len(self._source.names)):
            yield from self._chunks(origin)

    def _chunks(self, origin: int) -> Iterator[Chunk]:
        span, lane = self._span, origin * self._partitions + self._partition
        lost = {lane: to for lane, _, to in span.end.get("lost", ())}
        since = max(span.start["offsets"][lane], lost.get(lane, 0))
        to = span.end["offsets"][lane]
        if since >= to:
            return
        quiet = span.start.get("quiet")
        cursor = self._source.cursor(origin, self._partition)
        cursor.move(since)
        while cursor.at < to:
            messages = cursor.take(to)
            if messages:
                chunk = self._source.chunk(origin, messages)
                chunk.origin = origin
                chunk.is_quiet = quiet is not None and to <= quiet[lane]
                yield chunk


class _Planner:
    """How far a batch may go. Lives on the driver."""

    def __init__(self, cluster: Cluster, partitions: int, identities: dict[str, str]) -> None:
        self._cluster = cluster
        self._partitions = partitions
        self._identities = identities
        """By topic."""
        self._identified = time.monotonic()
        self._away_since: float | None = None
        self._renewed = time.monotonic()
        self.stop_at: list[int] | None = None
        self._last: list[int] | None = None
        """Where the lanes ended when that could last be seen; None: it could not be seen the last time."""

    def edge(self, *, first: bool) -> Position:
        ask = self._cluster.first_offsets if first else self._cluster.last_offsets
        offsets = [offset for topic in self._identities for offset in ask(topic, self._partitions)]
        return {"topics": self._identities, "offsets": offsets}

    def propose(self, start: Position, rows: int, skip: bool) -> Position:
        self._last = None
        try:
            self._check_identity()
            first, last = self._both_offsets()
            self._check_ends(start["offsets"], last)
        except (BrokerAway, NoTopic) as error:
            self._away(error)
            return start
        except TopicMismatch as error:
            if self._is_doubtful():
                self._away(error)
                return start
            raise
        if self._away_since is not None:
            logger.warning("the cluster answers again after %.0f s", time.monotonic() - self._away_since)
            self._away_since = None
        self._last = last
        begin, lost = list(start["offsets"]), []
        for lane, (at, low) in enumerate(zip(begin, first, strict=True)):
            if at < low:
                lost.append([lane, at, low])
                begin[lane] = low
        if lost:
            self._report(lost, skip)
        if self.stop_at is not None:
            last = [min(ends) for ends in zip(last, self.stop_at, strict=True)]
        quiet = start.get("quiet")
        if quiet is not None:  # a range is out already, or it is not: none is half of each
            last = [min(high, hush) if at < hush else high for at, high, hush in zip(begin, last, quiet, strict=True)]
        taken = fair_shares([high - at for at, high in zip(begin, last, strict=True)], rows)
        offsets = [at + more for at, more in zip(begin, taken, strict=True)]
        end: Position = {"topics": self._identities, "offsets": offsets}
        if lost:
            end["lost"] = lost
        if quiet is not None and any(at < hush for at, hush in zip(offsets, quiet, strict=True)):
            end["quiet"] = quiet
        return end

    def silent(self, span: Span) -> list[int]:
        """The topics that have nothing in any lane."""
        last = self._last
        if last is None:
            return []
        lanes = [
            start == end == high
            for start, end, high in zip(span.start["offsets"], span.end["offsets"], last, strict=True)
        ]
        size = self._partitions
        return [topic for topic in range(len(self._identities)) if all(lanes[topic * size : (topic + 1) * size])]

    def _both_offsets(self) -> tuple[list[int], list[int]]:
        """The first and last offsets of all lanes."""
        first: list[int] = []
        last: list[int] = []
        for topic in self._identities:
            low, high = self._cluster.both_offsets(topic, self._partitions)
            first += low
            last += high
        return first, last

    def _place(self, lane: int) -> tuple[str, int]:
        """The topic and partition of a lane."""
        return list(self._identities)[lane // self._partitions], lane % self._partitions

    def _report(self, lost: list[list[int]], skip: bool) -> None:
        lane, since, to = lost[0]
        topic, partition = self._place(lane)
        where = ", ".join(
            "topic {}, partition {} from {} to {}".format(*self._place(lane), since, to) for lane, since, to in lost
        )
        if skip:
            logger.warning("the records of %s are gone; going on after them", where)
            return
        raise OffsetsLost(
            f"the records of {where} were deleted before they were read. To go on without them, start with "
            'on_data_loss="skip": the gap is then recorded in the checkpoint. Otherwise put the topic back',
            topic=topic,
            partition=partition,
            since=since,
            to=to,
        )

    def _check_ends(self, begin: list[int], last: list[int]) -> None:
        for lane, (at, high) in enumerate(zip(begin, last, strict=True)):
            if at > high:
                topic, partition = self._place(lane)
                raise TopicMismatch(
                    f"topic {topic}, partition {partition} ends at offset {high}, before {at}, which was read already: its "
                    "records are others now. Begin a new checkpoint, or put the topic back",
                    topic=topic,
                    partition=partition,
                )

    def _is_doubtful(self) -> bool:
        """Whether a change of the topic may pass: a cluster that comes back knows less than it did, for a moment."""
        return self._away_since is None or time.monotonic() - self._away_since < DOUBT_S

    def _check_identity(self) -> None:
        if time.monotonic() - self._identified < IDENTITY_S:
            return
        known = self._cluster.topics(list(self._identities))
        for topic, identity in self._identities.items():
            found = known.get(topic)
            check_same_topic(
                topic,
                identity,
                self._partitions,
                None if found is None else found.id,
                0 if found is None else found.partitions,
            )
        self._identified = time.monotonic()

    def _away(self, error: HoldfastError) -> None:
        now = time.monotonic()
        if now - self._renewed > RENEW_S:
            self._renewed = now
            self._cluster.renew()
        if self._away_since is None:
            self._away_since = now
            logger.warning("%s; waiting for it", str(error).partition(";")[0])


def check_same_topic(name: str, identity: str, partitions: int, found: str | None, found_partitions: int) -> None:
    """Refuse a topic that was replaced or has grown under existing state."""
    if found is None:
        raise TopicMismatch(f"topic {name} is gone; put it back, or begin a new checkpoint", topic=name)
    if found != identity:
        raise TopicMismatch(
            f"topic {name} was deleted and created again since the checkpoint was begun (its id was {identity}, it is {found}): "
            "the offsets of the checkpoint mean nothing in it. Begin a new checkpoint: take another application name",
            topic=name,
            recorded=identity,
            found=found,
        )
    if found_partitions != partitions:
        raise TopicMismatch(
            f"topic {name} has {found_partitions} partitions, the state was built with {partitions}: keys are in other partitions "
            "now, and their state would not be found. Process into a new application name, or go on with a topic of "
            f"{partitions} partitions",
            topic=name,
            recorded=partitions,
            found=found_partitions,
        )
