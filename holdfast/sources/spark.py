"""A streaming DataFrame as a source: Spark reads, rows are shuffled by key to the partition that owns it.

The rows that reach a task have the columns `__key`, `__time` and `__route` before the value's own. `__route` is an int
that Spark's hash sends to the wanted partition, so that the shuffle and the state agree on where a key lives.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from holdfast.errors import FixTheRecord, InvalidPipeline
from holdfast.pickling import dumps, loads
from holdfast.plan.record import Chunk
from holdfast.sources.arrow import map_in_arrow
from holdfast.sources.base import CHUNK, Extract, milliseconds
from holdfast.state.keys import decode_key, encode_key, partition_of

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

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
        self.frame = frame
        self._key = key
        self._time = timestamp
        self._key_of: Extract | None = key if _is_function(key) else None  # type: ignore[assignment]
        self._time_of: Extract | None = timestamp if _is_function(timestamp) else None  # type: ignore[assignment]
        if self._key_of is None:
            self._letter(frame)

    def __getstate__(self) -> dict[str, Any]:
        return {"name": self.name, "_key_of": self._key_of, "_time_of": self._time_of}

    def routed(self, rows: DataFrame, routes: list[int]) -> DataFrame:
        """`rows` with key, time and route, before the shuffle. `routes[p]` leads to partition p."""
        from pyspark.sql import functions as F

        timed = rows.select(self._time_column(rows).alias(TIME), "*")
        if self._key_of is not None:
            return _routed_by_function(timed, self._key_of, routes)
        keyed = timed.select(self._key_column().alias(KEY), "*")
        if self._key is None:
            spread = F.pmod(
                F.xxhash64(*map(_column, rows.columns)), F.lit(len(routes))
            )  # the same if Spark computes it again
            return keyed.select(_route_to(spread, routes).alias(ROUTE), "*")
        letter = self._letter(rows)
        text = F.col(KEY).cast("string").cast("binary") if letter == "i" else F.col(KEY).cast("binary")
        partition = F.coalesce(F.crc32(F.concat(F.lit(letter).cast("binary"), text)) % len(routes), F.lit(0))
        return keyed.select(_route_to(partition, routes).alias(ROUTE), "*")

    def _key_column(self) -> Any:
        from pyspark.sql import functions as F

        return F.lit(None).cast("string") if self._key is None else _column(self._key)

    def _letter(self, rows: DataFrame) -> str:
        """What the encoding of the key column begins with."""
        kind = rows.select(self._key_column()).schema[0].dataType.simpleString()
        if kind not in _PLAIN_KEYS:
            raise InvalidPipeline(
                f"a key column of type {kind} is not supported: use a string, binary or integer column, or a function of the row"
            )
        return _PLAIN_KEYS[kind]

    def _time_column(self, rows: DataFrame) -> Any:
        """Event time in ms, from a timestamp column or an integer column of ms; null: none."""
        from pyspark.sql import functions as F

        if self._time is None or self._time_of is not None:
            return F.lit(None).cast("bigint")
        column = _column(self._time)
        kind = rows.select(column).schema[0].dataType.simpleString()
        return F.unix_millis(column.cast("timestamp")) if kind.startswith("timestamp") else column.cast("bigint")

    def chunks(self, batches: Iterable[pa.RecordBatch]) -> Iterator[Chunk]:
        """The rows of one task as chunks of records."""
        row = 0
        for table in _gathered(batches):
            keys, times = table.column(KEY).to_pylist(), table.column(TIME)
            values = _dicts(table.drop_columns([ROUTE, KEY, TIME]))
            chunk = Chunk(keys, values, None, range(row, row + len(values)), None, {})
            if self._key_of is not None:
                _decode_keys(chunk)
            if self._time_of is not None:
                _set_times(chunk, self._time_of)
            elif times.null_count < len(times):
                chunk.timestamps = times.to_pylist()
            row += len(values)
            yield chunk


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
            pairs = [key_and_route(value) for value in _dicts(pa.Table.from_batches([batch]).drop_columns([TIME]))]
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


def _dicts(table: pa.Table) -> list[dict[str, Any]]:
    """Rows as dicts; column by column, which is several times as fast as row by row."""
    names = table.column_names
    columns = [column.to_pylist() for column in table.columns]
    if not columns:
        return [{} for _ in range(table.num_rows)]
    return [dict(zip(names, row, strict=False)) for row in zip(*columns, strict=True)]


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


def _column(given: Any) -> Any:
    from pyspark.sql import functions as F

    return F.col(given) if isinstance(given, str) else given
