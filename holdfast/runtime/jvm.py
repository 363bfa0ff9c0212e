"""The JVM under a session of ours.

- It lives as long as this Python process. It ignores SIGINT, SIGTERM and SIGHUP, so that the batch in flight can be
  finished, and leaves when its standard input ends, however this process ended.
- It is started directly, with the command line that Spark's own launcher gives, and maps its classes from an archive.
- Workers import pyspark from the installed package instead of a zip without byte code.
- The user's stderr shows what the user's functions print and Spark's errors, nothing else.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ClassVar, Final

from holdfast.errors import MendTheMachine
from holdfast.runtime.class_archive import ClassArchive, Command

_FLAGS: Final = (
    "-Xss4m",  # a query stopped in mid-job matches a regular expression that overflows the default stack
    "-Xshare:auto",
    "-Xlog:disable",
    "-Xlog:all=error:stderr",
)

_QUICK: Final = ("-XX:TieredStopAtLevel=1",)
"""For a JVM that only plans: it is up 1.5 s sooner, and has nothing to do that a better compiler could make faster."""

_LOG4J: Final = """\
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d{yy/MM/dd HH:mm:ss} %p %c{1}: %m%n%ex
# A level of its own that equals the root's: otherwise Spark announces that it sets one.
logger.gateway.name = org.apache.spark.api.python.PythonGatewayServer
logger.gateway.level = error
# What these log is also raised, to the caller of the job or of the query.
logger.executor.name = org.apache.spark.executor.Executor
logger.executor.level = off
logger.tasks.name = org.apache.spark.scheduler.TaskSetManager
logger.tasks.level = off
logger.stream.name = org.apache.spark.sql.execution.streaming
logger.stream.level = off
logger.write.name = org.apache.spark.sql.execution.datasources
logger.write.level = off
logger.utils.name = org.apache.spark.util.Utils
logger.utils.level = off
"""


class Jvm:
    """The JVM of this process. It dies with `process.stdin`."""

    current: ClassVar[Jvm | None] = None

    def __init__(self, process: subprocess.Popen[bytes], info: Path, archive: ClassArchive | None) -> None:
        self.process = process
        self._info = info
        self.archive = archive
        self._owner = os.getpid()
        self._tail: list[str] = []
        self._connected = False
        self._printer = threading.Thread(target=self._print, name="holdfast-jvm-output", daemon=True)
        self._printer.start()
        Jvm.current = self
        atexit.register(self._at_exit)

    def connect(self) -> None:
        """Wait until the JVM listens, and make it pyspark's gateway."""
        from pyspark import SparkContext
        from pyspark.java_gateway import launch_gateway

        while not self._info.exists():
            if self.process.poll() is not None:
                self._printer.join(1)
                shutil.rmtree(self._info.parent)
                raise MendTheMachine("the JVM for Spark did not start:\n" + "\n".join(self._tail[-20:]))
            time.sleep(0.01)
        self._connected = True
        content = self._info.read_bytes()
        port, length = struct.unpack_from("!ii", content)
        shutil.rmtree(self._info.parent)
        given = {"PYSPARK_GATEWAY_PORT": str(port), "PYSPARK_GATEWAY_SECRET": content[8 : 8 + length].decode()}
        os.environ.update(given)
        try:
            gateway = launch_gateway()  # type: ignore[no-untyped-call]  # pyspark connects to the JVM that these variables name
        finally:
            for name in given:
                del os.environ[name]
        gateway.proc = self.process
        SparkContext._ensure_initialized(gateway=gateway)

    def _print(self) -> None:
        """Pass on what tasks print and Spark's errors."""
        assert self.process.stdout is not None
        for line in _without_farewells(self.process.stdout):
            self._tail = [*self._tail[-50:], line.rstrip()]
            if not self._connected:
                continue  # of use only if the start fails, and then it is in the error
            with suppress(OSError, ValueError):  # the user's stderr may be closed; the JVM must still be read
                sys.stderr.write(line)
                sys.stderr.flush()

    def stop(self, patience: float) -> None:
        """Let the JVM leave now and wait for it."""
        from pyspark import SparkContext

        assert self.process.stdin is not None
        if SparkContext._active_spark_context is not None:
            SparkContext._active_spark_context.stop()
        self.process.stdin.close()
        self.process.wait(patience)

    def _at_exit(self) -> None:
        """Print what tasks printed last. The JVM leaves, unheard, when this process has gone and its stdin ends."""
        if os.getpid() != self._owner:
            return
        assert self.process.stdout is not None
        while self._printer.is_alive() and select.select([self.process.stdout], [], [], 0.02)[0]:
            time.sleep(0.005)
        if self.archive is not None:
            self.archive.make_later()


_FAREWELLS: Final = ("python_streaming_source_runner.py", "pyspark/daemon.py")


