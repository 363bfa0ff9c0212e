"""Snapshots on a real Spark: taken beside the batches, and what a lost disk comes back from."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from holdfast import Application, Persistence
from holdfast.log import paths
from holdfast.log.snapshot import newest_snapshot, versions
from holdfast.log.storage import LocalStorage

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


def test_a_spark_source_has_snapshots_too(spark: SparkSession, tmp_path: Path, json_files: Path) -> None:
    place = Persistence(tmp_path / "checkpoint", snapshot_every=1, keep=1)
    app = Application("app", state_dir=tmp_path, persistence=place, spark=spark, partitions=2, loglevel=None)
    files = app.from_files(json_files, format="json", schema=SCHEMA, key="user", files_per_batch=1)
    app.dataframe(files).apply(total, stateful=True)
    app.run(available_now=True)
    assert versions(LocalStorage(tmp_path / "checkpoint"))
    assert totals(app) == {f"u{user}": sum(n for n in range(30) if n % 4 == user) for user in range(4)}
