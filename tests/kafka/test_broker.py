"""The broker itself: what the other tests take for granted about it."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import broker as broker_module
import pytest
from broker import Broker
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient


def produce(broker: Broker, topic: str, *values: bytes, **settings: str | int | float | bool) -> None:
    producer = Producer(broker.client_settings() | settings)
    for value in values:
        producer.produce(topic, value)
    assert producer.flush(30) == 0


def read(broker: Broker, topic: str, count: int) -> list[bytes | None]:
    consumer = Consumer(broker.client_settings() | {"group.id": "reader", "enable.auto.commit": False})
    try:
        consumer.assign([TopicPartition(topic, 0, 0)])
        messages = consumer.consume(count, timeout=30)
    finally:
        consumer.close()
    assert all(message.error() is None for message in messages)
    return [message.value() for message in messages]


def answers(broker: Broker, timeout: float = 1.0) -> bool:
    try:
        AdminClient(broker.client_settings() | {"log_level": 0}).list_topics(timeout=timeout)
    except KafkaException:
        return False
    return True


def test_a_message_goes_round(broker: Broker, topic_name: str) -> None:
    broker.create_topic(topic_name)
    produce(broker, topic_name, b"one", b"two")
    assert read(broker, topic_name, 2) == [b"one", b"two"]


def test_a_topic_that_nobody_created_does_not_appear(broker: Broker, topic_name: str) -> None:
    admin = AdminClient(broker.client_settings())
    assert admin.list_topics(topic_name, timeout=30).topics[topic_name].error is not None
    assert topic_name not in admin.list_topics(timeout=30).topics


def test_a_killed_broker_comes_back_with_its_address_and_its_data(tmp_path: Path, topic_name: str) -> None:
    with Broker(tmp_path) as broker:
        broker.create_topic(topic_name)
        produce(broker, topic_name, b"before")
        address = broker.address
        broker.kill()
        assert not broker.is_alive()
        broker.start()
        assert broker.address == address
        produce(broker, topic_name, b"after")
        assert read(broker, topic_name, 2) == [b"before", b"after"]


def test_a_stopped_broker_comes_back_with_its_data_for_another_object(tmp_path: Path, topic_name: str) -> None:
    with Broker(tmp_path) as broker:
        broker.create_topic(topic_name)
        produce(broker, topic_name, b"kept")
    with Broker(tmp_path) as broker:
        assert read(broker, topic_name, 1) == [b"kept"]


def test_a_paused_broker_is_silent_until_it_is_resumed(tmp_path: Path) -> None:
    with Broker(tmp_path) as broker:
        broker.pause()
        assert broker.is_alive()
        assert not answers(broker)
        broker.resume()
        assert answers(broker, timeout=30)


def test_a_paused_broker_can_be_stopped(tmp_path: Path) -> None:
    broker = Broker(tmp_path)
    broker.start()
    broker.pause()
    broker.stop()
    assert not broker.is_alive()


def test_only_a_living_broker_can_be_killed(tmp_path: Path) -> None:
    with Broker(tmp_path) as broker:
        broker.kill()
        with pytest.raises(AssertionError, match="ended by itself"):
            broker.kill()


def test_a_broker_that_does_not_come_up_says_why(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"log\.segment\.bytes"):
        Broker(tmp_path, settings={"log.segment.bytes": "none"}).start()


def test_a_broker_with_users_lets_them_in_and_nobody_else(tmp_path: Path, topic_name: str) -> None:
    with Broker(tmp_path, users={"ann": 'a "quoted\\ päss=word#;', "bob": "b"}) as broker:
        broker.create_topic(topic_name)
        produce(broker, topic_name, b"private", **broker.client_settings("bob"))
        assert read(broker, topic_name, 1) == [b"private"]
        wrong = broker.client_settings("bob") | {"sasl.password": "wrong", "log_level": 0}
        with pytest.raises(KafkaException):
            AdminClient(wrong).list_topics(timeout=3)


def test_the_broker_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib, broker\n"
        "born = broker.Broker(pathlib.Path(sys.argv[1]))\n"
        "born.start()\n"
        "print(born._process.pid, flush=True)\n"
        "input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as starter:
        assert starter.stdout is not None
        watch = os.pidfd_open(int(starter.stdout.readline()))
        starter.kill()
    try:
        assert select.select([watch], [], [], 30)[0], "the broker outlived its starter"
    finally:
        os.close(watch)


def test_the_script_runs_a_program_against_a_broker_and_returns_its_code(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\n"
        "from confluent_kafka.admin import AdminClient\n"
        'AdminClient({"bootstrap.servers": os.environ["BROKER_ADDRESS"]}).list_topics(timeout=30)\n'
        "sys.exit(int(sys.argv[1]))\n"
    )
    done = subprocess.run(
        [sys.executable, broker_module.__file__, program, "7"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 7, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("a broker listens on 127.0.0.1:")
