"""Rows: the values of a group, with the manners of a PySpark `Row` and the price of a dict.

A PySpark Row costs a microsecond to make and more than one for each field that is read by name. `Row` takes the dict that
the source made as its own `__dict__`: making one is a single assignment, and reading a field is a plain attribute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

Convert = Callable[[Any], Any]


class Row:
    """A row of named values: `row.amount`, `row["amount"]`, `row[1]`, and in a loop the values in order.

    Guaranteed: it compares, unpacks, iterates and shows itself as a PySpark Row of the same fields, and cannot be changed.
    A column always wins over a method of the same name. Not guaranteed: `isinstance(row, pyspark.sql.Row)`, which is False.

    >>> row = Row(user="ann", amount=3)
    >>> row.user, row["amount"], row[1], list(row), "user" in row
    ('ann', 3, 3, ['ann', 3], True)
    >>> row
    Row(user='ann', amount=3)
    """

    __slots__ = ("__dict__",)

    def __init__(self, **fields: Any) -> None:
        _set(self, "__dict__", fields)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the row has no column {name!r}; it has {', '.join(vars(self))}")

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a row cannot be changed: make a new value instead of setting {name!r}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError("a row cannot be changed")

    def __getitem__(self, item: str | int | slice) -> Any:
        if isinstance(item, str):
            try:
                return vars(self)[item]
            except KeyError:
                raise KeyError(f"the row has no column {item!r}; it has {', '.join(vars(self))}") from None
        return tuple(vars(self).values())[item]

    def __iter__(self) -> Iterator[Any]:
        return iter(vars(self).values())

    def __len__(self) -> int:
        return len(vars(self))

    def __contains__(self, name: object) -> bool:
        return name in vars(self)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Row | tuple):
            return tuple(self) == tuple(other)
        return NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"Row({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    def __reduce__(self) -> tuple[Any, ...]:
        return row_of, (vars(self),)

    def asDict(self, recursive: bool = False) -> dict[str, Any]:  # noqa: N802  (PySpark's name)
        """The columns and their values; with `recursive` also the rows inside them as dicts."""
        return {name: as_dicts(value) if recursive else value for name, value in vars(self).items()}


_new = Row.__new__
_set = object.__setattr__


def row_of(fields: dict[str, Any]) -> Row:
    """The row of these columns. It keeps the dict itself: nobody else may change it afterwards."""
    row = _new(Row)
    _set(row, "__dict__", fields)
    return row


def as_dicts(value: Any) -> Any:
    """`value` with every row in it as a dict, also PySpark's."""
    kind = type(value)
    if kind is Row:
        return {name: as_dicts(item) for name, item in vars(value).items()}
    if kind is dict:
        return {name: as_dicts(item) for name, item in value.items()}
    if kind is list:
        return [as_dicts(item) for item in value]
    if isinstance(value, tuple):
        names = field_names(value)
        items = [as_dicts(item) for item in value]
        return tuple(items) if names is None else dict(zip(names, items, strict=True))
    return value


def field_names(value: tuple[Any, ...]) -> list[str] | None:
    """The names in a PySpark Row or a named tuple; None for a plain tuple."""
    kind = type(value)
    if kind is tuple:
        return None
    names = getattr(value, "__fields__", None)
    if names is None:
        names = getattr(kind, "_fields", None)
    return None if names is None else list(names)


def conversion(kind: Any) -> Convert | None:
    """How a value that Arrow made of a Spark type becomes what PySpark makes of it; None: it is that already.

    Arrow gives a struct as a dict and a map as a list of pairs; PySpark gives a row and a dict.
    """
    if hasattr(kind, "fields"):
        return _Struct({field.name: conversion(field.dataType) for field in kind.fields})
    if hasattr(kind, "elementType"):
        item = conversion(kind.elementType)
        return None if item is None else _Array(item)
    if hasattr(kind, "keyType"):
        return _Map(conversion(kind.keyType), conversion(kind.valueType))
    return None


class _Struct:
    """A dict to a row. The columns that need no conversion are left as they are."""

    def __init__(self, columns: dict[str, Convert | None]) -> None:
        self._columns = [(name, convert) for name, convert in columns.items() if convert is not None]

    def __call__(self, value: Any) -> Any:
        if value is None:
            return None
        for name, convert in self._columns:
            value[name] = convert(value[name])
        return row_of(value)


class _Array:
    def __init__(self, item: Convert) -> None:
        self._item = item

    def __call__(self, value: Any) -> Any:
        return None if value is None else [self._item(item) for item in value]


class _Map:
    def __init__(self, key: Convert | None, item: Convert | None) -> None:
        self._key = key or _same
        self._item = item or _same

    def __call__(self, value: Any) -> Any:
        return None if value is None else {self._key(key): self._item(item) for key, item in value}


def _same(value: Any) -> Any:
    return value
