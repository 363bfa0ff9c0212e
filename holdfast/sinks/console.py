"""The console sink: the rows of every version as a table on the driver's standard output. At least once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.log.manifest import Manifest
from holdfast.runtime.delivery import Outbox
from holdfast.sinks.rows import outbox_frame

if TYPE_CHECKING:
    from holdfast.runtime.context import Context

_LINE = "-" * 43


class ConsoleTarget:
    """Shows at most `rows` rows of a version, with long values cut if `truncate` says so."""

    def __init__(self, context: Context, rows: int, truncate: bool) -> None:
        self._spark = context.spark
        self._rows = rows
        self._truncate = truncate

    def prepare(self, head: Manifest) -> None:
        """There is nothing that could be someone else's."""

    def deliver(self, manifest: Manifest, outbox: Outbox) -> None:
        with outbox.blamed():
            frame = outbox_frame(self._spark, outbox)
            print(f"{_LINE}\nVersion: {manifest.version}\n{_LINE}")
            frame.show(self._rows, self._truncate)