def _without_farewells(output: Iterable[bytes]) -> Iterator[str]:
    """Drop the tracebacks that a worker, or the process of a Python data source, prints when its query is stopped."""
    held: list[str] = []
    farewell = False
    for raw in output:
        line = raw.decode(errors="replace")
        if farewell and not held and (line == "\n" or line.startswith("During handling of")):
            continue  # the chain goes on with another traceback
        if not held and not line.startswith("Traceback (most recent call last):"):
            farewell = False
            yield line
            continue
        held.append(line)
        goes_on = line[0] in " \n" or line.startswith(("Traceback (", "During handling of", "EOFError"))
        if goes_on and len(held) < 200:
            continue
        farewell = line.startswith("BrokenPipeError") and any(place in text for place in _FAREWELLS for text in held)
        if not farewell:
            yield from held
        held.clear()
    yield from held


def is_local(master: str) -> bool:
    return master == "local" or master.startswith("local[")


def start_jvm(master: str, settings: Mapping[str, str], *, only_plans: bool) -> Jvm:
    command = command_for(settings, only_plans=only_plans)
    archive = ClassArchive.of(command) if os.environ.get("HOLDFAST_CLASS_ARCHIVE", "") != "off" else None
    directory = Path(tempfile.mkdtemp(prefix="holdfast-jvm-"))
    (directory / "log4j2.properties").write_text(_LOG4J)
    info = directory / "gateway"
    environment = {
        **os.environ,
        "SPARK_CONNECT_MODE": "0",
        "_PYSPARK_DRIVER_CONN_INFO_PATH": str(info),
    }
    if is_local(master):
        os.environ["PYSPARK_PYTHON"] = sys.executable
        environment["SPARK_LOCAL_IP"] = "127.0.0.1"
        environment["PYTHONPATH"] = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)
        environment.pop("SPARK_HOME", None)  # with it, workers import pyspark from a zip that has no byte code
    else:
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # on machines that are set up alike, the same path
    process = subprocess.Popen(
        [
            command.java,
            "-cp",
            os.pathsep.join(command.class_path),
            *command.options,
            *(archive.flags() if archive else ()),
            f"-Dlog4j2.configurationFile={(directory / 'log4j2.properties').as_uri()}",
            f"-XX:ErrorFile={tempfile.gettempdir()}/holdfast-jvm-%p.log",  # not in the user's working directory
            *command.arguments,
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment | {"PYSPARK_PYTHON": os.environ.get("PYSPARK_PYTHON", "python3")},
        preexec_fn=_ignore_signals,
    )
    return Jvm(process, info, archive)


def command_for(settings: Mapping[str, str], *, only_plans: bool) -> Command:
    """Ask Spark's launcher how to start the JVM (0.1 s): it knows what this Spark, this Java and the settings need."""
    spec = importlib.util.find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise MendTheMachine("pyspark is not installed")
    home = Path(os.environ.get("SPARK_HOME", Path(spec.origin).parent))
    java = str(Path(os.environ["JAVA_HOME"], "bin", "java")) if os.environ.get("JAVA_HOME") else shutil.which("java")
    if java is None:
        raise MendTheMachine("no Java found: install Java 17 or later, or set JAVA_HOME")
    jars = home / "jars"
    core = next(jars.glob("spark-core_*.jar"), None)
    launcher = next(jars.glob("spark-launcher_*.jar"), None)
    if core is None or launcher is None:
        raise MendTheMachine(f"no Spark in {home}: its jars are missing")
    conf = [part for item in settings.items() for part in ("--conf", "=".join(item))]
    answer = subprocess.run(
        [
            *(java, "-Xmx64m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-cp", str(launcher)),
            *("org.apache.spark.launcher.Main", "org.apache.spark.deploy.SparkSubmit", *conf, "pyspark-shell"),
        ],
        env=os.environ | {"SPARK_HOME": str(home), "SPARK_SCALA_VERSION": core.name.split("_")[1].split("-")[0]},
        capture_output=True,
        check=False,
    )
    parts = [part.strip("\n") for part in answer.stdout.decode().split("\0") if part.strip("\n")]
    if answer.returncode or "-cp" not in parts:
        raise MendTheMachine(f"Spark's launcher failed:\n{answer.stderr.decode()[-2000:]}")
    at, main = parts.index("-cp"), parts.index("org.apache.spark.deploy.SparkSubmit")
    return Command(
        java=parts[0],
        class_path=list(_expanded(parts[at + 1])),
        # The incubator module serves only Spark's machine learning; the JVM prints a warning about it.
        options=[
            *(_QUICK if only_plans else ()),
            *_FLAGS,
            *(part for part in parts[at + 2 : main] if not part.startswith("--add-modules=jdk.incubator")),
        ],
        arguments=parts[main:],
        only_plans=only_plans,
    )


def _expanded(class_path: str) -> Iterator[str]:
    """The class path in an order that does not depend on the directory: the archive fits only the order it saw."""
    for entry in class_path.split(os.pathsep):
        if entry.endswith("*"):
            yield from sorted(str(jar) for jar in Path(entry[:-1]).glob("*.jar"))
        elif entry and Path(entry).exists():
            yield entry


def _ignore_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def gateway_runs() -> bool:
    from pyspark import SparkContext

    return SparkContext._gateway is not None


@contextmanager
def keeping_the_interrupt_handler() -> Iterator[None]:
    """pyspark takes SIGINT over to cancel every job; Holdfast lets the batch finish instead."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, handler)
