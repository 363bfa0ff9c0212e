"""An iterable as a source: a sequence, or a function that makes the same iterator again each time it is called.

The position is the number of records taken. Every task walks the batch's range and keeps the records whose key
belongs to its partition; a worker process remembers where its iterator stands, so that going on costs nothing and only a
new process has to skip ahead. The records are copied as they are handed out: a step may change what it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from operator import itemgetter
from typing import Any
from zlib import crc32

from holdfast.errors import InvalidPipeline
from holdfast.log.manifest import Position
from holdfast.plan.record import Chunk, copied
from holdfast.sources.base import CHUNK, Extract, Field, Span, extractor
from holdfast.sources.joined import JoinedSource
from holdfast.state.keys import encode_key, encode_keys
from holdfast.times import milliseconds


class IterableSource:
    """See `Application.from_iterable`."""

    kind = "iterable"
    is_ordered = True
    """Positions order all records: they keep that order per key, also where the key changes."""

    def __init__(
        self,
        records: Sequence[Any] | Callable[[], Iterable[Any]],
        key: str | Extract | None,
        timestamp: str | Extract | None,
        name: str = "iterable",
    ) -> None:
        if isinstance(records, Mapping):
            raise InvalidPipeline(
                "from_iterable() takes a sequence; of a dict, take list(d.items()) or list(d.values())"
            )
        if not callable(records) and not (hasattr(records, "__getitem__") and hasattr(records, "__len__")):
            raise InvalidPipeline(
                "from_iterable() takes a sequence, or a function that returns a new iterator each time it is called; "
                f"a {type(records).__qualname__} can be read only once, so its records could not be read again after a crash"
            )
        self.name = name
        self.names: tuple[str, ...] = (name,)
        self._records = records
        self._key = extractor("key", key)
        self._timestamp = extractor("timestamp", timestamp)
        self._cursor: _Cursor | None = None
        """Where a task of this process stands. It does not travel: every run has its own in each worker."""

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_cursor": None}

    def joined(self, other: Any) -> JoinedSource:
        if not isinstance(other, IterableSource):
            raise InvalidPipeline(
                f"{self.name} and {other.name} cannot be read by one application: their keys lie in different partitions"
            )
        return JoinedSource(self, other)

    def initial(self) -> Position:
        return {"taken": 0}

    def propose(self, start: Position, rows: int) -> Position:
        end: int = start["taken"] + rows
        return {"taken": end if callable(self._records) else max(start["taken"], min(end, len(self._records)))}

    def count(self, span: Span) -> int:
        return int(span.end["taken"]) - int(span.start["taken"])

    def silent(self, span: Span) -> tuple[int, ...]:
        is_waiting = not callable(self._records) and span.end["taken"] < len(self._records)
        return () if is_waiting or span.start != span.end else (0,)

    def until_now(self) -> None:
        """An iterable ends by itself."""

    def is_over(self, position: Position, proposed: Position | None = None) -> bool:
        if proposed is not None and position != proposed:
            return True
        return not callable(self._records) and position["taken"] >= len(self._records)

    def read(self, partition: int, partitions: int, span: Span) -> IterableReading:
        return IterableReading(self, partition, partitions, span)

    def take(self, batch: int, start: int, end: int) -> Sequence[Any]:
        """The records of a range, in a batch that begins at `batch`; fewer if the source ends before."""
        if not callable(self._records):
            return self._records[start:end]
        if self._cursor is None:
            self._cursor = _Cursor(self._records)
        return self._cursor.take(batch, start, end)

    def chunk(self, start: int, records: Sequence[Any], partition: int, partitions: int) -> Chunk:
        """Those of `records` that belong to a partition."""
        try:
            keys, routes = self._keys_and_routes(records)
            times = None if self._timestamp is None else [milliseconds(time) for time in map(self._timestamp, records)]
        except Exception:  # some record is at fault: find out which
            return self._careful_chunk(start, records, partition, partitions)
        mine = [
            index
            for index, route in enumerate(routes)
            if (crc32(route) if route is not None else start + index) % partitions == partition
        ]
        return Chunk(
            keys=[keys[index] for index in mine],
            values=[copied(records[index]) for index in mine],
            timestamps=None if times is None else [times[index] for index in mine],
            positions=[start + index for index in mine],
            routes=[routes[index] for index in mine],
        )

    def _keys_and_routes(self, records: Sequence[Any]) -> tuple[list[Any], list[bytes | None]]:
        if self._key is None:
            return [None] * len(records), [None] * len(records)
        key_of = itemgetter(self._key.name) if isinstance(self._key, Field) else self._key
        keys = list(map(key_of, records))
        return keys, encode_keys(keys)

    def _careful_chunk(self, start: int, records: Sequence[Any], partition: int, partitions: int) -> Chunk:
        """As `chunk`, record by record: one whose key or time cannot be had is a fault of its own, owned by its position."""
        chunk = Chunk([], [], None if self._timestamp is None else [], [], [], {})
        assert chunk.routes is not None
        assert isinstance(chunk.positions, list)
        for position, record in enumerate(records, start):
            key, route, time, fault = None, None, None, None
            try:
                if self._key is not None:
                    key = self._key(record)
                    route = None if key is None else encode_key(key)
                if self._timestamp is not None:
                    time = milliseconds(self._timestamp(record))
            except Exception as error:
                fault = error
            if (position if route is None else crc32(route)) % partitions != partition:
                continue
            if fault is not None:
                chunk.faults[len(chunk.keys)] = fault
            chunk.keys.append(key)
            chunk.routes.append(route)
            chunk.values.append(copied(record))
            chunk.positions.append(position)
            if chunk.timestamps is not None:
                chunk.timestamps.append(time)
        return chunk


class IterableReading:
    """The chunks of one range."""

    def __init__(self, source: IterableSource, partition: int, partitions: int, span: Span) -> None:
        self.end = span.start
        self._source = source
        self._partition = partition
        self._partitions = partitions
        self._span = span

    def __iter__(self) -> Iterator[Chunk]:
        batch, end = self._span.start["taken"], self._span.end["taken"]
        start = batch
        while start < end:
            records = self._source.take(batch, start, min(start + CHUNK, end))
            if not len(records):
                break
            yield self._source.chunk(start, records, self._partition, self._partitions)
            start += len(records)
            self.end = {"taken": start}


class _Cursor:
    """An iterator that keeps the records of the current batch: the next task in this process may want them too."""

    def __init__(self, factory: Callable[[], Iterable[Any]]) -> None:
        self._factory = factory
        self._iterator = iter(factory())
        self._kept: list[Any] = []
        self._kept_from = 0
        self._reached = 0

    def take(self, batch: int, start: int, end: int) -> Sequence[Any]:
        """The records from `start` to `end`, in a batch that begins at `batch`."""
        if batch < self._kept_from:
            self.__init__(self._factory)  # type: ignore[misc]  # begin again
        del self._kept[: batch - self._kept_from]
        if not self._kept:
            for _ in islice(self._iterator, batch - self._reached):
                self._reached += 1
        self._kept_from = batch
        fresh = list(islice(self._iterator, max(0, end - self._reached)))
        self._kept += fresh
        self._reached += len(fresh)
        return self._kept[start - batch : end - batch]
