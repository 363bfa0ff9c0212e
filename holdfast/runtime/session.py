"""The Spark session that Holdfast builds for itself, and the check of one that the user brings.

What holds for a session built here:
- The JVM lives as long as this Python process. It ignores SIGINT, SIGTERM and SIGHUP, so that the batch in flight can
  be finished, and leaves when its standard input ends, however this process ended.
- The user's stdout and stderr show what the user's functions print and Spark's errors, nothing else.
- It starts fast: without Spark's shell scripts, with classes mapped from an archive, and with workers that import
  pyspark from the installed package instead of a zip without byte code.

Class archive: <user's cache>/holdfast/jvm/<key>/classes.jsa; the key names the JVM, the jars and the flags. A program
that ends and had no archive leaves a detached process behind that makes one, once, at the lowest priority (half a
minute, 170 MB). HOLDFAST_CLASS_ARCHIVE=use never makes one, =off never uses one either. The JVM ignores an archive
that does not fit.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib.util
import logging
import os
import re
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
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple

from holdfast.errors import FixTheProgram, MendTheMachine, MissingSettings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger("holdfast")

OLDEST_PYSPARK: Final = (4, 2)

# Start-time settings without which a program could be wrong: name -> (value wanted, Spark's default).
REQUIRED: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {"spark.shuffle.checksum.enabled": ("true", "true")}  # damage in a shuffle must not reach the state
)

# Start-time settings without which a program is only slower.
FASTER: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "spark.python.unix.domain.socket.enabled": ("true", "false"),  # over TCP a task waits 40 ms for its input
        "spark.python.worker.reuse": ("true", "true"),  # a new worker costs half a second
        "spark.shuffle.reduceLocality.enabled": ("false", "true"),  # else a shuffled stage leaves its store
    }
)

# What the session that starts a query needs. All can be set at run time, before the query starts.
STREAM: Final[Mapping[str, str]] = MappingProxyType(
    {
        # On a local disk a trigger takes 38 ms with this one, 106 ms or more with the default.
        "spark.sql.streaming.checkpointFileManagerClass": (
            "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
        ),
        "spark.sql.streaming.checkpoint.fileChecksum.enabled": "false",  # the manifest is the truth
        "spark.sql.streaming.minBatchesToRetain": "10",  # the manifest owns positions, Spark's log only proposes
        "spark.sql.streaming.pollingDelay": "15ms",  # the pause after a look at an idle source
    }
)

# What the engine's own session needs, whoever made the context. All can be set at run time.
RUNTIME: Final[Mapping[str, str]] = MappingProxyType(
    {
        "spark.sql.adaptive.enabled": "false",  # else an empty anchor is optimised away and its tasks never run
        "spark.sql.unionOutputPartitioning": "true",  # anchor.union(rows) keeps P partitions instead of 2P
        # A recomputed map stage that gives other rows must fail the job, not mix with the old ones.
        "spark.sql.shuffle.orderIndependentChecksum.enabled": "true",
        "spark.sql.shuffle.orderIndependentChecksum.enableFullRetryOnMismatch": "true",
    }
)


def build_session(
    app_name: str,
    *,
    master: str | None = None,
    ui: bool = False,
    warehouse: Path,
    extra: Mapping[str, str] = MappingProxyType({}),
) -> SparkSession:
    """Start a JVM and a Spark session in it, as fast and as quietly as Spark allows.

    `master` is every core of this machine unless given; a local master repeats no failed task. `extra` settings win
    over Holdfast's. One JVM serves a process for its whole life: after `spark.stop()` a second call starts a new
    session in the same JVM, whose memory and flags stay as they are. The handler of SIGINT stays the caller's.
    """
    master = master or f"local[{os.cpu_count() or 1}]"
    settings = {**_settings(app_name, master, ui, warehouse), **extra}
    gateway_running = "pyspark.core.context" in sys.modules and _pyspark_gateway_runs()
    jvm = None if gateway_running else _start_jvm(master, settings)  # boots while Python imports pyspark

    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

    if SparkContext._active_spark_context is not None:
        raise FixTheProgram("a Spark session already runs in this process: pass it to Holdfast, or stop it first")
    if jvm is not None:
        try:
            jvm.connect()
        except MendTheMachine:
            if jvm.archive is None or not jvm.archive.discard():
                raise
            _start_jvm(master, settings).connect()  # it may have been the archive
    with _keeping_the_interrupt_handler():
        conf = SparkConf(loadDefaults=False).setAll(list(settings.items()))
        return SparkSession.builder.config(conf=conf).getOrCreate()


def check_session(spark: SparkSession) -> None:
    """Refuse a user's session that cannot carry Holdfast, with the list of what to change; warn of what is slow."""
    import pyspark
    from pyspark.sql import SparkSession

    if not isinstance(spark, SparkSession):
        raise MissingSettings("Holdfast needs a classic Spark session, not Spark Connect", missing=("classic session",))
    wrong = []
    if _version(pyspark.__version__) < OLDEST_PYSPARK:
        wrong.append(f"pyspark {'.'.join(map(str, OLDEST_PYSPARK))} or later (it is {pyspark.__version__})")
    wrong += _differences(spark, REQUIRED)
    python = shutil.which(spark.sparkContext.pythonExec)
    if _is_local(str(spark.sparkContext.master)) and (
        python is None or Path(python).parent != Path(sys.executable).parent
    ):
        wrong.append(f"PYSPARK_PYTHON={sys.executable} in the environment (it is {spark.sparkContext.pythonExec})")
    if wrong:
        raise MissingSettings(
            "the Spark session cannot be used; start it again with:\n" + "\n".join(f"  {line}" for line in wrong),
            missing=tuple(wrong),
        )
    slow = _differences(spark, FASTER)
    if slow:
        log.warning("the Spark session works but is slow; it should be started with: %s", ", ".join(slow))


