"""Keys: from a Python value to bytes that are the same on every machine, in every run, and back.

    s<utf-8>    str          i<decimal>    int         b0, b1    bool
    y<bytes>    bytes        f<8 bytes>    float       t(<length, 4 bytes><key>)*    tuple

1, "1", True and 1.0 are different keys. The encoding also decides the state partition: crc32 modulo the number of
partitions, chosen because Spark has the same function, so that a key column needs no Python to find its partition.
"""

from __future__ import annotations

import math
import struct
import zlib
from typing import Any

from holdfast.errors import MissingKey, UnsupportedKey

_TEXT = frozenset((str,))
_FLOAT = struct.Struct(">d")
_LENGTH = struct.Struct(">I")


def encode_key(key: Any) -> bytes:
    """The bytes of a key. `MissingKey` for None, `UnsupportedKey` for a type without a stable encoding."""
    kind = type(key)
    if kind is str:
        text: str = key
        try:
            return b"s" + text.encode()
        except UnicodeEncodeError:
            raise UnsupportedKey("the key is a str with lone surrogates, which no encoding keeps") from None
    if kind is bytes:
        data: bytes = key
        return b"y" + data
    if kind is int:
        return b"i%d" % key
    if kind is bool:
        return b"b1" if key else b"b0"
    if kind is float and not math.isnan(key):
        return b"f" + _FLOAT.pack(key + 0.0)  # + 0.0 makes one key of 0.0 and -0.0, which are equal
    if kind is tuple:
        return b"t" + b"".join(_LENGTH.pack(len(part)) + part for part in map(encode_key, key))
    if key is None:
        raise MissingKey("the record has no key: give the source key=, or use this step without state")
    raise UnsupportedKey(
        f"a key of type {kind.__qualname__} has no stable encoding; use str, bytes, int, bool, float (not NaN) "
        "or a tuple of these"
    )


def encode_keys(keys: list[Any]) -> list[bytes | None]:
    """The bytes of many keys, None for None; quick where all are str, as they mostly are."""
    if _TEXT.issuperset(map(type, keys)):
        try:
            return [b"s" + key.encode() for key in keys]
        except UnicodeEncodeError:
            pass  # `encode_key` says it better
    return [None if key is None else encode_key(key) for key in keys]


def decode_key(data: bytes) -> Any:
    """What `encode_key` was given."""
    kind, body = data[:1], data[1:]
    if kind == b"s":
        return body.decode()
    if kind == b"y":
        return body
    if kind == b"i":
        return int(body)
    if kind == b"b":
        return body == b"1"
    if kind == b"f":
        return _FLOAT.unpack(body)[0]
    parts = []
    while body:
        (length,) = _LENGTH.unpack(body[:4])
        parts.append(decode_key(body[4 : 4 + length]))
        body = body[4 + length :]
    return tuple(parts)


def decode_keys(encoded: list[bytes]) -> list[Any]:
    """What `encode_key` was given many times; quick where all were str."""
    if {data[0] for data in encoded} <= {ord("s")}:
        return [data[1:].decode() for data in encoded]
    return list(map(decode_key, encoded))


def partition_of(encoded: bytes, partitions: int) -> int:
    """The state partition that owns a key."""
    return zlib.crc32(encoded) % partitions
