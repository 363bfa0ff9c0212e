"""Messages: what a task writes to the outbox of a topic.

Bytes already, so that whoever publishes them only copies. Columns: `key` (binary or null), `value` (binary, null is a
tombstone), `timestamp` (ms) and `headers` (msgpack of [[name, bytes], ...], or null).

What the topic could refuse is refused here, as an error of that record.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import msgspec
import pyarrow as pa

from holdfast.errors import UnsupportedValue
from holdfast.plan.record import Headers

OVERHEAD = 1_000
"""Bytes that a message of a topic may need beside its key, value and headers."""

Serialize = Callable[[Any], bytes | None]
Row = tuple[bytes | None, bytes | None, int, Headers | None]


class MessageForm(msgspec.Struct, frozen=True):
    """How a value becomes a message of a topic."""

    topic: str
    key: Serialize
    value: Serialize
    new_key: Callable[[Any], Any] | None = None
    """From the value to the message's key; None: the record's."""


class MessagesEncoder:
    """Values to messages."""

    def __init__(self, sink: str, form: MessageForm, limit: int | None) -> None:
        self._sink = sink
        self._key = form.key
        self._value = form.value
        self._new_key = form.new_key
        self._limit = sys.maxsize if limit is None else limit - OVERHEAD
        self._rows: list[Row] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, value: Any, key: Any, timestamp: int, headers: Headers | None) -> None:
        if self._new_key is not None:
            key = self._new_key(value)
        name, data = self._key(key), self._value(value)
        if headers or (0 if name is None else len(name)) + (0 if data is None else len(data)) > self._limit:
            self._check(name, data, headers)
        self._rows.append((name, data, timestamp, headers))

    def put(self, key: bytes | None, value: bytes | None, timestamp: int, headers: Headers | None) -> None:
        """Add a message as it is."""
        self._check(key, value, headers)
        self._rows.append((key, value, timestamp, headers))

    def _check(self, key: bytes | None, value: bytes | None, headers: Headers | None) -> None:
        size = len(key or b"") + len(value or b"")
        size += sum(len(name) + len(data or b"") + 10 for name, data in headers or ())
        if size > self._limit:
            raise UnsupportedValue(
                f"{self._sink}: the message has {size:,} bytes, the topic takes {self._limit:,} and a little more; "
                "raise the topic's max.message.bytes, or emit less"
            )

    def truncate(self, length: int) -> None:
        del self._rows[length:]

    def table(self) -> pa.Table:
        keys, values, timestamps, headers = zip(*self._rows, strict=True)
        packed = (
            [msgspec.msgpack.encode(one) if one else None for one in headers] if any(headers) else [None] * len(keys)
        )
        return pa.table(
            {
                "key": pa.array(keys, pa.binary()),
                "value": pa.array(values, pa.binary()),
                "timestamp": pa.array(timestamps, pa.int64()),
                "headers": pa.array(packed, pa.binary()),
            }
        )


def unpacked(headers: bytes) -> Headers:
    """The headers of a message."""
    return msgspec.msgpack.decode(headers, type=Headers)
