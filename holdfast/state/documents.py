"""Documents: one per (store, key), a map of the user's sub-keys; and `State`, the handle that a function is given.

The documents that a batch touches are read once, with one sorted multi-get per chunk of records, changed in memory
and written once, as the delta. Nothing is written anywhere before the batch is done.

On disk a document is a msgpack map, str to one of
    nil, bool, int, float, str    the value itself
    bin                           a value as the store's codec wrote it
    ext 1                         bytes that were set by `set_bytes`
    ext 2                         a value with an end: 8 bytes, the processing time in ms at which it expires, then one of the above
    ext 3                         the same by event time
under the store key `d<store>\\0<encoded key>`. A document without entries is deleted. Two names are reserved: the timers of
the key, and when the document has next to be looked at, which is also its place in the index of state/timers.py.

A record that fails leaves no trace: every write notes what it replaced, and `rollback` puts it back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from operator import attrgetter
from typing import Any, Protocol

import msgspec

from holdfast.errors import InvalidPipeline, MissingKey, UnsupportedKey, UnsupportedValue
from holdfast.state.cell import Clock
from holdfast.state.codecs import Codec, is_scalar
from holdfast.state.keys import decode_key, encode_key
from holdfast.state.timers import CLOCKS, Dues, Place, TimerIndex
from holdfast.stores.base import Mark, Store
from holdfast.times import milliseconds

_ABSENT: Any = object()
_BYTES = 1
_EXPIRING = 2
_EXPIRING_BY_EVENT = 3
_Ext = msgspec.msgpack.Ext
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(dict[str, Any]).decode
_decode_spilled = msgspec.msgpack.Decoder(tuple[int, Dues | None, bytes | None]).decode


TIMERS, DUES = "\0\0timers", "\0\0dues"
"""Names of entries that no sub-key can have: the key's timers, and the document's place in the index."""
Timer = tuple[str, Clock, int]
"""(name, clock, due in ms)."""


class Now(Protocol):
    """The times that a task goes by."""

    time_ms: int
    """The batch's processing time."""
    watermark_ms: int | None
    """The batch's watermark; None: the program has none."""
    timestamp: int
    """The current record's event time."""


class Changes(msgspec.Struct):
    """What a batch changes in one store."""

    keys: list[bytes]
    """Of documents, in order."""
    values: list[bytes | None]
    index: list[tuple[bytes, bytes | None]]
    """Of the index of timers, in order."""
    documents: int
    """How many more there are."""
    size: int
    """By how many bytes they grew."""


def document_prefix(store: str) -> bytes:
    """What the store keys of all documents of `store` begin with."""
    return b"d" + store.encode() + b"\0"


