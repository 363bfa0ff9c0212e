"""Snapshots on a real Spark: taken beside the batches, and what a lost disk comes back from."""

from __future__ import annotations

import logging
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from holdfast import Application, Persistence
from holdfast.log import paths
from holdfast.log.snapshot import newest_snapshot, versions
from holdfast.log.storage import LocalStorage
from holdfast.plan.program import program_of
from holdfast.runtime.anchor import SparkRunner
from holdfast.state.codecs import JsonCodec
from holdfast.stores.slots import LocalStores

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from holdfast import State

SCHEMA = "user string, code int, amount bigint, at bigint"
ORDERS = [{"user": f"u{n % 4}", "amount": n} for n in range(60)]


def total(order: dict[str, Any], state: State) -> dict[str, Any]:
    state.set("total", state.get("total", default=0) + order["amount"])
    return {**order, "total": state.get("total")}


def run(spark: SparkSession, home: Path, records: list[dict[str, Any]]) -> Application:
    place = Persistence(home / "checkpoint", snapshot_every=5, keep=1)
    app = Application("app", state_dir=home, persistence=place, spark=spark, max_batch_rows=3, loglevel=None)
    frame = app.dataframe(app.from_iterable(records, key="user")).apply(total, stateful=True)
    frame.group_by(lambda order: order["amount"] % 3, name="rest").update(total, stateful=True, store="rest")
    app.run()
    return app


def totals(app: Application, store: str = "default") -> dict[Any, int]:
    return {key: state["total"] for key, state in app.state(store).items()}


def test_a_lost_disk_comes_back_from_a_snapshot_of_every_stage(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(spark, tmp_path, ORDERS[:42])
    storage = LocalStorage(tmp_path / "checkpoint")
    snapshot = newest_snapshot(storage)
    assert snapshot is not None and snapshot.version >= 5
    assert paths.version_of(storage.names(paths.DELTAS)[0]) > snapshot.floor
    assert not list((tmp_path / "app" / "local").rglob("copy-*"))
    shutil.rmtree(tmp_path / "app" / "local")
    with caplog.at_level(logging.INFO, logger="holdfast"):
        app = run(spark, tmp_path, ORDERS)
    assert totals(app) == {f"u{user}": sum(n for n in range(60) if n % 4 == user) for user in range(4)}
    assert totals(app, "rest") == {rest: sum(n for n in range(60) if n % 3 == rest) for rest in range(3)}
    assert f"the snapshot of version {snapshot.version}" in caplog.text
    assert "the state is whole again" in caplog.text


def run_on_files(spark: SparkSession, home: Path, files: Path, *, staged: bool = False) -> Application:
    place = Persistence(home / "checkpoint", snapshot_every=1, keep=1)
    app = Application("app", state_dir=home, persistence=place, spark=spark, partitions=2, loglevel=None)
    source = app.from_files(files, format="json", schema=SCHEMA, key="user", files_per_batch=1)
    frame = app.dataframe(source).apply(total, stateful=True)
    if staged:
        frame.group_by(lambda order: order["amount"] % 3, name="rest").update(total, stateful=True, store="rest")
    app.run(available_now=True)
    return app


def test_a_spark_source_has_snapshots_too(spark: SparkSession, tmp_path: Path, json_files: Path) -> None:
    app = run_on_files(spark, tmp_path, json_files)
    assert versions(LocalStorage(tmp_path / "checkpoint"))
    assert totals(app) == {f"u{user}": sum(n for n in range(30) if n % 4 == user) for user in range(4)}


def test_a_lost_disk_of_a_spark_source_comes_back_with_a_word_of_every_stage(
    spark: SparkSession, tmp_path: Path, json_files: Path, caplog: pytest.LogCaptureFixture
) -> None:
    late = (json_files / "2.json").read_text()
    (json_files / "2.json").unlink()
    with caplog.at_level(logging.INFO, logger="holdfast"):
        run_on_files(spark, tmp_path, json_files, staged=True)
        assert "restoring" not in caplog.text
        (json_files / "2.json").write_text(late)
        shutil.rmtree(tmp_path / "app" / "local")
        app = run_on_files(spark, tmp_path, json_files, staged=True)
    for partition in range(4):
        assert f"app: partition {partition}: the snapshot of version " in caplog.text
    assert "the state is whole again" in caplog.text
    assert totals(app) == {f"u{user}": sum(n for n in range(30) if n % 4 == user) for user in range(4)}


def test_partitions_are_restored_at_the_same_time(spark: SparkSession, tmp_path: Path) -> None:
    """What runs once per partition, as a restore does, runs for all of them at once: here each waits for the other."""
    app = Application("app", state_dir=tmp_path, spark=spark, loglevel=None)
    pipeline = app.dataframe(app.from_iterable(ORDERS, key="user")).apply(total, stateful=True)._pipeline
    program = program_of("app", pipeline, JsonCodec(), 2)
    runner = SparkRunner(spark, program, LocalStorage(tmp_path / "checkpoint"), LocalStores(tmp_path / "local"))

    def meet(partition: int, storage: Any, stores: Any) -> bool:
        (tmp_path / f"here-{partition}").touch()
        limit = time.monotonic() + 60
        while not (tmp_path / f"here-{1 - partition}").exists() and time.monotonic() < limit:
            time.sleep(0.01)
        return (tmp_path / f"here-{1 - partition}").exists() and time.monotonic() < limit

    try:
        assert runner.each(meet) == [True, True]
    finally:
        runner.close()
