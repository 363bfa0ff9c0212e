"""Documents: one per (store, key), a map of the user's sub-keys; and `State`, the handle that a function is given.

The documents that a batch touches are read once, with one sorted multi-get per chunk of records, changed in memory
and written once, as the delta. Nothing is written anywhere before the batch is done.

On disk a document is a msgpack map, str to one of
    nil, bool, int, float, str    the value itself
    bin                           a value as the store's codec wrote it
    ext 1                         bytes that were set by `set_bytes`
    ext 2                         a value with an end: 8 bytes, the time in ms at which it expires, then one of the above
under the store key `d<store>\\0<encoded key>`. A document without entries is deleted.

A record that fails leaves no trace: every write notes what it replaced, and `rollback` puts it back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import timedelta
from operator import attrgetter
from typing import Any

import msgspec

from holdfast.errors import MissingKey, UnsupportedKey, UnsupportedValue
from holdfast.state.codecs import Codec, is_scalar
from holdfast.state.keys import decode_key, encode_key
from holdfast.stores.base import Mark, Store

_ABSENT: Any = object()
_BYTES = 1
_EXPIRING = 2
_Ext = msgspec.msgpack.Ext
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(dict[str, Any]).decode
_decode_spilled = msgspec.msgpack.Decoder(tuple[int, bytes | None]).decode


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

    __slots__ = ("_changed", "_document", "_documents", "_known", "_route")

    def __init__(self, documents: Documents, route: bytes, stored: bytes | None) -> None:
        self._documents = documents
        self._route = route
        self._changed = False
        self._known = 0 if stored is None else len(stored)
        self._document: dict[str, Any] = {} if stored is None else _decode(stored)

    def get(self, key: Any, default: Any = None) -> Any:
        """The value of `key`; `default` if it was never set or was deleted. A stored None is None."""
        entry = self._document.get(key if type(key) is str else _sub_key(key), _ABSENT)
        if entry is _ABSENT:
            return default
        kind = type(entry)
        if kind is not bytes and kind is not _Ext:
            return entry
        return self._decoded(entry, default)

    def set(self, key: Any, value: Any, ttl: timedelta | None = None) -> None:
        """Set `key`. With `ttl` the value is gone that long after the batch's processing time.

        `UnsupportedValue` if the codec would change the value; the state is then as it was.
        """
        codec = self._documents.codec
        entry = value if codec.inline and is_scalar(value) else codec.encode(value)
        if ttl is not None:
            entry = self._ending(entry, ttl)
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

    def set_bytes(self, key: Any, value: bytes, ttl: timedelta | None = None) -> None:
        """Store bytes as they are, past the codec."""
        if not isinstance(value, bytes | bytearray | memoryview):
            raise UnsupportedValue(f"set_bytes() takes bytes, not {type(value).__qualname__}")
        entry: Any = _Ext(_BYTES, bytes(value))
        if ttl is not None:
            entry = self._ending(entry, ttl)
        self._put(key, entry)

    def _decoded(self, entry: Any, default: Any) -> Any:
        if self._documents.is_over(entry):
            return default
        entry = _inner(entry)
        if type(entry) is bytes:
            return self._documents.codec.decode(entry)
        if type(entry) is _Ext:
            raise UnsupportedValue("this sub-key was written by set_bytes(): read it with get_bytes()")
        return entry

    def _ending(self, entry: Any, ttl: timedelta) -> Any:
        if not isinstance(ttl, timedelta) or ttl <= timedelta(0):
            raise UnsupportedValue("ttl is a positive timedelta")
        expires = self._documents.now_ms + max(1, round(ttl.total_seconds() * 1000))
        return _Ext(_EXPIRING, expires.to_bytes(8, "big") + _encode(entry))

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
        documents = self._documents
        if not self._changed:
            self._changed = True
            documents.changed.append(self)
        documents.undo.append((self._document, name, replaced))


class Documents:
    """The documents of one store that a batch touches, in one partition."""

    def __init__(self, store: Store, name: str, codec: Codec, now_ms: int, undo: list[Any]) -> None:
        self.name = name
        self.codec = codec
        self.now_ms = now_ms
        self.states: dict[bytes, State] = {}
        """By encoded key: what was asked for in this batch."""
        self.changed: list[State] = []
        self.undo = undo
        """Of the current record, shared by all stores of the task: (document, sub-key, what it replaced)."""
        self._store = store
        self._scratch: Store | None = None
        self._prefix = document_prefix(name)
        self._stored: dict[bytes, bytes | None] = {}
        """What was read and not yet asked for."""
        self._known: dict[bytes, int] = {}
        """Of documents that were read from the scratch store: the size that the store has."""

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
                    self._known[route], self._stored[route] = _decode_spilled(spilled)

    def state(self, route: bytes) -> State:
        """The state of an encoded key."""
        state = self.states.get(route)
        if state is None:
            if route not in self._stored:
                self.prefetch((route,))
            state = self.states[route] = State(self, route, self._stored.pop(route))
            if self._known:
                state._known = self._known.pop(route, state._known)
        return state

    def spill(self, scratch: Store) -> None:
        """Put what has changed so far on disk and forget the rest: a batch may touch more keys than memory holds."""
        entries = [(key, _encode((known, value))) for key, known, value in self._outcomes()]
        held = scratch.mark()
        scratch.apply(entries, held, Mark(held.version + 1, "spilled"))
        self._scratch = scratch
        self.states.clear()
        self.changed.clear()
        self._stored.clear()
        self._known.clear()

    def changes(self) -> tuple[list[bytes], list[bytes | None], int, int]:
        """The delta: sorted store keys, their new values; and by how much documents and bytes grew."""
        if self._scratch is not None:
            self.spill(self._scratch)
        keys: list[bytes] = []
        values: list[bytes | None] = []
        documents = size = 0
        for key, known, value in self._outcomes() if self._scratch is None else self._spilled(self._scratch):
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
        return keys, values, documents, size

    def _outcomes(self) -> Iterator[tuple[bytes, int, bytes | None]]:
        """In key order: the store key of each changed document, the size that the store has, and the new document."""
        prefix = self._prefix
        for state in sorted(self.changed, key=_route_of):
            document = state._document
            for entry in document.values():
                if type(entry) is _Ext:
                    document = {name: kept for name, kept in document.items() if not self.is_over(kept)}
                    break
            yield prefix + state._route, state._known, _encode(document) if document else None

    def _spilled(self, scratch: Store) -> Iterator[tuple[bytes, int, bytes | None]]:
        for key, spilled in scratch.scan(self._prefix, self._prefix[:-1] + b"\1"):
            known, value = _decode_spilled(spilled)
            yield key, known, value

    def key_of(self, stored: bytes) -> Any:
        """The user's key of a store key."""
        return decode_key(stored[len(self._prefix) :])

    def is_over(self, entry: Any) -> bool:
        """Whether an entry has expired."""
        return type(entry) is _Ext and entry.code == _EXPIRING and _expires(entry) <= self.now_ms


def rollback(undo: list[Any]) -> None:
    """The record failed: put back what it changed."""
    while undo:
        document, name, replaced = undo.pop()
        if replaced is _ABSENT:
            document.pop(name, None)
        else:
            document[name] = replaced


_route_of = attrgetter("_route")


def read_document(stored: bytes, codec: Codec, now_ms: int) -> dict[Any, Any]:
    """A stored document as the user would see it at `now_ms`."""
    result: dict[Any, Any] = {}
    for name, entry in _decode(stored).items():
        if type(entry) is _Ext and entry.code == _EXPIRING and _expires(entry) <= now_ms:
            continue
        entry = _inner(entry)
        if type(entry) is bytes:
            entry = codec.decode(entry)
        elif type(entry) is _Ext:
            entry = bytes(entry.data)
        result[_user_key(name)] = entry
    return result


def _expires(entry: Any) -> int:
    return int.from_bytes(bytes(entry.data)[:8], "big")


def _inner(entry: Any) -> Any:
    """An entry without its end, if it has one."""
    if type(entry) is _Ext and entry.code == _EXPIRING:
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
