"""Initial state: what groups have before their first row, read once, with the first batch.

It is written to the checkpoint when the query first starts, with two columns: `__group`, the key, and `__initial`, the state
as the codec wrote it. From there Spark reads it as a second stream, joined to the rows, so that a batch that is computed
again sees the same, and a restart none of it. `Seeded` takes these rows out again and sets the state before the function
is called.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from holdfast.errors import FixTheRecord, InvalidPipeline
from holdfast.log import paths
from holdfast.log.manifest import new_id
from holdfast.log.storage import sync_directory
from holdfast.sources.arrow import map_in_arrow
from holdfast.sources.spark import column_of
from holdfast.state.cell import Cell
from holdfast.state.group import GroupFunction
from holdfast.state.keys import decode_key, encode_key
from holdfast.state.python_codec import PythonCodec
from holdfast.state.row import conversion, row_of

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

GROUP, INITIAL = "__group", "__initial"
_KEY_TYPES = frozenset(("string", "binary", "bigint", "int", "smallint", "tinyint", "boolean", "double", "float"))


def check_initial(verb: str, initial: Any) -> None:
    """Refuse what cannot be an initial state."""
    if isinstance(initial, Mapping):
        return
    if not hasattr(initial, "isStreaming"):
        raise InvalidPipeline(f"{verb}(initialState=) is a dict or a DataFrame, not {type(initial).__qualname__}")
    if initial.isStreaming:
        raise InvalidPipeline(f"{verb}(initialState=) is a streaming DataFrame: it must be one that is read once")
    if len(initial.columns) < 2:
        raise InvalidPipeline(f"{verb}(initialState=) needs a column for the key and one or more for the state")
    key = initial.schema[0]
    if not _can_be_key(key.dataType):
        raise InvalidPipeline(
            f"{verb}(initialState=): its first column {key.name!r} is the key, and a {key.dataType.simpleString()} cannot be one; "
            "cast it to a string, binary, integer, boolean, float or double, or to a struct of these for keys that are tuples"
        )


def _can_be_key(kind: Any) -> bool:
    """Whether values of a Spark type have a stable encoding."""
    if hasattr(kind, "fields"):
        return all(_can_be_key(field.dataType) for field in kind.fields)
    return kind.simpleString() in _KEY_TYPES


def with_initial(
    frame: DataFrame, key: Any, initial: Mapping[Any, Any] | DataFrame | None, location: Path
) -> tuple[DataFrame, Any] | None:
    """`frame` joined with the rows of the initial state, and the key of both; None if the checkpoint has none.

    As in Spark, an initial state that is given to a query that has begun already is not looked at.
    """
    directory = location / paths.INITIAL
    if not (location / paths.SPARK).exists():
        if directory.exists():
            shutil.rmtree(directory)  # of a start that came to nothing
        if initial is not None:
            _write(frame, key, initial, directory)
    return _joined(frame, key, directory) if directory.exists() else None


class Seeded:
    """A `GroupFunction` whose groups may have an initial state among their values."""

    def __init__(self, function: GroupFunction) -> None:
        self._function = function

    def __call__(self, key: Any, values: Iterator[dict[str, Any]], cell: Cell, timed_out: bool) -> list[dict[str, Any]]:
        rows = []
        states = []
        for value in values:
            del value[GROUP]
            state = value.pop(INITIAL)
            if state is None:
                rows.append(value)
            else:
                states.append(state)
        if len(states) > 1:
            raise FixTheRecord("the initial state has this key more than once: leave one of them")
        if states:
            cell.update(_codec.decode(states[0]))
        return self._function(key, iter(rows), cell, timed_out)


_codec = PythonCodec()


class _KeyOf:
    """The key function of joined rows."""

    def __init__(self, key_of: Callable[[dict[str, Any]], Any]) -> None:
        self._key_of = key_of

    def __call__(self, value: dict[str, Any]) -> Any:
        encoded = value.pop(GROUP)
        del value[INITIAL]
        return self._key_of(value) if encoded is None else decode_key(encoded)


def _joined(frame: DataFrame, key: Any, directory: Path) -> tuple[DataFrame, Any]:
    from pyspark.sql import functions as F

    kind, group = _key_column(frame, key)
    initial = frame.sparkSession.readStream.schema(f"{GROUP} {kind}, {INITIAL} binary").parquet(str(directory))
    nulls = [F.lit(None).cast(field.dataType).alias(field.name) for field in frame.schema.fields]
    null = F.lit(None).cast("binary")
    rows = frame.select((null if group is None else group).alias(GROUP), null.alias(INITIAL), "*")
    joined = rows.union(initial.select(GROUP, INITIAL, *nulls))
    return joined, _KeyOf(key) if group is None else GROUP


def _key_column(frame: DataFrame, key: Any) -> tuple[str, Column | None]:
    """The type of `__group`, and what rows have there; None: the key is known when its function has run, and travels encoded."""
    from pyspark.sql import Column

    if not isinstance(key, str | Column):
        return "binary", None
    column = column_of(key)
    return frame.select(column).schema[0].dataType.simpleString(), column


def _write(frame: DataFrame, key: Any, initial: Mapping[Any, Any] | DataFrame, directory: Path) -> None:
    """Write it so that it is there as a whole or not at all, also after a power cut."""
    kind, column = _key_column(frame, key)
    to_key = _encode_group if column is None else None
    if isinstance(initial, Mapping):
        rows = [(to_key(group) if to_key else group, _codec.encode(state)) for group, state in initial.items()]
        states = frame.sparkSession.createDataFrame(rows, f"{GROUP} {kind}, {INITIAL} binary")
    else:
        states = _encoded(initial, kind, to_key)
    staging = directory.with_name(f".{paths.INITIAL}-{new_id()}")
    states.write.parquet(str(staging))
    for file in staging.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    sync_directory(staging)
    staging.rename(directory)
    sync_directory(directory.parent)


def _encode_group(group: Any) -> bytes:
    """The bytes of a key; a struct is the tuple of its values, as a row is."""
    return encode_key(_as_key(group))


def _as_key(group: Any) -> Any:
    return tuple(map(_as_key, group.values())) if type(group) is dict else group


def _encoded(initial: DataFrame, kind: str, to_key: Callable[[Any], bytes] | None) -> DataFrame:
    """The states of a DataFrame, encoded where its rows are."""
    first, *others = initial.columns
    whole = conversion(initial.drop(first).schema) or row_of
    codec = _codec

    def encode(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            groups = batch.column(0)
            if to_key is not None:
                groups = pa.array([to_key(group) for group in groups.to_pylist()], pa.binary())
            rows = [whole(row) for row in batch.select(others).to_pylist()]
            states = [codec.encode(row[0] if len(others) == 1 else row) for row in rows]
            yield pa.RecordBatch.from_arrays([groups, pa.array(states, pa.binary())], [GROUP, INITIAL])

    if to_key is None:
        if hasattr(initial.schema[0].dataType, "fields"):
            raise InvalidPipeline(
                f"initialState=: its keys are structs, that is tuples, and the groups are made by a {kind} column: make the "
                "groups by a function that returns tuples, or give keys of that type"
            )
        initial = initial.withColumn(first, column_of(first).cast(kind))
    return map_in_arrow(initial, encode, f"{GROUP} {kind}, {INITIAL} binary")
