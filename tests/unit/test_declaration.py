"""Every mistake in a declaration is reported by the call that makes it; nothing has run."""

from __future__ import annotations

import functools
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast import Application, Persistence, RocksDBOptions, StreamingDataFrame
from holdfast.errors import InvalidName, InvalidPipeline, UnknownOption
from holdfast.sources.spark import SparkSource
from holdfast.testing import Harness


@pytest.fixture
def sdf(app: Application) -> StreamingDataFrame:
    return app.dataframe(app.from_iterable([1, 2, 3]))


# -- functions ---------------------------------------------------------------------------------------------------

verbs = pytest.mark.parametrize("verb", ["apply", "update", "filter", "inspect", "foreach_batch"])


@verbs
@pytest.mark.parametrize("given", [None, 5, "lambda", [len]])
def test_a_step_takes_a_function(sdf: StreamingDataFrame, verb: str, given: Any) -> None:
    with pytest.raises(InvalidPipeline, match=rf"{verb}\(\) takes a function, not {type(given).__name__}"):
        getattr(sdf, verb)(given)


@verbs
def test_a_step_takes_no_async_function(sdf: StreamingDataFrame, verb: str) -> None:
    async def later(*_: Any) -> None: ...

    async def items(*_: Any) -> Any:
        yield 1

    for function in (later, items, functools.partial(later, 1)):
        with pytest.raises(InvalidPipeline, match="the function is async"):
            getattr(sdf, verb)(function)


@verbs
def test_a_generator_is_for_expand_only(sdf: StreamingDataFrame, verb: str) -> None:
    def items(value: Any, version: int = 0) -> Any:
        yield value

    with pytest.raises(InvalidPipeline, match=r"only apply\(expand=True\) takes one"):
        getattr(sdf, verb)(items)
    sdf.apply(items, expand=True)
    sdf.flat_map(items)
    sdf.flat_map("items", items)


def nothing() -> None: ...
def one(value: Any) -> None: ...
def two(value: Any, state: Any) -> None: ...
def four(value: Any, key: Any, timestamp: Any, headers: Any) -> None: ...
def five(value: Any, key: Any, timestamp: Any, headers: Any, state: Any) -> None: ...
def keyword(value: Any, *, needed: Any) -> None: ...
def any_number(*all: Any) -> None: ...


shapes: dict[str, tuple[dict[str, bool], Any]] = {
    "value": ({}, one),
    "value, state": ({"stateful": True}, two),
    "value, key, timestamp, headers": ({"metadata": True}, four),
    "value, key, timestamp, headers, state": ({"metadata": True, "stateful": True}, five),
}


@pytest.mark.parametrize("verb", ["apply", "update", "filter"])
@pytest.mark.parametrize("arguments", shapes)
def test_a_function_must_take_what_it_will_be_called_with(sdf: StreamingDataFrame, verb: str, arguments: str) -> None:
    options, right = shapes[arguments]
    getattr(sdf, verb)(right, **options)
    getattr(sdf, verb)(any_number, **options)
    for wrong in {nothing, one, two, four, five, keyword} - {right}:
        with pytest.raises(InvalidPipeline) as caught:
            getattr(sdf, verb)(wrong, **options)
        assert f"{verb}({wrong.__name__}): the function is called with ({arguments}), but its signature is" in str(
            caught.value
        )


@pytest.mark.parametrize("verb", ["inspect", "foreach_batch"])
def test_a_function_of_a_sink_must_take_what_it_will_be_called_with(sdf: StreamingDataFrame, verb: str) -> None:
    with pytest.raises(InvalidPipeline, match="the function is called with"):
        getattr(sdf, verb)(nothing)


def test_a_built_in_that_does_not_tell_its_signature_is_taken(sdf: StreamingDataFrame) -> None:
    sdf.apply(dict).apply(max).inspect(print)