class State:
    """The state of the current record's key in one store: a durable dictionary.

    Guaranteed: what `get` returns equals what was last `set`, in this batch or any later one, through crashes and restarts;
    other keys and other stores are invisible; if the record fails, none of its changes remain.

    Not guaranteed: a value that is changed in place is not saved until it is `set` again, and a handle kept beyond
    the call it was given to is worth nothing.

    >>> from holdfast.testing import run
    >>> def count(value, state):
    ...     total = state.get("total", default=0) + 1
    ...     state.set("total", total)
    ...     return total
    >>> run(lambda sdf: sdf.apply(count, stateful=True), [("a", 1), ("b", 1), ("a", 1)]).values
    [1, 1, 2]
    """

    __slots__ = ("_before", "_changed", "_document", "_documents", "_known", "_route")

    def __init__(self, documents: Documents, route: bytes, stored: bytes | None) -> None:
        self._documents = documents
        self._route = route
        self._changed = False
        self._known = 0 if stored is None else len(stored)
        self._document: dict[str, Any] = {} if stored is None else _decode(stored)
        self._before: Any = self._document.get(DUES)
        """Its place in the index, as the store has it."""

    def get(self, key: Any, default: Any = None) -> Any:
        """The value of `key`; `default` if it was never set or was deleted. A stored None is None."""
        entry = self._document.get(key if type(key) is str else _sub_key(key), _ABSENT)
        if entry is _ABSENT:
            return default
        kind = type(entry)
        if kind is not bytes and kind is not _Ext:
            return entry
        return self._decoded(entry, default)

    def set(self, key: Any, value: Any, ttl: timedelta | None = None, clock: Clock = "processing") -> None:
        """Set `key`. With `ttl` the value is gone that long after the batch's processing time or, by the clock "event", after
        the record's event time. Only by event time does it end at the same record when the input is read again.

        Guaranteed: an expired value is invisible at once, by event time to every record that is later, and removed from the
        store later. `UnsupportedValue` if the codec would change the value; the state is then as it was. By the clock "event" it
        needs a watermark.
        """
        codec = self._documents.codec
        entry = value if codec.inline and is_scalar(value) else codec.encode(value)
        if ttl is not None:
            entry = self._ending(entry, ttl, clock)
        self._put(key, entry)

    def delete(self, key: Any) -> None:
        """Remove `key`; nothing happens if there is none."""
        name = key if type(key) is str else _sub_key(key)
        if name in self._document:
            self._note(name, self._document.pop(name))

    def exists(self, key: Any) -> bool:
        """Whether `key` has a value, be it None."""
        entry = self._document.get(key if type(key) is str else _sub_key(key), _ABSENT)
        return entry is not _ABSENT and not self._documents.is_over(entry)

    def get_bytes(self, key: Any, default: bytes | None = None) -> bytes | None:
        """The bytes that `set_bytes` stored under `key`."""
        entry = self._document.get(key if type(key) is str else _sub_key(key), _ABSENT)
        if entry is _ABSENT or self._documents.is_over(entry):
            return default
        entry = _inner(entry)
        if type(entry) is not _Ext:
            raise UnsupportedValue("this sub-key was written by set(): read it with get()")
        return bytes(entry.data)

    def set_bytes(self, key: Any, value: bytes, ttl: timedelta | None = None, clock: Clock = "processing") -> None:
        """Store bytes as they are, past the codec."""
        if not isinstance(value, bytes | bytearray | memoryview):
            raise UnsupportedValue(f"set_bytes() takes bytes, not {type(value).__qualname__}")
        entry: Any = _Ext(_BYTES, bytes(value))
        if ttl is not None:
            entry = self._ending(entry, ttl, clock)
        self._put(key, entry)

    def set_timer(self, name: str, at: int | datetime, clock: Clock = "event") -> None:
        """Have the step's `on_timer` called for this key, once, in the first batch whose clock is later than `at`.

        `at` is an int of ms or a datetime; a timer of the same name is replaced. By the clock "event" it is the watermark that
        passes `at`, by "processing" the wall clock. Timers fire also while no input arrives. One that is past already fires at
        the end of this batch or in the next one.

        The timers of a key are part of its document, which is read and written as a whole: a key may have thousands, and each
        batch that touches the key then costs that much.

        >>> from holdfast.testing import Harness
        >>> def remember(value, key, timestamp, headers, state):
        ...     state.set_timer("quiet", timestamp + 1000)
        >>> def wake(key, name, state):
        ...     return [f"{key} is {name}"]
        >>> def pipeline(sdf):
        ...     return sdf.apply(remember, stateful=True, metadata=True, on_timer=wake).filter(lambda value: value is not None)
        >>> harness = Harness(pipeline, watermark_delay=0)
        >>> harness.feed(("ann", 1, 5_000), ("bob", 1, 9_000))
        >>> harness.run()
        >>> harness.run()
        >>> harness.values
        ['ann is quiet']
        """
        if not self._documents.has_timers:
            raise InvalidPipeline("a timer needs somebody to call: give the step on_timer=")
        self._set_timer(name, clock, milliseconds(at))

    def delete_timer(self, name: str) -> None:
        """Drop a timer; nothing happens if there is none of this name."""
        self._drop_timer(name)

    def _set_timer(self, name: str, clock: Clock, due: int) -> None:
        if type(name) is not str or not is_scalar(name):
            raise UnsupportedKey("the name of a timer is a str")
        self._check_clock("a timer", clock)
        if not -(2**63) <= due < 2**63:
            raise UnsupportedValue("the time of a timer is out of range")
        timers = self._timers()
        self._note_timer(name, timers.pop(name, _ABSENT))
        timers[name] = (clock, due)

    def _drop_timer(self, name: str) -> None:
        timers = self._timers()
        if name in timers:
            self._note_timer(name, timers.pop(name))

    def _timers(self) -> dict[str, tuple[Clock, int]]:
        """The clock and due time of each, by name: so they are in memory from when they are first asked for."""
        timers = self._document.get(TIMERS, ())
        if type(timers) is not dict:
            timers = self._document[TIMERS] = {name: (clock, due) for name, clock, due in timers}
        return timers

    def _note_timer(self, name: str, replaced: Any) -> None:
        self._mark()
        self._documents.undo.append((self._timers(), name, replaced))

    def _due_timers(self, clock: Clock, before: int) -> list[Timer]:
        """The timers that are due, in the order of their times."""
        due = [(name, by, at) for name, (by, at) in self._timers().items() if by == clock and at < before]
        return sorted(due, key=lambda timer: timer[2])

    def _take(self, timer: Timer) -> bool:
        """Remove a timer that is about to fire; whether it is still there, as one that fired before it may have changed it."""
        name, clock, due = timer
        if self._timers().get(name) != (clock, due):
            return False
        self._drop_timer(name)
        return True

    def _decoded(self, entry: Any, default: Any) -> Any:
        if self._documents.is_over(entry):
            return default
        entry = _inner(entry)
        if type(entry) is bytes:
            return self._documents.codec.decode(entry)
        if type(entry) is _Ext:
            raise UnsupportedValue("this sub-key was written by set_bytes(): read it with get_bytes()")
        return entry

    def _ending(self, entry: Any, ttl: timedelta, clock: Clock) -> Any:
        if not isinstance(ttl, timedelta) or ttl <= timedelta(0):
            raise UnsupportedValue("ttl is a positive timedelta")
        self._check_clock("ttl=", clock)
        now = self._documents.now
        since, code = (now.time_ms, _EXPIRING) if clock == "processing" else (now.timestamp, _EXPIRING_BY_EVENT)
        expires = since + max(1, round(ttl.total_seconds() * 1000))
        if not -(2**63) <= expires < 2**63:
            raise UnsupportedValue("the end of a value with ttl= is out of range")
        return _Ext(code, expires.to_bytes(8, "big", signed=True) + _encode(entry))

    def _check_clock(self, what: str, clock: Clock) -> None:
        if clock not in CLOCKS:
            raise UnsupportedValue(f"clock={clock!r}: it is one of {', '.join(CLOCKS)}")
        if clock == "event" and self._documents.now.watermark_ms is None:
            raise InvalidPipeline(f"{what} by event time needs a watermark: give the application watermark_delay=")

    def _put(self, key: Any, entry: Any) -> None:
        document = self._document
        name: str = key if type(key) is str else _sub_key(key)
        replaced = document.get(name, _ABSENT)
        if replaced is _ABSENT or name < "\1":
            _check_name(key)
        self._note(name, replaced)
        document[name] = entry

    def _note(self, name: str, replaced: Any) -> None:
        """Remember that this document changed and how to undo it."""
        self._mark()
        self._documents.undo.append((self._document, name, replaced))

    def _mark(self) -> None:
        if not self._changed:
            self._changed = True
            self._documents.changed.append(self)


