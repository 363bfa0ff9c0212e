"""Sources: one contract for those whose ranges we read, another for those that Spark reads.

A ranged source is replayable by position: reading the same range again gives the same records. It only plans on the
driver; the range itself is read in the task that owns the state partition. Where Spark reads, it owns the position too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple, Protocol

from holdfast.errors import FixTheRecord, InvalidPipeline
from holdfast.log.manifest import Position
from holdfast.plan.functions import check_function
from holdfast.plan.record import Chunk

CHUNK = 50_000
"""Records that a task takes at once: their state is one multi-get."""


class Span(NamedTuple):
    """What a batch reads of a ranged source: from the last commit's end to the proposed end."""

    start: Position
    end: Position


class Source(Protocol):
    """What every source has."""

    kind: str
    """In the manifest: another kind of source cannot go on from its positions."""
    name: str
    """For people, in errors and logs."""
    names: tuple[str, ...]
    """Of the sources that are read together: more than one if it is a joined one. A chunk says which it is of."""

    def joined(self, other: Any) -> Source:
        """A source of the records of both; `InvalidPipeline` if they cannot be read together."""


class RangedSource(Source, Protocol):
    """A source whose ranges tasks read."""

    def initial(self) -> Position:
        """Where a new application begins."""

    def propose(self, start: Position, rows: int) -> Position:
        """How far a batch of at most `rows` rows that begins at `start` may go; `start` itself if there is nothing.

        It may be asked any number of times before there is a batch, and asking changes nothing.
        """

    def count(self, span: Span) -> int:
        """How many records lie in `span`, at most."""

    def silent(self, span: Span) -> Collection[int]:
        """Which of `names` have nothing in `span` nor, as far as was seen, after it; none that could not be looked at."""

    def until_now(self) -> None:
        """What comes from now on is not part of this run."""

    def is_over(self, position: Position, proposed: Position | None = None) -> bool:
        """Whether nothing can ever come after `position`, as far as can be told without reading; or from having read, if it
        should have been read to `proposed` and there was no more. Asked without `proposed` when a run begins, and after each
        commit with it."""

    def read(self, partition: int, partitions: int, span: Span) -> Reading:
        """The records of `span` that belong to a state partition."""


class Reading(Protocol):
    """An iterator of chunks that knows, when it is exhausted, where it came to."""

    end: Position

    def __iter__(self) -> Iterator[Chunk]: ...


def fair_shares(available: list[int], rows: int) -> list[int]:
    """How many of its available records each of several may put into a batch of `rows`: all alike, as far as there are."""
    shares = [0] * len(available)
    left = rows
    open_ones = [one for one, count in enumerate(available) if count > 0]
    while left > 0 and open_ones:
        fair = max(1, left // len(open_ones))
        for one in open_ones:
            more = min(fair, available[one] - shares[one], left)
            shares[one] += more
            left -= more
        open_ones = [one for one in open_ones if shares[one] < available[one]]
    return shares


Extract = Callable[[Any], Any]


def extractor(what: str, given: str | Extract | None) -> Extract | None:
    """A `key=` or `timestamp=` argument as a function of the value."""
    if given is None:
        return None
    if callable(given):
        check_function(f"{what}=", given, ["value"])
        return given
    if isinstance(given, str):
        return Field(given)
    raise InvalidPipeline(f"{what} must be a field name or a function of the value, not {type(given).__qualname__}")


class Field:
    """Takes one field of a dict. A class, so that it pickles small and names itself in errors."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, value: Any) -> Any:
        try:
            return value[self.name]
        except (KeyError, TypeError, IndexError):
            raise FixTheRecord(f"the value has no field {self.name!r}") from None