@pytest.mark.parametrize("option", ["stateful", "expand", "metadata"])
def test_a_switch_is_true_or_false(sdf: StreamingDataFrame, option: str) -> None:
    with pytest.raises(InvalidPipeline, match=f"apply\\({option}=\\) is True or False"):
        sdf.apply(any_number, **{option: "yes"})  # type: ignore[arg-type]


# -- names -------------------------------------------------------------------------------------------------------

bad_names = pytest.mark.parametrize(
    "name", ["a/b", "../x", "", ".", "..", ".hidden", "-x", "a b", "a\0", "a\n", "ü", "x" * 201, 5]
)


@bad_names
def test_a_store_name_is_no_path(sdf: StreamingDataFrame, name: Any) -> None:
    with pytest.raises(InvalidName, match="store name"):
        sdf.apply(two, stateful=True, store=name)


@bad_names
def test_a_view_is_asked_for_by_the_same_kind_of_name(app: Application, name: Any) -> None:
    with pytest.raises(InvalidName, match="store name"):
        app.state(name)


@bad_names
def test_an_application_name_is_no_path(tmp_path: Path, name: Any) -> None:
    with pytest.raises(InvalidName, match="application name"):
        Application(name, state_dir=tmp_path)
    with pytest.raises(InvalidName, match="application name"):
        Application(consumer_group=name, state_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["orders", "a.b-c_D9", "0", "x" * 200])
def test_a_plain_name_is_taken(tmp_path: Path, name: str) -> None:
    assert Application(name, state_dir=tmp_path, loglevel=None).name == name
    assert Application(consumer_group=name, state_dir=tmp_path, loglevel=None).name == name


def test_two_names_for_one_application_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownOption, match="two words for one thing"):
        Application("a", consumer_group="b", state_dir=tmp_path)


@pytest.mark.parametrize("verb", ["apply", "update", "filter"])
def test_a_store_is_for_stateful_steps(sdf: StreamingDataFrame, verb: str) -> None:
    with pytest.raises(InvalidPipeline, match=rf"{verb}\(store='s'\) needs stateful=True"):
        getattr(sdf, verb)(one, store="s")


# -- options -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("partition", "did you mean 'partitions'"),
        ("state_directory", "did you mean 'state_dir'"),
        ("processing_error", "on_processing_error"),
        ("zzz", "the options are name, consumer_group"),
    ],
)
def test_an_option_that_does_not_exist_is_named_with_the_one_that_was_meant(option: str, hint: str) -> None:
    with pytest.raises(UnknownOption, match=hint) as caught:
        Application("a", **{option: 1})
    assert caught.value.option == option  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dump": 1}, r"no option 'dump'; .*dumps, loads"),
        ({"dumps": str}, "given together"),
        ({"loads": str}, "given together"),
        ({"dumps": 1, "loads": str}, "dumps must be a function, not int"),
        ({"dumps": str, "loads": b""}, "loads must be a function, not bytes"),
    ],
)
def test_rocksdb_options_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UnknownOption, match=message):
        RocksDBOptions(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"partitions": value}, "partitions=.*positive number") for value in (0, -1, 1.5, "2", True)
    ]
    + [({"max_batch_rows": value}, "max_batch_rows=.*positive number") for value in (0, -1, None, True)]
    + [({"persistence": "/tmp/x"}, "persistence is a holdfast.Persistence")]
    + [({"rocksdb_options": {}}, "rocksdb_options is a holdfast.RocksDBOptions")],
)  # fmt: skip
def test_an_option_with_a_value_that_it_cannot_take_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UnknownOption, match=message):
        Application("a", **options)


@pytest.mark.parametrize("callback", ["skip", nothing, one, two])
def test_an_error_callback_takes_exception_record_and_logger(callback: Any) -> None:
    with pytest.raises(InvalidPipeline, match="on_processing_error="):
        Application("a", on_processing_error=callback)


@pytest.mark.parametrize("url", ["", "  ", "http://x", "s3a://bucket/x"])
def test_a_checkpoint_lives_on_a_local_path_or_in_an_object_store(url: str) -> None:
    with pytest.raises(UnknownOption, match=r"is no place for a checkpoint: a local path is needed, or a URL"):
        Persistence(url)


