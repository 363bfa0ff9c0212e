"""Publishing: one transaction holds the output of a version, its changelog records, the source's offsets and a note.

The note says (instance, version, manifest) and is an offset with metadata of the application's own group, committed by
the transaction itself. The rule that makes it exact: a slot's note is only ever written under the slot's transactional id,
by a producer that has read the note after its own `init_transactions`. Whoever else opens the id in between fences that
producer, and its transaction never happens. Which slots publish a version is fixed in its manifest. Notes that were lost
are written again under the id of the driver's slot, by a run that has fenced all others.

After any error: a new producer, and the note is read again. So a commit whose answer was lost is found to have happened.

Without transactions (at least once) the same records are sent and the note is committed after them.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import Any

import msgspec
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from holdfast.errors import BrokerAway, ForeignTarget, MarkerLost
from holdfast.failpoints import reach
from holdfast.kafka import names
from holdfast.kafka.changelog import MILESTONE, Milestone, encode_milestone, records
from holdfast.kafka.cluster import named, patiently
from holdfast.kafka.connection import Connection
from holdfast.log.files import FileRef, read_delta, read_table
from holdfast.log.storage import Storage
from holdfast.plan.messages import unpacked

PATIENCE_S = 300.0
"""How long to try while the cluster does not answer."""
ANSWER_S = 30.0
OFFSETS_S = 10.0
"""How long the offsets of a transaction may take: too long only costs another try."""
TRANSACTION_S = 60
"""A transaction that is open for longer is aborted by the cluster; larger ones get a second more per `SLOWEST` records."""
SLOWEST = 1_000
LONGEST_S = 900
"""What a cluster allows at most, unless it is told otherwise."""
BATCH = 10_000

FENCED = frozenset(
    (
        KafkaError._FENCED,
        KafkaError.PRODUCER_FENCED,
        KafkaError.INVALID_PRODUCER_EPOCH,
        KafkaError.INVALID_PRODUCER_ID_MAPPING,
        KafkaError.INVALID_TXN_STATE,
    )
)
HOPELESS = frozenset(
    (
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.SASL_AUTHENTICATION_FAILED,
        KafkaError._AUTHENTICATION,
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.INVALID_TIMESTAMP,
        KafkaError.INVALID_RECORD,
        KafkaError._UNKNOWN_TOPIC,
        KafkaError._UNKNOWN_PARTITION,
        KafkaError._INVALID_ARG,
    )
)
"""What does not pass by itself."""

logger = logging.getLogger("holdfast")


class Note(msgspec.Struct, frozen=True):
    """The last version that is out."""

    instance: str
    version: int
    manifest: str


class Part(msgspec.Struct, frozen=True):
    """What one partition contributes to a version."""

    partition: int
    offsets: tuple[int, ...]
    """Its next offset in each source topic; none if it reads none."""
    outs: tuple[int, ...]
    """The offsets up to which the output is out with this version; later than `offsets` while state is rebuilt."""
    delta: FileRef | None
    outboxes: dict[str, FileRef]
    """By sink."""
    keys: int
    """Documents that the partition has, and their size."""
    bytes: int


class Shipment(msgspec.Struct, frozen=True):
    """What one transaction publishes."""

    note: Note
    cleared: int
    time_ms: int
    topics: dict[str, str]
    """By source topic: its id."""
    parts: tuple[Part, ...]
    watermark_ms: int | None
    event_ms: tuple[int | None, ...]
    offsets: tuple[int, ...] = ()
    """Of all partitions of the source, if records go from one to another within a version: then none stands for itself."""
    outs: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        files = [file for part in self.parts for file in (part.delta, *part.outboxes.values()) if file is not None]
        return sum(file.rows for file in files)


class Route(msgspec.Struct, frozen=True):
    """Where everything goes: the same for all shipments of a run. It travels to the tasks."""

    connection: Connection
    group: str
    sources: tuple[str, ...]
    """The source topics."""
    topics: dict[str, str]
    """By sink."""
    changelogs: dict[str, str]
    """By store."""
    homes: dict[str, tuple[int, int]]
    """By store: its first state partition, and how many it has."""
    codecs: dict[str, str]
    """By store."""
    exactly_once: bool
    largest: int
    """The most bytes of a message, over all topics."""

    def lanes(self, partition: int) -> Iterator[tuple[str, str, int]]:
        """The changelogs that follow a state partition: (store, topic, partition of the topic)."""
        for store, topic in self.changelogs.items():
            first, count = self.homes[store]
            if first <= partition < first + count:
                yield store, topic, partition - first

    def milestone(self, store: str, shipment: Shipment, part: Part) -> Milestone:
        return Milestone(
            app=self.group,
            instance=shipment.note.instance,
            version=shipment.note.version,
            manifest=shipment.note.manifest,
            cleared=shipment.cleared,
            time_ms=shipment.time_ms,
            topics=shipment.topics,
            offsets=shipment.offsets or part.offsets,
            outs=shipment.outs or part.outs,
            watermark_ms=shipment.watermark_ms,
            event_ms=shipment.event_ms,
            codec=self.codecs[store],
            keys=part.keys,
            bytes=part.bytes,
            stores=tuple(self.changelogs),
        )


class Ledger:
    """The notes of an application, as offsets of its consumer group."""

    def __init__(self, connection: Connection, group: str) -> None:
        self._topic = names.notes(group)
        self._consumer = connection.client(
            Consumer, {"group.id": group, "enable.auto.commit": False, "isolation.level": "read_committed"}
        )

    def close(self) -> None:
        self._consumer.close()

    @property
    def member(self) -> Any:
        """Who commits, for a transaction."""
        return self._consumer.consumer_group_metadata()

    def read(self, slots: Iterable[int]) -> list[Note | None]:
        """The notes of these slots. Waits for a transaction on them that is still open."""
        wanted = [TopicPartition(self._topic, slot) for slot in slots]
        found = patiently(f"read the offsets of {self._topic}", lambda: self._committed(wanted))
        return [None if place.offset < 0 else _decoded(place) for place in found]

    def _committed(self, wanted: list[TopicPartition]) -> Sequence[TopicPartition]:
        found: Sequence[TopicPartition] = self._consumer.committed(wanted, ANSWER_S)
        for place in found:
            if place.error is not None:
                raise KafkaException(place.error)
        return found

    def entry(self, slot: int, note: Note) -> TopicPartition:
        """A note, to be committed."""
        return TopicPartition(self._topic, slot, note.version, msgspec.json.encode(note).decode())

    def write(self, entries: list[TopicPartition]) -> None:
        """Commit outside a transaction."""

        def commit() -> None:
            for place in self._consumer.commit(offsets=entries, asynchronous=False) or ():
                if place.error is not None:
                    raise KafkaException(place.error)

        patiently(f"commit offsets of {self._topic}", commit)


_ledgers: dict[tuple[str, str], Ledger] = {}
_opening = threading.Lock()


def ledger(connection: Connection, group: str) -> Ledger:
    """This process's client for the notes: a new one would need 100 ms for its first answer."""
    with _opening:
        for known in [name for name in _ledgers if name[0] != connection.token]:
            _ledgers.pop(known).close()  # of an application that is over: a worker process outlives it
        name = (connection.token, group)
        if name not in _ledgers:
            _ledgers[name] = Ledger(connection, group)
        return _ledgers[name]


