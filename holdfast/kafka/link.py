"""An application's link to a Kafka cluster: what it declares there, and what a run finds.

`Link` is the declaration and talks to nobody. `Link.attach` looks at the cluster before anything runs: the topics are
there, as they have to be, and belong to the checkpoint; otherwise it says exactly what to change.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from holdfast.errors import InvalidPipeline, TopicMismatch
from holdfast.kafka import names
from holdfast.kafka.cluster import Cluster, TopicNeed, TopicState
from holdfast.kafka.connection import Connection
from holdfast.kafka.publishing import Route
from holdfast.kafka.topics import Topic, TopicConfig
from holdfast.log.manifest import Chain, Manifest
from holdfast.plan.messages import OVERHEAD, MessageForm, TopicLimits
from holdfast.plan.pipeline import Pipeline
from holdfast.plan.program import Program, stores_of
from holdfast.plan.sinks import Sink
from holdfast.plan.steps import Emit
from holdfast.sources.kafka import KafkaSource, check_same_topic

if TYPE_CHECKING:
    from holdfast.kafka.station import Station
    from holdfast.sinks.kafka import Tasks

DEAD_LETTERS = "dead_letters"
BROKERS_MOST = 1_048_588
"""What a topic takes whose settings cannot be seen: Kafka's default for max.message.bytes."""
NO_LIMIT = (1 << 63) - 1
"""Kafka's word for it."""

logger = logging.getLogger("holdfast")


class Link(msgspec.Struct):
    """What an application has declared about Kafka."""

    connection: Connection
    group: str
    reset: Literal["latest", "earliest"]
    create: bool
    use_changelogs: bool
    exactly_once: bool
    on_data_loss: Literal["fail", "skip"]
    dead_letter_topic: str | None = None
    topics: dict[str, Topic] = {}

    def topic(self, topic: Topic) -> Topic:
        self.topics[topic.name] = topic
        return topic

    def source(self, topic: Topic) -> KafkaSource:
        return KafkaSource([topic], self.connection, self.group, self.reset, self.on_data_loss)

    def dead_letters(self, index: int) -> Sink | None:
        """The sink of records that failed."""
        if self.dead_letter_topic is None:
            return None
        return Sink(DEAD_LETTERS, index, MessageForm(self.dead_letter_topic, _as_it_is, _as_it_is))

    def ensure(self, cluster: Cluster) -> dict[str, TopicState]:
        """The declared topics, created if they may be."""
        return cluster.check([_need(topic) for topic in self.topics.values()], create=self.create)

    def attach(self, pipeline: Pipeline, head: Manifest | None) -> Attachment:
        """Look at the cluster for a run of `pipeline` that goes on from `head`."""
        return Attachment(self, pipeline, head)


