"""The session that Holdfast builds: silent, deaf to signals, gone when its Python is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# An archive with which the JVM dies at start, as it does with some truncated ones.
BREAK = """
from pathlib import Path
from holdfast.runtime import class_archive
Path("classes.jsa").touch()
class_archive.ClassArchive.of = classmethod(lambda kind, command: kind(Path("classes.jsa").absolute()))
class_archive.ClassArchive.flags = lambda archive: ["-Xmxdies"] if archive.path.exists() else []
"""

BUILD = """
import os, signal, sys, time
from pathlib import Path
from holdfast.runtime.session import build_session, check_session, runtime_session
before = signal.getsignal(signal.SIGINT)
spark = build_session("test", master="local[2]", warehouse=Path("warehouse"))
def where(partition, rows):
    yield partition, os.getpid(), sys.executable, __import__("pyspark").__file__
def job():
    return runtime_session(spark).sparkContext.parallelize(range(2), 2).mapPartitionsWithIndex(where).collect()
"""


class Program:
    """A Python program in a process group of its own, that talks to the test by lines on stdout."""

    def __init__(self, code: str, directory: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=directory,
            env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "HOLDFAST_CLASS_ARCHIVE": "use"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().rstrip()
        assert line or self.process.poll() is None, self.process.communicate()[1]
        return line

    def family(self) -> set[int]:
        """Every process that descends from the program: the JVM, the daemon, its workers."""
        children: dict[int, list[int]] = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
        found, todo = set(), [self.process.pid]
        while todo:
            for child in children.get(todo.pop(), []):
                found.add(child)
                todo.append(child)
        return found


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Program]]:
    programs: list[Program] = []

    def begin(code: str) -> Program:
        programs.append(Program(code, tmp_path))
        return programs[-1]

    yield begin
    for program in programs:
        if program.process.poll() is None:
            os.killpg(program.process.pid, signal.SIGKILL)
        program.process.communicate()


def alive(pids: set[int]) -> set[int]:
    return {pid for pid in pids if Path(f"/proc/{pid}").exists()}


def wait_until_gone(pids: set[int], seconds: float) -> float:
    begun = time.monotonic()
    while alive(pids):
        assert time.monotonic() - begun < seconds, f"still alive: {alive(pids)}"
        time.sleep(0.02)
    return time.monotonic() - begun


def test_a_program_prints_what_it_prints_and_nothing_else(start: Callable[[str], Program]) -> None:
    program = start(
        BUILD
        + """
workers = job()
assert [partition for partition, *_ in workers] == [0, 1]
assert all(python == sys.executable for _, _, python, _ in workers)
assert all(".zip" not in pyspark for *_, pyspark in workers)
assert signal.getsignal(signal.SIGINT) is before
check_session(spark)
def batch(rows, number):
    print("batch", number)
rate = spark.readStream.format("rate").load().writeStream.foreachBatch(batch)
query = rate.option("checkpointLocation", "checkpoint").trigger(availableNow=True).start()
query.awaitTermination()
print("to stderr", file=sys.stderr)
print("done")
"""
    )
    out, err = program.process.communicate(timeout=60)
    assert program.process.returncode == 0, err
    assert out.splitlines()[-1] == "done"
    assert err == "to stderr\n"


def test_the_jvm_outlives_signals_to_the_group_and_nothing_outlives_a_kill(start: Callable[[str], Program]) -> None:
    program = start(
        BUILD
        + """
signal.signal(signal.SIGTERM, lambda *_: print("SIGTERM", flush=True))
signal.signal(signal.SIGINT, lambda *_: print("SIGINT", flush=True))
job()
print("ready", flush=True)
for _ in sys.stdin:
    print(len(job()), flush=True)
"""
    )
    assert program.line() == "ready"
    family = program.family()
    assert len(family) >= 3  # the JVM, the daemon, a worker
    for number in (signal.SIGTERM, signal.SIGINT):
        os.killpg(program.process.pid, number)
        assert program.line() == number.name
    assert program.process.stdin is not None
    program.process.stdin.write("again\n")
    program.process.stdin.flush()
    assert program.line() == "2"

    family = program.family()
    program.process.kill()
    program.process.wait()
    wait_until_gone(family, seconds=10)


def test_a_class_archive_that_kills_the_jvm_is_removed_and_the_start_goes_on(
    start: Callable[[str], Program], tmp_path: Path
) -> None:
    program = start(BREAK + BUILD + "print(len(job()))")
    assert program.process.communicate(timeout=60) == ("2\n", "")
    assert not (tmp_path / "classes.jsa").exists()


def test_a_session_that_lacks_a_setting_is_refused_with_the_list(start: Callable[[str], Program]) -> None:
    program = start(
        BUILD
        + """
import logging
from holdfast.errors import MissingSettings
spark.stop()
logging.basicConfig(stream=sys.stdout, format="%(message)s")
os.environ["PYSPARK_PYTHON"] = "/usr/bin/another-python"
from pyspark.sql import SparkSession
theirs = SparkSession.builder.master("local[1]").config("spark.shuffle.checksum.enabled", "false")
theirs = theirs.config("spark.python.unix.domain.socket.enabled", "false").getOrCreate()
try:
    check_session(theirs)
except MissingSettings as error:
    print(error)
theirs.stop()
os.environ["PYSPARK_PYTHON"] = sys.executable
theirs = SparkSession.builder.config("spark.python.unix.domain.socket.enabled", "false")
theirs = theirs.config("spark.shuffle.checksum.enabled", "true").getOrCreate()
check_session(theirs)
"""
    )
    out, err = program.process.communicate(timeout=60)
    assert err == ""
    refused, warned = out.split("the Spark session works")
    assert "spark.shuffle.checksum.enabled=true (it is false)" in refused
    assert f"PYSPARK_PYTHON={sys.executable} in the environment (it is /usr/bin/another-python)" in refused
    assert "unix.domain" not in refused
    assert "spark.python.unix.domain.socket.enabled=true (it is false)" in warned
