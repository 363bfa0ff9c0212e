"""Consumers of a worker process, one per partition, kept from batch to batch.

A new consumer needs 100 ms for its first record, and what was fetched beyond the end of a range is there for the next
one. A range is done when the client has come to its end, not when so many records have: transactions leave gaps.
"""

from __future__ import annotations

import atexit
import logging
import time

from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

from holdfast.errors import BrokerAway, KafkaRefused, OffsetsLost
from holdfast.kafka.connection import Connection
from holdfast.sources.base import CHUNK

FETCH = 10_000
"""Records asked of the client at once."""
LOOK_S = 0.1
"""How long a task waits for records before it looks whether it is done."""
PATIENCE_S = 300.0
"""How long a task waits for a cluster that does not answer."""

logger = logging.getLogger("holdfast")


class Cursor:
    """A consumer of one partition and where it stands."""

    def __init__(self, connection: Connection, group: str, topic: str, partition: int) -> None:
        self.at = -1
        """The next offset that was not handed out."""
        self._topic = topic
        self._partition = partition
        self._kept: list[Message] = []
        """Fetched, but beyond the end of the last range."""
        self._consumer = connection.client(
            Consumer,
            {
                "group.id": group,  # its offsets are neither read nor committed here
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "enable.partition.eof": True,
                "isolation.level": "read_committed",
                "auto.offset.reset": "error",
                "queued.min.messages": 100_000,
                "queued.max.messages.kbytes": 32_768,
                "fetch.queue.backoff.ms": 2,  # else a consumer that has fetched enough pauses for a second
                "fetch.wait.max.ms": 100,
            },
        )

    def close(self) -> None:
        self._consumer.close()

    def move(self, offset: int) -> None:
        """Stand at `offset`."""
        if self.at == offset:
            return
        self._kept.clear()
        self._consumer.assign([TopicPartition(self._topic, self._partition, offset)])
        self.at = offset

    def take(self, end: int) -> list[Message]:
        """The next records before `end`, at most a chunk; none says nothing but that `at` may have moved on."""
        taken: list[Message] = []
        limit = time.monotonic() + PATIENCE_S
        while self.at < end and len(taken) < CHUNK:
            fetched = self._kept or self._consumer.consume(min(end - self.at, FETCH), LOOK_S)
            self._kept = []
            before = self.at
            if fetched and not [message for message in fetched if message.error() is not None]:  # as it mostly is
                last: int = fetched[-1].offset()  # type: ignore[assignment]
                if last < end:
                    taken += fetched
                    self.at = last + 1
                    fetched = []
            for index, message in enumerate(fetched):
                if message.error() is not None:
                    self._meet(message)
                    continue
                offset: int = message.offset()  # type: ignore[assignment]
                if offset >= end:
                    self._kept = fetched[index:]
                    self.at = end
                    break
                taken.append(message)
                self.at = offset + 1
            if self.at != before:
                limit = time.monotonic() + PATIENCE_S
            elif taken:
                break
            elif time.monotonic() > limit:
                raise BrokerAway(
                    f"topic {self._topic}, partition {self._partition}: no record came for {PATIENCE_S:.0f} s, though some are "
                    f"before offset {end}; look at the cluster and start again: nothing is lost"
                )
        return taken

    def _meet(self, message: Message) -> None:
        """Something that is not a record."""
        error = message.error()
        assert error is not None
        code = error.code()
        if code == KafkaError._PARTITION_EOF:
            self.at = max(self.at, message.offset() or 0)
        elif code in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
            at, self.at = self.at, -1
            raise OffsetsLost(
                f"topic {self._topic}, partition {self._partition}: the record at offset {at} was deleted unread; start "
                'again to hear how much is gone, and with on_data_loss="skip" to go on without it',
                topic=self._topic,
                partition=self._partition,
                since=at,
            )
        elif not error.retriable() and code in (
            KafkaError.TOPIC_AUTHORIZATION_FAILED,
            KafkaError.GROUP_AUTHORIZATION_FAILED,
            KafkaError._AUTHENTICATION,
        ):
            raise KafkaRefused(f"topic {self._topic}: {error.str()} ({error.name()})", code=error.name())
        else:
            logger.debug("topic %s: %s", self._topic, error.str())


_cursors: dict[tuple[str, str, int], Cursor] = {}


def cursor(token: str, connection: Connection, group: str, topic: str, partition: int) -> Cursor:
    """This process's consumer of a partition, for the user of it that `token` names."""
    for known in [name for name in _cursors if name[0] != token]:
        _cursors.pop(known).close()  # of an application that is over: a worker process outlives it
    name = (token, topic, partition)
    if name not in _cursors:
        _cursors[name] = Cursor(connection, group, topic, partition)
    return _cursors[name]


@atexit.register
def _close_cursors() -> None:
    while _cursors:
        _cursors.popitem()[1].close()
