"""A Kafka topic as a source: a state partition is a topic partition, and the task that owns it reads its range itself.

The position is {"topic": id of the topic, "offsets": [next offset of each partition]}; while the state is rebuilt from the
beginning it also has "quiet": [offset up to which the output of each partition is out already]. A range is done when the client
has come to its end, not when so many records have: transactions leave gaps. The driver plans with the same isolation
level as the tasks read with, so a range never ends beyond what they can see.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from holdfast.errors import BrokerAway, HoldfastError, NoTopic, OffsetsLost, TopicMismatch
from holdfast.kafka.connection import Connection
from holdfast.kafka.cursors import Cursor, cursor
from holdfast.kafka.topics import Topic
from holdfast.log.manifest import Position, new_id
from holdfast.plan.record import Chunk, Headers
from holdfast.sources.base import Span
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

    def __init__(self, topic: Topic, connection: Connection, group: str, reset: str, on_data_loss: str) -> None:
        self.name = topic.name
        self._topic = topic
        self._connection = connection
        self._group = group
        self._reset = reset
        self._skips_losses = on_data_loss == "skip"
        self._token = new_id()
        self._planner: _Planner | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_planner": None}

    # -- on the driver -----------------------------------------------------------------------------------------------

    def connect(self, cluster: Cluster, partitions: int, identity: str) -> None:
        """Plan with this cluster; the topic was just found to be like this."""
        self._planner = _Planner(self._topic.name, cluster, partitions, identity)

    def initial(self) -> Position:
        return self._planning.edge(first=self._reset == "earliest")

    def latest(self) -> Position:
        """Where the topic ends now."""
        return self._planning.edge(first=False)

    def earliest(self) -> Position:
        """Where the topic begins now."""
        return self._planning.edge(first=True)

    def propose(self, start: Position, rows: int) -> Position:
        return self._planning.propose(start, rows, self._skips_losses)

    def count(self, span: Span) -> int:
        return sum(span.end["offsets"]) - sum(span.start["offsets"])

    def until_now(self) -> None:
        self._planning.stop_at = self.latest()["offsets"]

    def is_over(self, position: Position) -> bool:
        stop_at = self._planning.stop_at
        return stop_at is not None and all(at >= end for at, end in zip(position["offsets"], stop_at, strict=True))

    @property
    def _planning(self) -> _Planner:
        assert self._planner is not None, "connect() comes first"
        return self._planner

    # -- in a task -----------------------------------------------------------------------------------------------------

    def read(self, partition: int, partitions: int, span: Span) -> KafkaReading:
        return KafkaReading(self, partition, span)

    def cursor(self, partition: int) -> Cursor:
        """This process's consumer of a partition."""
        return cursor(self._token, self._connection, self._group, self._topic.name, partition)

    def chunk(self, messages: Sequence[Message]) -> Chunk:
        """Records of messages; one whose bytes cannot be read is a fault of its own."""
        topic = self._topic
        offsets: list[int] = [message.offset() for message in messages]  # type: ignore[misc]
        raw_headers = [message.headers() for message in messages]
        headers: list[Headers | None] | None = raw_headers if any(raw_headers) else None  # type: ignore[assignment]
        try:
            values = topic.value_deserializer.many([message.value() for message in messages])
            keys = topic.key_deserializer.many([message.key() for message in messages])
            times = self._times(messages, values)
        except Exception:  # some record is at fault: find out which
            return self._careful_chunk(messages, offsets, headers)
        return Chunk(keys, values, times, offsets, headers=headers, raw=messages)

    def _times(self, messages: Sequence[Message], values: Sequence[Any]) -> list[int | None]:
        extract = self._topic.timestamp_extractor
        if extract is None:
            return [message.timestamp()[1] for message in messages]
        return [self._time(message, value) for message, value in zip(messages, values, strict=True)]

    def _time(self, message: Message, value: Any) -> int:
        kind, time_ms = message.timestamp()
        extract = self._topic.timestamp_extractor
        return time_ms if extract is None else milliseconds(extract(value, message.headers(), time_ms, kind))

    def _careful_chunk(
        self, messages: Sequence[Message], offsets: list[int], headers: list[Headers | None] | None
    ) -> Chunk:
        chunk = Chunk([], [], [], offsets, None, {}, headers, messages)
        assert chunk.timestamps is not None
        for index, message in enumerate(messages):
            key, value, time_ms = None, None, message.timestamp()[1]
            try:
                key = self._topic.key_deserializer(message.key())
                value = self._topic.value_deserializer(message.value())
                time_ms = self._time(message, value)
            except Exception as error:
                chunk.faults[index] = error
            chunk.keys.append(key)
            chunk.values.append(value)
            chunk.timestamps.append(time_ms)
        return chunk


