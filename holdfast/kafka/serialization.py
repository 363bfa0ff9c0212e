"""Serializers and deserializers: from the bytes of a Kafka record to a Python value and back.

    json      any JSON, by msgspec; NaN and the infinities are refused, other conversions (tuple to list, ...) are not
    bytes     as they are
    string    UTF-8 (also "str")
    integer   4 bytes, big-endian, signed, as Kafka's IntegerSerializer (also "int")
    double    8 bytes, big-endian, as Kafka's DoubleSerializer
    function  the user's own, of one argument

None is Kafka's null (a tombstone, where it is the value) and stays None both ways; no codec and no function is asked.
What cannot be read raises `Undecodable`, what cannot be written `UnsupportedValue`; both name a type or a form, never
the payload. What a user's function raises goes through as itself.
"""

from __future__ import annotations

import json
import re
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any, ClassVar, NoReturn

import msgspec

from holdfast.errors import Undecodable, UnknownOption, UnsupportedValue
from holdfast.plan.functions import check_function

_ALIASES = {"str": "string", "int": "integer"}


def deserializer(what: str, given: str | Callable[[bytes], Any]) -> Deserializer:
    """The deserializer of `what` ("key" or "value"), by name or around the user's function.

    >>> deserializer("value", "json")(b'{"a": 1}')
    {'a': 1}
    >>> deserializer("key", "int")(b"oops!")
    Traceback (most recent call last):
        ...
    holdfast.errors.Undecodable: the key is not an integer of 4 bytes
    """
    if callable(given):
        return FunctionDeserializer(what, given)
    return _DESERIALIZERS[_name(f"{what}_deserializer", given)](what)


def serializer(what: str, given: str | Callable[[Any], bytes | None]) -> Serializer:
    """The serializer of `what` ("key" or "value"), by name or around the user's function.

    >>> serializer("value", "json")({"a": 1})
    b'{"a":1}'
    >>> serializer("key", "bytes")("ann")
    b'ann'
    >>> serializer("key", "bytes")(1)
    Traceback (most recent call last):
        ...
    holdfast.errors.UnsupportedValue: the key is a int, not bytes or str; convert it, or take another key_serializer
    """
    if callable(given):
        return FunctionSerializer(what, given)
    return _SERIALIZERS[_name(f"{what}_serializer", given)](what)


def _name(option: str, given: object) -> str:
    if not isinstance(given, str):
        raise UnknownOption(f"{option}= takes a name or a function, not {type(given).__qualname__}")
    name = _ALIASES.get(given, given)
    if name not in _SERIALIZERS:
        raise UnknownOption(f"there is no {option} {given!r}; take one of {', '.join(_SERIALIZERS)}, or a function")
    return name


class Deserializer(ABC):
    """Bytes to a value. None stays None."""

    name: str

    def __init__(self, what: str) -> None:
        self.what = what

    def __call__(self, data: bytes | None) -> Any:
        """The value, or `Undecodable`."""
        return self.many((data,))[0]

    @abstractmethod
    def many(self, data: Sequence[bytes | None]) -> list[Any]:
        """The values, in order; raises on the first that cannot be read, without saying which one it was."""

    def _refuse(self, form: str) -> NoReturn:
        raise Undecodable(f"the {self.what} is not {form}") from None


class Serializer(ABC):
    """A value to bytes. None stays None."""

    name: str

    def __init__(self, what: str) -> None:
        self.what = what

    @abstractmethod
    def __call__(self, value: Any) -> bytes | None:
        """The bytes, or `UnsupportedValue`."""

    def _refuse(self, is_what: str) -> NoReturn:
        raise UnsupportedValue(
            f"the {self.what} {is_what}; convert it, or take another {self.what}_serializer"
        ) from None

    def _refuse_type(self, value: Any, needed: str) -> NoReturn:
        self._refuse(f"is a {type(value).__qualname__}, not {needed}")


# -- JSON --------------------------------------------------------------------------------------------------------

_decode_json = msgspec.json.Decoder().decode
_encode_json = msgspec.json.Encoder().encode
_strictly_json = json.JSONEncoder(allow_nan=False).encode
_UNSUPPORTED = re.compile(r"objects of type ([\w.]+) is unsupported")


class JsonDeserializer(Deserializer):
    name = "json"

    def many(self, data: Sequence[bytes | None]) -> list[Any]:
        decode = _decode_json
        try:
            return [None if item is None else decode(item) for item in data]
        except ValueError:  # malformed, truncated, or not UTF-8
            self._refuse("JSON")
        except RecursionError:
            self._refuse("JSON of a depth that can be read")


class JsonSerializer(Serializer):
    name = "json"

    def __call__(self, value: Any) -> bytes | None:
        if value is None:
            return None
        try:
            data = _encode_json(value)
            finite = b"null" not in data or _is_finite(value)  # msgspec writes NaN and the infinities as null
        except RecursionError:
            self._refuse(f"({_a(value)}) is nested too deeply for JSON, or contains itself")
        except UnicodeEncodeError:
            self._refuse(f"({_a(value)}) has a str with lone surrogates, which is not UTF-8")
        except Exception as error:
            inner = _UNSUPPORTED.search(str(error))
            self._refuse(f"({_a(value)}) is or holds {f'a {inner[1]}' if inner else 'something'} that JSON cannot")
        if not finite:
            self._refuse(f"({_a(value)}) is or holds a NaN or an infinity, which JSON cannot")
        return data


