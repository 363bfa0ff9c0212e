"""Count, sum, minimum, maximum and average per user: a dict as state, and as a column of the output.

Run it: python examples/spark_running_stats.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from course import show, write
from pyspark.sql import SparkSession

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


if __name__ == "__main__":
    show(main)
