"""The memory sink: all rows of a query as a temporary view. For exploring and for tests; a restart begins it anew."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from holdfast.log.manifest import Manifest
from holdfast.plan.schema import arrow_schema
from holdfast.runtime.delivery import Outbox
from holdfast.sinks.rows import as_schema

if TYPE_CHECKING:
    from holdfast.runtime.context import Context


class MemoryTarget:
    """Keeps what it is given; a version that comes again replaces itself."""

    def __init__(self, context: Context, view: str, schema: pa.Schema | None) -> None:
        self._spark = context.spark
        self._view = view
        self._versions: dict[int, pa.Table] = {}
        if schema is not None:
            self._show(pa.table([[]] * len(schema), schema=schema))

    def prepare(self, head: Manifest) -> None:
        """There is nothing that could be someone else's."""

    def deliver(self, manifest: Manifest, outbox: Outbox) -> None:
        assert outbox.schema is not None
        schema = arrow_schema(outbox.schema)
        self._versions[manifest.version] = pa.concat_tables(as_schema(table, schema) for table in outbox.tables())
        self._show(pa.concat_tables(self._versions.values()))

    def _show(self, rows: pa.Table) -> None:
        self._spark.createDataFrame(rows).createOrReplaceTempView(self._view)
