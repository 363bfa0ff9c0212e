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

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import msgspec

from holdfast.errors import MissingKey, UnsupportedKey, UnsupportedValue
from holdfast.state.codecs import Codec, is_scalar
from holdfast.state.keys import decode_key, encode_key
from holdfast.stores.base import Store

_ABSENT: Any = object()
_BYTES = 1
_EXPIRING = 2
_Ext = msgspec.msgpack.Ext
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(dict[str, Any]).decode


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

    __slots__ = ("_document", "_documents", "_known", "_route")

    def __init__(self, documents: Documents, route: bytes, stored: bytes | None) -> None:
        self._documents = documents
        self._route = route
        self._known = 0 if stored is None else len(stored)
        self._document: dict[str, Any] = {} if stored is None else _decode(stored)

    def get(self, key: Any, default: Any = None) -> Any:
        """The value of `key`; `default` if it was never set or was deleted. A stored None is None."""
        entry = self._entry(key)
        if entry is _ABSENT:
            return default
        if type(entry) is bytes:
            return self._documents.codec.decode(entry)
        if type(entry) is _Ext:
            raise UnsupportedValue("this sub-key was written by set_bytes(): read it with get_bytes()")
        return entry

    def set(self, key: Any, value: Any, ttl: timedelta | None = None) -> None:
        """Set `key`. With `ttl` the value is gone that long after the batch's processing time.

        `UnsupportedValue` if the codec would change the value; the state is then as it was.
        """
        codec = self._documents.codec
        self._put(key, value if codec.inline and is_scalar(value) else codec.encode(value), ttl)

    def delete(self, key: Any) -> None:
        """Remove `key`; nothing happens if there is none."""
        name = key if type(key) is str and key[:1] != "\0" else _sub_key(key)
        if name in self._document:
            self._documents.note(self, name, self._document.pop(name))

    def exists(self, key: Any) -> bool:
        """Whether `key` has a value, be it None."""
        return self._entry(key) is not _ABSENT

    def get_bytes(self, key: Any, default: bytes | None = None) -> bytes | None:
        """The bytes that `set_bytes` stored under `key`."""
        entry = self._entry(key)
        if entry is _ABSENT:
            return default
        if type(entry) is not _Ext:
            raise UnsupportedValue("this sub-key was written by set(): read it with get()")
        return bytes(entry.data)

    def set_bytes(self, key: Any, value: bytes, ttl: timedelta | None = None) -> None:
        """Store bytes as they are, past the codec."""
        if not isinstance(value, bytes | bytearray | memoryview):
            raise UnsupportedValue(f"set_bytes() takes bytes, not {type(value).__qualname__}")
        self._put(key, _Ext(_BYTES, bytes(value)), ttl)

    def _entry(self, key: Any) -> Any:
        name = key if type(key) is str and key[:1] != "\0" else _sub_key(key)
        entry = self._document.get(name, _ABSENT)
        if type(entry) is _Ext and entry.code == _EXPIRING:
            return _ABSENT if self._documents._is_over(entry) else _unwrap(entry)
        return entry

    def _put(self, key: Any, entry: Any, ttl: timedelta | None) -> None:
        name = key if type(key) is str and key[:1] != "\0" else _sub_key(key)
        if ttl is not None:
            expires = self._documents.now_ms + max(1, round(ttl.total_seconds() * 1000))
            entry = _Ext(_EXPIRING, expires.to_bytes(8, "big") + _encode(entry))
        if not name.isascii():
            _refuse_surrogates(name)
        document = self._document
        self._documents.note(self, name, document.get(name, _ABSENT))
        document[name] = entry