_NOT_A_FLOAT = frozenset((str, int, bool, type(None), bytes))


def _is_finite(value: Any) -> bool:
    """Whether no float in `value`, which msgspec could encode, is a NaN or an infinity."""
    kind = type(value)
    if kind in _NOT_A_FLOAT:
        return True
    if kind is float:
        return isfinite(value)
    if kind is dict:
        value = value.values()
    elif kind is not list and kind is not tuple:
        try:
            _strictly_json(msgspec.to_builtins(value, str_keys=True))
        except ValueError:
            return False
        return True
    for item in value:  # noqa: SIM110 - a loop is twice as fast as all()
        if not _is_finite(item):
            return False
    return True


def _a(value: Any) -> str:
    return f"a {type(value).__qualname__}"


# -- bytes and text ----------------------------------------------------------------------------------------------


class BytesDeserializer(Deserializer):
    name = "bytes"

    def many(self, data: Sequence[bytes | None]) -> list[Any]:
        return list(data)


class BytesSerializer(Serializer):
    name = "bytes"

    def __call__(self, value: Any) -> bytes | None:
        if value is None or type(value) is bytes:
            return value
        if isinstance(value, str):  # as users of Quix Streams know it: to_topic(topic, key=...) mostly gives a str
            return value.encode()
        if not isinstance(value, bytes | bytearray | memoryview):
            self._refuse_type(value, "bytes or str")
        return bytes(value)


class StringDeserializer(Deserializer):
    name = "string"

    def many(self, data: Sequence[bytes | None]) -> list[Any]:
        try:
            return [None if item is None else item.decode() for item in data]
        except UnicodeDecodeError:
            self._refuse("UTF-8 text")


class StringSerializer(Serializer):
    name = "string"

    def __call__(self, value: Any) -> bytes | None:
        if value is None:
            return None
        if not isinstance(value, str):
            self._refuse_type(value, "str")
        try:
            return value.encode()
        except UnicodeEncodeError:
            self._refuse("is a str with lone surrogates, which is not UTF-8")


# -- numbers -----------------------------------------------------------------------------------------------------


class _NumberDeserializer(Deserializer):
    layout: ClassVar[struct.Struct]
    form: ClassVar[str]

    def many(self, data: Sequence[bytes | None]) -> list[Any]:
        unpack = self.layout.unpack
        try:
            return [None if item is None else unpack(item)[0] for item in data]
        except struct.error:
            self._refuse(self.form)


class _NumberSerializer(Serializer):
    layout: ClassVar[struct.Struct]
    form: ClassVar[str]

    def __call__(self, value: Any) -> bytes | None:
        if value is None:
            return None
        if isinstance(value, bool):
            self._refuse_type(value, self.form)
        try:
            data = self.layout.pack(value)
            kept = self.layout.unpack(data)[0] == value or value != value
        except (struct.error, TypeError, ValueError, OverflowError):
            self._refuse(f"({_a(value)}) cannot be {self.form}")
        if not kept:
            self._refuse(f"({_a(value)}) would change as {self.form}")
        return data


class IntegerDeserializer(_NumberDeserializer):
    name = "integer"
    layout = struct.Struct(">i")
    form = "an integer of 4 bytes"


class IntegerSerializer(_NumberSerializer):
    name = "integer"
    layout = struct.Struct(">i")
    form = "an integer of 4 bytes"


class DoubleDeserializer(_NumberDeserializer):
    name = "double"
    layout = struct.Struct(">d")
    form = "a double of 8 bytes"


class DoubleSerializer(_NumberSerializer):
    name = "double"
    layout = struct.Struct(">d")
    form = "a double of 8 bytes"


# -- the user's own ----------------------------------------------------------------------------------------------


class FunctionDeserializer(Deserializer):
    """The user's function. It is not called for None, and what it raises goes through as itself."""

    def __init__(self, what: str, function: Callable[[bytes], Any]) -> None:
        super().__init__(what)
        self.name = _name_of(function)
        check_function(f"{what}_deserializer={self.name}", function, (what,))
        self.function = function

    def many(self, data: Sequence[bytes | None]) -> list[Any]:
        function = self.function
        return [None if item is None else function(item) for item in data]


class FunctionSerializer(Serializer):
    """The user's function, which returns bytes, or None for Kafka's null. It is not called for None."""

    def __init__(self, what: str, function: Callable[[Any], bytes | None]) -> None:
        super().__init__(what)
        self.name = _name_of(function)
        check_function(f"{what}_serializer={self.name}", function, (what,))
        self.function = function

    def __call__(self, value: Any) -> bytes | None:
        if value is None:
            return None
        data = self.function(value)
        if data is not None and not isinstance(data, bytes):
            raise UnsupportedValue(
                f"{self.what}_serializer={self.name} must return bytes, not {type(data).__qualname__}"
            )
        return data


def _name_of(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))


_DESERIALIZERS: dict[str, type[Deserializer]] = {
    kind.name: kind
    for kind in (JsonDeserializer, BytesDeserializer, StringDeserializer, IntegerDeserializer, DoubleDeserializer)
}
_SERIALIZERS: dict[str, type[Serializer]] = {
    kind.name: kind for kind in (JsonSerializer, BytesSerializer, StringSerializer, IntegerSerializer, DoubleSerializer)
}
