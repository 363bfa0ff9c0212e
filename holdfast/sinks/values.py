"""`inspect` and `print`: values shown on the driver, after the commit. At least once: a crash may show some again."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from holdfast.log.manifest import Manifest
from holdfast.plan.sinks import decode_values
from holdfast.runtime.delivery import Outbox


class InspectTarget:
    """Calls a function with every value."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function

    def prepare(self, head: Manifest) -> None:
        """There is nothing that could be someone else's."""

    def deliver(self, manifest: Manifest, outbox: Outbox) -> None:
        for table in outbox.tables():
            for value, _, _ in decode_values(table):
                self._function(value)


class PrintTarget:
    """Prints every value on a line of its own."""

    def __init__(self, metadata: bool) -> None:
        self._metadata = metadata

    def prepare(self, head: Manifest) -> None:
        """There is nothing that could be someone else's."""

    def deliver(self, manifest: Manifest, outbox: Outbox) -> None:
        lines: list[str] = []
        for table in outbox.tables():
            for value, key, timestamp in decode_values(table):
                shown = {"value": value, "key": key, "timestamp": timestamp} if self._metadata else value
                lines.append(f"{shown}\n")
        sys.stdout.write("".join(lines))
        sys.stdout.flush()
