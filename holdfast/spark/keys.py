"""What `groupByKey` takes: a column, an expression, or a function, which may be a column in disguise."""

from __future__ import annotations

import dis
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any

from holdfast.plan.functions import check_function
from holdfast.sources.spark import SparkSource
from holdfast.state.row import Row, conversion, row_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def key_of(frame: DataFrame, key: Any) -> Any:
    """What a `SparkSource` takes as the key."""
    from pyspark.sql import Column

    if callable(key) and not isinstance(key, Column):
        check_function("groupByKey()", key, ["row"])
        column = column_taken(key)
        if column is None:
            return KeyFunction(key, conversion(frame.schema) or row_of)
        key = column
    if isinstance(key, str) and key in frame.columns:
        kind = frame.schema[key].dataType.simpleString()
        if kind in ("boolean", "float", "double"):
            return KeyFunction(_Taken(key), row_of)
    SparkSource(frame, key, None)  # refuses what cannot be a key
    return key


class KeyFunction:
    """The user's function of a row, as one of the dict that the source has. A row as a key is the tuple of its values."""

    def __init__(self, function: Callable[[Any], Any], to_row: Callable[[Any], Any]) -> None:
        self._function = function
        self._to_row = to_row

    def __call__(self, value: dict[str, Any]) -> Any:
        key = self._function(self._to_row(value))
        return tuple(key) if isinstance(key, Row | tuple) else key


_PLAIN_STEPS = frozenset(
    ("RESUME", "LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_CONST", "LOAD_ATTR", "BINARY_SUBSCR", "RETURN_VALUE")
)


def column_taken(function: Any) -> str | None:
    """The column of a function that does nothing but take one, by attribute or item: `lambda row: row.user_id`.

    Its code says so: no condition, no call, no other name. Trying it on an object that notes what it is asked for says
    which. (Trying alone would not do: `None if row.a is None else row.a` gives that object back, too.)

    >>> column_taken(lambda row: row.user_id), column_taken(lambda row: row["user_id"]), column_taken(lambda row: row.a or "b")
    ('user_id', 'user_id', None)
    """
    if type(function) is not FunctionType or function.__code__.co_argcount != 1:
        return None
    if not _PLAIN_STEPS.issuperset(step.opname for step in dis.get_instructions(function)):
        return None
    try:
        taken = function(_Probe())
    except Exception:  # whatever a function may do with what is no row
        return None
    return taken.column if type(taken) is _Taken else None


class _Probe:
    """Stands for a row whose columns are not known."""

    def __getattr__(self, name: str) -> Any:
        return _Taken(name)

    def __getitem__(self, name: Any) -> Any:
        return _Taken(name) if isinstance(name, str) else None


class _Taken:
    """A column that was asked for; and, called with a row, what takes it."""

    def __init__(self, column: str) -> None:
        self.column = column

    def __call__(self, row: Any) -> Any:
        return row[self.column]
