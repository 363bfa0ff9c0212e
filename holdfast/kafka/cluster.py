"""The cluster as an administrator sees it: which topics there are, what they are like, and where they end.

Every answer is checked and every failure has a name: a cluster that does not answer is `BrokerAway`, one that says no
is `KafkaRefused`. Nothing here changes a topic that exists.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    ConfigResource,
    NewTopic,
    OffsetSpec,
    ResourceType,
)

from holdfast.errors import BrokerAway, HoldfastError, KafkaRefused, NoTopic, TopicMismatch
from holdfast.kafka.connection import Connection

ANSWER_S = 15.0
"""How long a question may take."""
PLAN_S = 5.0
"""The same for the one that is asked all the time: a stop must not wait for long."""

AWAY = frozenset(
    (
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._TRANSPORT,
        KafkaError._TIMED_OUT,
        KafkaError._TIMED_OUT_QUEUE,
        KafkaError._MSG_TIMED_OUT,
        KafkaError._RESOLVE,
        KafkaError._WAIT_COORD,
        KafkaError._NOENT,  # no partition has a leader, as far as the client knows
        KafkaError.REQUEST_TIMED_OUT,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.NOT_COORDINATOR,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.BROKER_NOT_AVAILABLE,
        KafkaError.NETWORK_EXCEPTION,
        KafkaError.UNKNOWN_LEADER_EPOCH,
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.OFFSET_NOT_AVAILABLE,
        KafkaError.REPLICA_NOT_AVAILABLE,
    )
)
"""What passes when the cluster is well again."""

LOCKED_OUT = frozenset((KafkaError._AUTHENTICATION, KafkaError.SASL_AUTHENTICATION_FAILED, KafkaError._SSL))
"""What a client only says beside, while its questions time out."""

Answer = TypeVar("Answer")
logger = logging.getLogger("holdfast")


class TopicState(msgspec.Struct, frozen=True):
    """A topic as it is."""

    name: str
    id: str
    partitions: int
    replication: int


class TopicNeed(msgspec.Struct, frozen=True):
    """A topic as it has to be, or as it will be created."""

    name: str
    partitions: int | None
    """None: as many as it has; 1 if it is created."""
    replication: int | None
    """None: the cluster's default, and any is fine."""
    settings: Mapping[str, str] = {}
    purpose: str = ""
    """For people."""
    ours: bool = False
    """Holdfast's own: its settings are checked, too."""

    def __str__(self) -> str:
        settings = "".join(f", {name}={value}" for name, value in sorted(self.settings.items()))
        replication = self.replication if self.replication is not None else "the default"
        return f"{self.name}: partitions={self.partitions or 1}, replication-factor={replication}{settings}"


