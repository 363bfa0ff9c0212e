"""Kafka to Kafka, beside Quix Streams: how fast, how soon, and how long until lost state is back.

Each section starts a broker of its own on this machine. The contenders run one after the other on the same input, each in
processes of its own: Holdfast in one, on local[2]; Quix Streams in two of one consumer group. Input and changelog topics
have two partitions, everything is exactly once. Nothing is asked of a contender that it could answer in its own favour:
rates and latencies are read off the output topic, as a read_committed consumer sees it. Only a restore is invisible from
outside; there the times are those of the contenders' own log lines.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec
from kafka_clients import feed, some_of

HERE = Path(__file__).parent
OUT = HERE / "out"
WORK = OUT / "kafka"
QUIX_PYTHON = HERE.parent / ".venv-quix" / "bin" / "python"
sys.path.append(str(HERE.parent / "tests" / "kafka"))

from broker import Broker  # noqa: E402

PARTITIONS = 2
LOOK_S = 0.02
ANSWER_S = 30.0
PATIENCE_S = 600.0
AS_KAFKA_COMES = {
    "broker.heartbeat.interval.ms": "2000",
    "broker.session.timeout.ms": "9000",
    "group.initial.rebalance.delay.ms": "3000",
    "log.cleaner.backoff.ms": "15000",
    "log.cleaner.dedupe.buffer.size": str(128 << 20),
    "log.initial.task.delay.ms": "30000",
    "log.retention.check.interval.ms": "300000",
}
"""What the test broker has otherwise. The rebalance delay also lets both processes of Quix begin with a partition each."""

Row = tuple[str, str, str, bool]


class Sizes(NamedTuple):
    """How much of everything."""

    keys: int = 100_000
    records: int = 5_000_000
    """Of the backlog that the throughput is measured on."""
    batch: int = 200_000
    """Holdfast's max_batch_rows, for throughput."""
    long_commit_interval: float = 15.0
    """Quix's, for throughput, beside its default of 5 s. The longer, the fewer writes, says its documentation."""
    warm_up: float = 8.0
    """Seconds from the first output on that are left out."""
    seconds: float = 30.0
    """That are measured, if the backlog lasts."""
    rate: int = 2_000
    """Records per second, when latency is measured."""
    restored: int = 2_000_000
    """Keys in the changelog topic."""
    smoke: bool = False
    """Too small to say anything about speed."""


FULL = Sizes()
SMALL = Sizes(10_000, 100_000, 5_000, 1.0, 1.0, 6.0, 500, 50_000, smoke=True)


# -- the sections -------------------------------------------------------------------------------------------------------


def throughput(results: dict[str, Any], sizes: Sizes = FULL) -> list[Row]:
    """A backlog of JSON messages, running total, 100,000 keys: records that become visible per second."""
    quix = "Quix Streams in 2 processes, commit interval"
    long = sizes.long_commit_interval
    ours = ("Holdfast", "Holdfast", ["--max-batch-rows", str(sizes.batch)], sizes.seconds)
    turns = [
        ours,
        (f"{quix} {long:.0f} s", "Quix", ["--commit-interval", str(long)], max(sizes.seconds, 2.7 * long)),
        ours,  # on both sides of a Quix: a machine that grows slower or faster shows
    ]
    if not sizes.smoke:  # which lasts for too few commits of 5 s
        turns.insert(1, (f"{quix} default", "Quix", [], sizes.seconds))
    rates: dict[str, list[float]] = {}
    with Bench("throughput", results) as bench:
        bench.feed("input", some_of(sizes.keys, sizes.records))
        for turn, (label, name, options, seconds) in enumerate(turns):
            output = bench.topic(f"totals-{turn}")
            with bench.contender(name, f"throughput-{turn}", "input", output, *options) as contender:
                rate = bench.visible_rate(contender, output, "input", sizes.warm_up, seconds)
            rates.setdefault(label, []).append(rate)
            say(f"{label}: {rate:,.0f} records/s")
    results["kafka_records_per_second"] = rates
    mean = {label: statistics.mean(found) for label, found in rates.items()}
    return [
        *((f"Kafka to Kafka, {label}, records/s", f"{rate:,.0f}", "", True) for label, rate in mean.items()),
        at_least(
            "Kafka to Kafka, Holdfast / the faster Quix Streams",
            mean["Holdfast"] / max(rate for label, rate in mean.items() if label != "Holdfast"),
            3,
            sizes,
        ),
    ]


