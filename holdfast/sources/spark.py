"""A streaming DataFrame as a source: Spark reads, rows are shuffled by key to the partition that owns it.

The stream that is run has up to three columns before the value's own: `__route`, an int that Spark's hash sends to the
wanted partition, so that the shuffle and the state agree on where a key lives; `__key`, unless a column of the value is
the key; and `__time`, if event time comes from a column.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import pyarrow as pa

from holdfast.errors import FixTheRecord, InvalidPipeline
from holdfast.pickling import dumps, loads
from holdfast.plan.record import Chunk, dicts
from holdfast.sources.arrow import map_in_arrow
from holdfast.sources.base import CHUNK, Extract
from holdfast.state.keys import decode_key, encode_key, partition_of
from holdfast.times import milliseconds

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

KEY, TIME, ROUTE = "__key", "__time", "__route"
_PLAIN_KEYS = {"string": "s", "binary": "y", "bigint": "i", "int": "i", "smallint": "i", "tinyint": "i"}
"""Key columns that need no Python to find their partition, and the letter of their encoding."""


class SparkSource:
    """See `Application.from_spark`. The DataFrame stays on the driver: pickling leaves it out."""

    kind = "spark"

    def __init__(
        self,
        frame: DataFrame,
        key: str | Column | Extract | None,
        timestamp: str | Column | Extract | None,
        name: str = "spark",
    ) -> None:
        if not getattr(frame, "isStreaming", False):
            raise InvalidPipeline("from_spark() takes a streaming DataFrame: one made by spark.readStream")
        taken = {KEY, TIME, ROUTE}.intersection(frame.columns)
        if taken:
            raise InvalidPipeline(f"the columns {sorted(taken)} are used by Holdfast itself; rename them")
        for what, given in (("key", key), ("timestamp", timestamp)):
            if isinstance(given, str) and given not in frame.columns:
                raise InvalidPipeline(f"{what}={given!r} is not a column; the columns are {frame.columns}")
            if not (given is None or isinstance(given, str) or callable(given) or _is_column(given)):
                raise InvalidPipeline(f"{what} must be a column, an expression or a function of the row")
        self.name = name
        self.names: tuple[str, ...] = (name,)
        self.frame = frame
        self._key = key
        self._time = timestamp
        self._key_field = key if isinstance(key, str) else KEY
        self._key_of: Extract | None = key if _is_function(key) else None  # type: ignore[assignment]
        self._time_of: Extract | None = timestamp if _is_function(timestamp) else None  # type: ignore[assignment]
        if self._key_of is None and key is not None:
            self._letter()

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("name", "names", "_key_field", "_key_of", "_time_of")}

    def joined(self, other: Any) -> NoReturn:
        raise InvalidPipeline(
            f"{self.name} and {other.name}: Spark joins streams itself; take one.unionByName(other), and from_spark() of that"
        )

    def routed(self, partitions: int) -> DataFrame:
        """The stream with a route to one of `partitions` in every row, and its key and time."""
        from pyspark.sql import functions as F

        known = routes(self.frame.sparkSession, partitions)
        rows = self.frame
        if self._time is not None and self._time_of is None:
            rows = rows.select(self._time_column().alias(TIME), "*")
        if self._key_of is not None:
            return _routed_by_function(rows, self._key_of, known)
        if self._key is None:
            whole = F.xxhash64(*map(column_of, self.frame.columns))  # the same if Spark computes it again
            return rows.select(_route_to(F.pmod(whole, F.lit(partitions)), known).alias(ROUTE), "*")
        key = column_of(self._key)
        letter = self._letter()
        text = key.cast("string").cast("binary") if letter == "i" else key.cast("binary")
        partition = F.coalesce(F.crc32(F.concat(F.lit(letter).cast("binary"), text)) % partitions, F.lit(0))
        found = [_route_to(partition, known).alias(ROUTE)]
        if self._key_field == KEY:
            found.append(key.alias(KEY))
        return rows.select(*found, "*")

    def _letter(self) -> str:
        """What the encoding of the key column begins with."""
        kind = self.frame.select(column_of(self._key)).schema[0].dataType.simpleString()
        if kind not in _PLAIN_KEYS:
            raise InvalidPipeline(
                f"a key column of type {kind} is not supported: use a string, binary or integer column, or a function of the row"
            )
        return _PLAIN_KEYS[kind]

    def _time_column(self) -> Any:
        """Event time in ms, from a timestamp column or an integer column of ms; null: none."""
        from pyspark.sql import functions as F

        column = column_of(self._time)
        kind = self.frame.select(column).schema[0].dataType.simpleString()
        return F.unix_millis(column.cast("timestamp")) if kind.startswith("timestamp") else column.cast("bigint")

    def chunks(self, batches: Iterable[pa.RecordBatch]) -> Iterator[Chunk]:
        """The rows of one task as chunks of records."""
        row = 0
        for table in _gathered(batches):
            columns = {name: table.column(name).to_pylist() for name in table.column_names if name != ROUTE}
            keys = list(columns[self._key_field]) if self._key_field in columns else [None] * table.num_rows
            columns.pop(KEY, None)
            times = columns.pop(TIME, None)
            values = dicts(columns, table.num_rows)
            chunk = Chunk(keys, values, times, range(row, row + len(values)), None, {})
            if self._key_of is not None:
                _decode_keys(chunk)
            if self._time_of is not None:
                _set_times(chunk, self._time_of)
            row += len(values)
            yield chunk


def routes(spark: SparkSession, partitions: int) -> list[int]:
    """For each partition an int that Spark's hash partitioning sends there."""
    from pyspark.sql import functions as F

    found: dict[int, int] = {}
    where = spark.range(64 * partitions).select(
        F.pmod(F.hash(F.col("id").cast("int")), F.lit(partitions)).alias("partition")
    )
    for route, row in enumerate(where.collect()):
        found.setdefault(row.partition, route)
    return [found[partition] for partition in range(partitions)]


