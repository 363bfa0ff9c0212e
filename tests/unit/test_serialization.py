"""Serializers and deserializers: what they read and write, what they refuse, and that no payload shows."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import math
import pickle
import traceback
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import FixTheRecord, InvalidPipeline, Undecodable, UnknownOption, UnsupportedValue
from holdfast.kafka.serialization import deserializer, serializer
from holdfast.pickling import dumps, loads

CANARY = "canary-4711"
NAMES = ["json", "bytes", "string", "str", "integer", "int", "double"]

values: dict[str, st.SearchStrategy[Any]] = {
    "json": st.recursive(
        st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text() | st.none(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    ),
    "bytes": st.binary(),
    "string": st.text(),
    "integer": st.integers(-(2**31), 2**31 - 1),
    "double": st.floats(allow_nan=False),
}


@pytest.mark.parametrize("name", values)
@given(data=st.data())
def test_what_is_written_is_read_again(name: str, data: st.DataObject) -> None:
    some = data.draw(st.lists(values[name] | st.none(), max_size=5))
    written = [serializer("value", name)(value) for value in some]
    assert deserializer("value", name).many(written) == some
    assert [deserializer("value", name)(item) for item in written] == some


@pytest.mark.parametrize(
    ("name", "value", "data"),
    [
        ("json", {"a": [1, 2.5, None, "ü"]}, '{"a":[1,2.5,null,"ü"]}'.encode()),
        ("json", {1: (2, 3)}, b'{"1":[2,3]}'),
        ("json", "null", b'"null"'),
        ("json", datetime.date(2024, 1, 2), b'"2024-01-02"'),
        ("bytes", bytearray(b"x"), b"x"),
        ("str", "ü", "ü".encode()),
        ("int", 1, b"\0\0\0\x01"),
        ("integer", -2, b"\xff\xff\xff\xfe"),
        ("double", 1.5, b"\x3f\xf8\0\0\0\0\0\0"),
        ("double", 3, b"\x40\x08\0\0\0\0\0\0"),
    ],
)
def test_the_bytes_are_those_that_other_kafka_clients_write(name: str, value: Any, data: bytes) -> None:
    assert serializer("value", name)(value) == data


def test_a_double_may_be_no_number() -> None:
    data = serializer("value", "double")(math.nan)
    assert math.isnan(deserializer("value", "double")(data))


def never(_: Any) -> Any:
    raise AssertionError("called")


@pytest.mark.parametrize("codec", [*NAMES, never])
def test_none_stays_none_and_no_function_is_called(codec: Any) -> None:
    assert serializer("value", codec)(None) is None
    assert deserializer("value", codec)(None) is None
    assert deserializer("value", codec).many([None, None]) == [None, None]


@pytest.mark.parametrize(("alias", "name"), [("str", "string"), ("int", "integer"), ("json", "json")])
def test_an_alias_is_another_name_for_the_same(alias: str, name: str) -> None:
    assert (serializer("key", alias).name, deserializer("key", alias).name) == (name, name)


@pytest.mark.parametrize("codec", [*NAMES, lambda value: value])
def test_they_survive_pickling(codec: Any) -> None:
    copier: Any = (lambda it: loads(dumps(it))) if callable(codec) else (lambda it: pickle.loads(pickle.dumps(it)))
    value = {"json": b"1", "integer": b"abcd", "int": b"abcd", "double": b"abcdefgh"}.get(codec, b"x")
    for make in (deserializer, serializer):
        assert copier(make("key", codec)).name == make("key", codec).name
    assert copier(deserializer("key", codec))(value) == deserializer("key", codec)(value)


# -- what cannot be read -----------------------------------------------------------------------------------------

unreadable = [
    ("json", f'{{"a": "{CANARY}"'.encode(), "the value is not JSON"),
    ("json", CANARY.encode(), "the value is not JSON"),
    ("json", b"", "the value is not JSON"),
    ("json", b"NaN", "the value is not JSON"),
    ("json", f'"{CANARY}\xff"'.encode("latin-1"), "the value is not JSON"),
    ("json", b"[" * 100_000, "the value is not JSON of a depth that can be read"),
    ("string", f"{CANARY}\xff".encode("latin-1"), "the value is not UTF-8 text"),
    ("integer", CANARY.encode(), "the value is not an integer of 4 bytes"),
    ("integer", b"", "the value is not an integer of 4 bytes"),
    ("double", CANARY.encode(), "the value is not a double of 8 bytes"),
]


@pytest.mark.parametrize(("name", "data", "message"), unreadable)
def test_bytes_of_another_form_are_undecodable_and_not_shown(name: str, data: bytes, message: str) -> None:
    for read in (lambda: deserializer("value", name)(data), lambda: deserializer("value", name).many([None, data])):
        with pytest.raises(Undecodable) as caught:
            read()
        assert str(caught.value) == message
        assert isinstance(caught.value, FixTheRecord)
        assert CANARY not in "".join(traceback.format_exception(caught.value))


def test_an_error_says_whether_it_is_about_the_key() -> None:
    with pytest.raises(Undecodable, match="the key is not JSON"):
        deserializer("key", "json")(b"{")
    with pytest.raises(UnsupportedValue, match=r"the key is a int, not str; .* another key_serializer"):
        serializer("key", "string")(5)


# -- what cannot be written --------------------------------------------------------------------------------------


@dataclasses.dataclass
class Order:
    amount: float | None


class Reading(msgspec.Struct):
    amounts: list[float]


class Odd:
    def __repr__(self) -> str:
        return CANARY


def contains_itself() -> list[Any]:
    endless: list[Any] = [CANARY]
    endless.append(endless)
    return endless


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("json", Odd(), r"\(a Odd\) is or holds a Odd that JSON cannot"),
        ("json", {CANARY: [Odd()]}, r"\(a dict\) is or holds a Odd that JSON cannot"),
        ("json", {(CANARY, 2): 1}, r"\(a dict\) is or holds something that JSON cannot"),
        ("json", {None: CANARY}, r"\(a dict\) is or holds something that JSON cannot"),
        ("json", CANARY + "\ud800", r"\(a str\) has a str with lone surrogates"),
        ("json", contains_itself(), r"\(a list\) is nested too deeply for JSON, or contains itself"),
        ("bytes", [CANARY], "is a list, not bytes"),
        ("string", CANARY.encode(), "is a bytes, not str"),
        ("string", CANARY + "\ud800", "is a str with lone surrogates"),
        ("integer", CANARY, r"\(a str\) cannot be an integer of 4 bytes"),
        ("integer", 4711471147, r"\(a int\) cannot be an integer of 4 bytes"),
        ("integer", 1.0, r"\(a float\) cannot be an integer of 4 bytes"),
        ("integer", True, "is a bool, not an integer of 4 bytes"),
        ("double", CANARY, r"\(a str\) cannot be a double of 8 bytes"),
        ("double", 10**400, r"\(a int\) cannot be a double of 8 bytes"),
        ("double", 2**53 + 1, r"\(a int\) would change as a double of 8 bytes"),
        ("double", decimal.Decimal("0.1"), r"\(a Decimal\) would change as a double of 8 bytes"),
    ],
)
def test_a_value_that_cannot_be_written_is_named_by_its_type_only(name: str, value: Any, message: str) -> None:
    with pytest.raises(UnsupportedValue, match=message) as caught:
        serializer("value", name)(value)
    shown = "".join(traceback.format_exception_only(caught.value))
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    assert CANARY not in shown and "4711" not in shown


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_json_takes_no_nan_and_no_infinity_however_deep(number: float) -> None:
    for value in (number, {"a": [None, {"b": (1, number)}]}, [{number}], Order(number), {"r": Reading([1.0, number])}):
        with pytest.raises(UnsupportedValue, match="holds a NaN or an infinity"):
            serializer("value", "json")(value)


def test_a_null_in_json_is_no_nan() -> None:
    for value in ([None, 1.5, "null", True, b"x"], {"a": {1: None}}, Order(None), {"r": [Reading([1.5]), None]}):
        assert serializer("value", "json")(value) == msgspec.json.encode(value)


# -- the user's own ----------------------------------------------------------------------------------------------


def test_a_function_reads_and_writes_as_it_likes() -> None:
    read = deserializer("value", lambda data: data[::-1])
    assert (read(b"abc"), read.many([b"ab", None])) == (b"cba", [b"ba", None])
    assert serializer("value", str.encode)("x") == b"x"
    assert serializer("value", lambda value: None)("x") is None
    assert deserializer("value", len).name == "len"


def test_what_a_function_raises_goes_through_as_itself() -> None:
    def fail(_: Any) -> Any:
        raise LookupError("mine")

    for call in (deserializer("value", fail), deserializer("value", fail).many, serializer("value", fail)):
        with pytest.raises(LookupError, match="mine"):
            call([b"x"])  # type: ignore[arg-type]


def test_a_function_that_writes_must_return_bytes() -> None:
    with pytest.raises(UnsupportedValue, match=r"value_serializer=str must return bytes, not str") as caught:
        serializer("value", str)(CANARY)  # type: ignore[arg-type]
    assert CANARY not in str(caught.value)


def with_context(value: Any, ctx: Any) -> Any: ...
async def later(value: Any) -> Any: ...


@pytest.mark.parametrize("make", [deserializer, serializer])
def test_a_function_that_could_not_be_called_is_refused_at_once(make: Any) -> None:
    with pytest.raises(
        InvalidPipeline, match=rf"value_{make.__name__}=with_context: the function is called with \(value\)"
    ):
        make("value", with_context)
    with pytest.raises(InvalidPipeline, match="the function is async"):
        make("value", later)


@pytest.mark.parametrize("make", [deserializer, serializer])
def test_an_unknown_name_is_refused_with_those_that_exist(make: Any) -> None:
    with pytest.raises(
        UnknownOption, match=f"no key_{make.__name__} 'avro'; take one of json, bytes, string, integer, double, or a"
    ):
        make("key", "avro")
    with pytest.raises(UnknownOption, match="takes a name or a function, not NoneType"):
        make("key", None)
