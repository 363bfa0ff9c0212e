"""Sinks as a plan knows them: what a task writes to the outbox for them.

A `Sink` is plain data that travels to the tasks; what delivers the outbox lives on the driver (holdfast/sinks).
Whatever a sink could refuse is refused here, as an error of that record and before the commit: nothing poisonous may
be committed.

Three forms of outbox:
- rows: typed columns after the sink's schema; tables and `foreach_batch`. Without a given schema, the first version
  with rows decides it, and the manifest keeps it.
- values: `value` (msgpack), `key` (the encoded key or null) and `timestamp` (ms); `inspect` and `print`.
- messages: bytes for a topic, see messages.py.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, datetime
from typing import Any, Literal, Protocol

import msgspec
import pyarrow as pa

from holdfast.errors import InvalidPipeline, UnsupportedValue
from holdfast.plan.messages import MessageForm, MessagesEncoder, TopicLimits
from holdfast.plan.record import Headers, copied
from holdfast.plan.schema import arrow_schema, inferred, to_ddl
from holdfast.state.codecs import is_scalar
from holdfast.state.keys import decode_key, encode_key

VERSION_COLUMN = "holdfast_version"
"""The column that tables have beside the rows' own."""


class Sink(msgspec.Struct, frozen=True):
    """Where a branch of the pipeline ends, or is tapped."""

    id: str
    """Stable across runs: undelivered output finds its sink by it."""
    index: int
    form: Literal["rows", "values"] | MessageForm
    schema: str | None = None
    """DDL; None: decided by the first rows."""

    @property
    def label(self) -> str:
        return self.id

    def encoder(self, pinned: str | None, limits: TopicLimits | None, time_ms: int) -> Encoder:
        """`pinned`: the schema that was decided; `limits`: what the topic takes; `time_ms`: the batch's processing time."""
        if isinstance(self.form, MessageForm):
            return MessagesEncoder(self.id, self.form, limits, time_ms)
        if self.form == "values":
            return ValuesEncoder()
        schema = pinned or self.schema
        return RowsEncoder(self.id, arrow_schema(schema) if schema else None)


