"""A class-data archive: the classes that a Spark session loads, ready to be mapped instead of parsed from 280 jars.

It lies in <user's cache>/holdfast/jvm/<key>/classes.jsa; the key names the JVM, the jars and the flags. A program that
ends and had no archive leaves a detached process behind that makes one, once, at the lowest priority (half a minute,
170 MB); an installer makes it at once by calling `main`. HOLDFAST_CLASS_ARCHIVE=use never
makes one, =off never uses one either. The JVM ignores an archive that does not fit.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_MAKE: Final = "from holdfast.runtime.class_archive import make; make()"
_RETRY_SECONDS: Final = 24 * 3600
_UNUSED_SECONDS: Final = 30 * 24 * 3600


class Command(NamedTuple):
    java: str
    class_path: list[str]
    options: list[str]
    arguments: list[str]
    only_plans: bool


class ClassArchive:
    """The classes that a Spark session loads, laid out so that the JVM maps them instead of parsing 280 jars.

    Present or absent, never half: it is dumped under another name and moved. Absent, broken or foreign, the JVM
    starts as it would without one.
    """

    def __init__(self, path: Path, *, only_plans: bool = False) -> None:
        self.path = path
        self._only_plans = only_plans
        self._dump_to = os.environ.get("HOLDFAST_DUMP_CLASSES_TO")

    @classmethod
    def of(cls, command: Command) -> ClassArchive | None:
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
        return cls(cache / "holdfast" / "jvm" / key / "classes.jsa", only_plans=command.only_plans)

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

    def make_now(self) -> None:
        """Make the archive and wait for it, unless it exists."""
        if not self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.TemporaryFile(
                "w+"
            ) as said:  # a JVM that ends in mid-work has things to say that mean nothing
                made = subprocess.run(self._maker(), check=False, stdin=subprocess.DEVNULL, stderr=said)
                if made.returncode:
                    said.seek(0)
                    sys.stderr.write(said.read())
                    made.check_returncode()

    def _maker(self) -> list[str]:
        return [sys.executable, "-c", _MAKE, str(self.path), "only-plans" if self._only_plans else ""]

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
                self._maker(),
                env=os.environ | {"PYTHONPATH": os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError:
            return  # someone else makes it, or there is no place for it


def make() -> None:
    """The detached process: run what a first batch runs, in a JVM that writes down its classes as it exits."""
    from holdfast.runtime.jvm import Jvm
    from holdfast.runtime.session import build_session

    path = Path(sys.argv[1])
    os.nice(19)
    for left in path.parent.glob("making-*"):
        shutil.rmtree(left)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="making-") as directory:
        made = Path(directory) / "classes.jsa"
        os.environ["HOLDFAST_DUMP_CLASSES_TO"] = str(made)
        warehouse = Path(directory) / "warehouse"
        session = build_session("holdfast-class-archive", warehouse=warehouse, only_plans=sys.argv[2] == "only-plans")
        _rehearse(session, Path(directory))
        jvm = Jvm.current
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

    from holdfast.runtime.session import runtime_session

    session = runtime_session(spark)
    same = UserDefinedFunction(_same, "id long", evalType=PythonEvalType.SQL_MAP_ARROW_ITER_UDF)

    def run(rows: DataFrame) -> None:
        DataFrame(rows._jdf.mapInArrow(same(rows["id"])._jc, False, None), rows.sparkSession).collect()

    def batch(rows: DataFrame, _: int) -> None:
        spark.sparkContext.parallelize(range(2), 2).cache().mapPartitions(list).collect()
        run(session.range(0, 2, 1, 2).persist())
        empty = session.createDataFrame([], "id long").repartition(2, "id").persist()
        run(empty.union(session.range(0, 9).repartition(2, "id")))

    stream = spark.readStream.format("rate").load().writeStream.foreachBatch(batch)
    query = stream.option("checkpointLocation", str(directory / "checkpoint")).trigger(availableNow=True).start()
    query.awaitTermination()


def _same(batches: Iterator[object]) -> Iterator[object]:
    yield from batches


def main() -> None:
    """Make the archives of this installation now, if there are none."""
    from holdfast.runtime.jvm import command_for
    from holdfast.runtime.session import settings_for

    commands = [command_for(settings_for("", "local[2]", False, Path()), only_plans=quick) for quick in (True, False)]
    found = [ClassArchive.of(command) for command in commands]
    missing = [archive for archive in found if archive is not None and not archive.path.exists()]
    if missing:
        print("preparing the JVM, once (half a minute)", flush=True)
        with ThreadPoolExecutor(len(missing)) as both:
            list(both.map(ClassArchive.make_now, missing))