def second_stage(results: dict[str, Any], sizes: Sizes = FULL) -> list[Row]:
    """The same backlog: what a total by a second key costs, which every record is shuffled for."""
    rates: dict[str, list[float]] = {"one stage": [], "two stages": []}
    with Bench("second-stage", results) as bench:
        bench.feed("input", some_of(sizes.keys, sizes.records))
        for turn in range(4):
            label = ("one stage", "two stages")[turn % 2]
            output = bench.topic(f"totals-{turn}")
            options = ["--max-batch-rows", str(sizes.batch), *(["--two-stages"] if turn % 2 else [])]
            with bench.contender("Holdfast", f"stages-{turn}", "input", output, *options) as contender:
                rates[label].append(bench.visible_rate(contender, output, "input", sizes.warm_up, sizes.seconds))
            say(f"{label}: {rates[label][-1]:,.0f} records/s")
    results["kafka_stages"] = rates
    one, two = (statistics.mean(found) for found in rates.values())
    kept = sizes.smoke or one <= 1.8 * two
    return [
        *((f"Kafka to Kafka, {label}, records/s", f"{statistics.mean(found):,.0f}", "", True) for label, found in rates.items()),
        ("time of two keyed stages / of one, Kafka to Kafka", f"{one / two:.2f}", "" if sizes.smoke else "<= 1.8", kept),
    ]  # fmt: skip


def latency(results: dict[str, Any], sizes: Sizes = FULL) -> list[Row]:
    """From produce to a read_committed consumer, at a steady 2,000 records/s."""
    found: dict[str, dict[str, float]] = {}
    rows: list[Row] = []
    with Bench("latency", results) as bench:
        for label, name, options in (
            ("Holdfast", "Holdfast", ()),
            ("Quix Streams, default commit interval", "Quix", ()),
            ("Quix Streams, commit interval 0.3 s", "Quix", ("--commit-interval", "0.3")),
        ):
            number = len(found)
            source, output = bench.topic(f"input-{number}"), bench.topic(f"totals-{number}")
            with bench.contender(name, f"latency-{number}", source, output, *options) as contender:
                found[label] = bench.latencies(contender, source, output, sizes)
            p50, p99 = found[label]["p50"] * 1000, found[label]["p99"] * 1000
            say(f"{label}: p50 {p50:.0f} ms, p99 {p99:.0f} ms, {found[label]['records']:,.0f} records")
            ours = name == "Holdfast" and not sizes.smoke
            rows += [
                (f"produce to read_committed, {label}, p50 ms", f"{p50:,.0f}", "<= 400" if ours else "", not ours or p50 <= 400),
                (f"produce to read_committed, {label}, p99 ms", f"{p99:,.0f}", "<= 900" if ours else "", not ours or p99 <= 900),
            ]  # fmt: skip
    results["kafka_latency"] = found
    return rows


