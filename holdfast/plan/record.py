"""Records: what flows through the steps, and how a place is named in an error."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, Protocol

import msgspec

Headers = list[tuple[str, bytes | None]]


class Raw(Protocol):
    """A record as it came."""

    def key(self) -> bytes | None: ...

    def value(self) -> bytes | None: ...


class Chunk(msgspec.Struct):
    """Some records of one partition, column by column, in source order."""

    keys: list[Any]
    values: list[Any]
    timestamps: list[int | None] | None
    """Event times in ms; None: the batch's processing time."""
    positions: list[int] | range
    routes: list[bytes | None] | None = None
    """The encoded keys, where the source had to compute them; None in it: no key."""
    faults: dict[int, Exception] = {}
    """By index in the chunk: a record that could not be made (its key or timestamp function raised)."""
    headers: list[Headers | None] | None = None
    """None: no record has any."""
    raw: Sequence[Raw] | None = None
    """The records as they came, where that is bytes."""
    partitions: list[int] | None = None
    """Of the source, in a stage that does not read it; None: the task's own."""
    is_quiet: bool = False
    """The output of these records is out already: they only rebuild the state."""
    origin: int = 0
    """Which of the sources they come from."""


class Record(msgspec.Struct):
    """A record as an error callback sees it."""

    value: Any
    key: Any
    timestamp: int
    headers: Headers | None
    source: str
    partition: int
    position: int


class Place(msgspec.Struct, frozen=True):
    """Where a record failed. Attached to the exception as `exc.holdfast_place`."""

    source: str
    partition: int
    position: int
    """The record's position in the source; in a batch of a Spark source, its row number in the partition."""
    key: Any
    step: str

    def __str__(self) -> str:
        return (
            f"{self.source}, partition {self.partition}, position {self.position}, key {shown_key(self.key)}, "
            f"step {self.step}"
        )


def shown_key(key: Any) -> str:
    text = repr(key)
    return text if len(text) <= 80 else text[:77] + "..."


IMMUTABLE = frozenset((str, int, float, bool, bytes, type(None)))


def copied(value: Any) -> Any:
    """A copy that shares nothing mutable with `value`."""
    kind = type(value)
    if kind in IMMUTABLE:
        return value
    if kind is dict and IMMUTABLE.issuperset(map(type, value.values())):
        return value.copy()
    try:
        return pickle.loads(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))
    except (pickle.PicklingError, AttributeError, TypeError):
        return deepcopy(value)  # slower, but knows instances of classes that pickle cannot name


def dicts(columns: dict[str, list[Any]], rows: int) -> list[dict[str, Any]]:
    """Columns as rows. A function with a dict display is twice as quick as `dict(zip(...))`, and this is the hot path."""
    if not columns:
        return [{} for _ in range(rows)]
    names = [f"c{index}" for index in range(len(columns))]
    display = ", ".join(f"{field!r}: {name}" for field, name in zip(columns, names, strict=True))
    maker: Callable[..., dict[str, Any]] = eval(f"lambda {', '.join(names)}: {{{display}}}")
    return list(map(maker, *columns.values()))
