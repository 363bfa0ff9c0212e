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
DELAY_MS = 600_000
"""How long it may take from a batch's processing time until its messages are out: they grow old on the way."""

Serialize = Callable[[Any], bytes | None]
Row = tuple[bytes | None, bytes | None, int, Headers | None]


class MessageForm(msgspec.Struct, frozen=True):
    """How a value becomes a message of a topic."""

    topic: str
    key: Serialize
    value: Serialize
    new_key: Callable[[Any], Any] | None = None
    """From the value to the message's key; None: the record's."""


class TopicLimits(msgspec.Struct, frozen=True):
    """What a topic takes."""

    size: int
    """The most bytes of a message."""
    behind_ms: int | None = None
    """How far the time of a message may be behind the broker's clock; None: as far as you like."""
    ahead_ms: int | None = None
    """How far it may be ahead of it."""


class MessagesEncoder:
    """Values to messages, in a batch at `time_ms`."""

    def __init__(self, sink: str, form: MessageForm, limits: TopicLimits | None, time_ms: int) -> None:
        self.is_quiet = False
        """Whether what is added is going to be forgotten: it was published in its time, and may be too old by now."""
        self._sink = sink
        self._key = form.key
        self._value = form.value
        self._new_key = form.new_key
        self._limit = sys.maxsize if limits is None else limits.size - OVERHEAD
        self._time_ms = time_ms
        self._earliest, self._latest = _window(limits, time_ms)
        self._rows: list[Row] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, value: Any, key: Any, timestamp: int, headers: Headers | None) -> None:
        if self._new_key is not None:
            key = self._new_key(value)
        name, data = self._key(key), self._value(value)
        if headers or (0 if name is None else len(name)) + (0 if data is None else len(data)) > self._limit:
            self._check(name, data, headers)
        if not self._earliest <= timestamp <= self._latest:
            self._refuse_time(timestamp)
        self._rows.append((name, data, timestamp, headers))

    def put(self, key: bytes | None, value: bytes | None, timestamp: int, headers: Headers | None) -> None:
        """Add a message as it is; its time as near as the topic takes it."""
        self._check(key, value, headers)
        self._rows.append((key, value, min(max(timestamp, self._earliest), self._latest), headers))

    def _check(self, key: bytes | None, value: bytes | None, headers: Headers | None) -> None:
        size = len(key or b"") + len(value or b"")
        size += sum(len(name) + len(data or b"") + 10 for name, data in headers or ())
        if size > self._limit:
            raise UnsupportedValue(
                f"{self._sink}: the message has {size:,} bytes, the topic takes {self._limit:,} and a little more; "
                "raise the topic's max.message.bytes, or emit less"
            )

    def _refuse_time(self, timestamp: int) -> None:
        if self.is_quiet:
            return
        seconds = (timestamp - self._time_ms) / 1000
        where, limit, setting = (
            (f"{seconds:,.0f} s ahead of", self._latest - self._time_ms, "message.timestamp.after.max.ms")
            if seconds > 0
            else (f"{-seconds:,.0f} s behind", self._time_ms - self._earliest, "message.timestamp.before.max.ms")
        )
        raise UnsupportedValue(
            f"{self._sink}: the event time of the record is {where} the clock, the topic takes up to {limit / 1000:,.0f} s; "
            f"raise the topic's {setting}, set its message.timestamp.type to LogAppendTime, or give the record another time with "
            "set_timestamp()"
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


def _window(limits: TopicLimits | None, time_ms: int) -> tuple[int, int]:
    """The earliest and the latest time of a message that the topic still takes when a batch at `time_ms` is published."""
    earliest, latest = -sys.maxsize, sys.maxsize
    if limits is not None and limits.behind_ms is not None:
        earliest = time_ms - limits.behind_ms + min(DELAY_MS, limits.behind_ms // 2)
    if limits is not None and limits.ahead_ms is not None:
        latest = time_ms + limits.ahead_ms
    return earliest, latest


def unpacked(headers: bytes) -> Headers:
    """The headers of a message."""
    return msgspec.msgpack.decode(headers, type=Headers)
