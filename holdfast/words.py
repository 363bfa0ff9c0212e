"""Numbers as people read them: sizes, ages, moments, columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

_AGES = ((86_400, "day"), (3_600, "hour"), (60, "minute"), (1, "second"))


def size(count: int) -> str:
    """Bytes, in units of 1000.

    >>> size(1), size(999), size(1_250_000), size(3_000_000_000_000)
    ('1 byte', '999 bytes', '1.2 MB', '3.0 TB')
    """
    if count < 1_000:
        return counted(count, "byte")
    amount = float(count)
    for unit in ("kB", "MB", "GB", "TB"):
        amount /= 1_000
        if amount < 999.95 or unit == "TB":
            break
    return f"{amount:,.1f} {unit}"


def counted(count: int, noun: str) -> str:
    """
    >>> counted(1, "key"), counted(1234, "key")
    ('1 key', '1,234 keys')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def moment(time_ms: int) -> str:
    """
    >>> moment(0)
    '1970-01-01 00:00:00 UTC'
    """
    try:
        return datetime.fromtimestamp(time_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError):  # an event time can be anything
        return f"{time_ms:,} ms"


def age(time_ms: int, now_ms: int) -> str:
    """
    >>> age(0, 500), age(0, 61_000), age(0, 7_300_000), age(5_000, 0)
    ('just now', '1 minute ago', '2 hours ago', 'in 5 seconds')
    """
    seconds = abs(now_ms - time_ms) // 1000
    for length, noun in _AGES:
        if seconds >= length:
            words = counted(seconds // length, noun)
            return f"{words} ago" if now_ms > time_ms else f"in {words}"
    return "just now"


def columns(heading: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Lines with aligned columns; numbers are at the right, with thousands separators, and None is a dash.

    >>> print(*columns(("store", "keys", "codec"), [("default", 1234, "json"), ("x", 5, None)]), sep="\\n")
    store     keys  codec
    default  1,234  json
    x            5  -
    """
    body = [list(row) for row in rows]
    texts = [list(heading), *([_text(cell) for cell in row] for row in body)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    is_number = [{type(cell) for cell in column} - {type(None)} == {int} for column in zip(*body, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(line, widths, is_number or [False] * len(line), strict=True)
        ).rstrip()
        for line in texts
    ]


def _text(cell: object) -> str:
    if cell is None:
        return "-"
    return f"{cell:,}" if isinstance(cell, int) else str(cell)
