"""Codecs: from a state value to bytes and back, without changing it.

A store remembers the name of its codec, and another codec is refused by name.

JSON is the default. What it would change (a tuple, a set, a datetime, a NaN, a dict with keys that are not str) is
refused when it is set, not discovered when it is read. Numbers, strings, booleans and None need no encoding of their
own: they rest in the document as they are (`inline`).
"""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Any, Protocol

import msgspec

from holdfast.errors import UnsupportedValue
from holdfast.state.options import RocksDBOptions


class Codec(Protocol):
    """How the values of a store are written."""

    name: str
    inline: bool
    """Whether plain scalars may rest in the document without passing through `encode`."""

    def encode(self, value: Any) -> bytes:
        """The bytes of a value that `decode` gives back unchanged, or `UnsupportedValue`."""

    def decode(self, data: bytes) -> Any: ...


class JsonCodec:
    """JSON by msgspec, for values that JSON keeps."""

    name = "json"
    inline = True

    def encode(self, value: Any) -> bytes:
        _refuse_what_json_changes(value, "", 0)
        try:
            return msgspec.json.encode(value)
        except UnicodeEncodeError:
            raise UnsupportedValue("a str with lone surrogates cannot be kept as JSON") from None

    def decode(self, data: bytes) -> Any:
        return msgspec.json.decode(data)


class CustomCodec:
    """The user's own `dumps` and `loads`. That they fit each other is the user's promise; every value passes them."""

    inline = False

    def __init__(self, dumps: Callable[[Any], bytes], loads: Callable[[bytes], Any]) -> None:
        self.name = f"{_name_of(dumps)}/{_name_of(loads)}"
        self._dumps = dumps
        self.decode = loads

    def encode(self, value: Any) -> bytes:
        try:
            data = self._dumps(value)
        except Exception as error:
            raise UnsupportedValue(
                f"the codec {self.name} cannot encode a {type(value).__qualname__} ({type(error).__qualname__})"
            ) from error
        if type(data) is not bytes:
            raise UnsupportedValue(f"the codec {self.name} must return bytes, not {type(data).__qualname__}")
        return data


class Undecoded:
    """In place of a codec that is not at hand: values are shown as the bytes that it wrote. It writes nothing."""

    inline = False

    def __init__(self, name: str) -> None:
        self.name = name

    def encode(self, value: Any) -> bytes:
        raise UnsupportedValue(f"the codec {self.name} is not at hand")

    def decode(self, data: bytes) -> Any:
        return data


def codec_for(options: RocksDBOptions) -> Codec:
    if options.dumps is None or options.loads is None:
        return JsonCodec()
    return CustomCodec(options.dumps, options.loads)


def is_scalar(value: Any) -> bool:
    """Whether a document holds the value as it is, exactly."""
    kind = type(value)
    if kind is int:
        return -0x8000000000000000 <= value <= 0x7FFFFFFFFFFFFFFF  # type: ignore[no-any-return]
    if kind is float:
        return isfinite(value)
    if kind is str:
        return value.isascii() or _is_utf8(value)
    return kind is bool or value is None


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse_what_json_changes(value: Any, where: str, depth: int) -> None:
    kind = type(value)
    if kind is str or kind is int or kind is bool or value is None:
        return
    if kind is float and isfinite(value):
        return
    if depth > 200:
        raise UnsupportedValue("the value is nested more than 200 levels deep, or contains itself")
    if kind is list:
        for item in value:
            _refuse_what_json_changes(item, f"{where}[]", depth + 1)
    elif kind is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise UnsupportedValue(
                    f"JSON would change a dict key of type {type(key).__qualname__}{_at(where)} to str; use str keys, "
                    "or another codec: RocksDBOptions(dumps=, loads=)"
                )
            _refuse_what_json_changes(item, f"{where}.{key}", depth + 1)
    else:
        what = "NaN or an infinity" if kind is float else f"a value of type {kind.__qualname__}"
        raise UnsupportedValue(
            f"JSON would change {what}{_at(where)}; convert it, or use another codec: RocksDBOptions(dumps=, loads=)"
        )


def _at(where: str) -> str:
    return f" at {where.lstrip('.')}" if where else ""


def _name_of(function: Callable[..., Any]) -> str:
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', '?')}.{name}"
