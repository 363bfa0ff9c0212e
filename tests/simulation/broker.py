"""A simulated Kafka cluster: what producers and group offsets guarantee, and how they fail.

Transactions are real: a producer that opens a transactional id ends what the one before it has left open and fences it; what
a transaction holds, records and group offsets alike, appears together or never. An offset that an open transaction has
touched cannot be read. Whatever a call does, the process may not live to hear of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka import Producer as RealProducer

from holdfast.kafka.changelog import MILESTONE, Milestone, decode_milestone, documents
from holdfast.kafka.publishing import Note
from holdfast.log.files import changes_of

OUTPUT = "output"
Record = tuple[bytes | None, bytes | None]


class SimulatedBroker:
    """Everything of a cluster that outlives its clients. Also the `Connection` of those clients."""

    def __init__(self, chance: Callable[..., bool], crash: type[BaseException], pause: Callable[[], None]) -> None:
        self.token = f"simulated {id(self)}"
        self.chance = chance
        self.crash = crash
        self.pause = pause
        """May let another driver run, here and now."""
        self.topics: dict[tuple[str, int], list[Record]] = {}
        self.offsets: dict[tuple[str, int], tuple[int, str]] = {}
        self.epochs: dict[str, int] = {}
        self.open: dict[str, Producer] = {}

    def client(self, kind: Any, settings: dict[str, Any] | None = None) -> Any:
        if kind is RealProducer:
            assert settings is not None
            return Producer(self, settings["transactional.id"])
        return GroupClient(self)

    def moment(self) -> None:
        """Between any two steps of a client."""
        self.pause()
        if self.chance("crash before a call of Kafka"):
            raise self.crash("before a call of Kafka")
        if self.chance("Kafka does not answer"):
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))

    # -- what a user would see ----------------------------------------------------------------------------------------

    def rows(self, wanted: str) -> list[dict[str, Any]]:
        """What a consumer of committed records sees in a topic."""
        found = [record for (topic, _), records in sorted(self.topics.items()) if topic == wanted for record in records]
        return [msgspec.json.decode(value) for _, value in found if value is not None]

    def last_version(self) -> int:
        return max((version for version, _ in self.offsets.values()), default=-1)

    def is_another(self, instance: str) -> bool:
        return any(msgspec.json.decode(data, type=Note).instance != instance for _, data in self.offsets.values())

    def changelog(self, store: str, partition: int) -> tuple[Milestone | None, dict[bytes, bytes]]:
        """What a restore of a partition would find: its last milestone and its documents."""
        found = self.topics.get((f"changelog of {store}", partition), [])
        stone = dict(found).get(MILESTONE)
        if stone is None:
            return None, {}
        milestone = decode_milestone(store, partition, stone)
        changes = changes_of(documents(store, milestone.cleared, dict(found)))
        return milestone, {key: value for key, value in changes if value is not None}


class Producer:
    """A transactional producer."""

    def __init__(self, broker: SimulatedBroker, identity: str) -> None:
        self._broker = broker
        self._identity = identity
        self._epoch = -1
        self.records: list[tuple[str, int, Record]] = []
        self.offsets: dict[tuple[str, int], tuple[int, str]] = {}

    def init_transactions(self, timeout: float) -> None:
        broker = self._broker
        broker.moment()
        broker.open.pop(self._identity, None)
        self._epoch = broker.epochs.get(self._identity, 0) + 1
        broker.epochs[self._identity] = self._epoch
        broker.pause()

    def begin_transaction(self) -> None:
        self.records, self.offsets = [], {}

    def produce(self, topic: str, value: bytes | None, key: bytes | None, timestamp: int = 0) -> None:
        self._alive()
        self.records.append((topic, 0, (key, value)))

    def produce_batch(self, topic: str, messages: list[dict[str, Any]], partition: int) -> int:
        self._alive()
        self.records += [(topic, partition, (message["key"], message["value"])) for message in messages]
        return len(messages)

    def send_offsets_to_transaction(self, entries: list[TopicPartition], member: Any, timeout: float) -> None:
        self._broker.moment()
        self._alive()
        self.offsets |= {(entry.topic, entry.partition): (entry.offset, entry.metadata) for entry in entries}
        self._broker.open[self._identity] = self
        self._broker.pause()

    def commit_transaction(self, timeout: float) -> None:
        broker = self._broker
        broker.moment()
        self._alive()
        broker.open.pop(self._identity, None)
        for topic, partition, record in self.records:
            broker.topics.setdefault((topic, partition), []).append(record)
        broker.offsets |= self.offsets
        if broker.chance("crash after a commit of Kafka", 2):
            raise broker.crash("after a commit of Kafka")
        if broker.chance("Kafka's answer lost", 2):
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))

    def poll(self, timeout: float) -> None:
        """There is nothing to hear."""

    def flush(self, timeout: float) -> int:
        return 0

    def purge(self) -> None:
        """What was not committed stays open in the cluster until the id is opened again."""

    def _alive(self) -> None:
        if self._broker.epochs[self._identity] != self._epoch:
            raise KafkaException(KafkaError(KafkaError._FENCED))


class GroupClient:
    """A consumer that only reads and commits offsets of its group."""

    def __init__(self, broker: SimulatedBroker) -> None:
        self._broker = broker

    def consumer_group_metadata(self) -> None:
        """Nobody else is in the group."""

    def committed(self, wanted: list[TopicPartition], timeout: float) -> list[TopicPartition]:
        broker = self._broker
        broker.moment()
        touched = {place for producer in broker.open.values() for place in producer.offsets}
        if any((place.topic, place.partition) in touched for place in wanted):
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        found = []
        for place in wanted:
            offset, metadata = broker.offsets.get((place.topic, place.partition), (-1001, ""))
            found.append(TopicPartition(place.topic, place.partition, offset, metadata))
        return found

    def commit(self, offsets: list[TopicPartition], asynchronous: bool) -> None:
        self._broker.moment()
        for entry in offsets:
            self._broker.offsets[entry.topic, entry.partition] = (entry.offset, entry.metadata or "")

    def close(self) -> None:
        """Nothing is left open."""
