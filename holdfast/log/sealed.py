"""Sealed files: JSON for people to read, whose last field is a checksum of every byte before it.

The seal is computed over the bytes as they are, so a reader needs no canonical form of JSON. It has the same place and
form in every format, so that a later format can be told from damage.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from holdfast.errors import Damaged, FutureFormat
from holdfast.log.files import checksum

S = TypeVar("S", bound=msgspec.Struct)


class _Header(msgspec.Struct):
    format: int


def sealed(struct: msgspec.Struct) -> bytes:
    body = msgspec.json.format(msgspec.json.encode(struct), indent=1).removesuffix(b"\n}")
    return body + _seal(body)


def unsealed(name: str, data: bytes, kind: type[S], what: str, newest: int) -> S:
    """The `what` in the file `name`; `newest` is the latest format that can be read."""
    body, _, _ = data.rpartition(_CHECKSUM)
    if body + _seal(body) != data:
        raise Damaged(f"{name} is damaged: its checksum is that of other bytes; restore it from a backup", name=name)
    try:
        written = msgspec.json.decode(data, type=_Header).format
        if written <= newest:
            return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Damaged(f"{name} is not a {what} ({error}); restore it from a backup", name=name) from None
    raise FutureFormat(
        f"{name} has format {written}; this version of Holdfast reads up to {newest}: upgrade it",
        name=name,
        format=written,
    )


_CHECKSUM = b',\n "checksum": "'


def _seal(body: bytes) -> bytes:
    """The end of a file that begins with `body`."""
    return _CHECKSUM + checksum(body).encode() + b'"\n}'
