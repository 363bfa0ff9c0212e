"""A test's own corner of the shared broker: names that no other test uses, and the few things that every test does there.

A scene has one application, whose checkpoint and local stores lie in the test's directory. `read` sees what a consumer
sees that reads committed messages only.
"""

from __future__ import annotations

import json
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from broker import Broker
from confluent_kafka import Consumer, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from holdfast import Application
from holdfast.log.manifest import Chain, Manifest
from holdfast.log.storage import LocalStorage

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from holdfast import State

PATIENCE_S = 30.0


def count_messages(value: Any, state: State) -> dict[str, Any]:
    """The step of most tests: how many records its key has had, and their sum."""
    state.set("n", state.get("n", default=0) + 1)
    state.set("sum", state.get("sum", default=0) + value["amount"])
    return {"amount": value["amount"], "n": state.get("n"), "sum": state.get("sum")}


class Scene:
    """What one test has of the broker."""

    def __init__(self, broker: Broker, spark: SparkSession, directory: Path) -> None:
        self.broker = broker
        self.spark = spark
        self.directory = directory
        self.id = uuid.uuid4().hex[:10]
        self.name = f"app-{self.id}"
        self.source = self.named("in")
        self.target = self.named("out")
        self.admin = AdminClient(broker.client_settings() | {"log_level": 0})

    def named(self, what: str) -> str:
        return f"{what}-{self.id}"

    # -- the application --------------------------------------------------------------------------------------------

    def app(self, **settings: Any) -> Application:
        given = {
            "broker_address": self.broker.address,
            "auto_offset_reset": "earliest",
            "state_dir": self.directory / "state",
            "spark": self.spark,
        }
        return Application(settings.pop("name", self.name), **(given | settings))

    def counting(self, step: Callable[..., Any] = count_messages, **settings: Any) -> Application:
        """An application that counts the records of each key of the source topic and says so in the target topic."""
        app = self.app(**settings)
        frame = app.dataframe(app.topic(self.source)).apply(step, stateful=True)
        frame.to_topic(app.topic(self.target))
        return app

    @property
    def home(self) -> Path:
        return self.directory / "state" / self.name

    @property
    def checkpoint(self) -> Path:
        return self.home / "checkpoint"

    @property
    def local(self) -> Path:
        return self.home / "local"

    def head(self) -> Manifest:
        head = Chain(LocalStorage(self.checkpoint)).head()
        assert head is not None
        return head

    def manifest(self, version: int) -> Manifest:
        return Chain(LocalStorage(self.checkpoint)).read(version)

    def lose(self, *directories: Path) -> None:
        for directory in directories:
            assert any(directory.iterdir()), f"{directory} holds nothing to lose"
            shutil.rmtree(directory)

    # -- topics -----------------------------------------------------------------------------------------------------

    def create(self, topic: str, partitions: int = 1, **settings: str) -> None:
        """A topic; settings with `_` for Kafka's dots."""
        self.broker.create_topic(topic, partitions, {name.replace("_", "."): text for name, text in settings.items()})

    def feed(self, *records: tuple[Any, Any], topic: str | None = None, partition: int | None = None) -> None:
        """Send (key, value), the value as JSON unless it is bytes or None."""
        producer = Producer(self.broker.client_settings() | {"partitioner": "murmur2_random", "linger.ms": 0})
        for key, value in records:
            self._produce(producer, topic or self.source, key, value, partition)
        assert producer.flush(PATIENCE_S) == 0

    def transact(
        self, *records: tuple[Any, Any], commit: bool, topic: str | None = None, partition: int | None = None
    ) -> None:
        """The same in one transaction, which is committed or aborted."""
        producer = Producer(self.broker.client_settings() | {"transactional.id": self.named("feeder"), "linger.ms": 0})
        producer.init_transactions(PATIENCE_S)
        producer.begin_transaction()
        for key, value in records:
            self._produce(producer, topic or self.source, key, value, partition)
        producer.flush(PATIENCE_S)
        (producer.commit_transaction if commit else producer.abort_transaction)(PATIENCE_S)

    def _produce(self, producer: Producer, topic: str, key: Any, value: Any, partition: int | None) -> None:
        def hear(error: Any, _: Any) -> None:
            assert error is None, error

        data = value if value is None or isinstance(value, bytes) else json.dumps(value).encode()
        producer.produce(topic, data, key, -1 if partition is None else partition, on_delivery=hear)

    def read(self, topic: str | None = None, *, committed: bool = True) -> list[Message]:
        """All messages of a topic, partition by partition."""
        return [message for messages in self.read_partitions(topic, committed=committed) for message in messages]

    def read_partitions(self, topic: str | None = None, *, committed: bool = True) -> list[list[Message]]:
        consumer = Consumer(
            self.broker.client_settings()
            | {
                "group.id": self.named("reader"),
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "auto.offset.reset": "earliest",
                "isolation.level": "read_committed" if committed else "read_uncommitted",
                "fetch.wait.max.ms": 20,
            }
        )
        name = topic or self.target
        partitions = len(consumer.list_topics(name, timeout=PATIENCE_S).topics[name].partitions)
        found: list[list[Message]] = [[] for _ in range(partitions)]
        try:
            consumer.assign([TopicPartition(name, partition, 0) for partition in range(partitions)])
            left = set(range(partitions))
            while left:
                message = consumer.poll(PATIENCE_S)
                assert message is not None, f"topic {name} does not end"
                partition = message.partition()
                if message.error() is None:
                    found[partition].append(message)
                else:
                    assert message.error().code() == -191, message.error()  # the end of a partition
                    left.discard(partition)
        finally:
            consumer.close()
        return found

    def values(self, topic: str | None = None) -> list[Any]:
        return [None if message.value() is None else json.loads(message.value()) for message in self.read(topic)]

    def by_key(self, topic: str | None = None) -> dict[bytes | None, list[Any]]:
        """The values of each key, in order."""
        found: dict[bytes | None, list[Any]] = {}
        for message in self.read(topic):
            found.setdefault(message.key(), []).append(json.loads(message.value()))
        return found

    # -- the cluster ------------------------------------------------------------------------------------------------

    def topics(self) -> set[str]:
        """The topics of this scene."""
        return {name for name in self.admin.list_topics(timeout=PATIENCE_S).topics if self.id in name}

    def remove_topic(self, topic: str) -> None:
        self.admin.delete_topics([topic])[topic].result(PATIENCE_S)

    def delete_records(self, topic: str, partition: int, before: int) -> None:
        place = TopicPartition(topic, partition, before)
        for future in self.admin.delete_records([place]).values():
            future.result(PATIENCE_S)

    def alter(self, topic: str, **settings: str) -> None:
        """Settings of a topic, with `_` for Kafka's dots."""
        from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

        entries = [
            ConfigEntry(name.replace("_", "."), text, incremental_operation=AlterConfigOpType.SET)
            for name, text in settings.items()
        ]
        resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=entries)
        for future in self.admin.incremental_alter_configs([resource]).values():
            future.result(PATIENCE_S)

    def settings(self, topic: str) -> dict[str, str]:
        from confluent_kafka.admin import ConfigResource, ResourceType

        resource = ConfigResource(ResourceType.TOPIC, topic)
        found = self.admin.describe_configs([resource])[resource].result(PATIENCE_S)
        return {name: str(entry.value) for name, entry in found.items()}

    def partitions(self, topic: str) -> int:
        return len(self.admin.list_topics(topic, timeout=PATIENCE_S).topics[topic].partitions)

    def committed(self, topic: str | None = None, *, group: str | None = None) -> list[int]:
        """What a lag tool takes for read: the offsets of the application's consumer group; -1 where there is none.

        A consumer asks: librdkafka's administrator crashes the process when the group's coordinator has moved.
        """
        consumer = Consumer(
            self.broker.client_settings()
            | {"group.id": group or self.name, "isolation.level": "read_committed", "log_level": 0}
        )
        try:
            name = topic or self.source
            places = [TopicPartition(name, partition) for partition in range(self.partitions(name))]
            return [max(-1, place.offset) for place in consumer.committed(places, PATIENCE_S)]
        finally:
            consumer.close()

    def forget_notes(self) -> None:
        """As when the group's offsets expire."""
        self.admin.delete_consumer_groups([self.name])[self.name].result(PATIENCE_S)


