"""Event times as users write them, and the wall clock."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any

from holdfast.errors import FixTheRecord, UnsupportedValue


def milliseconds(value: Any) -> int:
    """An event time as ms since the epoch; it fits into 64 bits, as everything that holds one needs."""
    if type(value) is int:
        if not -(2**63) <= value < 2**63:
            raise UnsupportedValue("a timestamp is out of range: in ms it must fit into 64 bits")
        return value
    if isinstance(value, datetime):
        return round(value.timestamp() * 1000)
    raise FixTheRecord(f"a timestamp must be an int of ms or a datetime, not {type(value).__qualname__}")


def now_ms() -> int:
    return time.time_ns() // 1_000_000