class Attachment:
    """The cluster as a run found it."""

    def __init__(self, link: Link, pipeline: Pipeline, head: Manifest | None) -> None:
        self.link = link
        self.cluster = Cluster(link.connection)
        source = pipeline.source
        self.source = source if isinstance(source, KafkaSource) else None
        self._used = _used_topics(pipeline, link)
        read = () if self.source is None else self.source.names
        for name in read:
            if name not in link.topics:
                raise InvalidPipeline(f"topic {name} belongs to another application: take one of app.topic()")
        used = [name for name in link.topics if name in {*self._used.values(), *read}]
        found = self.cluster.check([_need(link.topics[name]) for name in used], create=link.create)
        self.partitions: int | None = None
        """Of the source's topics."""
        self.identities = {name: found[name].id for name in read}
        """By topic of the source: its id."""
        if self.source is not None:
            states = [found[name] for name in read]
            if head is not None and head.source == "kafka" and head.position is not None:
                _check_same_topics(head, states)
            self.partitions = _common_partitions(states)
            self._replication = max(state.replication for state in states)
            self.source.connect(self.cluster, self.partitions, self.identities)
        self.stores = [store for stage in pipeline.stages for store in stores_of(stage.root)]
        self.changelogs: dict[str, str] = {}
        """By store: the name of its changelog topic."""
        self.known: dict[str, TopicState] = found
        self._head = head

    def prepare(self, program: Program) -> Program:
        """Check or create the topics of ours, and tell the program what they take."""
        link = self.link
        slots = program.all_partitions + 1
        own = [TopicNeed(names.notes(link.group), slots, None, purpose="remembers what was published last", ours=True)]
        if self.source is not None and self.stores:
            self.changelogs = self._wanted_changelogs()
            own += [
                TopicNeed(
                    self.changelogs[store],
                    stage.partitions,
                    self._replication,
                    names.COMPACTED,
                    purpose=f"follows store {store}",
                    ours=True,
                )
                for stage in program.stages
                for store in stage.stores
                if store in self.changelogs
            ]
        dead = link.dead_letter_topic
        if dead is not None:
            own.append(TopicNeed(dead, None, None, purpose="takes records that failed"))
        logger.info("topics of %s:%s", link.group, "".join(f"\n  {need} ({need.purpose})" for need in own))
        self.known |= self.cluster.check(own, create=link.create)
        limits = self._limits()
        return msgspec.structs.replace(
            program,
            changelogs={store: self.known[topic].id for store, topic in self.changelogs.items()},
            message_limits={sink: limits[topic] for sink, topic in self._used.items()},
            document_limit=min(limits[topic].size for topic in self.changelogs.values()) - OVERHEAD
            if self.changelogs
            else None,
        )

    def route(self, program: Program) -> Route:
        return Route(
            connection=self.link.connection,
            group=self.link.group,
            sources=() if self.source is None else self.source.names,
            topics=self._used,
            changelogs=self.changelogs,
            homes={store: (stage.first, stage.partitions) for stage in program.stages for store in stage.stores},
            codecs=program.codecs(),
            exactly_once=self.link.exactly_once,
            largest=max([BROKERS_MOST, *(limits.size for limits in self._limits().values())]) + OVERHEAD,
        )

    def check_first_life(self) -> None:
        """Refuse to begin where Kafka remembers an earlier life."""
        from holdfast.kafka.recovery import check_first_life

        check_first_life(self)

    def station(self, program: Program, chain: Chain, tasks: Tasks, holder: str) -> Station:
        """What a run needs of Kafka once its tasks can run."""
        from holdfast.kafka.station import Station

        return Station(self, program, chain, tasks, holder)

    def to_backfill(self) -> list[str]:
        """The stores that have state but no changelog that has followed it from the beginning."""
        head = self._head
        if head is None or head.version == 0:
            return []
        stores = [store for store in self.changelogs if store in head.codecs and store not in head.changelogs]
        for store, topic in self.changelogs.items():
            recorded = head.changelogs.get(store)
            if recorded is not None:
                self._check_follows(store, topic, recorded)
        return stores

    def _wanted_changelogs(self) -> dict[str, str]:
        assert self.source is not None
        if self.link.use_changelogs:
            return {store: names.changelog(self.link.group, self.source.names, store) for store in self.stores}
        logger.warning("use_changelog_topics is off: if the checkpoint is lost, state and position are lost with it")
        return {}

    def _check_follows(self, store: str, topic: str, recorded: str) -> None:
        """A changelog topic that was replaced or emptied does not hold the state any more."""
        advice = (
            "the state itself is whole. To have the topic filled again from the checkpoint, run once with "
            "use_changelog_topics=False, remove the topic, and go on as before"
        )
        if self.known[topic].id != recorded:
            raise TopicMismatch(
                f"changelog topic {topic} was deleted and created again: it does not hold the state of store {store}; {advice}",
                topic=topic,
            )
        partitions = self.known[topic].partitions
        emptied = [partition for partition, low in enumerate(self.cluster.first_offsets(topic, partitions)) if low > 0]
        if emptied or not any(
            self.cluster.written_offsets(topic, partitions)
        ):  # the end of the last commit may be to come
            raise TopicMismatch(
                f"records were deleted from changelog topic {topic}, partitions {emptied or 'all'}: it does not hold the state of "
                f"store {store}; {advice}",
                topic=topic,
            )

    def _limits(self) -> dict[str, TopicLimits]:
        """By topic: what it takes."""
        wanted = {*self._used.values(), *self.changelogs.values()}
        settings = self.cluster.configuration(sorted(wanted))
        return {topic: limits_of(settings[topic]) for topic in wanted}


def limits_of(settings: Mapping[str, str]) -> TopicLimits:
    """What a topic of these settings takes. Times only matter where the broker does not put its own in their place."""
    size = int(settings.get("max.message.bytes", BROKERS_MOST))
    if settings.get("message.timestamp.type") == "LogAppendTime":
        return TopicLimits(size)
    return TopicLimits(size, _distance(settings, "before"), _distance(settings, "after"))


def _distance(settings: Mapping[str, str], side: str) -> int | None:
    """How far a time may be from the broker's clock; None: as far as you like. Until Kafka 3.6 one setting was for both sides."""
    for name in (f"message.timestamp.{side}.max.ms", "message.timestamp.difference.max.ms"):
        distance = int(settings.get(name, NO_LIMIT))
        if distance != NO_LIMIT:
            return distance
    return None


def _check_same_topics(head: Manifest, states: list[TopicState]) -> None:
    """Refuse topics that are not those of the checkpoint."""
    assert head.position is not None
    position = head.position["from"] if head.kind == "restoring" else head.position
    recorded: dict[str, str] = position["topics"]
    if list(recorded) != [state.name for state in states]:
        raise TopicMismatch(
            f"the checkpoint was read from {', '.join(recorded)}, the program reads {', '.join(state.name for state in states)}: "
            "read the same topics, or begin a new checkpoint: take another application name",
            topic=states[0].name,
        )
    for state in states:
        check_same_topic(state.name, recorded[state.name], head.stages[0].partitions, state.id, state.partitions)


def _common_partitions(states: list[TopicState]) -> int:
    """The number of partitions that all topics have."""
    if len({state.partitions for state in states}) > 1:
        listed = ", ".join(f"{state.name} has {state.partitions}" for state in states)
        raise TopicMismatch(
            f"topics that are read together need the same number of partitions, so that a key has one place: {listed}. Create "
            "them alike, or copy one into a topic that fits with an application of its own",
            topic=states[0].name,
        )
    return states[0].partitions


def _used_topics(pipeline: Pipeline, link: Link) -> dict[str, str]:
    """By sink: the topic that it writes to."""
    used = {
        step.sink.id: step.sink.form.topic
        for step in pipeline.steps()
        if isinstance(step, Emit) and isinstance(step.sink.form, MessageForm)
    }
    if link.dead_letter_topic is not None:
        used[DEAD_LETTERS] = link.dead_letter_topic
    return used


def _need(topic: Topic) -> TopicNeed:
    config = topic.config or TopicConfig()
    settings: Mapping[str, Any] = config.extra_config
    return TopicNeed(topic.name, config.num_partitions, config.replication_factor, settings)


def _as_it_is(data: Any) -> Any:
    return data