def await_that(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < limit, "it does not come true"
        time.sleep(0.05)


def orders(keys: Iterable[str], amounts: Iterable[int]) -> list[tuple[bytes, dict[str, int]]]:
    """For every amount a record of every key."""
    names = list(keys)
    return [(key.encode(), {"amount": amount}) for amount in amounts for key in names]


def totals(app: Application, store: str = "default") -> dict[Any, tuple[int, int]]:
    """The state that `count_messages` keeps."""
    return {key: (document["n"], document["sum"]) for key, document in app.state(store).items()}


def counted(records: Iterable[tuple[bytes, Mapping[str, int]]]) -> dict[bytes, list[dict[str, int]]]:
    """What `count_messages` has to say of these records: by key, in order. Recomputed from the input alone."""
    said: dict[bytes, list[dict[str, int]]] = {}
    for key, value in records:
        before = said.setdefault(key, [])
        known = before[-1]["sum"] if before else 0
        before.append({"amount": value["amount"], "n": len(before) + 1, "sum": known + value["amount"]})
    return said


def ends(said: Mapping[bytes, list[dict[str, int]]]) -> dict[bytes, tuple[int, int]]:
    """The state after all that was said."""
    return {key: (values[-1]["n"], values[-1]["sum"]) for key, values in said.items()}