class KafkaReading:
    """The chunks of one range of one partition."""

    def __init__(self, source: KafkaSource, partition: int, span: Span) -> None:
        self.end = span.end
        self._source = source
        self._partition = partition
        lost = {partition: to for partition, _, to in span.end.get("lost", ())}
        self._from = max(span.start["offsets"][partition], lost.get(partition, 0))
        self._to = span.end["offsets"][partition]
        quiet = span.start.get("quiet")
        self._is_quiet = quiet is not None and self._to <= quiet[partition]

    def __iter__(self) -> Iterator[Chunk]:
        if self._from >= self._to:
            return
        cursor = self._source.cursor(self._partition)
        cursor.move(self._from)
        while cursor.at < self._to:
            messages = cursor.take(self._to)
            if messages:
                chunk = self._source.chunk(messages)
                chunk.is_quiet = self._is_quiet
                yield chunk


class _Planner:
    """How far a batch may go. Lives on the driver."""

    def __init__(self, topic: str, cluster: Cluster, partitions: int, identity: str) -> None:
        self._topic = topic
        self._cluster = cluster
        self._partitions = partitions
        self._identity = identity
        self._identified = time.monotonic()
        self._away_since: float | None = None
        self._renewed = time.monotonic()
        self.stop_at: list[int] | None = None

    def edge(self, *, first: bool) -> Position:
        ask = self._cluster.first_offsets if first else self._cluster.last_offsets
        return {"topic": self._identity, "offsets": ask(self._topic, self._partitions)}

    def propose(self, start: Position, rows: int, skip: bool) -> Position:
        try:
            self._check_identity()
            first, last = self._cluster.both_offsets(self._topic, self._partitions)
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
        begin, lost = list(start["offsets"]), []
        for partition, (at, low) in enumerate(zip(begin, first, strict=True)):
            if at < low:
                lost.append([partition, at, low])
                begin[partition] = low
        if lost:
            self._report(lost, skip)
        if self.stop_at is not None:
            last = [min(ends) for ends in zip(last, self.stop_at, strict=True)]
        quiet = start.get("quiet")
        if quiet is not None:  # a range is out already, or it is not: none is half of each
            last = [min(high, hush) if at < hush else high for at, high, hush in zip(begin, last, quiet, strict=True)]
        taken = _shares([high - at for at, high in zip(begin, last, strict=True)], rows)
        offsets = [at + more for at, more in zip(begin, taken, strict=True)]
        end: Position = {"topic": self._identity, "offsets": offsets}
        if lost:
            end["lost"] = lost
        if quiet is not None and any(at < hush for at, hush in zip(offsets, quiet, strict=True)):
            end["quiet"] = quiet
        return end

    def _report(self, lost: list[list[int]], skip: bool) -> None:
        partition, since, to = lost[0]
        where = ", ".join(f"partition {partition} from {since} to {to}" for partition, since, to in lost)
        if skip:
            logger.warning("topic %s: the records of %s are gone; going on after them", self._topic, where)
            return
        raise OffsetsLost(
            f"topic {self._topic}: the records of {where} were deleted before they were read. To go on without them, start with "
            'on_data_loss="skip": the gap is then recorded in the checkpoint. Otherwise put the topic back',
            topic=self._topic,
            partition=partition,
            since=since,
            to=to,
        )

    def _check_ends(self, begin: list[int], last: list[int]) -> None:
        for partition, (at, high) in enumerate(zip(begin, last, strict=True)):
            if at > high:
                raise TopicMismatch(
                    f"topic {self._topic}, partition {partition} ends at offset {high}, before {at}, which was read already: its "
                    "records are others now. Begin a new checkpoint, or put the topic back",
                    topic=self._topic,
                    partition=partition,
                )

    def _is_doubtful(self) -> bool:
        """Whether a change of the topic may pass: a cluster that comes back knows less than it did, for a moment."""
        return self._away_since is None or time.monotonic() - self._away_since < DOUBT_S

    def _check_identity(self) -> None:
        if time.monotonic() - self._identified < IDENTITY_S:
            return
        found = self._cluster.topics([self._topic]).get(self._topic)
        check_same_topic(
            self._topic,
            self._identity,
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


def _shares(available: list[int], rows: int) -> list[int]:
    """How many of the available records each partition may take of a batch of `rows`: all alike, as far as there are."""
    shares = [0] * len(available)
    left = rows
    open_partitions = [partition for partition, count in enumerate(available) if count > 0]
    while left > 0 and open_partitions:
        fair = max(1, left // len(open_partitions))
        for partition in open_partitions:
            more = min(fair, available[partition] - shares[partition], left)
            shares[partition] += more
            left -= more
        open_partitions = [partition for partition in open_partitions if shares[partition] < available[partition]]
    return shares