@pytest.mark.parametrize("url", ["/data/my orders", Path("/data/my orders"), "file:///data/my%20orders"])
def test_a_path_and_its_url_are_the_same_place(url: Any) -> None:
    assert Persistence(url).directory == Path("/data/my orders")


@pytest.mark.parametrize(
    "options",
    [
        {"snapshot_every": True},
        {"snapshot_every": 0},
        {"snapshot_every": timedelta(0)},
        {"snapshot_every": "1 minute"},
        {"keep": 0},
        {"keep": 1.5},
    ],
)
def test_snapshots_come_after_a_time_or_a_number_of_batches(options: dict[str, Any]) -> None:
    with pytest.raises(UnknownOption, match=next(iter(options))):
        Persistence("/data/orders", **options)
    assert Persistence("/data/orders", snapshot_every=timedelta(seconds=10)).keep == 2


# -- sources -----------------------------------------------------------------------------------------------------


def test_a_source_is_used_once(app: Application) -> None:
    source = app.from_iterable([1])
    app.dataframe(source)
    with pytest.raises(InvalidPipeline, match="iterable is already read: keep the first dataframe and branch it"):
        app.dataframe(source)


def test_sources_whose_keys_lie_differently_are_not_read_together() -> None:
    app = Application("mixed", broker_address="localhost:9", loglevel=None)
    app.dataframe(app.from_iterable([1]))
    with pytest.raises(InvalidPipeline, match="iterable and orders cannot be read by one application"):
        app.dataframe(app.topic("orders"))


def test_a_store_has_the_records_of_the_same_sources_everywhere(app: Application) -> None:
    one, other = app.dataframe(app.from_iterable([1])), app.dataframe(app.from_iterable([2]))
    one.apply(two, stateful=True)
    with pytest.raises(InvalidPipeline, match=r"'default' holds state by the keys of iterable, .* of iterable-2: give"):
        other.apply(two, stateful=True)
    with pytest.raises(InvalidPipeline, match=r"of iterable, .* of iterable and iterable-2: give it another store="):
        one.concat(other).apply(two, stateful=True)
    one.concat(other).apply(two, stateful=True, store="both")


@pytest.mark.parametrize("given", [[1, 2], None, "topic"])
def test_a_dataframe_is_made_of_a_source(app: Application, given: Any) -> None:
    with pytest.raises(
        InvalidPipeline, match=f"takes a source such as app.from_iterable\\(\\), not {type(given).__name__}"
    ):
        app.dataframe(given)


@pytest.mark.parametrize("given", [(n for n in range(3)), iter([1]), map(str, [1]), {1, 2}, 5, None, {"a": 1}])
def test_what_cannot_be_read_again_by_position_is_no_source(app: Application, given: Any) -> None:
    with pytest.raises(InvalidPipeline, match="takes a sequence"):
        app.from_iterable(given)


@pytest.mark.parametrize("what", ["key", "timestamp"])
def test_a_key_or_time_is_a_field_name_or_a_function_of_the_value(app: Application, what: str) -> None:
    with pytest.raises(InvalidPipeline, match=f"{what} must be a field name or a function of the value, not int"):
        app.from_iterable([1], **{what: 5})  # type: ignore[arg-type]
    with pytest.raises(InvalidPipeline, match=rf"{what}=: the function is called with \(value\)"):
        app.from_iterable([1], **{what: two})


def test_from_spark_takes_a_streaming_frame(app: Application) -> None:
    with pytest.raises(InvalidPipeline, match="takes a streaming DataFrame"):
        app.from_spark([1])  # type: ignore[arg-type]


def test_files_have_a_known_format(app: Application) -> None:
    with pytest.raises(InvalidPipeline, match="one of json, parquet, csv"):
        app.from_files("/tmp/x", format="xlsx", schema="a int")


