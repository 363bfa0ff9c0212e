"""The rows of a group: as Spark's, but cheap."""

from __future__ import annotations

import pickle

import pytest
from pyspark.sql import Row as SparkRow
from pyspark.sql.types import ArrayType, LongType, MapType, StringType, StructField, StructType

from holdfast.state.row import Row, conversion


def test_a_row_reads_as_spark_s_does() -> None:
    ours, sparks = Row(user="ann", amount=3), SparkRow(user="ann", amount=3)
    for row in (ours, sparks):
        user, amount = row
        assert (user, amount, row.user, row["amount"], row[0], row[-1], row[:1]) == (
            *sparks,
            "ann",
            3,
            "ann",
            3,
            ("ann",),
        )
        assert (len(row), "user" in row, "x" in row, row.asDict()) == (2, True, False, {"user": "ann", "amount": 3})
    assert repr(ours) == repr(sparks)
    assert ours == sparks
    assert hash(ours) == hash(sparks)
    assert ours != Row(user="bob", amount=3)
    assert ours == ("ann", 3)
    assert ours != ["ann", 3]


def test_a_column_wins_over_a_method_of_its_name() -> None:
    assert (Row(count=1, asDict=2).count, Row(asDict=2).asDict) == (1, 2)


def test_a_column_that_is_not_there_is_named_with_those_that_are() -> None:
    row = Row(user="a secret", amount=3)
    with pytest.raises(AttributeError, match=r"no column 'usr'; it has user, amount") as by_attribute:
        _ = row.usr
    with pytest.raises(KeyError, match=r"no column 'usr'; it has user, amount") as by_item:
        _ = row["usr"]
    assert "secret" not in f"{by_attribute.value}{by_item.value}"


def test_a_row_cannot_be_changed() -> None:
    row = Row(a=1)
    with pytest.raises(AttributeError, match="cannot be changed"):
        row.a = 2
    with pytest.raises(AttributeError, match="cannot be changed"):
        del row.a
    assert row.a == 1


def test_a_row_survives_pickling() -> None:
    assert pickle.loads(pickle.dumps(Row(a=1, b=[Row(c=2)]))) == Row(a=1, b=[Row(c=2)])


def test_rows_inside_become_dicts_if_that_is_wanted() -> None:
    row = Row(a=Row(b=1), c=[Row(d=2)])
    assert row.asDict()["a"] == Row(b=1)
    assert row.asDict(recursive=True) == {"a": {"b": 1}, "c": [{"d": 2}]}


def test_structs_and_maps_of_arrow_become_what_spark_makes_of_them() -> None:
    inner = StructType([StructField("n", LongType()), StructField("tags", MapType(StringType(), LongType()))])
    schema = StructType(
        [StructField("user", StringType()), StructField("one", inner), StructField("many", ArrayType(inner))]
    )
    to_row = conversion(schema)
    assert to_row is not None
    value = {"user": "ann", "one": {"n": 1, "tags": [("a", 1)]}, "many": [{"n": 2, "tags": None}, None]}
    assert pickle.loads(pickle.dumps(to_row))(value) == Row(
        user="ann", one=Row(n=1, tags={"a": 1}), many=[Row(n=2, tags=None), None]
    )
    assert to_row({"user": None, "one": None, "many": None}) == Row(user=None, one=None, many=None)


def test_plain_columns_need_no_conversion() -> None:
    assert conversion(StringType()) is None
    assert conversion(ArrayType(LongType())) is None