class Documents:
    """The documents of one store that a batch touches, in one partition."""

    def __init__(
        self, store: Store, name: str, codec: Codec, now: Now, undo: list[Any], *, has_timers: bool = False
    ) -> None:
        self.name = name
        self.codec = codec
        self.now = now
        self.has_timers = has_timers
        """Whether somebody is called when a timer is due."""
        self.states: dict[bytes, State] = {}
        """By encoded key: what was asked for in this batch."""
        self.changed: list[State] = []
        self.undo = undo
        """Of the current record, shared by all stores of the task: (document or its timers, name, what it replaced)."""
        self._store = store
        self._scratch: Store | None = None
        self._prefix = document_prefix(name)
        self._stored: dict[bytes, bytes | None] = {}
        """What was read and not yet asked for."""
        self._known: dict[bytes, tuple[int, Dues | None]] = {}
        """Of documents that were read from the scratch store: size and place in the index that the store has."""
        self._index = TimerIndex(store, name)

    def prefetch(self, routes: Iterable[bytes | None]) -> None:
        """Read the documents of these keys, which are about to be asked for."""
        wanted = set(routes).difference(self.states, self._stored)
        wanted.discard(None)
        ordered: list[bytes] = sorted(wanted)  # type: ignore[arg-type]
        prefix = self._prefix
        keys = [prefix + route for route in ordered]
        self._stored.update(zip(ordered, self._store.get_many(keys), strict=True))
        if self._scratch is not None:
            for route, spilled in zip(ordered, self._scratch.get_many(keys), strict=True):
                if spilled is not None:
                    known, before, self._stored[route] = _decode_spilled(spilled)
                    self._known[route] = (known, before)

    def state(self, route: bytes) -> State:
        """The state of an encoded key."""
        state = self.states.get(route)
        if state is None:
            if route not in self._stored:
                self.prefetch((route,))
            state = self.states[route] = State(self, route, self._stored.pop(route))
            if route in self._known:
                state._known, state._before = self._known.pop(route)
        return state

    def due(self, clock: Clock, before: int) -> Iterator[Iterator[tuple[State, Timer]]]:
        """The timers on `clock` that are due, page by page, of each key in the order of their times."""
        for places in self._index.due(clock, before):
            self.prefetch(place.route for place in places)
            yield self._due_at(places, before)

    def _due_at(self, places: list[Place], before: int) -> Iterator[tuple[State, Timer]]:
        """Look at the documents of a page: whatever has expired goes, and they get another place in the index."""
        for place in places:
            state = self.state(place.route)
            dues = state._before
            if dues is None or dues[CLOCKS.index(place.clock)] != place.due:
                self._index.drop(place)  # of a document that a restore has replaced since
            state._mark()
            for timer in state._due_timers(place.clock, before):
                yield state, timer

    def spill(self, scratch: Store) -> None:
        """Put what has changed so far on disk and forget the rest: a batch may touch more keys than memory holds."""
        entries = [(key, _encode((known, before, value))) for key, known, before, value, _ in self._outcomes()]
        held = scratch.mark()
        scratch.apply(entries, held, Mark(held.version + 1, "spilled"))
        self._scratch = scratch
        self.forget()

    def forget(self) -> None:
        """All that was read and changed."""
        self.states.clear()
        self.changed.clear()
        self._stored.clear()
        self._known.clear()

    def changes(self) -> Changes:
        """What the batch changes in this store."""
        if self._scratch is not None:
            self.spill(self._scratch)
        keys: list[bytes] = []
        values: list[bytes | None] = []
        documents = size = 0
        index = self._index
        for key, known, before, value, after in (
            self._outcomes() if self._scratch is None else self._spilled(self._scratch)
        ):
            if before is not None or after is not None:
                index.move(key[len(self._prefix) :], before, after)
            if value is not None:
                documents += not known
                size += len(value) - known + (0 if known else len(key))
            elif known:
                documents -= 1
                size -= known + len(key)
            else:
                continue
            keys.append(key)
            values.append(value)
        return Changes(keys, values, index.changes(), documents, size)

    def next_due(self, clock: Clock, after: int | None) -> int | None:
        """When a document of this store has next to be looked at, as far as is known: not later than that."""
        return self._index.first(clock, after)

    def _outcomes(self) -> Iterator[tuple[bytes, int, Dues | None, bytes | None, Dues | None]]:
        """In key order, of each changed document: its store key; size and place in the index that the store has; the new document
        and its place."""
        prefix = self._prefix
        for state in sorted(self.changed, key=_route_of):
            document = state._document
            after: Dues | None = None
            if state._before is not None or TIMERS in document or _has_an_end(document):
                document = {name: kept for name, kept in document.items() if not self._is_removable(kept)}
                document.pop(DUES, None)
                _list_timers(document)
                after = dues_of(document)
                if after is not None:
                    document[DUES] = after
            yield prefix + state._route, state._known, state._before, _encode(document) if document else None, after

    def _spilled(self, scratch: Store) -> Iterator[tuple[bytes, int, Dues | None, bytes | None, Dues | None]]:
        for key, spilled in scratch.scan(self._prefix, self._prefix[:-1] + b"\1"):
            known, before, value = _decode_spilled(spilled)
            yield key, known, before, value, None if value is None else stored_dues(value)

    def key_of(self, stored: bytes) -> Any:
        """The user's key of a store key."""
        return decode_key(stored[len(self._prefix) :])

    def is_over(self, entry: Any) -> bool:
        """Whether an entry has expired, for the current record."""
        if type(entry) is not _Ext:
            return False
        if entry.code == _EXPIRING:
            return _expires(entry) <= self.now.time_ms
        return entry.code == _EXPIRING_BY_EVENT and _expires(entry) <= self._event_now()

    def _event_now(self) -> int:
        now = self.now
        return now.timestamp if now.watermark_ms is None else max(now.timestamp, now.watermark_ms)

    def _is_removable(self, entry: Any) -> bool:
        """Whether an entry has expired for every record that may still come."""
        if type(entry) is not _Ext:
            return False
        if entry.code == _EXPIRING:
            return _expires(entry) <= self.now.time_ms
        watermark = self.now.watermark_ms
        return entry.code == _EXPIRING_BY_EVENT and watermark is not None and _expires(entry) <= watermark


