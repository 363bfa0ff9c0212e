"""The index of timers: when which document has to be looked at, ordered by time.

It lies in the same store as the documents, under `t<store>\\0<clock><due><encoded key>`, the clock as one letter and the
time as 8 bytes whose order is that of the times; the values are empty. A document has at most one entry per clock, for
the earliest of its timers and of the ends of its values. So what is due is one range, and what is not costs nothing.

The documents are the truth, the index follows from them: an entry that its document does not know is dropped when it is
met, and a restore from a changelog, which has documents only, makes the entries again.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from holdfast.state.cell import Clock
from holdfast.stores.base import Store

CLOCKS: tuple[Clock, Clock] = ("processing", "event")
_LETTERS = {"processing": b"p", "event": b"e"}
Dues = list[int | None]
"""By clock, in the order of `CLOCKS`: when a document has next to be looked at."""
PAGE = 10_000
"""Documents that are looked at together."""
LOOK = 1_000
"""Entries to pass over in search of the next time: beyond them an early answer is good enough."""
_ZERO = 1 << 63


class Place(NamedTuple):
    """An entry."""

    clock: Clock
    due: int
    route: bytes


class TimerIndex:
    """The index of one store, as a batch finds it, and what the batch changes in it."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._prefix = index_prefix(name)
        self._changes: dict[bytes, bytes | None] = {}
        self._stays: dict[Clock, int] = {}
        """By clock: the earliest place of a document that changed and has it still."""

    def due(self, clock: Clock, before: int) -> Iterator[list[Place]]:
        """What is due before a time, in its order, page by page."""
        start = self._prefix + _LETTERS[clock]
        entries = self._store.scan(start, start + _time(before))
        while page := [self._place(clock, key) for key, _ in islice(entries, PAGE)]:
            yield page

    def drop(self, place: Place) -> None:
        self._changes[self._key(*place)] = None

    def move(self, route: bytes, before: Dues | None, after: Dues | None) -> None:
        """A document has changed, and with it perhaps its place."""
        for clock, old, new in zip(CLOCKS, before or (None, None), after or (None, None), strict=True):
            if old == new:
                if new is not None:
                    self._stays[clock] = min(new, self._stays.get(clock, new))
                continue
            if old is not None:
                self._changes.setdefault(self._key(clock, old, route), None)
            if new is not None:
                self._changes[self._key(clock, new, route)] = b""

    def changes(self) -> list[tuple[bytes, bytes | None]]:
        return sorted(self._changes.items())

    def first(self, clock: Clock, after: int | None) -> int | None:
        """The earliest time in the index after this batch, or an earlier one; `after`: what is earlier was looked at, so it is
        among the changes, also if it stays where it is."""
        start = self._prefix + _LETTERS[clock]
        found = [
            self._place(clock, key).due
            for key, value in self._changes.items()
            if value is not None and key.startswith(start)
        ]
        if clock in self._stays:
            found.append(self._stays[clock])
        scan = self._store.scan(start if after is None else start + _time(after), start + b"\xff" * 9)
        for passed, (key, _) in enumerate(scan):
            if self._changes.get(key, b"") is not None or passed == LOOK:
                found.append(self._place(clock, key).due)
                break
        return min(found, default=None)

    def _key(self, clock: Clock, due: int, route: bytes) -> bytes:
        return self._prefix + _LETTERS[clock] + _time(due) + route

    def _place(self, clock: Clock, key: bytes) -> Place:
        at = len(self._prefix) + 1
        return Place(clock, int.from_bytes(key[at : at + 8], "big") - _ZERO, key[at + 8 :])


def index_prefix(store: str) -> bytes:
    """What the keys of the index of `store` begin with."""
    return b"t" + store.encode() + b"\0"


def entries(store: str, route: bytes, dues: Dues) -> Iterator[bytes]:
    """The keys in the index of a document with these times."""
    for clock, due in zip(CLOCKS, dues, strict=True):
        if due is not None:
            yield index_prefix(store) + _LETTERS[clock] + _time(due) + route


def _time(due: int) -> bytes:
    """8 bytes in the order of time."""
    return min(max(due + _ZERO, 0), 2 * _ZERO - 1).to_bytes(8, "big")
