"""A real Spark standalone cluster on loopback: a master, and three workers that take 127.0.0.2 to .4 for their hosts."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyspark
import pytest

HOME = Path(pyspark.__file__).parent
HERE = Path(__file__).parent
HOSTS = ("127.0.0.2", "127.0.0.3", "127.0.0.4")


class Cluster:
    """The processes of a cluster; each is the leader of a group with its executor, so that a worker can be killed whole."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._port = free_port()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def url(self) -> str:
        return f"spark://127.0.0.1:{self._port}"

    @property
    def settings(self) -> dict[str, str]:
        """Of an application that takes all workers; its tasks can import what lies beside this file."""
        return {
            "spark.master": self.url,
            "spark.executor.memory": "512m",
            "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
            "spark.executor.cores": "2",
            "spark.executorEnv.PYTHONPATH": f"{HERE.parents[1]}{os.pathsep}{HERE}",
            "spark.scheduler.minRegisteredResourcesRatio": "1.0",
        }

    def start(self) -> None:
        self._spawn("127.0.0.1", "master.Master", "--port", str(self._port))
        await_line(self._log("127.0.0.1"), "I have been elected leader", 60)

    def mend(self) -> None:
        """Start the workers that are not there: all of them at first, and later those that a test has killed."""
        missing = [host for host in HOSTS if host not in self._processes]
        for host in missing:
            self._spawn(
                host,
                "worker.Worker",
                "--cores",
                "2",
                "--memory",
                "600m",
                "--work-dir",
                str(self._directory / host),
                self.url,
            )
        for host in missing:
            await_line(self._log(host), "Successfully registered with master", 60)

    def kill(self, host: str) -> None:
        """SIGKILL a worker and its executors, as if the machine lost its power."""
        process = self._processes.pop(host)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def stop(self) -> None:
        for host in list(self._processes):
            self.kill(host)

    def _spawn(self, host: str, kind: str, *arguments: str) -> None:
        environment = os.environ | {"SPARK_LOCAL_IP": host, "SPARK_HOME": str(HOME), "PYSPARK_PYTHON": sys.executable}
        with self._log(host).open("wb") as log:
            self._processes[host] = subprocess.Popen(
                [
                    HOME / "bin/spark-class",
                    f"org.apache.spark.deploy.{kind}",
                    "--host",
                    host,
                    "--webui-port",
                    "0",
                    *arguments,
                ],
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )

    def _log(self, host: str) -> Path:
        return self._directory / f"{host}.log"


def await_line(log: Path, text: str, patience: float) -> None:
    limit = time.monotonic() + patience
    while text not in log.read_text(errors="replace"):
        if time.monotonic() > limit:
            raise TimeoutError(f"{text!r} did not appear:\n{log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.05)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def one_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def cluster(one_cluster: Cluster) -> Cluster:
    """The cluster that all tests share, with all its workers."""
    one_cluster.mend()
    return one_cluster
