"""What crosses between driver and tasks: a job out, one receipt per partition back."""

from __future__ import annotations

import msgspec

from holdfast.log.files import FileRef
from holdfast.log.manifest import AttemptId, InstanceId, Position
from holdfast.log.recipe import Brought, Recipe
from holdfast.plan.record import Place
from holdfast.sources.base import Span


class Job(msgspec.Struct, frozen=True):
    """The work of one version, for all partitions."""

    version: int
    """The version that the job will become if it is committed."""
    instance: InstanceId
    time_ms: int
    """The batch's processing time: tasks never look at a clock."""
    watermark_ms: int | None
    """The batch's watermark."""
    span: Span | None
    """What to read of a ranged source; None: the rows come from Spark."""
    recipes: tuple[Recipe, ...]
    schemas: dict[str, str]
    """Of the sinks whose schema is already decided."""
    copies: bool = False
    """Whether every task keeps a copy of its store as it is before the batch: a snapshot is due."""


class Failure(msgspec.Struct, frozen=True):
    """An exception in a task, on its way to the caller of `run()`."""

    kind: str
    message: str
    traceback: str
    pickled: bytes | None
    """The exception itself, if it can be pickled."""
    place: Place | None


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """What one attempt of one task has made durable; or why it could not."""

    version: int
    partition: int
    attempt: AttemptId
    span: Span | None
    """What the task was told to read, for the driver to compare with its plan."""
    end: Position | None = None
    """Where reading came to."""
    delta: FileRef | None = None
    outboxes: dict[str, FileRef] = {}
    schemas: dict[str, str] = {}
    """Of the rows written, for sinks that have no schema yet."""
    rows_in: int = 0
    rows_out: int = 0
    skipped: int = 0
    late: int = 0
    keys_grown: int = 0
    bytes_grown: int = 0
    keys_updated: int = 0
    keys_removed: int = 0
    events: dict[int, int] = {}
    """By source: the latest event time that moves the watermark, if there was one."""
    due_ms: int | None = None
    """When something in the partition is next due by processing time."""
    event_due_ms: int | None = None
    """The same by event time."""
    copied: bool = False
    """Whether there is a copy of the store, under the attempt's name."""
    restored: Brought | None = None
    """What it took to bring the store to the version before, if that took long."""
    failure: Failure | None = None
