"""One contender of the benchmark, in a process of its own: a running total per user, over batches of rows.

Prints one JSON line: the seconds between the commits of consecutive batches, read off the files that mark a batch as
committed, which every contender has. So the figure holds everything that a batch costs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

SCHEMA = "user string, amount bigint"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=sorted(CONTENDERS))
    parser.add_argument("--input", type=Path, required=True, help="a directory of parquet files, one per batch")
    parser.add_argument("--work", type=Path, required=True, help="an empty directory")
    parser.add_argument("--rows", type=int, default=200_000, help="rows per batch, for iterables")
    parser.add_argument("--batches", type=int, default=10, help="batches, for iterables")
    parser.add_argument("--keys", type=int, default=100_000)
    parser.add_argument("--fill", type=int, default=0, help="keys that the store is filled with first")
    parser.add_argument("--waiting", type=int, default=0, help="more keys, which no batch touches")
    parser.add_argument("--timers", action="store_true", help="each of those has a timer")
    parser.add_argument("--snapshot-every", type=int, default=10**9, help="batches")
    parser.add_argument("--stages", type=int, default=1, help="by how many keys there is a total")
    options = parser.parse_args()
    commits = CONTENDERS[options.name](options)
    times = sorted((int(path.stem), path.stat().st_mtime_ns) for path in commits.iterdir() if path.stem.isdigit())
    seconds = [(after - before) / 1e9 for (_, before), (_, after) in pairwise(times)]
    json.dump(seconds, sys.stdout)


# -- Holdfast ---------------------------------------------------------------------------------------------------------


def running_total(value: dict[str, Any], state: Any) -> dict[str, Any]:
    total = state.get("total", 0) + value["amount"]
    state.set("total", total)
    return {"user": value["user"], "total": total, "amount": value["amount"]}


def another_key(value: dict[str, Any]) -> str:
    return str(value["user"][::-1])


def wait(value: dict[str, Any], state: Any) -> None:
    """Of those that no batch touches."""
    state.set("total", 1)
    if value["timer"]:
        state.set_timer("later", 2**50 + value["amount"], clock="processing")


def total_or_wait(value: dict[str, Any], state: Any) -> Any:
    return wait(value, state) if "timer" in value else running_total(value, state)


def never(key: str, name: str, state: Any) -> None:
    raise AssertionError("a timer has fired")


def holdfast_files(options: argparse.Namespace) -> Path:
    app, commits = application(options)
    source = app.from_files(options.input, format="parquet", schema=SCHEMA, key="user", files_per_batch=1)
    frame = app.dataframe(source).apply(running_total, stateful=True)
    for stage in range(1, options.stages):
        frame = frame.group_by(another_key, name=f"stage-{stage}").apply(running_total, stateful=True)
    app.run(available_now=True)
    return commits


def application(options: argparse.Namespace, **more: Any) -> tuple[Any, Path]:
    """An application that keeps all its commits, to be read, and takes snapshots only as often as it is told; its commits."""
    from holdfast import Application, Persistence

    checkpoint = options.work / "checkpoint"
    place = Persistence(checkpoint, snapshot_every=options.snapshot_every, keep=10**6)
    app = Application("bench", state_dir=options.work, persistence=place, partitions=2, loglevel="WARNING", **more)
    return app, checkpoint / "commits"


def holdfast_iterable(options: argparse.Namespace) -> Path:
    rows, keys, fill, waiting = options.rows, options.keys, options.fill, options.waiting
    total = fill + waiting + rows * options.batches

    def orders() -> Iterator[dict[str, Any]]:
        chance = random.Random(1).random
        for n in range(fill):
            yield {"user": f"user{n}", "amount": 1}
        for n in range(waiting):
            yield {"user": f"waiting{n}", "amount": n, "timer": options.timers}
        for n in range(rows * options.batches):
            yield {"user": f"user{int(chance() * keys)}", "amount": n}

    app, commits = application(options, max_batch_rows=rows)
    frame = app.dataframe(app.from_iterable(orders, key="user"))
    if waiting:
        frame.apply(total_or_wait, stateful=True, on_timer=never)
    else:
        frame.apply(running_total, stateful=True)
    app.run(count=total)  # or a last, empty batch would find out that there is no more
    snapshots = len(list((commits.parent / "snapshots").glob("*.json")))
    assert (snapshots > 2) == (options.snapshot_every < 10**9), f"{snapshots} snapshots were taken"
    return commits


# -- Spark ------------------------------------------------------------------------------------------------------------


def spark_session(work: Path) -> Any:
    """Spark as it comes, with what makes its state and its small batches fast."""
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    session = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.memory", "4g")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.python.unix.domain.socket.enabled", "true")
        .config("spark.sql.streaming.checkpoint.fileChecksum.enabled", "false")
        .config("spark.sql.streaming.minBatchesToRetain", "10000")
        .config(
            "spark.sql.streaming.stateStore.providerClass",
            "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
        )
        .config("spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled", "true")
        .config("spark.sql.warehouse.dir", str(work / "warehouse"))
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    return session


def run_spark(options: argparse.Namespace, grouped: Any) -> Path:
    spark = spark_session(options.work)
    rows = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(options.input))
    checkpoint = options.work / "checkpoint"
    writer = grouped(rows).writeStream.format("noop").outputMode("update").trigger(availableNow=True)
    writer.option("checkpointLocation", str(checkpoint)).start().awaitTermination()
    spark.stop()
    return checkpoint / "commits"


def spark_jvm_sum(options: argparse.Namespace) -> Path:
    return run_spark(options, lambda rows: rows.groupBy("user").sum("amount"))


def spark_transform_with_state(options: argparse.Namespace) -> Path:
    from pyspark.sql import Row
    from pyspark.sql.streaming import StatefulProcessor

    class Total(StatefulProcessor):
        def init(self, handle: Any) -> None:
            self._total = handle.getValueState("total", "total bigint")

        def handleInputRows(self, key: Any, rows: Iterator[Any], timers: Any) -> Iterator[Any]:  # noqa: N802
            known = self._total.get() if self._total.exists() else (0,)
            total = known[0]
            for row in rows:
                total += row.amount
            self._total.update((total,))
            yield Row(user=key[0], total=total)

        def close(self) -> None:
            pass

    def grouped(rows: Any) -> Any:
        return rows.groupBy("user").transformWithState(
            statefulProcessor=Total(),
            outputStructType="user string, total bigint",
            outputMode="Update",
            timeMode="None",
        )

    return run_spark(options, grouped)


CONTENDERS = {
    "holdfast-files": holdfast_files,
    "holdfast-iterable": holdfast_iterable,
    "spark-jvm-sum": spark_jvm_sum,
    "spark-transformWithState": spark_transform_with_state,
}

if __name__ == "__main__":
    main()
