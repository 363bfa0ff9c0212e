"""A real Kafka broker on loopback, for the tests, the benchmarks and whoever runs a program against one.

One process that is broker and controller (KRaft). It keeps its ports for life and its data in a directory of the caller,
so `start` after `kill` is the same broker, and a clean one is a new directory.

    python tests/kafka/broker.py <program> [arguments]    runs a Python program with BROKER_ADDRESS in its environment
    python tests/kafka/broker.py fetch                    only brings what it needs

The jars come by Maven (pom.xml beside this file) into build/broker, once.

    build/broker/libs/        the jars
    build/broker/classes.jsa  what the JVM learnt from a first broker: it starts in half the time
    build/broker/fetched      both are there, for a pom that is not newer than this
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, ClusterMetadata, NewTopic

POM = Path(__file__).with_name("pom.xml")
BUILD = Path(__file__).parents[2] / "build" / "broker"
LIBS = BUILD / "libs"
ARCHIVE = BUILD / "classes.jsa"
FETCHED = BUILD / "fetched"

HOST = "127.0.0.1"
PATIENCE_S = 60.0
JVM = (
    "-Xmx512m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
)
ClientSettings = dict[str, str | int | float | bool]
SETTINGS = {
    "auto.create.topics.enable": "false",
    "broker.heartbeat.interval.ms": "200",
    "broker.session.timeout.ms": "2000",  # a killed broker is let in again only when its last session has run out
    "group.initial.rebalance.delay.ms": "0",
    "log.cleaner.backoff.ms": "200",
    "log.cleaner.dedupe.buffer.size": str(8 << 20),
    "log.initial.task.delay.ms": "500",
    "log.retention.check.interval.ms": "500",
    "offsets.topic.num.partitions": "4",
    "offsets.topic.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.num.partitions": "4",
    "transaction.state.log.replication.factor": "1",
}


class Broker:
    """A broker that a test starts, ends, and starts again. Leaving the block stops it.

    With `users` (name to password) clients must log in by SASL/PLAIN, and `directory` holds the passwords: look for
    leaked secrets elsewhere. `settings` are the broker's own, over the ones above. The broker dies with the thread that
    started it, however that ends.
    """

    def __init__(
        self,
        directory: Path,
        *,
        users: Mapping[str, str] | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self.directory = directory
        self._users = dict(users or {})
        self._settings = dict(settings or {})
        self._port, self._broker_port, self._controller_port = free_ports(3)
        self._process: subprocess.Popen[bytes] | None = None
        self._jvm: tuple[str, ...] = (f"-XX:SharedArchiveFile={ARCHIVE}",)

    def __enter__(self) -> Broker:
        if not self.is_alive():
            self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def address(self) -> str:
        return f"{HOST}:{self._port}"

    def client_settings(self, user: str | None = None) -> ClientSettings:
        """What a confluent_kafka client needs to reach this broker; as `user`, or as the first one if it has users."""
        settings: ClientSettings = {"bootstrap.servers": self.address}
        if self._users:
            name = user or next(iter(self._users))
            settings |= {
                "security.protocol": "SASL_PLAINTEXT",
                "sasl.mechanism": "PLAIN",
                "sasl.username": name,
                "sasl.password": self._users[name],
            }
        return settings

    # -- watching --------------------------------------------------------------------------------------------------

    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def said(self) -> str:
        """The last lines that the broker wrote to stdout and stderr, over all its lives."""
        log = self._log.read_text(errors="replace") if self._log.exists() else ""
        return "\n".join(log.splitlines()[-60:])

    # -- topics ----------------------------------------------------------------------------------------------------

    def create_topic(self, name: str, partitions: int = 1, settings: Mapping[str, str] | None = None) -> None:
        """Returns when every partition of it has a leader."""
        admin = AdminClient(self.client_settings())  # held by a name: a client that is dropped drops what it was asked
        admin.create_topics([NewTopic(name, partitions, 1, config=dict(settings or {}))])[name].result(PATIENCE_S)
        limit = time.monotonic() + PATIENCE_S
        while not is_ready(known := admin.list_topics(name, timeout=PATIENCE_S)) or not known.topics[name].partitions:
            assert time.monotonic() < limit, f"topic {name} has no leaders:\n{self.said()}"
            time.sleep(0.01)

    # -- starting --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Returns when a client can talk to it and every partition that it holds has a leader."""
        assert not self.is_alive(), "the broker is running already"
        fetch()
        self._launch()

    def _launch(self) -> None:
        self._write_properties()
        if not (self._data / "meta.properties").exists():
            self._format()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *self._java("kafka.Kafka"), str(self._properties)],
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            self._await_ready()
        except BaseException:
            self._end(signal.SIGKILL)
            raise

    def _await_ready(self) -> None:
        quiet: ClientSettings = {"log_level": 0, "reconnect.backoff.ms": 20, "reconnect.backoff.max.ms": 50}
        admin = AdminClient(self.client_settings() | quiet)
        limit = time.monotonic() + PATIENCE_S
        while True:
            assert self.is_alive(), f"the broker ended while it started:\n{self.said()}"
            assert time.monotonic() < limit, f"the broker does not come up:\n{self.said()}"
            with contextlib.suppress(KafkaException):
                if is_ready(admin.list_topics(timeout=1)):
                    return
            time.sleep(0.02)

    def _format(self) -> None:
        cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        with self._log.open("ab") as log:
            code = subprocess.call(
                [
                    *self._java("kafka.tools.StorageTool"),
                    "format",
                    f"--cluster-id={cluster}",
                    f"--config={self._properties}",
                ],
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        assert code == 0, f"the broker's directory cannot be formatted:\n{self.said()}"

    def _java(self, main: str) -> Sequence[str]:
        jars = ":".join(map(str, sorted(LIBS.glob("*.jar"))))
        return "java", *JVM, *self._jvm, "-cp", jars, main

    def _write_properties(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self._properties.touch(mode=0o600)
        lines = [f"{name}={value}".replace("\\", "\\\\") for name, value in self._all_settings().items()]
        self._properties.write_text(escaped("\n".join([*lines, ""])), encoding="ascii")

    def _all_settings(self) -> dict[str, str]:
        # Static voters: the ports are in the settings only, so a directory may come back on other ones.
        own = {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.voters": f"1@{HOST}:{self._controller_port}",
            "controller.listener.names": "CONTROLLER",
            "inter.broker.listener.name": "BROKER",
            "listeners": f"CLIENT://{self.address},BROKER://{HOST}:{self._broker_port},CONTROLLER://{HOST}:{self._controller_port}",
            "listener.security.protocol.map": "CLIENT:PLAINTEXT,BROKER:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "log.dirs": str(self._data),
        }
        if self._users:
            logins = " ".join(f"user_{name}={quoted(password)}" for name, password in self._users.items())
            own |= {
                "listener.security.protocol.map": "CLIENT:SASL_PLAINTEXT,BROKER:PLAINTEXT,CONTROLLER:PLAINTEXT",
                "listener.name.client.sasl.enabled.mechanisms": "PLAIN",
                "listener.name.client.plain.sasl.jaas.config": (
                    f"org.apache.kafka.common.security.plain.PlainLoginModule required {logins};"
                ),
            }
        return SETTINGS | own | self._settings

    @property
    def _data(self) -> Path:
        return self.directory.absolute() / "data"

    @property
    def _properties(self) -> Path:
        return self.directory.absolute() / "server.properties"

    @property
    def _log(self) -> Path:
        return self.directory.absolute() / "broker.log"

    # -- disturbing and ending -------------------------------------------------------------------------------------

    def pause(self) -> None:
        """SIGSTOP: its connections stay open and nobody answers."""
        self._living().send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._living().send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, provably of a living process."""
        process = self._living()
        process.kill()
        assert process.wait() == -signal.SIGKILL, f"ended before it could be killed:\n{self.said()}"

    def stop(self) -> None:
        """SIGTERM, and SIGKILL if it does not heed that. A broker that has ended, or never began, is stopped."""
        if self.is_alive():
            self.resume()
            try:
                self._end(signal.SIGTERM, PATIENCE_S / 2)
            except subprocess.TimeoutExpired:
                self._end(signal.SIGKILL)

    def _living(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "the broker was never started"
        assert self._process.poll() is None, f"the broker has ended by itself:\n{self.said()}"
        return self._process

    def _end(self, how: signal.Signals, patience: float | None = None) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(patience)


def is_ready(cluster: ClusterMetadata) -> bool:
    partitions = (partition for topic in cluster.topics.values() for partition in topic.partitions.values())
    return bool(cluster.brokers) and all(partition.leader != -1 for partition in partitions)


def free_ports(count: int) -> list[int]:
    """Below the range of outgoing connections: no client can take a dead broker's port before it comes back."""
    ports: list[int] = []
    with contextlib.ExitStack() as probes:
        while len(ports) < count:
            probe = probes.enter_context(socket.socket())
            port = random.randrange(20_000, 32_000)
            with contextlib.suppress(OSError):
                probe.bind((HOST, port))
                ports.append(port)
    return ports


def quoted(text: str) -> str:
    """A string as the login configuration of Java writes it."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def escaped(text: str) -> str:
    """A properties file is Latin-1 to Java; whatever is not ASCII goes in as \\uXXXX, in UTF-16."""
    units = text.encode("utf-16-be")
    codes = [int.from_bytes(units[at : at + 2]) for at in range(0, len(units), 2)]
    return "".join(chr(code) if code < 128 else f"\\u{code:04x}" for code in codes)


# -- the jars ------------------------------------------------------------------------------------------------------


def fetch() -> None:
    """The jars and the class archive, unless they are there. One process at a time; the others wait for it."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if FETCHED.exists() and FETCHED.stat().st_mtime >= POM.stat().st_mtime:
            return
        FETCHED.unlink(missing_ok=True)
        say("fetching the broker by Maven")
        copy_jars()
        archive_classes()
        FETCHED.touch()


def copy_jars() -> None:
    assert shutil.which("mvn"), "the broker comes by Maven, which is missing: scripts/maven installs it"
    if LIBS.exists():
        shutil.rmtree(LIBS)
    maven = subprocess.run(
        ["mvn", "-q", "-B", "-f", POM, "dependency:copy-dependencies", f"-DoutputDirectory={LIBS}"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert maven.returncode == 0, f"Maven could not fetch the broker:\n{maven.stdout[-4000:]}"


def archive_classes() -> None:
    """A first broker, that leaves its classes for the next ones when it stops."""
    ARCHIVE.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        first = Broker(Path(directory))
        first._jvm = (f"-XX:ArchiveClassesAtExit={ARCHIVE}",)
        first._launch()
        first.stop()


# -- as a script ---------------------------------------------------------------------------------------------------


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(arguments: Sequence[str]) -> int:
    """The exit code of the program."""
    if not arguments:
        say("usage: python tests/kafka/broker.py fetch | <program> [arguments]")
        return 2
    if arguments == ["fetch"]:
        fetch()
        return 0
    with tempfile.TemporaryDirectory() as directory, Broker(Path(directory)) as broker:
        say(f"a broker listens on {broker.address}")
        code = subprocess.call([sys.executable, *arguments], env=os.environ | {"BROKER_ADDRESS": broker.address})
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
