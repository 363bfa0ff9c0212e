"""A plain producer, to feed topics by hand: tests, demos, scripts. It is not part of any transaction."""

from __future__ import annotations

from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer

from holdfast.errors import BrokerAway
from holdfast.kafka.cluster import Cluster, named
from holdfast.kafka.link import Link
from holdfast.kafka.topics import HeadersLike, Topic, headers_list


class TopicProducer:
    """Sends messages to topics. Made by `Application.get_producer`; leaving the block sends what is left.

    Guaranteed: when the block is left without an error, the cluster has everything. Not guaranteed: that a message is there
    only once if the program is run again.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._failed: KafkaError | None = None
        self._producer = link.connection.client(
            Producer,
            {
                "partitioner": "murmur2_random",
                "enable.idempotence": True,
                "linger.ms": 5,
                "message.max.bytes": 100_000_000,
            },
        )

    def __enter__(self) -> TopicProducer:
        self._link.ensure(Cluster(self._link.connection))
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        if kind is None:
            self.flush()

    def produce(
        self,
        topic: Topic | str,
        value: bytes | str | None = None,
        key: bytes | str | None = None,
        *,
        headers: HeadersLike | None = None,
        partition: int = -1,
        timestamp: int | None = None,
    ) -> None:
        """Send bytes; `topic.serialize()` makes them of a value."""
        name = topic.name if isinstance(topic, Topic) else topic
        given: Any = headers_list(headers) or None
        more: dict[str, Any] = {} if timestamp is None else {"timestamp": timestamp}
        while True:
            try:
                self._producer.produce(
                    name,
                    value,
                    key,
                    partition,
                    self._hear,
                    headers=given,
                    **more,
                )
                break
            except BufferError:
                self._producer.poll(0.1)
            except KafkaException as error:
                raise named(error, f"cannot send to topic {name}") from None
        self._producer.poll(0)

    def flush(self, timeout: float = 60.0) -> None:
        """Wait until the cluster has everything."""
        if self._producer.flush(timeout):
            raise BrokerAway(f"some messages could not be sent within {timeout:.0f} s; look at the cluster")
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise named(KafkaException(failed), "cannot send a message")

    def _hear(self, error: KafkaError | None, message: Any) -> None:
        if error is not None:
            self._failed = error
