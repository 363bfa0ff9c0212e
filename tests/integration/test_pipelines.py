"""Whole pipelines on a real Spark: every source and every sink, and what a user sees of them."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest
from damage import truncated

from holdfast import Application, Persistence
from holdfast.errors import Damaged, ForeignTarget, InvalidPipeline, PlanMismatch, RunIsAlive, SourceMismatch
from holdfast.sinks import table
from holdfast.sinks.rows import outbox_frame
from holdfast.sources.arrow import map_in_arrow
from holdfast.testing import Crash

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from holdfast import State

SCHEMA = "user string, code int, amount bigint, at bigint"
ORDERS = [{"user": f"u{n % 4}", "amount": n} for n in range(30)]
TOTALS = {f"u{user}": sum(n for n in range(30) if n % 4 == user) for user in range(4)}


def total(order: dict[str, Any], state: State) -> dict[str, Any]:
    state.set("total", state.get("total", default=0) + order["amount"])
    return {**order, "total": state.get("total")}


def totals(app: Application) -> dict[Any, int]:
    return {key: state["total"] for key, state in app.state().items()}


def table_rows(path: Path) -> list[dict[str, Any]]:
    return [
        row for file in sorted(path.glob("holdfast_version=*/*.parquet")) for row in pq.read_table(file).to_pylist()
    ]


# -- sources -------------------------------------------------------------------------------------------------------------


def test_a_function_is_asked_again_in_the_next_run(spark: SparkSession, tmp_path: Path) -> None:
    here = tmp_path / "orders"

    def lines() -> Iterator[dict[str, Any]]:
        return map(json.loads, here.read_text().splitlines())

    app = Application("app", state_dir=tmp_path, spark=spark)
    app.dataframe(app.from_iterable(lines, key="user")).apply(total, stateful=True)
    for count in (10, 30):
        here.write_text("".join(json.dumps(order) + "\n" for order in ORDERS[:count]))
        app.run()
    assert totals(app) == TOTALS


@pytest.mark.parametrize("records", [ORDERS, lambda: iter(ORDERS)], ids=["sequence", "factory"])
def test_an_iterable_is_processed_once_across_runs(spark: SparkSession, tmp_path: Path, records: Any) -> None:
    for _ in range(2):
        app = Application("app", state_dir=tmp_path, spark=spark, max_batch_rows=7)
        app.dataframe(app.from_iterable(records, key="user")).apply(total, stateful=True)
        app.run()
        assert totals(app) == TOTALS


def test_records_that_are_added_later_are_processed_by_the_next_run(spark: SparkSession, tmp_path: Path) -> None:
    for until in (10, 30):
        app = Application("app", state_dir=tmp_path, spark=spark)
        app.dataframe(app.from_iterable(ORDERS[:until], key="user")).apply(total, stateful=True)
        app.run()
    assert totals(app) == TOTALS


def by_column() -> Any:
    return "user"


def by_expression() -> Any:
    from pyspark.sql import functions as F

    return F.concat(F.lit("u"), F.col("code").cast("string"))


def by_function() -> Any:
    return lambda row: f"u{row['code']}"


@pytest.mark.parametrize("key", [by_column, by_expression, by_function])
def test_a_spark_source_is_keyed_by(
    spark: SparkSession, tmp_path: Path, json_files: Path, key: Callable[[], Any]
) -> None:
    app = Application("app", state_dir=tmp_path, spark=spark)
    rows = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).json(str(json_files))
    app.dataframe(app.from_spark(rows, key=key())).apply(total, stateful=True)
    app.run(available_now=True)
    assert totals(app) == TOTALS


def test_an_integer_column_is_a_key_and_differs_from_its_text(
    spark: SparkSession, tmp_path: Path, json_files: Path
) -> None:
    app = Application("app", state_dir=tmp_path, spark=spark)
    app.dataframe(app.from_files(json_files, format="json", schema=SCHEMA, key="code")).apply(total, stateful=True)
    app.run(available_now=True)
    assert totals(app) == {int(user[1]): amount for user, amount in TOTALS.items()}
    assert app.state().get(1) == {"total": TOTALS["u1"]}
    assert app.state().get("1") is None


@pytest.mark.parametrize("format", ["parquet", "csv"])
def test_files_of_other_formats(spark: SparkSession, tmp_path: Path, json_files: Path, format: str) -> None:
    spark.read.schema(SCHEMA).json(str(json_files)).write.format(format).save(str(tmp_path / "other"))
    app = Application("app", state_dir=tmp_path, spark=spark)
    app.dataframe(app.from_files(tmp_path / "other", format=format, schema=SCHEMA, key="user")).apply(
        total, stateful=True
    )
    app.run(available_now=True)
    assert totals(app) == TOTALS


def test_event_times_come_from_a_column_or_a_function(spark: SparkSession, tmp_path: Path, json_files: Path) -> None:
    for name, timestamp in (("column", "at"), ("function", lambda row: row["at"])):
        seen: list[Any] = []
        app = Application(name, state_dir=tmp_path, spark=spark)
        source = app.from_files(json_files, format="json", schema=SCHEMA, key="user", timestamp=timestamp)
        frame = app.dataframe(source).apply(lambda row, key, time, headers: [key, row["at"], time], metadata=True)
        frame.inspect(seen.append)
        app.run(available_now=True)
        assert len(seen) == 30
        assert all(at == time for _, at, time in seen)


def test_rows_without_a_key_are_spread_and_processed(spark: SparkSession, tmp_path: Path, json_files: Path) -> None:
    seen: list[Any] = []
    app = Application("app", state_dir=tmp_path, spark=spark)
    app.dataframe(app.from_files(json_files, format="json", schema=SCHEMA)).apply(lambda row: row["amount"]).inspect(
        seen.append
    )
    app.run(available_now=True)
    assert sorted(seen) == list(range(30))


def test_a_batch_frame_is_not_a_streaming_source(spark: SparkSession, tmp_path: Path) -> None:
    app = Application("app", state_dir=tmp_path, spark=spark)
    with pytest.raises(InvalidPipeline, match="streaming"):
        app.from_spark(spark.range(3), key="id")
    rows = spark.readStream.format("rate").load()
    with pytest.raises(InvalidPipeline, match="not a column"):
        app.from_spark(rows, key="user")
    with pytest.raises(InvalidPipeline, match="timestamp is not supported"):
        app.from_spark(rows, key="timestamp")


def test_sparks_checkpoint_of_a_spark_source_is_missed_by_name(
    spark: SparkSession, tmp_path: Path, json_files: Path
) -> None:
    def run() -> dict[str, int]:
        app = Application("app", state_dir=tmp_path, spark=spark)
        source = app.from_files(json_files, format="json", schema=SCHEMA, key="user", files_per_batch=1)
        app.dataframe(source).apply(total, stateful=True)
        app.run(available_now=True)
        return totals(app)

    last = (json_files / "2.json").rename(tmp_path / "2.json")
    run()
    last.rename(json_files / "2.json")
    checkpoint, kept = tmp_path / "app/checkpoint/spark", tmp_path / "kept"
    checkpoint.rename(kept)
    with pytest.raises(SourceMismatch, match="Spark's checkpoint was lost"):
        run()
    shutil.rmtree(checkpoint)
    shutil.copytree(kept, checkpoint)
    for entry in (checkpoint / "offsets").iterdir():
        truncated(entry, random.Random(1))
    with pytest.raises(Damaged, match=str(checkpoint)):
        run()
    shutil.rmtree(checkpoint)
    kept.rename(checkpoint)
    assert run() == TOTALS


def test_another_kind_of_source_cannot_go_on(spark: SparkSession, tmp_path: Path, json_files: Path) -> None:
    app = Application("app", state_dir=tmp_path, spark=spark)
    app.dataframe(app.from_iterable(ORDERS, key="user")).apply(total, stateful=True)
    app.run()
    app = Application("app", state_dir=tmp_path, spark=spark)
    app.dataframe(app.from_files(json_files, format="json", schema=SCHEMA, key="user")).apply(total, stateful=True)
    with pytest.raises(PlanMismatch, match="kind"):
        app.run(available_now=True)


# -- sinks ---------------------------------------------------------------------------------------------------------------


def test_a_worker_that_dies_while_a_table_is_written_costs_a_second_try(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    deaths = [True]

    def dying(spark: SparkSession, outbox: Any) -> Any:
        frame = outbox_frame(spark, outbox)
        if deaths and deaths.pop():
            return map_in_arrow(frame, lambda batches: os.kill(os.getpid(), signal.SIGKILL), frame.schema)
        return frame

    monkeypatch.setattr(table, "outbox_frame", dying)
    app = Application("app", state_dir=tmp_path, spark=spark, max_batch_rows=10)
    app.dataframe(app.from_iterable(ORDERS, key="user")).apply(total, stateful=True).to_table(str(tmp_path / "totals"))
    app.run()
    assert "the job to write version 1 was lost; running it again" in caplog.text
    assert sorted(row["amount"] for row in table_rows(tmp_path / "totals")) == list(range(30))


def test_a_table_by_path_has_every_row_once_with_its_version(spark: SparkSession, tmp_path: Path) -> None:
    app = Application("app", state_dir=tmp_path, spark=spark, max_batch_rows=10)
    app.dataframe(app.from_iterable(ORDERS, key="user")).apply(total, stateful=True).to_table(str(tmp_path / "totals"))
    app.run()
    read = spark.read.parquet(str(tmp_path / "totals"))
    assert sorted(row.amount for row in read.collect()) == list(range(30))
    assert sorted(row.holdfast_version for row in read.select("holdfast_version").distinct().collect()) == [1, 2, 3]
    assert dict(read.dtypes)["total"] == "bigint"


def test_a_table_by_name_is_in_the_catalog_and_keeps_a_given_schema(spark: SparkSession, tmp_path: Path) -> None:
    app = Application("app", state_dir=tmp_path, spark=spark, max_batch_rows=10)
    frame = app.dataframe(app.from_iterable(ORDERS, key="user")).apply(lambda order: {"amount": order["amount"]})
    frame.to_table("amounts", schema="amount double, note string")
    app.run()
    assert spark.sql("SELECT count(*), sum(amount), count(note) FROM amounts").collect() == [(30, 435.0, 0)]


def test_an_overwritten_table_has_the_rows_of_the_last_version(spark: SparkSession, tmp_path: Path) -> None:
    app = Application("app", state_dir=tmp_path, spark=spark, max_batch_rows=10)
    app.dataframe(app.from_iterable(ORDERS)).to_table(f"{tmp_path}/last", mode="overwrite")
    app.run()
    assert sorted(row["amount"] for row in table_rows(tmp_path / "last")) == list(range(20, 30))


@pytest.mark.parametrize("format", ["json", "orc", "csv"])
def test_tables_of_other_formats(spark: SparkSession, tmp_path: Path, format: str) -> None:
    app = Application("app", state_dir=tmp_path, spark=spark)
    app.dataframe(app.from_iterable(ORDERS)).to_table(f"{tmp_path}/table", format=format)
    app.run()
    assert spark.read.format(format).load(str(tmp_path / "table")).count() == 30


def test_a_repeated_delivery_changes_nothing(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast import failpoints

    def crash(point: str, version: int) -> None:
        if point == "deliver.done" and version == 2:
            raise Crash(point)

    def run() -> None:
        app = Application("app", state_dir=tmp_path, spark=spark, max_batch_rows=10)
        app.dataframe(app.from_iterable(ORDERS, key="user")).apply(total, stateful=True).to_table(f"{tmp_path}/table")
        app.run()

    monkeypatch.setattr(failpoints, "_hook", crash)
    with pytest.raises(Crash):
        run()
    delivered = {path: path.stat().st_mtime_ns for path in (tmp_path / "table").rglob("*.parquet")}
    assert delivered
    monkeypatch.undo()
    run()
    assert all(path.stat().st_mtime_ns == time for path, time in delivered.items())
    assert sorted(row["amount"] for row in table_rows(tmp_path / "table")) == list(range(30))


def test_a_table_of_another_instance_is_refused_before_anything_runs(spark: SparkSession, tmp_path: Path) -> None:
    for name in ("first", "second"):
        app = Application(name, state_dir=tmp_path, spark=spark)
        app.dataframe(app.from_iterable(ORDERS)).to_table(f"{tmp_path}/table")
        if name == "first":
            app.run()
        else:
            with pytest.raises(ForeignTarget, match="first"):
                app.run()
    assert len(table_rows(tmp_path / "table")) == 30


def test_foreach_batch_gets_every_version_as_a_frame(spark: SparkSession, tmp_path: Path) -> None:
    got: dict[int, list[Any]] = defaultdict(list)
    app = Application("app", state_dir=tmp_path, spark=spark, max_batch_rows=10)
    frame = app.dataframe(app.from_iterable(ORDERS, key="user")).apply(total, stateful=True)
    frame.foreach_batch(lambda df, version: got[version].extend(df.select("amount").collect()))
    app.run()
    assert {version: sorted(row.amount for row in rows) for version, rows in got.items()} == {
        1: list(range(10)), 2: list(range(10, 20)), 3: list(range(20, 30)),
    }  # fmt: skip


def test_print_shows_values_on_standard_output(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    app = Application("app", state_dir=tmp_path, spark=spark, partitions=1)
    app.dataframe(app.from_iterable(["a", "b"])).print()
    app.run()
    assert capsys.readouterr().out == "a\nb\n"


# -- errors --------------------------------------------------------------------------------------------------------------


class OutOfStockError(Exception):
    pass


def test_a_users_exception_reaches_the_caller_as_itself_and_leaves_no_trace(
    spark: SparkSession, tmp_path: Path
) -> None:
    def fail(order: dict[str, Any], state: State) -> dict[str, Any]:
        if order["amount"] == 17:
            raise OutOfStockError("no more bolts")
        return total(order, state)

    seen: list[Any] = []
    app = Application("app", state_dir=tmp_path, spark=spark, max_batch_rows=10)
    frame = app.dataframe(app.from_iterable(ORDERS, key="user")).apply(fail, stateful=True)
    frame.to_table(f"{tmp_path}/table").inspect(seen.append)
    with pytest.raises(OutOfStockError) as caught:
        app.run()
    assert str(caught.value) == "no more bolts"
    place = caught.value.holdfast_place
    assert (place.position, place.key, place.step) == (17, "u1", "apply(fail)")
    assert "java" not in "".join(caught.value.__notes__).lower()
    assert sorted(row["amount"] for row in table_rows(tmp_path / "table")) == list(range(10))
    assert sorted(order["amount"] for order in seen) == list(range(10))
    assert totals(app) == {f"u{user}": sum(n for n in range(10) if n % 4 == user) for user in range(4)}


def test_a_record_that_the_callback_skips_leaves_no_trace(spark: SparkSession, tmp_path: Path) -> None:
    def fail(order: dict[str, Any], state: State) -> dict[str, Any]:
        result = total(order, state)
        if order["amount"] % 10 == 7:
            raise ValueError("seven")
        return result

    app = Application(
        "app",
        state_dir=tmp_path,
        spark=spark,
        on_processing_error=lambda error, record, logger: isinstance(error, ValueError),
    )
    app.dataframe(app.from_iterable(ORDERS, key="user")).apply(fail, stateful=True).to_table(f"{tmp_path}/table")
    app.run()
    assert sorted(row["amount"] for row in table_rows(tmp_path / "table")) == [n for n in range(30) if n % 10 != 7]
    assert sum(totals(app).values()) == sum(n for n in range(30) if n % 10 != 7)


# -- running -------------------------------------------------------------------------------------------------------------


def test_count_stops_after_exactly_so_many_records(spark: SparkSession, tmp_path: Path) -> None:
    app = Application("app", state_dir=tmp_path, spark=spark, max_batch_rows=4)
    app.dataframe(app.from_iterable(ORDERS, key="user")).apply(total, stateful=True)
    app.run(count=10)
    assert sum(totals(app).values()) == sum(range(10))
    app.run(count=3)
    assert sum(totals(app).values()) == sum(range(13))


def test_a_timeout_ends_a_run_without_new_records(spark: SparkSession, tmp_path: Path, json_files: Path) -> None:
    app = Application("app", state_dir=tmp_path, spark=spark)
    app.dataframe(app.from_files(json_files, format="json", schema=SCHEMA, key="user")).apply(total, stateful=True)
    app.run(timeout=1)
    assert totals(app) == TOTALS


def test_state_is_read_by_another_process_while_the_app_runs_and_clearing_is_refused(
    spark: SparkSession, tmp_path: Path, json_files: Path
) -> None:
    app = Application("app", state_dir=tmp_path, spark=spark)
    done = threading.Event()
    seen: set[int] = set()

    def see(order: dict[str, Any]) -> None:
        seen.add(order["amount"])
        if len(seen) == len(ORDERS):  # files of one moment come in any order
            done.set()

    frame = app.dataframe(app.from_files(json_files, format="json", schema=SCHEMA, key="user", files_per_batch=1))
    frame.apply(total, stateful=True).inspect(see)
    runner = threading.Thread(target=app.run)
    runner.start()
    try:
        assert done.wait(60)
        reader = (
            "import json, sys; from holdfast import Application; app = Application('app', state_dir=sys.argv[1])\n"
            "print(json.dumps({key: state['total'] for key, state in app.state().items()}))\n"
            "try: app.clear_state()\n"
            "except Exception as error: print(type(error).__name__)\n"
        )
        run = subprocess.run([sys.executable, "-c", reader, str(tmp_path)], capture_output=True, text=True, check=True)
        shown, refused = run.stdout.splitlines()
        assert json.loads(shown) == TOTALS
        assert refused == "RunIsAlive"
        with pytest.raises(RunIsAlive, match="stop it"):
            app.clear_state()
    finally:
        app.stop()
        runner.join()


def test_cleared_state_is_gone_and_the_position_is_kept(spark: SparkSession, tmp_path: Path) -> None:
    def run(until: int) -> Application:
        app = Application("app", state_dir=tmp_path, spark=spark)
        app.dataframe(app.from_iterable(ORDERS[:until], key="user")).apply(total, stateful=True)
        app.run()
        return app

    app = run(20)
    app.clear_state()
    assert totals(app) == {}
    assert sum(totals(run(30)).values()) == sum(range(20, 30))


def test_persistence_puts_the_checkpoint_elsewhere_and_local_stores_can_be_lost(
    spark: SparkSession, tmp_path: Path
) -> None:
    for number, until in enumerate((10, 30)):
        app = Application(
            "app", state_dir=tmp_path / str(number), persistence=Persistence(tmp_path / "durable"), spark=spark
        )
        app.dataframe(app.from_iterable(ORDERS[:until], key="user")).apply(total, stateful=True)
        app.run()
    assert totals(app) == TOTALS
    assert not (tmp_path / "0/app/checkpoint").exists()


def test_state_as_a_frame(spark: SparkSession, tmp_path: Path) -> None:
    app = Application("app", state_dir=tmp_path, spark=spark)
    app.dataframe(app.from_iterable(ORDERS, key="user")).apply(total, stateful=True)
    app.run()
    rows = {row.key: json.loads(row.state) for row in app.state().to_dataframe().collect()}
    assert rows == {user: {"total": amount} for user, amount in TOTALS.items()}
