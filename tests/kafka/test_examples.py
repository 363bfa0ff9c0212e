"""What the examples and the README show of Kafka runs as it is written, each program in a process of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from broker import Broker
from confluent_kafka import Consumer, Producer, TopicPartition

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("kafka_*.py"))


def totals(said: str) -> None:
    assert "20,000 orders in, 20,000 totals out" in said
    assert "equal a recomputation: True" in said


def dead_letters(said: str) -> None:
    assert said.splitlines() == [
        "300",
        "700",  # neither the refund nor what could not be read has left a trace
        "b'not JSON' at offset 2, step source: Undecodable, the value is not JSON",
        "b'{\"euros\": 3}' at offset 3, step apply(add_up): KeyError, 'cents'",
    ]


def recovery(said: str) -> None:
    assert re.findall(r"visited (\d) times", said) == ["1", "2", "3", "4"]
    assert "-- EarlierLife: there is no checkpoint" in said
    assert "-- the state is {'count': 4}" in said


def metadata(said: str) -> None:
    seen = [
        (shown["key"], shown["value"]["unit"], shown["value"]["value"]) for shown in map(_literal, said.splitlines())
    ]
    assert seen == [("degrees", "degrees", 21), ("lumen", "lumen", 400)]
    for shown in map(_literal, said.splitlines()):
        assert shown["timestamp"] == shown["value"]["at"]  # the extracted one went along


def custom_serializers(said: str) -> None:
    assert said.splitlines() == ["7: 0.0", "7: 5.0", "7: 11.0"]


def data_loss(said: str) -> None:
    assert [line for line in said.splitlines() if not line.startswith("--")] == ["0", "1", "4"]
    assert "partition 0 from 2 to 4 were deleted" in said


EXPECTED: dict[str, Callable[[str], None]] = {
    f"kafka_{check.__name__}": check
    for check in (totals, dead_letters, recovery, metadata, custom_serializers, data_loss)
}


def _literal(line: str) -> dict[str, dict[str, str]]:
    return dict(json.loads(line.replace("'", '"')))


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_says_what_it_promises(example: str, broker: Broker, tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{example}.py")],
        cwd=tmp_path,
        env=os.environ | {"BROKER_ADDRESS": broker.address},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    EXPECTED[example](run.stdout)


def test_the_kafka_program_of_the_readme_runs(broker: Broker, tmp_path: Path) -> None:
    _, program, _ = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert "localhost:9092" in program
    orders, totals = "orders-of-the-readme", "totals-of-the-readme"  # the broker is shared
    for written, here in (("localhost:9092", broker.address), ('"orders"', f'"{orders}"'), ('"totals"', f'"{totals}"')):
        program = program.replace(written, here)
    (tmp_path / "program.py").write_text(program)
    for topic in (orders, totals):
        broker.create_topic(topic)
    quiet = broker.client_settings() | {"log_level": 0}
    producer = Producer(quiet)
    for amount in (3, 4):
        producer.produce(orders, json.dumps({"amount": amount}), key="ann")
    producer.flush()
    reader = Consumer(quiet | {"group.id": "a test", "isolation.level": "read_committed"})
    reader.assign([TopicPartition(totals, 0, 0)])
    run = subprocess.Popen([sys.executable, "program.py"], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    try:
        found = reader.consume(2, timeout=120)
        reader.close()
        assert [json.loads(message.value() or b"")["total"] for message in found] == [3, 7]
        run.send_signal(signal.SIGTERM)
        assert run.wait(60) == 0
    finally:
        run.kill()
        _, said = run.communicate()
    assert "stopped at version" in said
