"""A password is nowhere but in memory: not in a file, a log line, an error, or on a page of Spark's.

The program runs in a process of its own, against a broker that asks for a login, with everything that it and Spark
write below one directory. Afterwards every byte of that is searched.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from broker import Broker
from confluent_kafka import Consumer, Producer, TopicPartition

CANARY = "canary-3f8b2c-Straße"
"""Also as JSON, URL and Python would write it: see `forms`."""
PROGRAM = Path(__file__).with_name("secretive.py")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("guarded"), users={"ann": CANARY}) as broker:
        broker.create_topic("orders", 2)
        broker.create_topic("totals")
        producer = Producer(broker.client_settings())
        for n in range(20):
            producer.produce("orders", json.dumps({"amount": n}).encode(), b"k%d" % (n % 3))
        assert producer.flush(30) == 0
        yield broker


@pytest.fixture(scope="module", autouse=True)
def locked_out(guarded: Broker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    """A run with a wrong password. It takes its time to be sure, while the other tests run."""
    program = Program(guarded, tmp_path_factory.mktemp("locked-out"))
    program.tell(password=CANARY + "-wrong")
    yield program
    program.end()


class Program:
    """A run of the program and all that it wrote."""

    def __init__(self, broker: Broker, directory: Path) -> None:
        self.directory = directory
        for name in ("tmp", "state", "spark"):
            (directory / name).mkdir(parents=True)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
        with (directory / "output").open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, str(PROGRAM)],
                cwd=directory,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment
                | {
                    "TMPDIR": str(directory / "tmp"),
                    "SPARK_LOCAL_DIRS": str(directory / "spark"),
                    "BROKER_ADDRESS": broker.address,
                },
            )

    def tell(self, **words: Any) -> None:
        """What the program must not get by its environment or arguments, which others on the machine can see."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(words).encode() + b"\n")
        self.process.stdin.flush()

    def end(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(120)

    def output(self) -> str:
        return (self.directory / "output").read_text(errors="replace")

    def await_word(self, word: str) -> str:
        """The rest of the line that begins with `word`."""
        limit = time.monotonic() + 120
        while time.monotonic() < limit and self.process.poll() is None:
            for line in self.output().splitlines(keepends=True):
                if line.startswith(word) and line.endswith("\n"):
                    return line.removeprefix(word).strip()
            time.sleep(0.1)
        raise AssertionError(f"{word!r} was not said:\n{self.output()}")


def forms(secret: str) -> list[bytes]:
    """The secret as it might be written somewhere."""
    return [
        secret.encode(),
        secret.encode("utf-16-le"),
        json.dumps(secret)[1:-1].encode(),
        urllib.request.quote(secret).encode(),
        secret[:13].encode(),  # the part that every form has in common
        secret[:13].encode("utf-16-le"),
    ]


def leaks(directory: Path) -> list[str]:
    """Files below `directory` that hold the secret."""
    found = []
    for file in directory.rglob("*"):
        if file.is_file():
            data = file.read_bytes()
            found += [f"{file}: {form!r}" for form in forms(CANARY) if form in data]
    return found


def test_the_search_finds_what_it_looks_for(tmp_path: Path) -> None:
    for n, form in enumerate(forms(CANARY)):
        (tmp_path / f"{n}").write_bytes(b"before" + form + b"after")
    assert len({leak.partition(":")[0] for leak in leaks(tmp_path)}) == len(forms(CANARY))


def test_neither_a_run_nor_one_that_fails_writes_its_password_anywhere(guarded: Broker, tmp_path: Path) -> None:
    program = Program(guarded, tmp_path)
    program.tell(password=CANARY)
    pages = program.await_word("UI ")
    program.await_word("COMMITTED")  # the run lives, and has used its password everywhere
    (application,) = fetch(f"{pages}/api/v1/applications")
    for page in ("environment", "jobs", "stages", "executors", "storage/rdd"):
        text = json.dumps(fetch(f"{pages}/api/v1/applications/{application['id']}/{page}"), ensure_ascii=False)
        assert CANARY[:13] not in text, page
        assert len(text) > 10 or page == "storage/rdd"
    for place in ("state", "spark"):
        assert any(file.is_file() for file in (tmp_path / place).rglob("*")), f"nothing was written to {place}"
    assert leaks(tmp_path) == []  # before Spark clears up after itself
    assert program.end() == 0, program.output()
    assert "ValueError: the step has failed" in program.output()  # in a task of the second run
    assert len(read_totals(guarded)) == 20
    assert leaks(tmp_path) == []


def test_a_wrong_password_is_an_error_that_does_not_show_it(locked_out: Program) -> None:
    assert locked_out.end() == 1
    output = locked_out.output()
    assert "holdfast.errors.KafkaRefused" in output and "uthentication failed" in output, output
    assert "REPR" in output and "sasl_password=***" in output
    assert leaks(locked_out.directory) == []


def fetch(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.load(answer)


def read_totals(broker: Broker) -> list[bytes | None]:
    consumer = Consumer(
        broker.client_settings() | {"group.id": "r", "isolation.level": "read_committed", "enable.partition.eof": True}
    )
    found = []
    try:
        consumer.assign([TopicPartition("totals", 0, 0)])
        while (message := consumer.poll(30)) is not None and message.error() is None:
            found.append(message.value())
    finally:
        consumer.close()
    return found