def rollback(undo: list[Any]) -> None:
    """The record failed: put back what it changed."""
    while undo:
        document, name, replaced = undo.pop()
        if replaced is _ABSENT:
            document.pop(name, None)
        else:
            document[name] = replaced


_route_of = attrgetter("_route")


def _list_timers(document: dict[str, Any]) -> None:
    """Timers as they are on disk, from as they are in memory."""
    timers = document.get(TIMERS)
    if type(timers) is dict:
        document[TIMERS] = [(name, clock, due) for name, (clock, due) in timers.items()]
    if not timers:
        document.pop(TIMERS, None)


def _has_an_end(document: dict[str, Any]) -> bool:
    for entry in document.values():  # noqa: SIM110  (`any` with a generator costs three times as much)
        if type(entry) is _Ext:
            return True
    return False


def read_document(stored: bytes, codec: Codec, now_ms: int, watermark_ms: int | None = None) -> dict[Any, Any]:
    """A stored document as the user would see it at these times."""
    result: dict[Any, Any] = {}
    for name, entry in _decode(stored).items():
        if name in (TIMERS, DUES):
            continue
        if type(entry) is _Ext and entry.code in (_EXPIRING, _EXPIRING_BY_EVENT):
            now = now_ms if entry.code == _EXPIRING else watermark_ms
            if now is not None and _expires(entry) <= now:
                continue
        entry = _inner(entry)
        if type(entry) is bytes:
            entry = codec.decode(entry)
        elif type(entry) is _Ext:
            entry = bytes(entry.data)
        result[_user_key(name)] = entry
    return result