class Documents:
    """The documents of one store that a batch touches, in one partition."""

    def __init__(self, store: Store, name: str, codec: Codec, now_ms: int, undo: list[Any]) -> None:
        self.codec = codec
        self.now_ms = now_ms
        self._store = store
        self._prefix = document_prefix(name)
        self._stored: dict[bytes, bytes | None] = {}
        self._states: dict[bytes, State] = {}
        self._changed: dict[bytes, State] = {}
        self._undo = undo
        """Of the current record, shared by all stores of the task: (state, sub-key, what it replaced)."""

    def prefetch(self, routes: Iterable[bytes]) -> None:
        """Read the documents of these keys, which are about to be asked for."""
        prefix = self._prefix
        wanted = sorted(route for route in set(routes) if route not in self._states)
        found = self._store.get_many([prefix + route for route in wanted])
        self._stored.update(zip(wanted, found, strict=True))

    def state(self, route: bytes) -> State:
        """The state of an encoded key."""
        state = self._states.get(route)
        if state is None:
            if route not in self._stored:
                self.prefetch((route,))
            state = self._states[route] = State(self, route, self._stored.pop(route))
        return state

    def note(self, state: State, name: str, replaced: Any) -> None:
        """Remember that `state` changed and how to undo it."""
        self._changed[state._route] = state
        self._undo.append((state, name, replaced))

    def rollback(self) -> None:
        """The record failed: put back what it changed."""
        while self._undo:
            state, name, replaced = self._undo.pop()
            if replaced is _ABSENT:
                state._document.pop(name, None)
            else:
                state._document[name] = replaced

    def changes(self) -> tuple[list[bytes], list[bytes | None], int, int]:
        """The delta: sorted store keys, their new values; and by how much documents and bytes grew."""
        keys: list[bytes] = []
        values: list[bytes | None] = []
        documents = size = 0
        prefix = self._prefix
        for route in sorted(self._changed):
            state = self._changed[route]
            document = self._without_expired(state._document)
            key = prefix + route
            known = state._known
            if document:
                value = _encode(document)
                values.append(value)
                documents += not known
                size += len(value) - known + (0 if known else len(key))
            elif known:
                values.append(None)
                documents -= 1
                size -= known + len(key)
            else:
                continue
            keys.append(key)
        return keys, values, documents, size

    def _without_expired(self, document: dict[str, Any]) -> dict[str, Any]:
        for entry in document.values():
            if type(entry) is _Ext and entry.code == _EXPIRING:
                return {name: kept for name, kept in document.items() if not self._is_over(kept)}
        return document

    def _is_over(self, entry: Any) -> bool:
        return type(entry) is _Ext and entry.code == _EXPIRING and _expires(entry) <= self.now_ms


def read_document(stored: bytes, codec: Codec, now_ms: int) -> dict[Any, Any]:
    """A stored document as the user would see it at `now_ms`."""
    result: dict[Any, Any] = {}
    for name, entry in _decode(stored).items():
        if type(entry) is _Ext and entry.code == _EXPIRING:
            if _expires(entry) <= now_ms:
                continue
            entry = _unwrap(entry)
        if type(entry) is bytes:
            entry = codec.decode(entry)
        elif type(entry) is _Ext:
            entry = bytes(entry.data)
        result[_user_key(name)] = entry
    return result


def _expires(entry: Any) -> int:
    return int.from_bytes(entry.data[:8], "big")


def _unwrap(entry: Any) -> Any:
    return msgspec.msgpack.decode(entry.data[8:])


def _sub_key(key: Any) -> str:
    """A sub-key that is not a plain str, as the str that stands for it in the document."""
    try:
        return "\0" + encode_key(key).decode("latin-1")
    except (MissingKey, UnsupportedKey):
        raise UnsupportedKey(
            f"a sub-key of type {type(key).__qualname__} cannot be kept; use str, bytes, int, bool, float or a tuple of these"
        ) from None


def _refuse_surrogates(name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise UnsupportedKey("the sub-key is a str with lone surrogates, which no encoding keeps") from None


def _user_key(name: str) -> Any:
    return decode_key(name[1:].encode("latin-1")) if name[:1] == "\0" else name