def runtime_session(spark: SparkSession) -> SparkSession:
    """A session on the same context with the settings that anchors and their jobs need."""
    session = spark.newSession()
    for key, value in RUNTIME.items():
        session.conf.set(key, value)
    return session


# -- what is asked of Spark ----------------------------------------------------------------------------------------


def _settings(app_name: str, master: str, ui: bool, warehouse: Path) -> dict[str, str]:
    settings = {
        "spark.app.name": app_name,
        "spark.master": master,
        "spark.ui.enabled": str(ui).lower(),
        "spark.sql.streaming.ui.enabled": str(ui).lower(),
        "spark.ui.showConsoleProgress": "false",
        # Without .crc files beside every file of Spark's log: 29 ms a trigger instead of 38.
        "spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
        "spark.sql.warehouse.dir": warehouse.absolute().as_uri(),
        **STREAM,
        **{key: value for key, (value, _) in {**REQUIRED, **FASTER}.items()},
    }
    if _is_local(master):
        settings |= {
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.sql.shuffle.partitions": str(os.cpu_count() or 1),
        }
    return settings


def _is_local(master: str) -> bool:
    return master == "local" or master.startswith("local[")


def _differences(spark: SparkSession, wanted: Mapping[str, tuple[str, str]]) -> list[str]:
    conf = spark.sparkContext.getConf()
    found = {key: conf.get(key, default) or default for key, (_, default) in wanted.items()}
    return [f"{key}={value} (it is {found[key]})" for key, (value, _) in wanted.items() if found[key].lower() != value]


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])


# -- the JVM ---------------------------------------------------------------------------------------------------------