def restore(results: dict[str, Any], sizes: Sizes = FULL) -> list[Row]:
    """Local stores are gone: how long until 2 million keys are back, from a snapshot and from the changelog topic."""
    spans: dict[str, Span] = {}
    with Bench("restore", results) as bench:
        bench.feed("input", range(sizes.restored))
        options = ["--max-batch-rows", str(sizes.batch), "--to-the-end", "--snapshot-every", "4"]
        with bench.contender("Holdfast", "restore", "input", None, *options) as fill:
            fill.finish()
        with bench.contender("Quix", "restore", "input", None) as fill:
            bench.wait_for_group(fill, "input")
        for name in ("Holdfast", "Quix"):
            held = bench.changelog_records(f"{name.lower()}-restore", "input")
            assert sizes.restored <= held < sizes.restored * 1.01, f"{name}'s changelog holds {held:,} records"
        bench.forget_stores("Holdfast", "holdfast-restore")
        bench.feed_more("input", range(10))  # a store is restored when there is something to do
        with bench.contender("Holdfast", "restore", "input", None, *options) as contender:
            contender.wait_for("the snapshot of version")
            contender.finish()
            spans["Holdfast, snapshot"] = contender.span("restoring from the checkpoint", "the state is whole again")
        for name in ("Holdfast", "Quix"):
            bench.forget_state(name)
        with bench.contender("Holdfast", "restore", "input", None, "--to-the-end", "--recover") as contender:
            contender.finish()
            spans["Holdfast"] = contender.span("restoring from the changelog topics", "the state is whole again")
        with bench.contender("Quix", "restore", "input", None) as contender:
            contender.wait_for("Recovery process complete!")
            contender.check_once_each("Recovery successful for")
            spans["Quix"] = contender.span("Beginning recovery check", "Recovery process complete!")
    for name, span in spans.items():
        say(f"{name}: {span.seconds:.1f} s, {span.from_start:.1f} s from the start of the process")
    results["kafka_restore_seconds"] = {name: span._asdict() for name, span in spans.items()}
    ours, theirs, snapshot = spans["Holdfast"], spans["Quix"], spans["Holdfast, snapshot"]
    keys = f"{sizes.restored:,} keys from the changelog"
    return [
        (f"{keys}, Holdfast, s", f"{ours.seconds:.1f}", "", True),
        (f"{keys}, Quix Streams in 2 processes, s", f"{theirs.seconds:.1f}", "", True),
        at_least(f"{keys}, Quix Streams / Holdfast", theirs.seconds / ours.seconds, 5, sizes),
        ("  the same from the start of the process", f"{theirs.from_start / ours.from_start:.2f}", "", True),
        ("the same from a snapshot, Holdfast, s", f"{snapshot.seconds:.1f}", "", True),
        at_least("  Quix Streams from the changelog / that", theirs.seconds / snapshot.seconds, 10, sizes),
    ]


SECTIONS = {
    "kafka-throughput": throughput,
    "kafka-second-stage": second_stage,
    "kafka-latency": latency,
    "kafka-restore": restore,
}


def at_least(what: str, found: float, promised: float, sizes: Sizes) -> Row:
    return what, f"{found:.2f}", "" if sizes.smoke else f">= {promised}", sizes.smoke or found >= promised


# -- a broker and who runs on it ------------------------------------------------------------------------------------------


