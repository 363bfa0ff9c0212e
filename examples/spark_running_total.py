"""A running total per user, with mapGroupsWithState: one output per group and batch.

Run it: python examples/spark_running_total.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from course import show, write
from pyspark.sql import SparkSession

from holdfast.spark import GroupStateTimeout, stateful

ORDERS = [
    [{"user_id": "ann", "amount": 5.0}, {"user_id": "bob", "amount": 7.5}, {"user_id": "ann", "amount": 2.5}],
    [{"user_id": "ann", "amount": 10.0}, {"user_id": "cy", "amount": 1.0}],
]


def update_total(user_id, values, state):
    total = state.get if state.exists else 0
    for value in values:
        total += value.amount
    state.update(total)
    return (user_id, total)


def main(spark: SparkSession, directory: Path) -> list[Any]:
    files = write(directory / "orders", ORDERS)
    orders = spark.readStream.schema("user_id string, amount double").option("maxFilesPerTrigger", 1).json(str(files))
    result = (
        stateful(orders)
        .groupByKey(lambda x: x.user_id)
        .mapGroupsWithState(update_total, outputMode="update", timeoutConf=GroupStateTimeout.NoTimeout)
    )
    query = result.writeStream.format("memory").queryName("running_total").trigger(availableNow=True).start()
    query.awaitTermination()
    return spark.table("running_total").collect()


if __name__ == "__main__":
    show(main)
