"""Keys: the same bytes on every machine, in every run."""

from __future__ import annotations

import enum
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import MissingKey, UnsupportedKey
from holdfast.state.keys import decode_key, decode_keys, encode_key, partition_of

plain = st.text() | st.binary() | st.integers() | st.booleans() | st.floats(allow_nan=False)
keys = st.recursive(plain, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=6)


def exactly(key: Any) -> Any:
    """A key with its types, for comparison: 1, True and 1.0 are equal in Python and different keys."""
    if type(key) is tuple:
        return tuple(exactly(part) for part in key)
    return type(key), key


@given(keys)
def test_a_key_comes_back_from_its_bytes(key: Any) -> None:
    assert exactly(decode_key(encode_key(key))) == exactly(key)


@given(st.lists(keys) | st.lists(st.text()))
def test_many_keys_come_back_from_their_bytes(many: list[Any]) -> None:
    assert exactly(tuple(decode_keys(list(map(encode_key, many))))) == exactly(tuple(many))


@given(keys, keys)
def test_different_keys_have_different_bytes_and_equal_ones_the_same(one: Any, other: Any) -> None:
    assert (encode_key(one) == encode_key(other)) == (exactly(one) == exactly(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True),
        (1, 1.0),
        (1, "1"),
        ("1", b"1"),
        (0, False),
        (("ab",), ("a", "b")),
        (("a",), "a"),
        ((), ""),
        ((("a",),), ("a",)),
        (("a", ("b",)), (("a", "b"),)),
    ],
)
def test_keys_that_look_alike_are_different(one: Any, other: Any) -> None:
    assert encode_key(one) != encode_key(other)


@pytest.mark.parametrize(
    ("key", "encoded"),
    [
        ("ann", b"sann"),
        ("é", b"s\xc3\xa9"),
        ("", b"s"),
        (b"\0\xff", b"y\0\xff"),
        (42, b"i42"),
        (-(2**70), b"i-1180591620717411303424"),
        (True, b"b1"),
        (False, b"b0"),
        (1.5, b"f\x3f\xf8\0\0\0\0\0\0"),
        (-0.0, b"f\0\0\0\0\0\0\0\0"),
        (float("-inf"), b"f\xff\xf0\0\0\0\0\0\0"),
        ((), b"t"),
        (("a", 1), b"t\0\0\0\x02sa\0\0\0\x02i1"),
    ],
)
def test_the_bytes_of_a_key_are_those_that_checkpoints_hold(key: Any, encoded: bytes) -> None:
    assert encode_key(key) == encoded


def test_the_partition_of_a_key_is_the_crc32_of_its_bytes() -> None:
    """Pinned, not recomputed: another process, with another hash seed, must find the same partition."""
    assert [partition_of(encode_key(key), 1000) for key in ("ann", "bob", 1)] == [127, 324, 147]
    assert [partition_of(data, 2**32) for data in (b"sann", b"")] == [zlib.crc32(b"sann"), 0]


@given(keys, st.integers(1, 64))
def test_every_key_has_a_partition(key: Any, partitions: int) -> None:
    assert 0 <= partition_of(encode_key(key), partitions) < partitions


class Colour(enum.StrEnum):
    RED = "red"


@pytest.mark.parametrize(
    "key", [["a"], {"a": 1}, {1}, object(), 1j, float("nan"), Colour.RED, bytearray(b"a"), "\ud800", ([],)]
)
def test_a_key_without_a_stable_encoding_is_refused(key: Any) -> None:
    with pytest.raises(UnsupportedKey):
        encode_key(key)


@pytest.mark.parametrize("key", [None, ("a", None)])
def test_no_key_is_an_error_of_its_own(key: Any) -> None:
    with pytest.raises(MissingKey):
        encode_key(key)