class Bench:
    """A broker for one section. What was run on it is kept in the results, under "how"."""

    def __init__(self, section: str, results: dict[str, Any]) -> None:
        self._how: list[str] = results.setdefault("how", [])
        self._home = WORK / section
        self._open = ExitStack()

    def __enter__(self) -> Bench:
        if self._home.exists():
            shutil.rmtree(self._home)
        (self._home / "logs").mkdir(parents=True)
        self._broker = self._open.enter_context(Broker(self._home / "broker", settings=AS_KAFKA_COMES))
        self._admin = AdminClient(self._broker.client_settings() | {"log_level": 0})
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()
        for left in (self._home / "broker", self._home / "state"):
            if left.exists():
                shutil.rmtree(left)

    def topic(self, name: str) -> str:
        self._broker.create_topic(name, PARTITIONS)
        return name

    def feed(self, topic: str, users: Any) -> None:
        began = time.monotonic()
        feed(self._broker.address, self.topic(topic), users)
        say(f"{sum(self.ends(topic)):,} records fed in {time.monotonic() - began:.0f} s")

    def feed_more(self, topic: str, users: Any) -> None:
        feed(self._broker.address, topic, users)

    @contextmanager
    def contender(self, name: str, run: str, source: str, output: str | None, *options: str) -> Iterator[Contender]:
        """Started; stopped at the end of the block."""
        group = f"{name.lower()}-{run}"
        there = ["--broker", self._broker.address, "--group", group, "--input", source]
        there += [] if output is None else ["--output", output]
        python, program, processes = sys.executable, "kafka_holdfast.py", 1
        if name == "Quix":
            python, program, processes = str(QUIX_PYTHON), "kafka_quix.py", PARTITIONS
            assert QUIX_PYTHON.exists(), "Quix Streams is not installed: make .venv-quix/quix"
        commands = [
            [python, str(HERE / program), *there, "--state", str(self._home / "state" / name / str(process)), *options]
            for process in range(processes)
        ]
        self._how.append(f"{processes} x {shlex.join(commands[0])}")
        contender = Contender(name, group, commands, self._home / "logs")
        try:
            yield contender
        finally:
            contender.stop()

    def forget_state(self, name: str) -> None:
        """Everything that a contender has on disk: stores and checkpoint."""
        shutil.rmtree(self._home / "state" / name)

    def forget_stores(self, name: str, group: str) -> None:
        """The local stores of Holdfast; the checkpoint stays."""
        shutil.rmtree(self._home / "state" / name / "0" / group / "local")

    # -- what becomes visible ---------------------------------------------------------------------------------------------

    def ends(self, topic: str) -> list[int]:
        """Per partition: where a read_committed consumer comes to the end now."""
        asked = {TopicPartition(topic, partition): OffsetSpec.latest() for partition in range(PARTITIONS)}
        limit = time.monotonic() + ANSWER_S
        while True:
            answers = self._admin.list_offsets(asked, isolation_level=IsolationLevel.READ_COMMITTED)
            try:
                found = {place.partition: answer.result(ANSWER_S).offset for place, answer in answers.items()}
                return [found[partition] for partition in range(PARTITIONS)]
            except KafkaException as error:  # of a new topic: everybody knows its leader but the leader
                if error.args[0].code() != KafkaError.NOT_LEADER_FOR_PARTITION or time.monotonic() > limit:
                    raise
                time.sleep(LOOK_S)

    def visible_rate(self, contender: Contender, output: str, source: str, warm_up: float, seconds: float) -> float:
        """Records per second that appear in `output`, between the first commit after the warm-up and the last one.

        Output appears with commits, so a partition's rate is taken from one commit to another one. It ends before either
        partition runs dry. The marker of a transaction counts as a record: one in thousands.
        """
        backlog = self.ends(source)
        commits: list[list[tuple[float, int]]] = [[(float("-inf"), 0)] for _ in range(PARTITIONS)]
        begin = float("inf")
        limit = time.monotonic() + PATIENCE_S
        while True:
            ends, now = self.ends(output), time.monotonic()
            if any(end >= there for end, there in zip(ends, backlog, strict=True)) or now > begin + seconds:
                break
            if any(ends):
                begin = min(begin, now + warm_up)
            for seen, end in zip(commits, ends, strict=True):
                if end != seen[-1][1]:
                    seen.append((now, end))
            contender.check()
            assert now < limit, f"{contender.name}: no output:\n{contender.said()}"
            time.sleep(LOOK_S)
        measured = [[commit for commit in seen if commit[0] >= begin] for seen in commits]
        assert all(len(seen) >= 2 for seen in measured), f"{contender.name}: too few commits to tell a rate: {commits}"
        return sum((seen[-1][1] - seen[0][1]) / (seen[-1][0] - seen[0][0]) for seen in measured)

    def latencies(self, contender: Contender, source: str, output: str, sizes: Sizes) -> dict[str, float]:
        """What the watching process says."""
        client = [sys.executable, str(HERE / "kafka_clients.py")]
        there = ["--broker", self._broker.address, "--topic"]
        pacing = [*client, "pace", *there, source, "--rate", str(sizes.rate), "--keys", str(sizes.keys)]
        watching = [*client, "watch", *there, output]
        watching += ["--warm-up", str(max(2.0, sizes.warm_up)), "--seconds", str(sizes.seconds)]
        self._how += [shlex.join(pacing), shlex.join(watching)]
        watch = subprocess.Popen(watching, stdout=subprocess.PIPE, text=True)
        pace = subprocess.Popen(pacing)
        try:
            limit = time.monotonic() + PATIENCE_S
            while watch.poll() is None:
                contender.check()
                assert pace.poll() is None, "the producer has ended"
                assert time.monotonic() < limit, f"{contender.name}: no output:\n{contender.said()}"
                time.sleep(0.2)
            assert watch.returncode == 0 and watch.stdout is not None, "the consumer has failed"
            found: dict[str, float] = json.loads(watch.stdout.read())
        finally:
            for process in (watch, pace):
                process.kill()
                process.wait()
        wanted = sizes.rate * sizes.seconds
        assert found["records"] >= 0.99 * wanted, f"only {found['records']:,.0f} of {wanted:,.0f} records were sent"
        return found

    # -- what a contender has done ----------------------------------------------------------------------------------------

    def wait_for_group(self, contender: Contender, source: str) -> None:
        """Until the contender has committed the end of its input."""
        ends = self.ends(source)
        asker = Consumer({"bootstrap.servers": self._broker.address, "group.id": contender.group, "log_level": 0})
        limit = time.monotonic() + PATIENCE_S
        try:
            while True:
                found = asker.committed(
                    [TopicPartition(source, partition) for partition in range(PARTITIONS)], ANSWER_S
                )
                if all(place.offset >= end for place, end in zip(found, ends, strict=True)):
                    return
                contender.check()
                assert time.monotonic() < limit, f"{contender.name} does not come to the end:\n{contender.said()}"
                time.sleep(0.2)
        finally:
            asker.close()

    def changelog_records(self, group: str, source: str) -> int:
        """In the changelog topic; both contenders name it alike, and both never delete in it before a restore."""
        topics = self._admin.list_topics(timeout=ANSWER_S).topics
        (changelog,) = [name for name in topics if name.startswith(f"changelog__{group}--{source}--")]
        return sum(self.ends(changelog))


