"""An outbox of rows as a Spark DataFrame: read by tasks, straight from the checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import pyarrow as pa

from holdfast.log.files import read_table
from holdfast.plan.schema import arrow_schema
from holdfast.runtime.delivery import Outbox
from holdfast.sources.arrow import map_in_arrow
from holdfast.vault import Carried

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def outbox_frame(spark: SparkSession, outbox: Outbox) -> DataFrame:
    """The rows of a version. Its schema is the sink's, whatever the single partitions found."""
    assert outbox.schema is not None
    schema, files, storage = arrow_schema(outbox.schema), outbox.files, Carried(outbox.storage)

    def read(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for index in batch.column(0).to_pylist():
                yield from as_schema(read_table(storage.thing, files[index], kind="outbox"), schema).to_batches()

    return map_in_arrow(spark.range(0, len(files), 1, len(files)), read, outbox.schema)


def as_schema(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """`table` with exactly the columns of `schema`, which its rows fit; a column that it lacks is null."""
    return table if table.schema == schema else pa.Table.from_pylist(table.to_pylist(), schema)
