"""Count, sum, minimum, maximum and average per user: a dict as state, and as a column of the output.

Run it: python examples/spark_running_stats.py
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pyspark.sql import SparkSession

from holdfast import Application
from holdfast.spark import GroupStateTimeout, stateful

ORDERS = [
    [{"user_id": "ann", "amount": 5.0}, {"user_id": "bob", "amount": 7.5}, {"user_id": "ann", "amount": 2.5}],
    [{"user_id": "ann", "amount": 10.5}],
]


def running_stats(key, values, state):
    stats = state.get if state.exists else {"count": 0, "sum": 0, "min": float("inf"), "max": float("-inf")}
    for value in values:
        stats["count"] += 1
        stats["sum"] += value.amount
        stats["min"] = min(stats["min"], value.amount)
        stats["max"] = max(stats["max"], value.amount)
    stats["avg"] = stats["sum"] / stats["count"]
    state.update(stats)
    return (key, stats)


def main(spark: SparkSession, directory: Path) -> list[Any]:
    files = write(directory / "orders", ORDERS)
    orders = spark.readStream.schema("user_id string, amount double").option("maxFilesPerTrigger", 1).json(str(files))
    result = (
        stateful(orders)
        .groupByKey(lambda x: x.user_id)
        .mapGroupsWithState(running_stats, outputMode="update", timeoutConf=GroupStateTimeout.NoTimeout)
    )
    query = result.writeStream.format("memory").queryName("running_stats").trigger(availableNow=True).start()
    query.awaitTermination()
    return spark.table("running_stats").collect()


def write(directory: Path, batches: list[list[dict[str, Any]]]) -> Path:
    """One file per batch; Spark takes files in the order of their times."""
    directory.mkdir()
    for number, rows in enumerate(batches):
        file = directory / f"{number}.json"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        os.utime(file, (number, number))
    return directory


if __name__ == "__main__":
    with TemporaryDirectory() as directory:
        session = Application("running-stats", state_dir=directory).spark
        for row in main(session, Path(directory)):
            print(row)
        session.stop()
