"""State as JSON, for programs that are not written in Python; and keys as people type them.

What JSON has is itself. The rest:

    tuple, set                   an array; a set in the order of its items' texts
    bytes                        {"base64": "..."}
    date, time, datetime         ISO 8601
    timedelta                    seconds
    Decimal                      its text
    a row                        an object
    NaN and the infinities       their names
    a dict whose keys are not all str    an array of pairs

It is one way: a reader cannot tell a tuple from a list. The bytes of `--raw` are exact.
"""

from __future__ import annotations

import binascii
import math
from base64 import b64decode, b64encode
from datetime import date, time, timedelta
from typing import Any

import msgspec

from holdfast.errors import MissingKey, UnsupportedKey
from holdfast.state.keys import encode_key
from holdfast.state.row import Row

KEY_TYPES = ("str", "int", "float", "bool", "bytes", "hex", "json")
"""How a key can be typed in: `bytes` is their text in UTF-8, `json` is what `plain` makes of a key."""


def plain(value: Any) -> Any:
    """
    >>> plain({"seen": {2, 1}, "raw": b"ab", "at": (1, None)})
    {'seen': [1, 2], 'raw': {'base64': 'YWI='}, 'at': [1, None]}
    """
    kind = type(value)
    if kind is str:
        return value.encode("utf-8", "backslashreplace").decode()
    if kind is float:
        return value if math.isfinite(value) else str(value)
    if value is None or kind in (int, bool):
        return value
    if kind is bytes:
        return {"base64": b64encode(value).decode()}
    if kind is dict:
        return _object(value)
    if kind is Row:
        return _object(vars(value))
    if kind in (set, frozenset):
        return sorted(map(plain, value), key=msgspec.json.encode)
    if isinstance(value, list | tuple):
        names = getattr(value, "__fields__", None)  # a row of PySpark's
        return [plain(item) for item in value] if names is None else _object(dict(zip(names, value, strict=True)))
    if isinstance(value, date | time):
        return value.isoformat()
    return value.total_seconds() if isinstance(value, timedelta) else str(value)


def _object(value: dict[Any, Any]) -> Any:
    if all(type(key) is str for key in value):
        return {plain(key): plain(item) for key, item in value.items()}
    return [[plain(key), plain(item)] for key, item in value.items()]


def json_of(value: Any) -> str:
    return msgspec.json.encode(plain(value)).decode()


def key_of(text: str, kind: str) -> Any:
    """The key that somebody typed.

    >>> key_of("ann", "str"), key_of("7", "int"), key_of("00ff", "hex"), key_of('["ann", [1, true]]', "json")
    ('ann', 7, b'\\x00\\xff', ('ann', (1, True)))
    """
    try:
        key = _READ[kind](text)
        encode_key(key)
    except (ValueError, KeyError, msgspec.DecodeError, MissingKey, UnsupportedKey):
        raise UnsupportedKey(f"what was typed is no {kind} that can be a key") from None
    return key


def _bool(text: str) -> bool:
    return {"true": True, "false": False}[text.lower()]


def _from_json(value: Any) -> Any:
    if type(value) is list:
        return tuple(map(_from_json, value))
    if type(value) is dict and value.keys() == {"base64"}:
        try:
            return b64decode(value["base64"], validate=True)
        except (binascii.Error, TypeError):
            raise ValueError from None
    return value


_READ: dict[str, Any] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": _bool,
    "bytes": str.encode,
    "hex": bytes.fromhex,
    "json": lambda text: _from_json(msgspec.json.decode(text)),
}