class Encoder(Protocol):
    """Gathers what one task emits for one sink."""

    def add(self, value: Any, key: Any, timestamp: int, headers: Headers | None) -> None:
        """Take a value as it is now, or raise `UnsupportedValue` if the sink could not hold it."""

    def __len__(self) -> int: ...

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` values: the record failed."""

    def table(self) -> pa.Table:
        """All of it, for the outbox file."""


class RowsEncoder:
    """Dicts to typed columns, after a schema or finding one.

    A schema that is being found grows with the rows, as long as every row so far fits it as it is. What a row made of it is
    forgotten with the row.
    """

    def __init__(self, sink: str, schema: pa.Schema | None) -> None:
        self._sink = sink
        self._fixed = schema is not None
        self._seen: set[tuple[tuple[str, type], ...]] = set()
        self._rows: list[dict[str, Any]] = []
        self._before: list[tuple[int, pa.Schema]] = []
        """(row, schema): what the schema was before this row made it grow."""
        self._take(schema if schema is not None else pa.schema([]))

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, value: Any, key: Any, timestamp: int, headers: Headers | None) -> None:
        if type(value) is not dict:
            raise UnsupportedValue(f"{self._sink} takes rows: a value must be a dict, not {type(value).__qualname__}")
        if self._fixed:
            self._check(value)
        else:
            self._widen(value)
        self._rows.append(copied(value))

    def truncate(self, length: int) -> None:
        del self._rows[length:]
        while self._before and self._before[-1][0] >= length:
            self._take(self._before.pop()[1])

    def table(self) -> pa.Table:
        return pa.Table.from_pylist(self._rows, self._schema)

    def _take(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._fits = {field.name: column_check(field.type) for field in schema}
        self._seen.clear()

    def _check(self, row: dict[str, Any]) -> None:
        """Refuse a row that the schema cannot hold as it is."""
        for name, value in row.items():
            fits = self._fits.get(name)
            if fits is None:
                columns = ", ".join(self._fits)
                raise UnsupportedValue(f"{self._sink} has no column {name!r}; its columns are: {columns}")
            if value is not None and not fits(value):
                kind = self._schema.field(name).type
                raise UnsupportedValue(
                    f"{self._sink}: a {type(value).__qualname__} does not fit the column {name!r} of type {kind}"
                )

    def _widen(self, row: dict[str, Any]) -> None:
        """Let the schema grow with the row, or refuse a row that contradicts those before it."""
        shape = tuple((name, type(value)) for name, value in row.items())
        if shape in self._seen:
            return
        if VERSION_COLUMN in row:
            raise UnsupportedValue(f"{self._sink}: the column {VERSION_COLUMN} is added by Holdfast; rename yours")
        if not row:
            raise UnsupportedValue(f"{self._sink}: a row needs a column; give schema=, and {{}} is a row of nulls")
        known = self._schema
        try:
            schema = merged([known, inferred([row])])
            arrow_schema(to_ddl(schema))  # a type that Spark lacks, two columns of one name
        except (InvalidPipeline, pa.ArrowException, OverflowError, TypeError, ValueError) as error:
            # Arrow's own text would show the value.
            raise UnsupportedValue(
                f"{self._sink}: the row has no type that a table can hold together with the rows before it "
                f"({type(error).__name__}); give schema="
            ) from None
        if schema != known:
            self._grow(schema, row)
        else:
            self._check(row)
        if _PLAIN.issuperset(kind for _, kind in shape):
            self._seen.add(shape)

    def _grow(self, schema: pa.Schema, row: dict[str, Any]) -> None:
        """Take `schema`, unless it would change this row or one before it."""
        known = self._schema
        self._take(schema)
        try:
            for one in (row, *self._rows):
                self._check(one)
        except UnsupportedValue:
            self._take(known)
            raise
        self._before.append((len(self._rows), known))


_PLAIN = frozenset((str, float, bool, type(None)))
"""Types whose every value has the same Arrow type; an int may be too large for one."""


def merged(schemas: list[pa.Schema]) -> pa.Schema:
    """One schema that holds the rows of all."""
    return pa.unify_schemas(schemas, promote_options="permissive")


def check_rows(sink: str, schema: pa.Schema, table: pa.Table) -> None:
    """Refuse an outbox with a row that `schema` cannot hold as it is."""
    encoder = RowsEncoder(sink, schema)
    for row in table.to_pylist():
        encoder.add(row, None, 0, None)


def column_check(kind: pa.DataType) -> Callable[[Any], bool]:
    """Whether a value that is not None fits a column without being changed; an int is allowed to become a double."""
    if pa.types.is_integer(kind):
        low, high = -(1 << kind.bit_width - 1), (1 << kind.bit_width - 1) - 1
        return lambda value: type(value) is int and low <= value <= high
    if pa.types.is_float64(kind):
        return lambda value: type(value) is float or (type(value) is int and -(2**53) <= value <= 2**53)
    if pa.types.is_boolean(kind):
        return lambda value: type(value) is bool
    if pa.types.is_string(kind):
        return lambda value: type(value) is str and is_scalar(value)
    if pa.types.is_list(kind):
        return _list_check(kind)
    if pa.types.is_struct(kind):
        return _struct_check(kind)
    allowed = _ALLOWED.get(kind, object)

    def ask_arrow(value: Any) -> bool:
        if not isinstance(value, allowed) or (allowed is date and isinstance(value, datetime)):
            return False
        try:
            pa.scalar(value, kind)
        except (pa.ArrowException, OverflowError, TypeError, ValueError):
            return False
        return True

    return ask_arrow


_ALLOWED: dict[pa.DataType, type] = {
    pa.binary(): bytes,
    pa.date32(): date,
    pa.timestamp("us"): datetime,
    pa.timestamp("us", tz="UTC"): datetime,
}
"""Where Arrow would take more than it keeps: a datetime as a date, a str as bytes, an int as a time."""


def _list_check(kind: pa.DataType) -> Callable[[Any], bool]:
    fits = column_check(kind.value_type)
    return lambda value: type(value) in (list, tuple) and all(item is None or fits(item) for item in value)


def _struct_check(kind: pa.DataType) -> Callable[[Any], bool]:
    """Arrow would drop a field that the struct does not have."""
    checks = {field.name: column_check(field.type) for field in kind}

    def fits(value: Any) -> bool:
        return type(value) is dict and all(
            name in checks and (item is None or checks[name](item)) for name, item in value.items()
        )

    return fits


class ValuesEncoder:
    """Any value that msgpack keeps, with its key and time."""

    def __init__(self) -> None:
        self._rows: list[tuple[bytes, bytes | None, int]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, value: Any, key: Any, timestamp: int, headers: Headers | None) -> None:
        try:
            encoded = msgspec.msgpack.encode(value)
        except (TypeError, ValueError, OverflowError, UnicodeEncodeError) as error:
            kind = type(value).__qualname__
            raise UnsupportedValue(f"a {kind} cannot be carried to the driver ({type(error).__name__})") from None
        self._rows.append((encoded, None if key is None else encode_key(key), timestamp))

    def truncate(self, length: int) -> None:
        del self._rows[length:]

    def table(self) -> pa.Table:
        values, keys, timestamps = zip(*self._rows, strict=True)
        return pa.table(
            {
                "value": pa.array(values, pa.binary()),
                "key": pa.array(keys, pa.binary()),
                "timestamp": pa.array(timestamps, pa.int64()),
            }
        )


def decode_values(table: pa.Table) -> list[tuple[Any, Any, int]]:
    """(value, key, timestamp) of an outbox of values."""
    return [
        (msgspec.msgpack.decode(value), None if key is None else decode_key(key), timestamp)
        for value, key, timestamp in zip(*(column.to_pylist() for column in table.columns), strict=True)
    ]