def stored_dues(stored: bytes) -> Dues | None:
    """The place of a stored document in the index."""
    found: Dues | None = _decode(stored).get(DUES)
    return found


def dues_of(document: dict[str, Any]) -> Dues | None:
    """When a document has next to be looked at, by each clock; None: never."""
    found: dict[str, int] = {}
    for _, clock, due in document.get(TIMERS, ()):
        found[clock] = min(due, found.get(clock, due))
    for entry in document.values():
        if type(entry) is _Ext and entry.code in (_EXPIRING, _EXPIRING_BY_EVENT):
            clock, due = ("processing" if entry.code == _EXPIRING else "event"), _expires(entry)
            found[clock] = min(due, found.get(clock, due))
    return [found.get(clock) for clock in CLOCKS] if found else None


def _expires(entry: Any) -> int:
    return int.from_bytes(bytes(entry.data)[:8], "big", signed=True)


def _inner(entry: Any) -> Any:
    """An entry without its end, if it has one."""
    if type(entry) is _Ext and entry.code in (_EXPIRING, _EXPIRING_BY_EVENT):
        return msgspec.msgpack.decode(bytes(entry.data)[8:])
    return entry


def _check_name(key: Any) -> None:
    """Refuse a str that cannot be the name of an entry; those that begin with NUL stand for sub-keys of other types."""
    if type(key) is not str:
        return
    if key[:1] == "\0":
        raise UnsupportedKey("a sub-key cannot begin with a NUL character")
    if not is_scalar(key):
        raise UnsupportedKey("the sub-key is a str with lone surrogates, which no encoding keeps")


def _sub_key(key: Any) -> str:
    """A sub-key that is not a plain str, as the str that stands for it in the document."""
    try:
        return "\0" + encode_key(key).decode("latin-1")
    except (MissingKey, UnsupportedKey):
        raise UnsupportedKey(
            f"a sub-key of type {type(key).__qualname__} cannot be kept; use str, bytes, int, bool, float or a tuple of these"
        ) from None


def _user_key(name: str) -> Any:
    return decode_key(name[1:].encode("latin-1")) if name[:1] == "\0" else name