class Cluster:
    """A connection for questions. Lives on the driver."""

    def __init__(self, connection: Connection) -> None:
        self._answers = False
        self._refusal: KafkaError | None = None
        """Why a cluster that has never answered does not let us in."""
        self._connection = connection
        self.renew()

    def renew(self) -> None:
        """Ask with a new client: an old one may hold on to what it knew before the cluster went away."""
        given = self._connection.settings()["error_cb"]

        def hear(error: KafkaError) -> None:
            if error.code() in LOCKED_OUT:
                self._refusal = error
            given(error)

        self._admin = self._connection.client(AdminClient, {"error_cb": hear})

    def topics(self, names: Iterable[str]) -> dict[str, TopicState]:
        """Those of `names` that exist."""
        wanted = list(dict.fromkeys(names))
        found = {}
        for name, future in self._admin.describe_topics(TopicCollection(wanted), request_timeout=ANSWER_S).items():
            try:
                topic = self._answer(f"describe topic {name}", future.result)
            except NoTopic:
                continue
            replication = min((len(partition.replicas) for partition in topic.partitions), default=1)
            found[name] = TopicState(name, str(topic.topic_id), len(topic.partitions), replication)
        return found

    def configuration(self, names: Iterable[str]) -> dict[str, dict[str, str]]:
        """The settings of topics that exist."""
        resources = [ConfigResource(ResourceType.TOPIC, name) for name in names]
        if not resources:
            return {}
        answers = self._admin.describe_configs(resources, request_timeout=ANSWER_S)
        found = {}
        for resource, future in answers.items():
            entries = self._answer(f"describe the settings of topic {resource.name}", future.result)
            found[resource.name] = {name: str(entry.value) for name, entry in entries.items()}
        return found

    def first_offsets(self, topic: str, partitions: int) -> list[int]:
        """Where each partition begins."""
        return self._offsets(topic, partitions, OffsetSpec.earliest())

    def last_offsets(self, topic: str, partitions: int) -> list[int]:
        """Where each partition ends for those who read committed records only: open transactions lie beyond."""
        return self._offsets(topic, partitions, OffsetSpec.latest())

    def written_offsets(self, topic: str, partitions: int) -> list[int]:
        """Where each partition ends, with what was written by transactions that are open, or whose end is not yet written."""
        return self._read(topic, self._ask(topic, partitions, OffsetSpec.latest(), IsolationLevel.READ_UNCOMMITTED))

    def both_offsets(self, topic: str, partitions: int) -> tuple[list[int], list[int]]:
        """Begin and end of each partition; both questions are on their way at once."""
        asked = [self._ask(topic, partitions, spec) for spec in (OffsetSpec.earliest(), OffsetSpec.latest())]
        first, last = (self._read(topic, answers) for answers in asked)
        return first, last

    def group_offsets(self, group: str, topic: str, partitions: int, *, stable: bool = True) -> dict[int, int]:
        """By partition: the offset of a consumer group; `stable` waits for transactions on them that are open.

        A consumer asks: librdkafka's administrator crashes the process when the group's coordinator has moved.
        """
        isolation = "read_committed" if stable else "read_uncommitted"
        consumer = self._connection.client(
            Consumer, {"group.id": group, "enable.auto.commit": False, "isolation.level": isolation}
        )
        wanted = [TopicPartition(topic, partition) for partition in range(partitions)]

        def ask() -> Sequence[TopicPartition]:
            found: Sequence[TopicPartition] = consumer.committed(wanted, ANSWER_S)
            for place in found:
                if place.error is not None:
                    raise KafkaException(place.error)
            return found

        try:
            found = patiently(f"read the offsets of group {group}", ask)
        finally:
            consumer.close()
        return {place.partition: place.offset for place in found if place.offset >= 0}

    def create(self, needs: Sequence[TopicNeed]) -> None:
        """Create topics that do not exist; one that another process creates meanwhile is as good."""
        if not needs:
            return
        wanted = [
            NewTopic(
                need.name,
                num_partitions=need.partitions or 1,
                replication_factor=need.replication if need.replication is not None else -1,
                config=dict(need.settings),
            )
            for need in needs
        ]
        answers = self._admin.create_topics(wanted, operation_timeout=ANSWER_S, request_timeout=ANSWER_S)
        for need in needs:
            try:
                answers[need.name].result()
                logger.info("created topic %s", need)
            except KafkaException as error:
                if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                    lines = "\n".join(f"  {one}" for one in needs)
                    raise KafkaRefused(
                        f"topic {need.name} could not be created ({error.args[0].str()}); "
                        f"create these by hand, exactly so:\n{lines}",
                        topic=need.name,
                    ) from None

    def check(self, needs: Sequence[TopicNeed], *, create: bool) -> dict[str, TopicState]:
        """The topics that are needed, created if they are missing and may be, refused if they are not as they have to be."""
        found = self.topics(need.name for need in needs)
        missing = [need for need in needs if need.name not in found]
        if missing and not create:
            lines = "\n".join(f"  {need}" for need in missing)
            raise TopicMismatch(
                f"these topics do not exist, and auto_create_topics is off; create them, exactly so:\n{lines}",
                topics=[need.name for need in missing],
            )
        if missing:
            self.create(missing)
            found |= self._appeared([need.name for need in missing])
        wrong = self._differences(needs, found)
        if wrong:
            lines = "\n".join(f"  {need} ({why})" for need, why in wrong)
            raise TopicMismatch(
                f"these topics have other settings than they need; change them, or remove them to have them created anew, "
                f"exactly so:\n{lines}",
                topics=[need.name for need, _ in wrong],
            )
        return found

    def _differences(self, needs: Sequence[TopicNeed], found: Mapping[str, TopicState]) -> list[tuple[TopicNeed, str]]:
        wrong = []
        settings = self.configuration(need.name for need in needs if need.ours)
        for need in needs:
            if not need.ours:
                continue
            if need.partitions is not None and found[need.name].partitions != need.partitions:
                wrong.append((need, f"it has {found[need.name].partitions} partitions"))
            for name, value in need.settings.items():
                if settings[need.name].get(name) != value:
                    wrong.append((need, f"{name} is {settings[need.name].get(name)}"))
        return wrong

    def _appeared(self, names: list[str]) -> dict[str, TopicState]:
        """Topics that were just created: the brokers hear of them, and that they lead them, a moment later."""
        limit = time.monotonic() + ANSWER_S
        while True:
            found = self.topics(names)
            if all(name in found and self._is_led(found[name]) for name in names) or time.monotonic() > limit:
                return found
            time.sleep(0.05)

    def _is_led(self, topic: TopicState) -> bool:
        try:
            self.first_offsets(topic.name, topic.partitions)
        except (BrokerAway, NoTopic):
            return False
        return True

    def _offsets(self, topic: str, partitions: int, spec: OffsetSpec) -> list[int]:
        return self._read(topic, self._ask(topic, partitions, spec))

    def _ask(
        self,
        topic: str,
        partitions: int,
        spec: OffsetSpec,
        isolation: IsolationLevel = IsolationLevel.READ_COMMITTED,
    ) -> dict[TopicPartition, Any]:
        request = {TopicPartition(topic, partition): spec for partition in range(partitions)}
        answers: dict[TopicPartition, Any] = self._admin.list_offsets(
            request, isolation_level=isolation, request_timeout=PLAN_S
        )
        return answers

    def _read(self, topic: str, answers: dict[TopicPartition, Any]) -> list[int]:
        offsets = {
            place.partition: int(self._answer(f"read the offsets of topic {topic}", future.result).offset)
            for place, future in answers.items()
        }
        if any(offset < 0 for offset in offsets.values()):  # a cluster that is going away may answer with nothing
            raise BrokerAway(f"cannot read the offsets of topic {topic}: no answer for some partitions; start again")
        return [offsets[partition] for partition in sorted(offsets)]

    def _answer(self, what: str, ask: Callable[[], Answer]) -> Answer:
        try:
            answer = ask()
        except KafkaException as error:
            self._admin.poll(0)  # what the client has to say beside
            if self._refusal is not None and not self._answers:
                raise named(KafkaException(self._refusal), f"cannot {what}") from None
            raise named(error, f"cannot {what}") from None
        self._answers = True
        return answer


