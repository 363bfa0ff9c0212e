"""Schemas of rows: DDL without a JVM, schemas that grow out of rows, and rows that do not fit."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import types as T

from holdfast.errors import InvalidPipeline, PlanMismatch, UnsupportedValue
from holdfast.log.manifest import Chain
from holdfast.plan.schema import arrow_schema, to_ddl
from holdfast.plan.sinks import RowsEncoder
from holdfast.testing import Harness, run

# -- DDL ---------------------------------------------------------------------------------------------------------

names = st.text(min_size=1, max_size=8).filter(lambda name: "\0" not in name)
simple = st.sampled_from(
    [
        "string",
        "bigint",
        "int",
        "smallint",
        "tinyint",
        "double",
        "float",
        "boolean",
        "binary",
        "date",
        "timestamp",
        "timestamp_ntz",
        "decimal(10,2)",
    ]
).map(lambda name: arrow_schema(f"x {name}").field(0).type)


def fields(kinds: Any) -> Any:
    return st.dictionaries(names, kinds, min_size=1, max_size=3).filter(
        lambda columns: len({name.lower() for name in columns}) == len(columns)
    )


types = st.recursive(
    simple | st.just(pa.null()),
    lambda inner: st.one_of(
        inner.map(pa.list_),
        st.tuples(simple, inner).map(lambda pair: pa.map_(*pair)),
        fields(inner).map(lambda columns: pa.struct(list(columns.items()))),
    ),
    max_leaves=5,
)


@given(fields(types))
def test_a_schema_comes_back_from_its_ddl(columns: dict[str, pa.DataType]) -> None:
    schema = pa.schema(list(columns.items()))
    assert arrow_schema(to_ddl(schema)) == schema


@pytest.mark.parametrize(
    ("ddl", "canonical"),
    [
        ("user string, total bigint", "user string, total bigint"),
        ("  a   INT ,b Long", "a int, b bigint"),
        ("a integer, b short, c byte, d real", "a int, b smallint, c tinyint, d float"),
        ("a numeric(5), b dec, c decimal(38, 38)", "a decimal(5,0), b decimal(10,0), c decimal(38,38)"),
        (
            "a: int, `b c` map<string, struct<x: int, `y``z`: date>>",
            "a int, `b c` map<string,struct<x:int,`y``z`:date>>",
        ),
    ],
)
def test_ddl_is_read_as_spark_reads_it(ddl: str, canonical: str) -> None:
    assert to_ddl(arrow_schema(ddl)) == canonical


def test_a_struct_type_of_spark_is_a_schema() -> None:
    inner = T.StructType([T.StructField("x y", T.IntegerType()), T.StructField("z", T.DecimalType(12, 3))])
    schema = T.StructType(
        [
            T.StructField("user", T.StringType(), nullable=False),
            T.StructField("my total", T.LongType()),
            T.StructField("a-b", T.ArrayType(inner)),
            T.StructField("m", T.MapType(T.StringType(), inner)),
            T.StructField("at", T.TimestampType()),
            T.StructField("local", T.TimestampNTZType()),
            T.StructField("raw", T.BinaryType()),
        ]
    )
    assert to_ddl(arrow_schema(schema)) == (
        "user string, `my total` bigint, `a-b` array<struct<`x y`:int,z:decimal(12,3)>>, "
        "m map<string,struct<`x y`:int,z:decimal(12,3)>>, at timestamp, local timestamp_ntz, raw binary"
    )


# -- a given schema ----------------------------------------------------------------------------------------------


def written(schema: str | None, *rows: Any) -> list[dict[str, Any]]:
    encoder = RowsEncoder("sink", None if schema is None else arrow_schema(schema))
    for row in rows:
        encoder.add(row, None, 0, None)
    result: list[dict[str, Any]] = encoder.table().to_pylist()
    return result


NOON = datetime(2024, 1, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("bigint", 2**63 - 1),
        ("bigint", -(2**63)),
        ("tinyint", -128),
        ("double", 1.5),
        ("double", float("inf")),
        ("boolean", True),
        ("string", "né"),
        ("binary", b"\0"),
        ("date", date(2024, 1, 1)),
        ("timestamp", NOON),
        ("timestamp_ntz", NOON.replace(tzinfo=None)),
        ("decimal(5,2)", Decimal("123.45")),
        ("array<int>", [1, None, 3]),
        ("array<array<string>>", [["a"], None, []]),
        ("struct<x:int,y:array<double>>", {"x": 1, "y": [0.5]}),
    ],
)
def test_a_value_that_fits_its_column_is_kept(kind: str, value: Any) -> None:
    assert written(f"a {kind}, b int", {"a": value}, {"a": None}, {}) == [
        {"a": value, "b": None},
        {"a": None, "b": None},
        {"a": None, "b": None},
    ]


def test_an_int_may_go_into_a_double_column() -> None:
    (row,) = written("a double", {"a": 2**53})
    assert row == {"a": 2.0**53} and type(row["a"]) is float


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("bigint", 2**63),
        ("tinyint", 128),
        ("int", 1.0),
        ("int", True),
        ("int", "1"),
        ("double", 2**53 + 1),
        ("double", True),
        ("double", "1.5"),
        ("boolean", 1),
        ("string", 1),
        ("string", b"bytes"),
        ("string", "\ud800"),
        ("binary", "text"),
        ("date", NOON),
        ("date", 5),
        ("timestamp", 5),
        ("timestamp", date(2024, 1, 1)),
        ("decimal(5,2)", Decimal("1.234")),
        ("decimal(5,2)", 1.5),
        ("array<int>", [1, "2"]),
        ("array<int>", [1, True]),
        ("array<int>", {1}),
        ("array<string>", "text"),
        ("struct<x:int>", {"x": "1"}),
        ("struct<x:int>", {"x": 1, "unknown": 2}),
        ("struct<x:array<struct<y:int>>>", {"x": [{"y": 1}, {"z": 1}]}),
        ("map<string,int>", {"a": "b"}),
    ],
)
def test_a_value_that_its_column_would_change_is_refused(kind: str, value: Any) -> None:
    with pytest.raises(UnsupportedValue, match="does not fit the column 'a'"):
        written(f"a {kind}", {"a": value})


def test_a_column_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(UnsupportedValue, match="sink has no column 'c'; its columns are: a, b"):
        written("a int, b int", {"a": 1, "c": 2})


@pytest.mark.parametrize("row", [None, 5, "text", [("a", 1)], (1,)])
def test_a_row_is_a_dict(row: Any) -> None:
    for schema in ("a int", None):
        with pytest.raises(UnsupportedValue, match=f"a value must be a dict, not {type(row).__name__}"):
            written(schema, row)


# -- a schema that grows out of the rows -------------------------------------------------------------------------


def pinned(*rows: Any, partitions: int = 1) -> tuple[str, list[dict[str, Any]]]:
    """The schema that the first version gave to a table, and the rows that it was given."""
    harness = Harness(lambda sdf: sdf.to_table("t"), partitions=partitions)
    harness.feed(*rows)
    harness.run()
    return Chain(harness.storage).read(1).schemas["table:t"], harness.rows["table:t"]


@pytest.mark.parametrize(
    ("rows", "ddl"),
    [
        ([{"a": 1, "b": "x"}], "a bigint, b string"),
        ([{"a": True, "b": 1.5, "c": b"", "d": date(2024, 1, 1)}], "a boolean, b double, c binary, d date"),
        ([{"at": NOON, "local": NOON.replace(tzinfo=None)}], "at timestamp, local timestamp_ntz"),
        ([{"a": 1}, {"b": 2}], "a bigint, b bigint"),
        ([{"a": None}, {"a": "x"}], "a string"),
        ([{"a": []}, {"a": [1]}, {"a": [0.5]}], "a array<double>"),
        ([{"a": {"x": 1}}, {"a": {"y": "z"}}], "a struct<x:bigint,y:string>"),
        ([{"a": Decimal("1.5")}, {"a": Decimal("10.25")}], "a decimal(4,2)"),
        ([{"a": None, "b": [], "c": {"d": None}}], "a string, b array<string>, c struct<d:string>"),
    ],
)
def test_the_first_rows_decide_the_schema(rows: list[dict[str, Any]], ddl: str) -> None:
    assert pinned(*rows)[0] == ddl


def test_an_int_column_becomes_a_double_column_when_a_float_comes() -> None:
    assert pinned({"a": 1}, {"a": 2.5}, {"a": 3}) == ("a double", [{"a": 1.0}, {"a": 2.5}, {"a": 3.0}])


@pytest.mark.parametrize(
    ("first", "contradiction"),
    [
        ({"a": 1}, {"a": "x"}),
        ({"a": "x"}, {"a": 1}),
        ({"a": 1}, {"a": True}),
        ({"a": b"x"}, {"a": "x"}),
        ({"a": "x"}, {"a": b"x"}),
        ({"a": [1]}, {"a": 1}),
        ({"a": {"x": 1}}, {"a": {"x": "1"}}),
        ({"a": date(2024, 1, 1)}, {"a": NOON}),
        ({"a": 1.5}, {"a": 2**60}),
        ({"a": 2**60}, {"a": 1.5}),
        ({"a": 1}, {"a": 2**64}),
        ({"a": 1}, {"A": 1}),
        ({"a": 1}, {}),
        ({"a": 1}, {"b": {}}),
        ({"a": 1}, {"b": timedelta(1)}),
        ({"a": 1}, {"b": object()}),
        ({"a": 1}, {"b": {1: 2}}),
        ({"a": 1}, {1: 2}),
        ({"a": 1}, {"b": "\ud800"}),
    ],
)
def test_a_row_that_contradicts_those_before_it_is_an_error_of_that_record_alone(
    first: Any, contradiction: Any
) -> None:
    skipped: list[Any] = []

    def skip(exc: Exception, record: Any, logger: Any) -> bool:
        skipped.append((type(exc), record.position))
        return True

    harness = Harness(lambda sdf: sdf.to_table("t").apply(bool), on_processing_error=skip)
    harness.feed(first, contradiction, first)
    harness.run()
    assert skipped == [(UnsupportedValue, 1)]
    assert harness.rows["table:t"] == [first, first]


def test_a_record_that_fails_elsewhere_leaves_no_trace_in_the_schema() -> None:
    def build(sdf: Any) -> None:
        sdf.to_table("t")
        sdf.update(lambda row: row["number"] / 1)

    harness = Harness(build, on_processing_error=lambda *_: True)
    harness.feed({"number": "text", "extra": 1}, {"number": 1}, {"number": "text"}, {"number": 2.5})
    harness.run()
    assert harness.rows["table:t"] == [{"number": 1.0}, {"number": 2.5}]
    assert Chain(harness.storage).read(1).schemas == {"table:t": "number double"}


def test_the_schema_of_the_first_version_holds_for_all_later_ones() -> None:
    harness = Harness(lambda sdf: sdf.to_table("t"))
    harness.feed({"a": 1})
    harness.run()
    for row, message in [({"a": 1.5}, "does not fit the column 'a' of type int64"), ({"b": 1}, "has no column 'b'")]:
        harness.feed(row)
        harness.restart()
        with pytest.raises(UnsupportedValue, match=message):
            harness.run()
        harness._fed.pop()
    harness.feed({"a": 2})
    harness.run()
    assert harness.rows["table:t"] == [{"a": 1}, {"a": 2}]


def test_the_rows_of_all_partitions_have_one_schema() -> None:
    rows = [("a", {"n": 1}), ("b", {"n": None, "more": "x"}), ("c", {"n": 2.5}), ("d", {"n": 4})]
    assert pinned(*rows, partitions=4)[0] == "n double, more string"


@pytest.mark.parametrize(
    "rows", [({"n": 2**60}, {"n": 1.5}), ({"n": "x"}, {"n": b"x"}), ({"n": 1}, {"n": "x"}), ({"n": 1}, {"N": 1})]
)
def test_partitions_whose_rows_have_no_schema_in_common_commit_nothing(rows: tuple[Any, Any]) -> None:
    harness = Harness(lambda sdf: sdf.to_table("t").update(lambda _: None), partitions=2)
    harness.feed(*rows)  # without keys: one row in each partition
    with pytest.raises(UnsupportedValue, match="no schema in common"):
        harness.run()
    assert len(harness.storage.names("commits/")) == 1


def test_a_column_named_like_the_version_of_a_table_is_refused() -> None:
    with pytest.raises(InvalidPipeline, match="holdfast_version"):
        run(lambda sdf: sdf.to_table("t", schema="holdfast_version bigint"), [])
    with pytest.raises(UnsupportedValue, match="holdfast_version"):
        run(lambda sdf: sdf.to_table("t"), [{"holdfast_version": 1}])


# -- a schema that changes on a checkpoint -------------------------------------------------------------------------------


def next_life(before: Harness, schema: str | None) -> Harness:
    harness = Harness(lambda sdf: sdf.to_table("t", schema=schema))
    harness.storage = before.storage
    return harness


def test_another_schema_than_the_checkpoint_has_is_refused_at_the_start() -> None:
    first = run(lambda sdf: sdf.to_table("t", schema="a int, b string"), [{"a": 1}])
    for other in ("a bigint, b string", "a int", "b string, a int", "a int, c string"):
        with pytest.raises(PlanMismatch, match="table:t was written with the schema 'a int, b string'") as caught:
            next_life(first, other).restart()
        assert caught.value.checkpoint == "a int, b string"
    for same in ("a int, b string", "`a` integer, `b` string", None):
        next_life(first, same).restart()


def test_a_schema_that_is_given_later_must_be_the_one_that_was_found() -> None:
    first = run(lambda sdf: sdf.to_table("t"), [{"a": 1, "b": None}])
    next_life(first, "a bigint, b string").restart()
    next_life(first, "a bigint, b void").restart()  # a column that held only None is one of strings
    with pytest.raises(PlanMismatch, match="Give the first one"):
        next_life(first, "a double, b string").restart()


def test_before_the_first_rows_a_schema_may_change() -> None:
    first = run(lambda sdf: sdf.to_table("t", schema="a int"), [])
    next_life(first, "b string").restart()
