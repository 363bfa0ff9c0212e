"""PythonCodec: what goes in comes out, equal and of the same types; everything else is refused with its place."""

from __future__ import annotations

import enum
from collections import OrderedDict, namedtuple
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import Row as SparkRow

from holdfast.errors import UnsupportedValue
from holdfast.state.codecs import is_scalar
from holdfast.state.python_codec import PythonCodec
from holdfast.state.row import Row, row_of

codec = PythonCodec()


def back(value: Any) -> Any:
    return codec.decode(codec.encode(value))


def shape(value: Any) -> Any:
    """A value with its types, comparable: equal shapes mean that nothing was changed."""
    kind = type(value)
    if isinstance(value, datetime | time):
        return kind, repr(value), value.fold
    if kind is dict:
        return kind, [(shape(key), shape(item)) for key, item in value.items()]
    if kind in (set, frozenset):
        return kind, sorted(repr(shape(item)) for item in value)
    if kind is Row:
        return kind, list(vars(value)), [shape(item) for item in value]
    if kind is SparkRow:
        return kind, getattr(value, "__fields__", None), [shape(item) for item in value]
    if kind in (list, tuple):
        return kind, [shape(item) for item in value]
    return kind, repr(value)


fixed_offsets = st.builds(timezone, st.timedeltas(timedelta(hours=-23), timedelta(hours=23)))
named_offsets = st.builds(timezone, st.timedeltas(timedelta(hours=-23), timedelta(hours=23)), st.text(min_size=1))
zones: st.SearchStrategy[tzinfo | None] = st.one_of(
    st.none(),
    st.just(UTC),
    st.sampled_from(["UTC", "Europe/Berlin", "Asia/Kathmandu", "America/New_York"]).map(ZoneInfo),
    fixed_offsets,
    named_offsets,
)
moments = st.datetimes(timezones=zones, allow_imaginary=True)
clocks = st.times(timezones=zones)
any_text = st.text(st.characters(exclude_categories=()))  # lone surrogates, too
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    any_text,
    st.binary(),
    moments,
    clocks,
    st.dates(),
    st.timedeltas(),
    st.decimals(),
)
hashable = st.recursive(
    scalars.filter(lambda value: not (isinstance(value, Decimal) and value.is_snan())),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
names = st.text("abcdefgh_", min_size=1, max_size=5)


def spark_row(fields: dict[str, Any]) -> SparkRow:
    row = SparkRow(*fields.values())
    row.__fields__ = list(fields)
    return row


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(any_text | st.integers(), inner, max_size=4),
        st.dictionaries(hashable, inner, max_size=4),
        st.sets(hashable, max_size=4),
        st.frozensets(hashable, max_size=4),
        st.dictionaries(names, inner, max_size=4).map(row_of),
        st.dictionaries(names, inner, max_size=4).map(spark_row),
    )


@given(st.recursive(scalars, containers, max_leaves=12))
def test_a_value_comes_back_equal_and_with_its_types(value: Any) -> None:
    assert shape(back(value)) == shape(value)


@pytest.mark.parametrize(
    "value",
    [
        2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 10**100, -(10**100), -256, -(2**71),
        float("inf"), float("-inf"), -0.0,
        {}, [], (), set(), frozenset(), b"", "", {"a": ()}, {(): {}}, {None: 1, True: 2, 2.5: 3, b"x": 4},
        {1: {2: {3: (4, [5, {6}])}}}, [{"at": datetime(2024, 5, 1)}, 2**70, "\ud800"],
        datetime.min, datetime.max, datetime(2024, 10, 27, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=1),
        datetime(2024, 1, 1, fold=1), datetime(2024, 1, 1, tzinfo=UTC),
        datetime(2024, 1, 1, tzinfo=timezone(timedelta(hours=2), "X")),
        date.min, date.max, time(23, 59, 59, 999999), timedelta.min, timedelta.max, timedelta(microseconds=-1),
        Decimal("1.10"), Decimal("-0"), Decimal("1E+5"), Decimal("Infinity"), Decimal("NaN12"),
        SparkRow("unnamed", 1), SparkRow(user="ann", tags=[SparkRow(a=1)]), Row(), Row(count=1, index=2),
    ],
)  # fmt: skip
def test_these_come_back_as_they_were(value: Any) -> None:
    assert shape(back(value)) == shape(value)


def test_the_state_of_the_course_s_programs_comes_back() -> None:
    session = {"start": None, "end": None, "count": 0}
    stats = {"count": 0, "sum": 0, "min": float("inf"), "max": float("-inf")}
    history = [row_of({"user_id": "ann", "amount": 1.5, "timestamp": datetime(2024, 1, 1, tzinfo=ZoneInfo("UTC"))})]
    for value in (session, stats, history, datetime(2024, 1, 1), history[0]):
        assert shape(back(value)) == shape(value)


def test_a_zone_is_the_very_one_that_it_was() -> None:
    assert back(datetime(2024, 1, 1, tzinfo=UTC)).tzinfo is UTC
    assert back(datetime(2024, 1, 1, tzinfo=ZoneInfo("UTC"))).tzinfo is ZoneInfo("UTC")


def test_a_spark_row_keeps_two_columns_of_one_name() -> None:
    row = SparkRow(1, 2)
    row.__fields__ = ["a", "a"]
    assert back(row).__fields__ == ["a", "a"]
    assert back(row) == row


class Colour(enum.IntEnum):
    RED = 1


class Text(str):
    __slots__ = ()


Point = namedtuple("Point", "x y")


class Anything:
    pass


class OwnZone(tzinfo):
    pass


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (Anything(), r"type Anything cannot be kept"),
        ({"a": [{"b": Anything()}]}, r"type Anything at a\[\].b cannot"),
        ([(1, {Colour.RED})], r"type Colour at \[\]\[\]\[\] cannot"),
        ({"a": Text("x")}, r"type Text at a cannot"),
        ({Text("x"): 1}, r"type Text at a key of the dict cannot"),
        (Point(1, 2), r"type Point cannot"),
        (OrderedDict(a=1), r"type OrderedDict cannot"),
        (bytearray(b"x"), r"type bytearray cannot"),
        ({"f": len}, r"type builtin_function_or_method at f cannot"),
        (Row(a=1j), r"type complex at \[\] cannot"),
        ([datetime(2024, 1, 1, tzinfo=OwnZone())], r"time zone of type OwnZone at \[\] cannot"),
    ],
)
def test_anything_else_is_refused_with_its_type_and_its_place(value: Any, said: str) -> None:
    with pytest.raises(UnsupportedValue, match=said):
        codec.encode(value)


def test_what_is_nested_too_deep_or_in_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    deep: Any = 0
    for _ in range(300):
        deep = (deep,)
    for value in (endless, {"a": endless}, deep):
        with pytest.raises(UnsupportedValue, match="200 levels deep, or contains itself"):
            codec.encode(value)


def test_a_value_as_deep_as_is_allowed_comes_back() -> None:
    deep: Any = 0
    for _ in range(199):
        deep = {"a": deep} if _ % 2 else (deep,)
    assert back(deep) == deep


def test_no_payload_shows_in_the_error() -> None:
    with pytest.raises(UnsupportedValue) as caught:
        codec.encode({"name": [Text("a secret")]})
    assert "a secret" not in str(caught.value)


@given(scalars)
def test_what_rests_in_a_document_as_it_is_would_be_encoded_to_the_same(value: Any) -> None:
    if is_scalar(value):
        assert shape(back(value)) == shape(value)