@atexit.register
def _close_ledgers() -> None:
    while _ledgers:
        _ledgers.popitem()[1].close()


def _decoded(place: TopicPartition) -> Note:
    try:
        return msgspec.json.decode(place.metadata or "", type=Note)
    except msgspec.DecodeError:
        raise ForeignTarget(
            f"the offset of {place.topic} in the application's group is not a note of Holdfast: something else commits there",
            topic=place.topic,
        ) from None


class Publisher:
    """Publishes under the transactional id of one slot. Stays open; any error opens it anew."""

    def __init__(self, route: Route, slot: int, rows: int = 0) -> None:
        """`rows`: how many records a shipment may have."""
        self._route = route
        self._slot = slot
        self._rows = rows
        self._producer: Any = None
        self._note: Note | None = None
        self._failed: KafkaError | None = None

    def open(self) -> None:
        """Fence whoever held this slot before, and read its note."""
        self._persist("open the producer", self._open)

    def read_note_again(self) -> None:
        """Notes were mended since this slot was opened: what it knows may be that there is none."""
        if self._note is None:
            self.close()

    def mend(self, lost: Callable[[], list[TopicPartition]]) -> None:
        """Write notes that are gone, in a transaction: a run that was overtaken since it has looked must not write them.

        `lost` says which, and is asked again after every error.
        """

        def attempt() -> None:
            self._open()  # before the look: whoever opens the slot after it fences this one
            entries = lost()
            if entries:
                self._transact(lambda producer: None, entries)

        self._persist("write the notes", attempt)

    def publish(self, shipment: Shipment, storage: Storage) -> None:
        """Once, whatever happens; nothing if it is out already."""
        self._persist(f"publish version {shipment.note.version}", lambda: self._publish(shipment, storage))

    def send_changelog(
        self, topic: str, partition: int, changes: Sequence[tuple[bytes, bytes | None]], milestone: Milestone | None
    ) -> None:
        """Records of a changelog in a transaction of their own, without a note. To send them again changes nothing."""

        def produce(producer: Any) -> None:
            self._produce_changelog(producer, topic, partition, changes, milestone)

        self._persist(f"write to topic {topic}", lambda: self._transact(produce))

    def close(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            with contextlib.suppress(KafkaException):
                producer.purge()
            with contextlib.suppress(KafkaException):
                producer.flush(0)

    def _open(self) -> None:
        if self._producer is not None:
            return
        route = self._route
        settings: dict[str, Any] = {
            "partitioner": "murmur2_random",
            "linger.ms": 5,
            "enable.idempotence": True,
            "message.max.bytes": route.largest,
            "batch.size": max(1_000_000, route.largest),
            "batch.num.messages": BATCH,
            "queue.buffering.max.messages": 1_000_000,
            "queue.buffering.max.kbytes": 512 * 1024,
        }
        if route.exactly_once:
            settings["transactional.id"] = names.transactional_id(route.group, self._slot)
            settings["transaction.timeout.ms"] = 1000 * min(TRANSACTION_S + self._rows // SLOWEST, LONGEST_S)
        producer = route.connection.client(Producer, settings)
        if route.exactly_once:
            producer.init_transactions(ANSWER_S)
        (self._note,) = ledger(route.connection, route.group).read([self._slot])
        self._producer = producer

    def _publish(self, shipment: Shipment, storage: Storage) -> None:
        version = shipment.note.version
        if self._producer is None:
            reach("publish.begin", version)
            self._open()
            reach("publish.opened", version)
        if _is_out(self._note, shipment.note):
            logger.debug("version %d is out already", version)
            return
        route = self._route
        entries = [ledger(route.connection, route.group).entry(self._slot, shipment.note)]
        entries += [
            TopicPartition(topic, part.partition, out)
            for part in shipment.parts
            for topic, out in zip(route.sources, part.outs, strict=bool(part.outs))
        ]

        def produce(producer: Any) -> None:
            for part in shipment.parts:
                self._produce(producer, shipment, part, storage)
            reach("publish.produced", version)

        self._transact(produce, entries, version)
        self._note = shipment.note
        reach("publish.committed", version)

    def _transact(
        self, produce: Callable[[Any], None], entries: list[TopicPartition] | None = None, version: int = -1
    ) -> None:
        self._open()
        producer, notes = self._producer, ledger(self._route.connection, self._route.group)
        if not self._route.exactly_once:
            self._failed = None
            produce(producer)
            if producer.flush(ANSWER_S):
                raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
            if self._failed is not None:
                raise KafkaException(self._failed)
            if entries:
                notes.write(entries)
            reach("publish.marked", version)
            return
        producer.begin_transaction()
        produce(producer)
        if entries:
            member = notes.member
            _within(OFFSETS_S, lambda: producer.send_offsets_to_transaction(entries, member, OFFSETS_S))
        reach("publish.marked", version)
        producer.commit_transaction(ANSWER_S)
        reach("publish.answered", version)

    def _produce(self, producer: Any, shipment: Shipment, part: Part, storage: Storage) -> None:
        route = self._route
        for sink, topic in route.topics.items():
            if sink in part.outboxes:
                self._produce_outbox(producer, topic, read_table(storage, part.outboxes[sink], kind="outbox"))
        changes = list(read_delta(storage, part.delta)) if part.delta is not None and route.changelogs else []
        for store, topic, partition in route.lanes(part.partition):
            self._produce_changelog(
                producer,
                topic,
                partition,
                records(store, shipment.note.version, changes),
                route.milestone(store, shipment, part),
            )

    def _produce_outbox(self, producer: Any, topic: str, table: Any) -> None:
        keys, values, times, headers = (column.to_pylist() for column in table.columns)
        produce, report = producer.produce, self._report
        for key, value, time_ms, packed in zip(keys, values, times, headers, strict=True):
            more: dict[str, Any] = {} if packed is None else {"headers": unpacked(packed)}
            if report is not None:
                more["on_delivery"] = report
            while True:
                try:
                    produce(topic, value, key, timestamp=time_ms, **more)
                    break
                except BufferError:
                    producer.poll(0.05)
        producer.poll(0)

    def _produce_changelog(
        self,
        producer: Any,
        topic: str,
        partition: int,
        changes: Iterable[tuple[bytes, bytes | None]],
        milestone: Milestone | None,
    ) -> None:
        """Records of a changelog topic and, at their end, the milestone."""
        messages: list[dict[str, Any]] = [{"key": key, "value": value} for key, value in changes]
        if milestone is not None:
            messages.append({"key": MILESTONE, "value": encode_milestone(milestone)})
        more = {} if self._report is None else {"on_delivery": self._report}
        for start in range(0, len(messages), BATCH):
            batch = messages[start : start + BATCH]
            while batch:
                producer.produce_batch(topic, batch, partition=partition, **more)
                batch = [message for message in batch if "_error" in message]
                for message in batch:  # each key is there once, so it may come after its neighbours
                    error = message.pop("_error")
                    if error.code() != KafkaError._QUEUE_FULL:
                        raise KafkaException(error)
                producer.poll(0.05 if batch else 0)

    @property
    def _report(self) -> Callable[[Any, Any], None] | None:
        """What hears of every record; within a transaction the commit does."""
        return None if self._route.exactly_once else self._hear

    def _hear(self, error: KafkaError | None, message: Any) -> None:
        if error is not None and (self._failed is None or self._failed.code() == KafkaError._INVALID_DIFFERENT_RECORD):
            self._failed = error  # that of the record itself, rather than of its neighbours in a request

    def _persist(self, what: str, attempt: Callable[[], None]) -> None:
        """Try until it is done, or hopeless, or the cluster has been away for too long."""
        limit = time.monotonic() + PATIENCE_S
        pause = 0.05
        while True:
            try:
                return attempt()
            except (KafkaException, BrokerAway) as error:
                self.close()
                code, reason = _code_and_text(error)
                if isinstance(error, KafkaException) and code in HOPELESS:
                    raise named(error, f"cannot {what}") from None
                if time.monotonic() > limit:
                    raise BrokerAway(
                        f"cannot {what}: {reason}, for {PATIENCE_S:.0f} s; mend the cluster and start again: nothing is lost"
                    ) from None
                level = logging.DEBUG if code in FENCED else logging.WARNING
                logger.log(level, "cannot %s (%s); trying again", what, reason)
                time.sleep(pause)
                pause = min(pause * 2, 2.0)
            except BaseException:
                self.close()
                raise


def _within(seconds: float, call: Callable[[], None]) -> None:
    """Give up on a call that does not return in time, though it was told how much it has.

    librdkafka may wait for good for a coordinator that went away (its issues 5456 and 5511). The thread is left behind;
    a new producer fences the one that it waits with.
    """
    outcome: SimpleQueue[BaseException | None] = SimpleQueue()

    def run() -> None:
        try:
            call()
        except BaseException as error:
            outcome.put(error)
        else:
            outcome.put(None)

    threading.Thread(target=run, name="holdfast-offsets", daemon=True).start()
    try:
        error = outcome.get(timeout=seconds + 1)
    except Empty:
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT)) from None
    if error is not None:
        raise error


