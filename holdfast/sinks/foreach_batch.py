"""`foreach_batch`: the user's function gets every committed version as a DataFrame. At least once, in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from holdfast.log.manifest import Manifest
from holdfast.runtime.delivery import Outbox
from holdfast.sinks.rows import outbox_frame

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from holdfast.runtime.context import Context


class ForeachBatchTarget:
    """See `StreamingDataFrame.foreach_batch`."""

    def __init__(self, context: Context, function: Callable[[DataFrame, int], Any]) -> None:
        self._context = context
        self._function = function

    def prepare(self, head: Manifest) -> None:
        """There is nothing that could be someone else's."""

    def deliver(self, manifest: Manifest, outbox: Outbox) -> None:
        with outbox.blamed():
            self._function(outbox_frame(self._context.spark, outbox), manifest.version)
