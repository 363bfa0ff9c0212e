"""The public API as a typed program uses it. `mypy --strict` checks it in test_public_api.py; nothing runs it."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, assert_type

from pyspark.sql import DataFrame

from holdfast import Application, Persistence, Place, Record, RocksDBOptions, State, StateView, StreamingDataFrame
from holdfast.errors import Fenced, FixTheRecord, HoldfastError
from holdfast.testing import DRIVER_POINTS, TASK_POINTS, Crash, Harness, run


def skip(exception: Exception, record: Record, logger: logging.Logger) -> bool:
    logger.warning("%s at position %d of partition %d", type(exception), record.position, record.partition)
    return isinstance(exception, FixTheRecord)


def count(value: dict[str, Any], state: State) -> dict[str, Any]:
    total: int = state.get("total", default=0) + 1
    state.set("total", total, ttl=timedelta(hours=1))
    if state.exists("old"):
        state.delete("old")
    raw: bytes | None = state.get_bytes("raw")
    state.set_bytes("raw", raw or b"", ttl=None)
    return {**value, "total": total}


def orders() -> Iterator[dict[str, Any]]:
    yield {"user": "ann", "amount": 3}


def on_rows(df: DataFrame, version: int) -> None: ...


def main() -> None:
    app = Application(
        "orders",
        state_dir=Path("state"),
        persistence=Persistence("/data/orders"),
        partitions=4,
        max_batch_rows=1_000,
        rocksdb_options=RocksDBOptions(dumps=pickle.dumps, loads=pickle.loads),
        on_processing_error=skip,
        spark_ui=True,
        spark_config={"spark.driver.memory": "2g"},
        loglevel="INFO",
    )
    assert_type(app.name, str)
    sdf = app.dataframe(app.from_iterable(orders, key="user", timestamp=lambda order: order["at"]))
    assert_type(sdf, StreamingDataFrame)
    sdf = sdf.filter(lambda order: order["amount"] > 0).update(lambda order: order.pop("note", None))
    sdf = sdf.apply(count, stateful=True, store="totals")
    sdf = sdf.apply(lambda order: [order, order], expand=True).inspect(print).print(metadata=True)
    sdf.to_table("totals", format="parquet", schema="user string, total bigint", mode="append")
    assert_type(sdf.foreach_batch(on_rows), StreamingDataFrame)
    try:
        app.run(count=10, timeout=5.0, available_now=True)
    except Fenced as fenced:
        assert_type(str(fenced), str)
    except HoldfastError as error:
        place: Place = getattr(error, "holdfast_place")  # noqa: B009
        assert_type(place.position, int)
    view = app.state("totals")
    assert_type(view, StateView)
    assert_type(view.get("ann"), dict[Any, Any] | None)
    assert_type(view.to_dataframe(), DataFrame)
    for _key, document in view.items():
        assert_type(document, dict[Any, Any])
    app.stop()
    app.clear_state()


def test_of_a_user() -> None:
    harness = Harness(lambda sdf: sdf.apply(count, stateful=True), partitions=2, on_processing_error=skip)
    harness.feed(("ann", {}), ("bob", {}, 1_000))
    for point in DRIVER_POINTS + TASK_POINTS:
        harness.crash_at(point)
        try:
            harness.run()
        except Crash:
            harness.restart(lose_local=True)
    assert_type(harness.values, list[Any])
    assert_type(harness.rows, dict[str, list[dict[str, Any]]])
    assert_type(harness.state("default"), StateView)
    assert_type(run(lambda sdf: sdf.apply(str), [1], partitions=1), Harness)