def patiently(what: str, ask: Callable[[], Answer], patience: float = 2 * ANSWER_S) -> Answer:
    """The answer of a cluster that may still be finding its coordinators, or be away for a moment."""
    limit = time.monotonic() + patience
    while True:
        try:
            return ask()
        except KafkaException as error:
            if error.args[0].code() not in AWAY or time.monotonic() > limit:
                raise named(error, f"cannot {what}") from None
            time.sleep(0.1)


def named(error: KafkaException, what: str) -> HoldfastError:
    """A client's error as the one that says what to do."""
    reason: KafkaError = error.args[0]
    if reason.code() in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError.GROUP_ID_NOT_FOUND):
        return NoTopic(f"{what}: there is no such topic; create it, or correct its name")
    if reason.code() in (KafkaError.INVALID_TIMESTAMP, KafkaError.INVALID_RECORD):
        return KafkaRefused(
            f"{what}: the broker refuses a record ({reason.name()}). Its event time is further from the broker's clock than its "
            "topic takes: raise the topic's message.timestamp.before.max.ms or message.timestamp.after.max.ms; or it has no key "
            "and the topic is compacted. Then start again: nothing is lost",
            code=reason.name(),
        )
    if reason.code() in AWAY or reason.retriable():
        return BrokerAway(f"{what}: {reason.str()}; when the cluster answers again, start again: nothing is lost")
    return KafkaRefused(f"{what}: {reason.str()} ({reason.name()})", code=reason.name())