class Span(NamedTuple):
    """From one log line to another one."""

    seconds: float
    from_start: float
    """To the second line, from the start of the process."""


class Contender:
    """Processes that run the same program. What they say goes to files."""

    def __init__(self, name: str, group: str, commands: Sequence[Sequence[str]], logs: Path) -> None:
        self.name = name
        self.group = group
        self._began = time.time()
        number = len(list(logs.iterdir()))
        self._logs = [logs / f"{number}-{group}-{process}.log" for process in range(len(commands))]
        self._processes = []
        told = os.environ | {"PYTHONFAULTHANDLER": "1"}
        for command, log in zip(commands, self._logs, strict=True):
            with log.open("w") as file:
                self._processes.append(
                    subprocess.Popen(command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, env=told)
                )

    def check(self) -> None:
        """That all of them are alive."""
        for process in self._processes:
            if process.poll() is not None:
                sys.exit(f"{self.name} has ended with code {process.returncode}:\n{self.said()}")

    def said(self) -> str:
        return "\n".join(f"{log}:\n{log.read_text(errors='replace')[-3000:]}" for log in self._logs)

    def finish(self) -> None:
        """Wait until they end by themselves, well."""
        for process in self._processes:
            process.wait(PATIENCE_S)
            if process.returncode:
                sys.exit(f"{self.name} has ended with code {process.returncode}:\n{self.said()}")

    def stop(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def wait_for(self, text: str) -> None:
        """Until each process has said this."""
        limit = time.monotonic() + PATIENCE_S
        while not all(self._times(log, text) for log in self._logs):
            self.check()
            assert time.monotonic() < limit, f"{self.name} never said {text!r}:\n{self.said()}"
            time.sleep(0.2)

    def check_once_each(self, text: str) -> None:
        """Or the work was not shared as it should be, and the time says nothing."""
        counts = [len(self._times(log, text)) for log in self._logs]
        assert counts == [1] * len(counts), f"{self.name} said {text!r} {counts} times:\n{self.said()}"

    def span(self, begin: str, end: str) -> Span:
        """From the first process that said `begin` to the last one that said `end`."""
        begins = [time for log in self._logs for time in self._times(log, begin)]
        last = max(time for log in self._logs for time in self._times(log, end))
        return Span(last - min(begins), last - self._began)

    @staticmethod
    def _times(log: Path, text: str) -> list[float]:
        lines = log.read_text(errors="replace").splitlines()
        return [float(line.split()[0]) for line in lines if text in line and re.match(r"\d+\.\d+ ", line)]


def say(line: str) -> None:
    print(f"  {line}", file=sys.stderr, flush=True)
