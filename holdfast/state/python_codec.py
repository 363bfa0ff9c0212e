"""PythonCodec: what GroupState keeps, unchanged and without pickle.

msgpack, with an extension type for everything that msgpack lacks:

     1 tuple        the items, as a list              9 date        4 bytes: the ordinal, big-endian as all here
     2 set          the items, as a list             10 time        [hour, minute, second, microsecond, fold, zone]
     3 frozenset    the items, as a list             11 timedelta   [days, seconds, microseconds]
     4 dict         [key, value, key, value, ...]    12 Decimal     its text, which names every digit and the exponent
     5 int          signed bytes, big-endian         13 PySpark Row [names or nil, [value, ...]]
     6 str          UTF-8 with lone surrogates       14 Row         [[name, ...], [value, ...]]
     7 datetime     8 bytes: naive, in us since 1970
     8 datetime     8 bytes: in `timezone.utc`; other zones are 15: [us since 1970 as on its clock, fold, zone]

A zone is nil, the name of a ZoneInfo, or [offset in us] or [offset in us, name] for a fixed offset. Dicts whose keys are
all str and ints of 64 bits are plain msgpack.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from itertools import chain
from typing import Any
from zoneinfo import ZoneInfo

import msgspec

from holdfast.errors import UnsupportedValue
from holdfast.state.row import Row, field_names, row_of

_Ext = msgspec.msgpack.Ext
_encode = msgspec.msgpack.Encoder().encode
_LONG = struct.Struct(">q")
_INT = struct.Struct(">i")
_EPOCH = datetime(1970, 1, 1)
_UTC_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_DEEPEST = 200


class PythonCodec:
    """Python's own values, and rows. What comes back equals what went in and has the same types.

    Kept: None, bool, int of any size, float, str, bytes, list, tuple, dict, set, frozenset, datetime, date, time and
    timedelta of the standard library, Decimal, PySpark's Row and the rows of a group; in each other, up to 200 levels deep.
    Anything else, also an instance of a subclass of these, is `UnsupportedValue`, which says where in the value it is.

    >>> codec = PythonCodec()
    >>> codec.decode(codec.encode({"seen": {1, 2}, "last": date(2024, 2, 29)}))
    {'seen': {1, 2}, 'last': datetime.date(2024, 2, 29)}
    """

    name = "python"
    inline = True

    def encode(self, value: Any) -> bytes:
        if _is_plain(value, 0):
            try:
                return _encode(value)
            except (OverflowError, UnicodeEncodeError):
                pass  # a large int, a lone surrogate: somewhere in the value
        return _encode(_packed(value, "", 0))

    def decode(self, data: bytes) -> Any:
        return _decode(data)


_SCALARS = frozenset((str, int, float, bool, type(None), bytes))
_PLAIN_KEYS = frozenset((str, int))


def _is_plain(value: Any, depth: int) -> bool:
    """Whether msgpack keeps the value as it is, but for the size of ints and for lone surrogates."""
    kind = type(value)
    if kind in _SCALARS:
        return True
    if depth > _DEEPEST:
        return False
    if kind is dict:
        if not _PLAIN_KEYS.issuperset(map(type, value)):
            return False
        items = value.values()
    elif kind is list:
        items = value
    else:
        return False
    return _SCALARS.issuperset(map(type, items)) or all(_is_plain(item, depth + 1) for item in items)


def _packed(value: Any, where: str, depth: int) -> Any:
    """`value` in the words of msgpack."""
    if depth > _DEEPEST:
        raise UnsupportedValue(f"the value is nested more than {_DEEPEST} levels deep, or contains itself")
    kind = type(value)
    pack = _PACK.get(kind)
    if pack is not None:
        return pack(value, where, depth)
    if kind.__name__ == "Row" and kind.__module__ == "pyspark.sql.types":
        return _packed_spark_row(value, where, depth)
    raise UnsupportedValue(
        f"a value of type {kind.__qualname__}{_at(where)} cannot be kept in state; use Python's own types: numbers, str, "
        "bytes, list, tuple, dict, set, dates and times, Decimal, rows"
    )


def _at(where: str) -> str:
    return f" at {where.lstrip('.')}" if where else ""


def _as_it_is(value: Any, where: str, depth: int) -> Any:
    return value


def _packed_int(value: int, where: str, depth: int) -> Any:
    size = value.bit_length()
    return value if size < 64 else _Ext(5, value.to_bytes(size // 8 + 1, "big", signed=True))


def _packed_str(value: str, where: str, depth: int) -> Any:
    try:
        value.encode()
    except UnicodeEncodeError:
        return _Ext(6, value.encode("utf-8", "surrogatepass"))
    return value


def _packed_list(value: Any, where: str, depth: int) -> list[Any]:
    inside = f"{where}[]"
    return [_packed(item, inside, depth + 1) for item in value]


def _packed_dict(value: dict[Any, Any], where: str, depth: int) -> Any:
    keys = [_packed(key, f"a key of {where.lstrip('.') or 'the dict'}", depth + 1) for key in value]
    items = [
        _packed(item, f"{where}.{key}" if type(key) is str else f"{where}[]", depth + 1) for key, item in value.items()
    ]
    if _PLAIN_KEYS.issuperset(map(type, keys)):
        return dict(zip(keys, items, strict=True))
    return _Ext(4, _encode(list(chain.from_iterable(zip(keys, items, strict=True)))))


def _packed_as(code: int) -> Callable[[Any, str, int], Any]:
    return lambda value, where, depth: _Ext(code, _encode(_packed_list(value, where, depth)))


def _packed_datetime(value: datetime, where: str, depth: int) -> Any:
    zone, fold = value.tzinfo, value.fold
    clock = (value.replace(tzinfo=None) - _EPOCH) // _MICROSECOND
    if zone is None and not fold:
        return _Ext(7, _LONG.pack(clock))
    if zone is UTC and not fold:
        return _Ext(8, _LONG.pack(clock))
    return _Ext(15, _encode([clock, fold, _packed_zone(zone, where)]))


def _packed_time(value: time, where: str, depth: int) -> Any:
    zone = _packed_zone(value.tzinfo, where)
    return _Ext(10, _encode([value.hour, value.minute, value.second, value.microsecond, value.fold, zone]))


def _packed_zone(zone: tzinfo | None, where: str) -> Any:
    if zone is None:
        return None
    if type(zone) is ZoneInfo and zone.key is not None:
        return zone.key
    if type(zone) is timezone:
        offset, *name = zone.__getinitargs__()  # type: ignore[attr-defined]
        return [offset // _MICROSECOND, *name]
    raise UnsupportedValue(
        f"a time zone of type {type(zone).__qualname__}{_at(where)} cannot be kept in state; use datetime.timezone or "
        "zoneinfo.ZoneInfo with a name"
    )


def _packed_row(value: Row, where: str, depth: int) -> Any:
    return _Ext(14, _encode([list(vars(value)), _packed_list(value, where, depth)]))


def _packed_spark_row(value: Any, where: str, depth: int) -> Any:
    return _Ext(13, _encode([field_names(value), _packed_list(value, where, depth)]))


_PACK: dict[type, Callable[[Any, str, int], Any]] = {
    **dict.fromkeys((type(None), bool, float, bytes), _as_it_is),
    int: _packed_int,
    str: _packed_str,
    list: _packed_list,
    dict: _packed_dict,
    tuple: _packed_as(1),
    set: _packed_as(2),
    frozenset: _packed_as(3),
    datetime: _packed_datetime,
    date: lambda value, where, depth: _Ext(9, _INT.pack(value.toordinal())),
    time: _packed_time,
    timedelta: lambda value, where, depth: _Ext(11, _encode([value.days, value.seconds, value.microseconds])),
    Decimal: lambda value, where, depth: _Ext(12, str(value).encode()),
    Row: _packed_row,
}


def _dict_of(data: memoryview) -> dict[Any, Any]:
    flat = _decode(data)
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _datetime_of(data: memoryview) -> datetime:
    clock, fold, zone = _decode(data)
    return (_EPOCH + timedelta(microseconds=clock)).replace(tzinfo=_zone_of(zone), fold=fold)


def _time_of(data: memoryview) -> time:
    hour, minute, second, microsecond, fold, zone = _decode(data)
    return time(hour, minute, second, microsecond, _zone_of(zone), fold=fold)


def _zone_of(zone: Any) -> tzinfo | None:
    if zone is None:
        return None
    if isinstance(zone, str):
        return ZoneInfo(zone)
    offset, *name = zone
    return timezone(timedelta(microseconds=offset), *name)


def _spark_row_of(data: memoryview) -> Any:
    from pyspark.sql import Row as SparkRow

    names, values = _decode(data)
    row = SparkRow(*values)
    if names is not None:
        row.__fields__ = names
    return row


def _row_of(data: memoryview) -> Row:
    names, values = _decode(data)
    return row_of(dict(zip(names, values, strict=True)))


_UNPACK: dict[int, Callable[[memoryview], Any]] = {
    1: lambda data: tuple(_decode(data)),
    2: lambda data: set(_decode(data)),
    3: lambda data: frozenset(_decode(data)),
    4: _dict_of,
    5: lambda data: int.from_bytes(data, "big", signed=True),
    6: lambda data: bytes(data).decode("utf-8", "surrogatepass"),
    7: lambda data: _EPOCH + timedelta(microseconds=_LONG.unpack(data)[0]),
    8: lambda data: _UTC_EPOCH + timedelta(microseconds=_LONG.unpack(data)[0]),
    9: lambda data: date.fromordinal(_INT.unpack(data)[0]),
    10: _time_of,
    11: lambda data: timedelta(*_decode(data)),
    12: lambda data: Decimal(bytes(data).decode()),
    13: _spark_row_of,
    14: _row_of,
    15: _datetime_of,
}


def _unpacked(code: int, data: memoryview) -> Any:
    return _UNPACK[code](data)


_decode: Callable[[Any], Any] = msgspec.msgpack.Decoder(ext_hook=_unpacked).decode
