"""The other ends of the Kafka benchmark: who feeds the input topic and who reads the output topic.

    python bench/kafka_clients.py pace    records at a steady rate, until SIGTERM
    python bench/kafka_clients.py watch   how long records took to a read_committed consumer, as one JSON line

A record is {"user", "amount", "sent": seconds}. Its key is placed as the Java client does, which is also how both
contenders place the keys of their output.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterable, Iterator

from confluent_kafka import Consumer, Producer

BATCH = 10_000
TICK_S = 0.005


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["pace", "watch"])
    parser.add_argument("--broker", required=True)
    parser.add_argument("--topic", required=True)
    parser.add_argument("--rate", type=int, default=2_000, help="pace: records per second")
    parser.add_argument("--keys", type=int, default=100_000, help="pace: how many users there are")
    parser.add_argument(
        "--warm-up", type=float, default=10.0, help="watch: seconds to leave out, from the first record"
    )
    parser.add_argument("--seconds", type=float, default=30.0, help="watch: how long")
    options = parser.parse_args()
    if options.what == "pace":
        pace(options.broker, options.topic, options.rate, options.keys)
    else:
        json.dump(watch(options.broker, options.topic, options.warm_up, options.seconds), sys.stdout)


# -- feeding ------------------------------------------------------------------------------------------------------------


def feed(broker: str, topic: str, users: Iterable[int]) -> None:
    """A record per user, as fast as they can be sent. Returns when all are there."""
    producer = Producer(_producing(broker) | {"linger.ms": 50, "queue.buffering.max.messages": 1_000_000})
    chance = random.Random(2).randrange
    batch: list[dict[str, bytes]] = []
    for user in users:
        batch.append(_message(user, chance(1000), 0.0))
        if len(batch) == BATCH:
            _send(producer, topic, batch)
            batch = []
    _send(producer, topic, batch)
    assert producer.flush(60) == 0, f"topic {topic} could not be fed"


def some_of(keys: int, records: int) -> Iterator[int]:
    """Users at random; the same ones in every run."""
    chance = random.Random(1).random
    return (int(chance() * keys) for _ in range(records))


def pace(broker: str, topic: str, rate: int, keys: int) -> None:
    """`rate` records a second, evenly, each with the time at which it was handed to the producer."""
    producer = Producer(_producing(broker) | {"linger.ms": 1})
    chance = random.Random(1).randrange
    began = time.time()
    done = 0
    while True:
        now = time.time()
        due = int((now - began) * rate)
        for _ in range(due - done):
            message = _message(chance(keys), chance(1000), time.time())
            producer.produce(topic, message["value"], message["key"])
        done = due
        producer.poll(0)
        time.sleep(max(0.0, TICK_S - (time.time() - now)))


def _producing(broker: str) -> dict[str, str | int]:
    return {"bootstrap.servers": broker, "partitioner": "murmur2_random", "log_level": 0}


def _message(user: int, amount: int, sent: float) -> dict[str, bytes]:
    return {
        "key": b"user%d" % user,
        "value": b'{"user": "user%d", "amount": %d, "sent": %.6f}' % (user, amount, sent),
    }


def _send(producer: Producer, topic: str, messages: list[dict[str, bytes]]) -> None:
    while messages:
        queued = producer.produce_batch(topic, messages)
        messages = messages[queued:]
        for refused in messages:
            refused.pop("_error", None)
        producer.poll(0 if queued else 0.05)


# -- reading ------------------------------------------------------------------------------------------------------------


def watch(broker: str, topic: str, warm_up: float, seconds: float) -> dict[str, float]:
    """Latencies in seconds of the records that were sent within a window, of which none is left out.

    The window begins `warm_up` after the first record was seen. It is over when every partition has shown a later one.
    """
    consumer = Consumer(
        {
            "bootstrap.servers": broker,
            "group.id": f"{topic}-watch",
            "isolation.level": "read_committed",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "fetch.wait.max.ms": 100,
        }
    )
    consumer.subscribe([topic])
    wanted = set(consumer.list_topics(topic, 30).topics[topic].partitions)
    over: set[int] = set()
    latencies: list[float] = []
    begin = end = float("inf")
    while over != wanted:
        first = consumer.poll(0.1)  # not consume(1_000, 0.1), which waits for a thousand
        messages = [] if first is None else [first, *consumer.consume(1_000, 0)]
        now = time.time()
        if messages and begin == float("inf"):
            begin, end = now + warm_up, now + warm_up + seconds
        for message in messages:
            assert message.error() is None, message.error()
            sent = json.loads(message.value() or b"")["sent"]
            if sent >= end:
                over.add(message.partition() or 0)
            elif sent >= begin:
                latencies.append(now - sent)
    consumer.close()
    latencies.sort()
    return {
        "p50": latencies[len(latencies) // 2],
        "p99": latencies[int(len(latencies) * 0.99)],
        "max": latencies[-1],
        "records": len(latencies),
        "seconds": seconds,
    }


if __name__ == "__main__":
    main()
