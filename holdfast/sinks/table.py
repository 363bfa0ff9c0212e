"""Tables: every version's rows in a directory of their own, which appears by one rename.

    <table>/_holdfast.json                          whose table this is: format, application and instance
    <table>/holdfast_version=<version>/             the rows of a version, written by Spark
    <table>/holdfast_version=<version>/_commit-<manifest id>
    <table>/.staging-<random>/                      a version on its way; garbage after a crash

A version that is there is not written again, so a repeated delivery changes nothing, and neither does a driver that
wakes up late. Spark and others read the table as one that is partitioned by `holdfast_version`.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from py4j.protocol import Py4JJavaError

from holdfast.errors import Damaged, ForeignTarget, FutureFormat, InvalidPipeline
from holdfast.failpoints import reach
from holdfast.log.manifest import Manifest, new_id
from holdfast.log.storage import Exists, LocalStorage, disk_error, raise_as_storage_error, sync_directory
from holdfast.plan.sinks import VERSION_COLUMN
from holdfast.runtime.delivery import Outbox
from holdfast.sinks.rows import outbox_frame
from holdfast.sinks.surely import surely

if TYPE_CHECKING:
    from holdfast.runtime.context import Context

FORMATS = ("parquet", "json", "csv", "orc")
FORMAT = 1
OWNER = "_holdfast.json"


class Owner(msgspec.Struct, frozen=True):
    """Whose output a table holds."""

    format: int
    app: str
    instance: str


def table_id(name_or_path: str) -> str:
    """The sink's id; `InvalidPipeline` for what is neither a name nor a path."""
    if not isinstance(name_or_path, str) or not name_or_path.strip():
        raise InvalidPipeline("to_table() takes the name or the path of a table")
    if "/" not in name_or_path and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name_or_path):
        raise InvalidPipeline(
            f"to_table({name_or_path!r}): a table's name has letters, digits and '_'; a path contains a '/'"
        )
    if "://" in name_or_path and not name_or_path.startswith("file://"):
        raise InvalidPipeline(f"to_table({name_or_path!r}): tables are written to local paths")
    return f"table:{name_or_path}"


def same_table(one: str, other: str) -> bool:
    """Whether two ids are spellings of one table."""
    return one == other or ("/" in one and "/" in other and _path_of(one) == _path_of(other))


def _path_of(identity: str) -> str:
    return os.path.realpath(identity.removeprefix("table:").removeprefix("file://"))


