"""Several sources read together: every batch takes some records of each.

The position is {"sources": [position of each]}. A batch is shared out evenly as far as there are records; one that has
come to its end leaves its share to the others. Within a task the sources are read one after the other, so there is no
order between them. The keys of all must be spread over the partitions in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.log.manifest import Position
from holdfast.plan.record import Chunk
from holdfast.sources.base import RangedSource, Reading, Span, fair_shares


class JoinedSource:
    """The records of several sources whose ranges we read."""

    def __init__(self, *members: RangedSource) -> None:
        self.kind = "+".join(member.kind for member in members)
        self.names = tuple(name for member in members for name in member.names)
        self.name = ", ".join(self.names)
        self._members = members
        self._ended: set[int] = set()
        """Members that in this run gave less than was proposed: they have no more."""

    def joined(self, other: RangedSource) -> JoinedSource:
        self._members[0].joined(other)  # says it if they do not fit
        return JoinedSource(*self._members, other)

    def initial(self) -> Position:
        return {"sources": [member.initial() for member in self._members]}

    def propose(self, start: Position, rows: int) -> Position:
        starts: list[Position] = start["sources"]
        available = [
            0 if index in self._ended else member.count(Span(at, member.propose(at, rows)))
            for index, (member, at) in enumerate(zip(self._members, starts, strict=True))
        ]
        shares = fair_shares(available, rows)
        ends = [
            member.propose(at, share) if share else at
            for member, at, share in zip(self._members, starts, shares, strict=True)
        ]
        return {"sources": ends}

    def count(self, span: Span) -> int:
        return sum(member.count(part) for member, part in zip(self._members, _parts(span), strict=True))

    def silent(self, span: Span) -> list[int]:
        parts = zip(self._members, _parts(span), strict=True)
        return [index for index, (member, part) in enumerate(parts) if member.silent(part)]

    def until_now(self) -> None:
        for member in self._members:
            member.until_now()

    def is_over(self, position: Position, proposed: Position | None = None) -> bool:
        """Also remembers, for `propose`, which members have come to their end; a run that begins forgets it."""
        starts: list[Position] = position["sources"]
        if proposed is None:
            self._ended.clear()
        else:
            self._ended |= {index for index, end in enumerate(proposed["sources"]) if starts[index] != end}
        return all(
            index in self._ended or member.is_over(at)
            for index, (member, at) in enumerate(zip(self._members, starts, strict=True))
        )

    def read(self, partition: int, partitions: int, span: Span) -> JoinedReading:
        return JoinedReading(
            [member.read(partition, partitions, part) for member, part in zip(self._members, _parts(span), strict=True)]
        )


class JoinedReading:
    """The chunks of one range, source by source."""

    def __init__(self, readings: list[Reading]) -> None:
        self._readings = readings

    def __iter__(self) -> Iterator[Chunk]:
        for origin, reading in enumerate(self._readings):
            for chunk in reading:
                chunk.origin = origin
                yield chunk

    @property
    def end(self) -> Position:
        return {"sources": [reading.end for reading in self._readings]}


def _parts(span: Span) -> list[Span]:
    return [Span(start, end) for start, end in zip(span.start["sources"], span.end["sources"], strict=True)]