# -- sinks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ddl", "message"),
    [
        ("", "it ends too early"),
        ("a", "it ends too early"),
        ("a int,", "it ends too early"),
        ("a int b int", "unexpected 'b'"),
        ("a blob", "no type 'blob'"),
        ("a array<int", "'>' expected"),
        ("a array", "'<' expected"),
        ("a struct<b int, c>", "a ':' is missing after 'b'"),
        ("a map<string>", "',' expected"),
        ("a map<void,int>", "keys of type 'void'"),
        ("a decimal(x)", "a number expected, not 'x'"),
        ("a decimal(39,2)", "at most 38 digits"),
        ("a decimal(5,6)", "at most 38 digits"),
        ("a int; drop", "unexpected ';'"),
        ("a int, b int, A string", "the column 'A' is there twice"),
        ("a struct<b:int,B:int>", "the column 'B' is there twice"),
        (5, "a DDL string or a StructType, not int"),
    ],
)
def test_a_schema_that_cannot_be_read_is_refused(sdf: StreamingDataFrame, ddl: Any, message: str) -> None:
    for declare in (lambda: sdf.to_table("t", schema=ddl), lambda: sdf.foreach_batch(two, schema=ddl)):
        with pytest.raises(InvalidPipeline) as caught:
            declare()
        assert message in str(caught.value)


@pytest.mark.parametrize(
    ("option", "given"), [("format", "xlsx"), ("format", None), ("mode", "upsert"), ("mode", ["append"])]
)
def test_a_table_has_a_known_format_and_mode(sdf: StreamingDataFrame, option: str, given: Any) -> None:
    with pytest.raises(InvalidPipeline, match=rf"to_table\({option}="):
        sdf.to_table("t", **{option: given})


@pytest.mark.parametrize("name", ["", "  ", None, 5, "a;b", "a.b", "1a", "s3://bucket/t", "hdfs://x/t"])
def test_a_table_has_a_name_or_a_local_path(sdf: StreamingDataFrame, name: Any) -> None:
    with pytest.raises(InvalidPipeline, match="to_table"):
        sdf.to_table(name)


@pytest.mark.parametrize(
    ("first", "again"), [("t", "t"), ("/tmp/t", "/tmp/t/"), ("/tmp/t", "file:///tmp/x/../t"), ("./t", "./x/../t")]
)
def test_a_table_is_written_by_one_sink(sdf: StreamingDataFrame, first: str, again: str) -> None:
    sdf.to_table(first)
    with pytest.raises(InvalidPipeline, match="writes to this table already"):
        sdf.apply(one).to_table(again)


# -- running -----------------------------------------------------------------------------------------------------


def test_running_needs_a_dataframe(app: Application) -> None:
    with pytest.raises(InvalidPipeline, match="there is nothing to run"):
        app.run()


def test_running_needs_a_step(app: Application) -> None:
    app.dataframe(app.from_iterable([1]))
    with pytest.raises(InvalidPipeline, match="the pipeline has no steps"):
        app.run()


def test_the_harness_knows_its_failpoints() -> None:
    with pytest.raises(InvalidPipeline, match="no failpoint 'commit'"):
        Harness(lambda sdf: sdf.apply(one)).crash_at("commit")


class RowsOf:
    """A streaming DataFrame that only remembers what was selected."""

    isStreaming = True  # noqa: N815  (Spark's name)

    def __init__(self, *columns: str) -> None:
        self.columns = list(columns)
        self.selected: list[Any] = []

    def select(self, column: Any) -> Any:
        self.selected.append(column)
        kind = SimpleNamespace(simpleString=lambda: "string")
        return SimpleNamespace(schema=[SimpleNamespace(dataType=kind)])


@pytest.mark.parametrize(("name", "asked"), [("user", "`user`"), ("a.b", "`a.b`"), ("a`b", "`a``b`")])
def test_a_column_is_found_whatever_its_name(name: str, asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyspark.sql.functions.col", lambda name: name)
    rows = RowsOf(name)
    SparkSource(rows, name, None)  # type: ignore[arg-type]
    assert rows.selected == [asked]
