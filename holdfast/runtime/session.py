"""The Spark session that Holdfast builds for itself, and the check of one that the user brings.

A session built here is quiet and quick: see jvm.py for how its JVM is started and class_archive.py for why that does
not take long. The settings are in four groups, by what they are needed for and by when they can be set.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from holdfast.errors import FixTheProgram, MendTheMachine, MissingSettings
from holdfast.runtime.jvm import gateway_runs, is_local, keeping_the_interrupt_handler, start_jvm

if TYPE_CHECKING:
    from pyspark import SparkContext
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
    only_plans: bool = False,
) -> SparkSession:
    """Start a JVM and a Spark session in it, as fast and as quietly as Spark allows.

    With `only_plans` it is tuned for a JVM through which no rows go, as with sources whose ranges tasks read themselves.
    `master` is every core of this machine and a task more unless given; a local master repeats no failed task. `extra` settings win
    over Holdfast's. Applications of one process that ask for the same share a session. One JVM serves a process for its
    whole life: after `spark.stop()` a second call starts a new session in the same JVM, whose memory and flags stay as
    they are. The handler of SIGINT stays the caller's.
    """
    master = master or f"local[{(os.cpu_count() or 1) + 1}]"  # one for uploads, so that no batch waits for them
    settings = {**settings_for(app_name, master, ui, warehouse), **extra}
    gateway_running = "pyspark.core.context" in sys.modules and gateway_runs()
    jvm = (
        None if gateway_running else start_jvm(master, settings, only_plans=only_plans)
    )  # boots while Python imports pyspark

    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

    if SparkContext._active_spark_context is not None:
        return _known_session(settings)
    if jvm is not None:
        try:
            jvm.connect()
        except MendTheMachine:
            if jvm.archive is None or not jvm.archive.discard():
                raise
            start_jvm(master, settings, only_plans=only_plans).connect()  # it may have been the archive
    with keeping_the_interrupt_handler():
        conf = SparkConf(loadDefaults=False).setAll(list(settings.items()))
        session = SparkSession.builder.config(conf=conf).getOrCreate()
    _started[session.sparkContext] = settings
    return session


_started: weakref.WeakKeyDictionary[SparkContext, dict[str, str]] = weakref.WeakKeyDictionary()
"""The contexts that were started here, and with what."""


def _known_session(settings: dict[str, str]) -> SparkSession:
    """The session that runs in this process, if it was started here for an application that asked for the same."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    context = SparkContext._active_spark_context
    known = _started.get(context) if context is not None else None
    session = SparkSession.getActiveSession() or SparkSession._instantiatedSession
    if known is None or session is None:
        raise FixTheProgram("a Spark session already runs in this process: pass it to Holdfast, or stop it first")
    own = ("spark.app.name", "spark.sql.warehouse.dir")
    other = {name for name in known.keys() | settings.keys() if known.get(name) != settings.get(name)}.difference(own)
    if other:
        raise FixTheProgram(
            f"a Spark session with other settings already runs in this process ({', '.join(sorted(other))}): stop it first"
        )
    return session


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
    if is_local(str(spark.sparkContext.master)) and (
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


def settings_for(app_name: str, master: str, ui: bool, warehouse: Path) -> dict[str, str]:
    """What a session is started with."""
    settings = {
        "spark.app.name": app_name,
        "spark.master": master,
        "spark.ui.enabled": str(ui).lower(),
        "spark.sql.streaming.ui.enabled": str(ui).lower(),
        "spark.ui.showConsoleProgress": "false",
        "spark.broadcast.UDFCompressionThreshold": str(
            1 << 30
        ),  # else a large closure goes through a file, with its secrets
        # Without .crc files beside every file of Spark's log: 29 ms a trigger instead of 38.
        "spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
        "spark.sql.warehouse.dir": warehouse.absolute().as_uri(),
        **STREAM,
        **{key: value for key, (value, _) in {**REQUIRED, **FASTER}.items()},
    }
    if is_local(master):
        settings |= {
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.python.daemon.module": "holdfast.runtime.daemon",
            "spark.sql.shuffle.partitions": str(os.cpu_count() or 1),
        }
    return settings


def _differences(spark: SparkSession, wanted: Mapping[str, tuple[str, str]]) -> list[str]:
    conf = spark.sparkContext.getConf()
    found = {key: conf.get(key, default) or default for key, (_, default) in wanted.items()}
    return [f"{key}={value} (it is {found[key]})" for key, (value, _) in wanted.items() if found[key].lower() != value]


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])
