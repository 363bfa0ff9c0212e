"""Sinks as a plan knows them: what a task writes to the outbox for them.

A `Sink` is plain data that travels to the tasks; what delivers the outbox lives on the driver (holdfast/sinks).
Whatever a sink could refuse is refused here, as an error of that record and before the commit: nothing poisonous may
be committed.

Two forms of outbox:
- rows: typed columns after the sink's schema; tables and `foreach_batch`. Without a given schema, the first version
  with rows decides it, and the manifest keeps it.
- values: `value` (msgpack), `key` (the encoded key or null) and `timestamp` (ms); `inspect` and `print`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol

import msgspec
import pyarrow as pa

from holdfast.errors import UnsupportedValue
from holdfast.plan.schema import arrow_schema, inferred
from holdfast.state.codecs import is_scalar
from holdfast.state.keys import decode_key, encode_key


class Sink(msgspec.Struct, frozen=True):
    """Where a branch of the pipeline ends, or is tapped."""

    id: str
    """Stable across runs: undelivered output finds its sink by it."""
    index: int
    form: Literal["rows", "values"]
    schema: str | None = None
    """DDL; None: decided by the first rows."""

    @property
    def label(self) -> str:
        return self.id

    def encoder(self, pinned: str | None) -> Encoder:
        if self.form == "values":
            return ValuesEncoder()
        schema = pinned or self.schema
        return RowsEncoder(self.id, arrow_schema(schema) if schema else None)


class Encoder(Protocol):
    """Gathers what one task emits for one sink."""

    def add(self, value: Any, key: Any, timestamp: int) -> None:
        """Take a value, or raise `UnsupportedValue` if the sink could not hold it. The value is kept: it must not change."""

    def __len__(self) -> int: ...

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` values: the record failed."""

    def table(self) -> pa.Table:
        """All of it, for the outbox file."""


class RowsEncoder:
    """Dicts to typed columns, after a schema or finding one."""

    def __init__(self, sink: str, schema: pa.Schema | None) -> None:
        self._sink = sink
        self._fixed = schema is not None
        self._schema = schema if schema is not None else pa.schema([])
        self._fits = {field.name: column_check(field.type) for field in self._schema}
        self._seen: set[tuple[tuple[str, type], ...]] = set()
        self._rows: list[dict[str, Any]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, value: Any, key: Any, timestamp: int) -> None:
        if type(value) is not dict:
            raise UnsupportedValue(f"{self._sink} takes rows: a value must be a dict, not {type(value).__qualname__}")
        if self._fixed:
            self._check(value)
        else:
            self._widen(value)
        self._rows.append(value)

    def truncate(self, length: int) -> None:
        del self._rows[length:]

    def table(self) -> pa.Table:
        return pa.Table.from_pylist(self._rows, self._schema)

    def _check(self, row: dict[str, Any]) -> None:
        """Refuse a row that the schema cannot hold."""
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
        try:
            self._schema = merged([self._schema, inferred([row])])
        except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
            # Arrow's own text would show the value.
            raise UnsupportedValue(
                f"{self._sink}: the row has no type in common with those before it ({type(error).__name__}); give schema="
            ) from None
        if _PLAIN.issuperset(kind for _, kind in shape):
            self._seen.add(shape)


_PLAIN = frozenset((str, float, bool, type(None)))
"""Types whose every value has the same Arrow type; an int may be too large for one."""


def merged(schemas: list[pa.Schema]) -> pa.Schema:
    """One schema that holds the rows of all."""
    return pa.unify_schemas(schemas, promote_options="permissive")


def column_check(kind: pa.DataType) -> Callable[[Any], bool]:
    """Whether a value that is not None fits a column: quickly for plain types, by asking Arrow for the others."""
    if pa.types.is_integer(kind):
        low, high = -(1 << kind.bit_width - 1), (1 << kind.bit_width - 1) - 1
        return lambda value: type(value) is int and low <= value <= high
    if pa.types.is_float64(kind):
        return lambda value: type(value) is float or (type(value) is int and -(2**53) <= value <= 2**53)
    if pa.types.is_boolean(kind):
        return lambda value: type(value) is bool
    if pa.types.is_string(kind):
        return lambda value: type(value) is str and is_scalar(value)

    def ask_arrow(value: Any) -> bool:
        try:
            pa.scalar(value, kind)
        except (pa.ArrowException, OverflowError, TypeError, ValueError):
            return False
        return True

    return ask_arrow


class ValuesEncoder:
    """Any value that msgpack keeps, with its key and time."""

    def __init__(self) -> None:
        self._rows: list[tuple[bytes, bytes | None, int]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, value: Any, key: Any, timestamp: int) -> None:
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