def _route_to(partition: Any, routes: list[int]) -> Any:
    """The column of routes for a column of partitions."""
    from pyspark.sql import functions as F

    return F.element_at(F.array(*(F.lit(route) for route in routes)), (partition + 1).cast("int"))


def _routed_by_function(rows: DataFrame, key_of: Extract, routes: list[int]) -> DataFrame:
    """Run the key function before the shuffle. A key travels encoded; what the function raised travels as b"!" + pickle."""
    from pyspark.sql.types import BinaryType, IntegerType, StructField, StructType

    def key_and_route(value: dict[str, Any]) -> tuple[bytes | None, int]:
        try:
            key = key_of(value)
            if key is None:
                return None, routes[0]
            encoded = encode_key(key)
            return encoded, routes[partition_of(encoded, len(routes))]
        except Exception as error:
            return b"!" + _pickled(error), routes[0]

    def route(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            columns = {name: batch.column(name).to_pylist() for name in batch.schema.names if name != TIME}
            pairs = [key_and_route(value) for value in dicts(columns, batch.num_rows)]
            where = pa.array([pair[1] for pair in pairs], pa.int32())
            keys = pa.array([pair[0] for pair in pairs], pa.binary())
            yield pa.RecordBatch.from_arrays([where, keys, *batch.columns], [ROUTE, KEY, *batch.schema.names])

    schema = StructType([StructField(ROUTE, IntegerType()), StructField(KEY, BinaryType()), *rows.schema.fields])
    return map_in_arrow(rows, route, schema)


def _pickled(error: Exception) -> bytes:
    try:
        return dumps(error)
    except Exception:  # whatever an exception's own pickling may raise
        return dumps(FixTheRecord(f"the key function raised {type(error).__qualname__}"))


def _decode_keys(chunk: Chunk) -> None:
    """Encoded keys to keys, routes and faults."""
    chunk.routes = []
    for index, encoded in enumerate(chunk.keys):
        if encoded is not None and encoded[:1] == b"!":
            chunk.faults[index] = loads(encoded[1:])
            encoded = None
        chunk.routes.append(encoded)
        chunk.keys[index] = None if encoded is None else decode_key(encoded)


def _set_times(chunk: Chunk, time_of: Extract) -> None:
    chunk.timestamps = []
    for index, value in enumerate(chunk.values):
        try:
            chunk.timestamps.append(milliseconds(time_of(value)))
        except Exception as error:
            chunk.timestamps.append(0)
            chunk.faults[index] = error


def _gathered(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Arrow batches, joined to about `CHUNK` rows."""
    pending: list[pa.RecordBatch] = []
    count = 0
    for batch in batches:
        if batch.num_rows:
            pending.append(batch)
            count += batch.num_rows
        if count >= CHUNK:
            yield pa.Table.from_batches(pending)
            pending, count = [], 0
    if pending:
        yield pa.Table.from_batches(pending)


def _is_column(given: Any) -> bool:
    from pyspark.sql import Column

    return isinstance(given, Column)


def _is_function(given: Any) -> bool:
    return callable(given) and not _is_column(given)


def column_of(given: Any) -> Any:
    """A column by its name, which may have dots and backticks in it; or the column itself."""
    from pyspark.sql import functions as F

    return F.col("`" + given.replace("`", "``") + "`") if isinstance(given, str) else given