_FLAGS: Final = (
    "-XX:TieredStopAtLevel=1",
    "-Xss4m",  # a query stopped in mid-job matches a regular expression that overflows the default stack
    "-Xshare:auto",
    "-Xlog:disable",
    "-Xlog:all=error:stderr",
)

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
"""


class _Jvm:
    """The JVM of this process. It dies with `process.stdin`."""

    current: ClassVar[_Jvm | None] = None

    def __init__(self, process: subprocess.Popen[bytes], info: Path, archive: _Archive | None) -> None:
        self.process = process
        self._info = info
        self.archive = archive
        self._owner = os.getpid()
        self._tail: list[str] = []
        self._connected = False
        self._printer = threading.Thread(target=self._print, name="holdfast-jvm-output", daemon=True)
        self._printer.start()
        _Jvm.current = self
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


def _start_jvm(master: str, settings: Mapping[str, str]) -> _Jvm:
    spec = importlib.util.find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise MendTheMachine("pyspark is not installed")
    home = Path(os.environ.get("SPARK_HOME", Path(spec.origin).parent))
    command = _command(home, settings)
    archive = _Archive.of(command) if os.environ.get("HOLDFAST_CLASS_ARCHIVE", "") != "off" else None
    directory = Path(tempfile.mkdtemp(prefix="holdfast-jvm-"))
    (directory / "log4j2.properties").write_text(_LOG4J)
    info = directory / "gateway"
    environment = {
        **os.environ,
        "SPARK_CONNECT_MODE": "0",
        "_PYSPARK_DRIVER_CONN_INFO_PATH": str(info),
    }
    if _is_local(master):
        os.environ["PYSPARK_PYTHON"] = sys.executable
        environment["SPARK_LOCAL_IP"] = "127.0.0.1"
        environment["PYTHONPATH"] = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)
        environment.pop("SPARK_HOME", None)  # with it, workers import pyspark from a zip that has no byte code
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
    return _Jvm(process, info, archive)


class _Command(NamedTuple):
    java: str
    class_path: list[str]
    options: list[str]
    arguments: list[str]


def _command(home: Path, settings: Mapping[str, str]) -> _Command:
    """Ask Spark's launcher how to start the JVM (0.1 s): it knows what this Spark, this Java and the settings need."""
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
    return _Command(
        java=parts[0],
        class_path=list(_expanded(parts[at + 1])),
        # The incubator module serves only Spark's machine learning; the JVM prints a warning about it.
        options=[
            *_FLAGS,
            *(part for part in parts[at + 2 : main] if not part.startswith("--add-modules=jdk.incubator")),
        ],
        arguments=parts[main:],
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


def _pyspark_gateway_runs() -> bool:
    from pyspark import SparkContext

    return SparkContext._gateway is not None


@contextmanager
def _keeping_the_interrupt_handler() -> Iterator[None]:
    """pyspark takes SIGINT over to cancel every job; Holdfast lets the batch finish instead."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, handler)


# -- the class archive -----------------------------------------------------------------------------------------------

_RETRY_SECONDS: Final = 24 * 3600
_UNUSED_SECONDS: Final = 30 * 24 * 3600


class _Archive:
    """The classes that a Spark session loads, laid out so that the JVM maps them instead of parsing 280 jars.

    Present or absent, never half: it is dumped under another name and moved. Absent, broken or foreign, the JVM
    starts as it would without one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._dump_to = os.environ.get("HOLDFAST_DUMP_CLASSES_TO")

    @classmethod
    def of(cls, command: _Command) -> _Archive | None:
        if any(Path(entry).is_dir() for entry in command.class_path):
            return None  # the JVM archives classes of jars only
        modules = Path(command.java).resolve().parent.parent / "lib" / "modules"
        facts: list[object] = [command.options]
        try:
            for path in (modules, *map(Path, command.class_path)):
                stat = path.stat()
                facts.append((str(path), stat.st_size, stat.st_mtime_ns))
        except OSError:
            return None  # not a JVM as we know it
        key = hashlib.sha256(repr(facts).encode()).hexdigest()[:24]
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return cls(cache / "holdfast" / "jvm" / key / "classes.jsa")

    def flags(self) -> list[str]:
        if self._dump_to:
            return [f"-XX:ArchiveClassesAtExit={self._dump_to}"]
        if self.path.exists():
            os.utime(self.path)  # in use: not to be collected
            return [f"-XX:SharedArchiveFile={self.path}"]
        return []

    def discard(self) -> bool:
        """Remove the archive; False if there was none."""
        try:
            self.path.unlink()
        except FileNotFoundError:
            return False
        return True

    def make_later(self) -> None:
        """Start the detached process that makes the archive, unless it exists or was tried within a day."""
        if self._dump_to or self.path.exists() or os.environ.get("HOLDFAST_CLASS_ARCHIVE") == "use":
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            tried = self.path.with_name("tried")
            if tried.exists() and time.time() - tried.stat().st_mtime > _RETRY_SECONDS:
                tried.unlink(missing_ok=True)
            tried.touch(exist_ok=False)
            subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    "from holdfast.runtime.session import _make_archive; _make_archive()",
                    self.path,
                ],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError:
            return  # someone else makes it, or there is no place for it


def _make_archive() -> None:
    """The detached process: run what a first batch runs, in a JVM that writes down its classes as it exits."""
    path = Path(sys.argv[1])
    os.nice(19)
    for left in path.parent.glob("making-*"):
        shutil.rmtree(left)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="making-") as directory:
        made = Path(directory) / "classes.jsa"
        os.environ["HOLDFAST_DUMP_CLASSES_TO"] = str(made)
        _rehearse(build_session("holdfast-class-archive", warehouse=Path(directory) / "warehouse"), Path(directory))
        jvm = _Jvm.current
        assert jvm is not None
        jvm.stop(patience=600)
        with made.open("rb") as file:
            os.fsync(file.fileno())
        made.replace(path)
        path.with_name("tried").unlink(missing_ok=True)
    for other in path.parent.parent.iterdir():
        archive = other / "classes.jsa"
        if archive.exists() and time.time() - archive.stat().st_mtime > _UNUSED_SECONDS:
            shutil.rmtree(other)


def _rehearse(spark: SparkSession, directory: Path) -> None:
    """A first batch in small: an anchor, a shuffled stage, a stream and its log."""
    from pyspark.sql import DataFrame
    from pyspark.sql.udf import UserDefinedFunction
    from pyspark.util import PythonEvalType

    session = runtime_session(spark)
    same = UserDefinedFunction(_same, "id long", evalType=PythonEvalType.SQL_MAP_ARROW_ITER_UDF)

    def run(rows: DataFrame) -> None:
        DataFrame(rows._jdf.mapInArrow(same(rows["id"])._jc, False, None), rows.sparkSession).collect()

    def batch(rows: DataFrame, _: int) -> None:
        run(session.range(0, 2, 1, 2).persist())
        empty = session.createDataFrame([], "id long").repartition(2, "id").persist()
        run(empty.union(session.range(0, 9).repartition(2, "id")))

    stream = spark.readStream.format("rate").load().writeStream.foreachBatch(batch)
    query = stream.option("checkpointLocation", str(directory / "checkpoint")).trigger(availableNow=True).start()
    query.awaitTermination()


def _same(batches: Iterator[object]) -> Iterator[object]:
    yield from batches