class TableTarget:
    """See `StreamingDataFrame.to_table`."""

    def __init__(self, context: Context, name_or_path: str, format: str, *, overwrite: bool) -> None:
        self._context = context
        self._name = None if "/" in name_or_path else name_or_path
        self._path = (
            Path(name_or_path.removeprefix("file://")).absolute()
            if self._name is None
            else context.warehouse / self._name
        )
        self._format = format
        self._overwrite = overwrite

    def prepare(self, head: Manifest) -> None:
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            self._claim(head)
            for leftover in self._path.glob(".staging-*"):
                shutil.rmtree(leftover)
        except OSError as error:
            raise_as_storage_error(error, self._path)
        newest = max(self._versions(), default=0)
        if newest > head.version:
            raise ForeignTarget(
                f"{self._path} has the output of version {newest}, but the checkpoint is at version {head.version}: it was put "
                "back from a backup. Put the table back too, or remove its later versions",
                path=str(self._path),
                table=newest,
                checkpoint=head.version,
            )

    def deliver(self, manifest: Manifest, outbox: Outbox) -> None:
        final = self._path / f"{VERSION_COLUMN}={manifest.version}"
        if self._overwrite and max(self._versions(), default=0) > manifest.version:
            return  # a driver that wakes up late: its rows have been replaced meanwhile
        if not self._has(final, manifest):
            staging = surely(f"write version {manifest.version}", lambda: self._written(outbox), lost=Py4JJavaError)
            (staging / f"_commit-{manifest.id}").touch()
            _sync_all(staging)
            reach("table.staged", manifest.version)
            self._reveal(staging, final, manifest)
        if self._overwrite:
            for version in self._versions():
                if version < manifest.version:
                    shutil.rmtree(self._path / f"{VERSION_COLUMN}={version}")
        if self._name is not None:
            assert outbox.schema is not None
            self._register(outbox.schema, manifest.version)

    def _written(self, outbox: Outbox) -> Path:
        """The rows, in a directory of their own."""
        staging = self._path / f".staging-{new_id()}"
        try:
            with outbox.blamed():
                outbox_frame(self._context.spark, outbox).write.format(self._format).save(str(staging))
        except Exception as error:  # Spark's and py4j's have no root in common
            named = disk_error(str(error), self._path)
            if named is None:
                raise
            raise named from None
        return staging

    def _claim(self, head: Manifest) -> None:
        """Make the table ours, or see that it is."""
        owner = Owner(FORMAT, head.app, head.instance)
        storage = LocalStorage(self._path)
        if not (self._path / OWNER).exists() and any(self._path.iterdir()):
            raise ForeignTarget(f"{self._path} is not empty and not a table of Holdfast: choose another path")
        try:
            storage.put(OWNER, msgspec.json.encode(owner))
        except Exists:
            found = self._owner(storage.get(OWNER))
            if found.instance != head.instance:
                raise ForeignTarget(
                    f"{self._path} holds the output of application {found.app!r}, instance {found.instance}, not of instance "
                    f"{head.instance}: its versions mean something else. Choose another path, or remove the table",
                    path=str(self._path),
                ) from None

    def _owner(self, data: bytes) -> Owner:
        try:
            found = msgspec.json.decode(data, type=Owner)
        except msgspec.DecodeError as error:
            raise Damaged(f"{self._path / OWNER} is damaged ({error}): whose table it is cannot be told") from None
        if found.format > FORMAT:
            raise FutureFormat(
                f"{self._path} has format {found.format}; this version of Holdfast reads up to {FORMAT}: upgrade it",
                format=found.format,
            )
        return found

    def _has(self, final: Path, manifest: Manifest) -> bool:
        if not final.exists():
            return False
        if not (final / f"_commit-{manifest.id}").exists():
            raise ForeignTarget(
                f"{final} is the output of another commit than version {manifest.version} of this chain; remove it if the "
                "checkpoint was put back from a backup",
                path=str(final),
            )
        return True

    def _reveal(self, staging: Path, final: Path, manifest: Manifest) -> None:
        try:
            staging.rename(final)  # fails if it is there: someone else delivered the same version
        except OSError as error:
            if not self._has(final, manifest):
                raise_as_storage_error(error, final)
            shutil.rmtree(staging)
        sync_directory(self._path)

    def _versions(self) -> list[int]:
        return [int(path.name.partition("=")[2]) for path in self._path.glob(f"{VERSION_COLUMN}=*")]

    def _register(self, schema: str, version: int) -> None:
        """Make the version known to the session's catalog, which forgets everything when the session ends."""
        spark = self._context.spark
        table = f"`{self._name}`"
        if not spark.catalog.tableExists(table):
            spark.sql(
                f"CREATE TABLE {table} ({schema}, {VERSION_COLUMN} bigint) USING {self._format} "
                f"PARTITIONED BY ({VERSION_COLUMN}) LOCATION '{self._path}'"
            )
            spark.sql(f"MSCK REPAIR TABLE {table}")
        spark.sql(f"ALTER TABLE {table} ADD IF NOT EXISTS PARTITION ({VERSION_COLUMN}={version})")
        if self._overwrite:
            spark.sql(f"MSCK REPAIR TABLE {table} SYNC PARTITIONS")


def _sync_all(directory: Path) -> None:
    """Make everything below `directory` survive a power cut."""
    for path in directory.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    sync_directory(directory)