def _code_and_text(error: KafkaException | BrokerAway) -> tuple[int | None, str]:
    if isinstance(error, BrokerAway):
        return None, str(error).partition(";")[0]
    reason: KafkaError = error.args[0]
    return reason.code(), reason.str()


def fence(route: Route, slots: Iterable[int]) -> None:
    """Abort the transactions that were left open in these slots; whoever left one there cannot go on with it."""

    def open_once(slot: int) -> None:
        publisher = Publisher(route, slot)
        try:
            publisher.open()
        finally:
            publisher.close()

    if route.exactly_once:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(open_once, slots))


def _is_out(note: Note | None, wanted: Note) -> bool:
    """Whether the version that is wanted is the one that is out; an error if what is out is not ours to follow."""
    if note is None:
        raise MarkerLost(
            f"the note of what was published last is gone from the application's consumer group, so nobody can say whether version "
            f"{wanted.version} is out. If the group was deleted by hand or has expired: start again",
            version=wanted.version,
        )
    check_instance(note, wanted.instance)
    if note.version > wanted.version:
        raise ForeignTarget(
            f"version {note.version} is out in Kafka already, this run is to publish version {wanted.version}: another run went on "
            "from here, or the checkpoint was put back from an older copy",
            out=note.version,
            wanted=wanted.version,
        )
    if note.version == wanted.version and note.manifest != wanted.manifest:
        raise ForeignTarget(
            f"version {note.version} is out in Kafka, but with another commit than this checkpoint has: it was put back from a "
            "copy that went another way",
            out=note.version,
        )
    return note.version == wanted.version


def check_instance(note: Note, instance: str) -> None:
    if note.instance != instance:
        raise ForeignTarget(
            "Kafka holds the output of another instance of this application (another checkpoint of the same name): give this one a "
            "name of its own, or put the other checkpoint back",
            found=note.instance,
            ours=instance,
        )
