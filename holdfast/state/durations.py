"""Durations at the front doors: milliseconds, a timedelta, or words as Spark reads them ("1 hour 30 minutes")."""

from __future__ import annotations

import re
from datetime import timedelta
from fractions import Fraction

from holdfast.errors import UnknownOption

_SECOND = 1_000_000
_DAY = 86_400 * _SECOND
_UNITS = {
    "year": 12 * 31 * _DAY,
    "month": 31 * _DAY,
    "week": 7 * _DAY,
    "day": _DAY,
    "hour": 3600 * _SECOND,
    "minute": 60 * _SECOND,
    "second": _SECOND,
    "millisecond": 1_000,
    "microsecond": 1,
}
"""In microseconds. A month is the longest one, 31 days: what waits for a month must not end before it does."""
_PART = re.compile(rf"([+-]?)\s*(\d+(?:\.\d*)?|\.\d+)\s+({'|'.join(_UNITS)})s?(?:\s+|$)")


def duration_ms(given: int | str | timedelta) -> int:
    """A duration in whole ms; what is below a millisecond is cut off. It may be negative: whether that makes sense is the
    caller's question. `UnknownOption` for what is no duration.

    >>> duration_ms("1 hour 30 minutes"), duration_ms(timedelta(seconds=2)), duration_ms("interval -0.5 seconds")
    (5400000, 2000, -500)
    """
    if type(given) is int:
        return given
    if isinstance(given, timedelta):
        return _whole_ms(given // timedelta(microseconds=1))
    if not isinstance(given, str):
        raise UnknownOption(f"a duration is a number of ms, a text or a timedelta, not {type(given).__qualname__}")
    text = given.strip().lower()
    text = text.removeprefix("interval ").lstrip()
    total, at = Fraction(0), 0
    while at < len(text):
        part = _PART.match(text, at)
        if part is None or ("." in part[2] and part[3] != "second"):
            raise _wrong(given)
        total += Fraction(part[2]) * _UNITS[part[3]] * (-1 if part[1] == "-" else 1)
        at = part.end()
    if not text:
        raise _wrong(given)
    return _whole_ms(int(total))


def _whole_ms(microseconds: int) -> int:
    return microseconds // 1000 if microseconds >= 0 else -(-microseconds // 1000)


def _wrong(given: str) -> UnknownOption:
    return UnknownOption(
        f"{given!r} is no duration; write it as in '1 hour' or '90 seconds', with {', '.join(_UNITS)} or their plurals"
    )
