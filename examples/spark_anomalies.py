"""Amounts more than three standard deviations from a user's mean, over the last hundred of them.

Run it: python examples/spark_anomalies.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from course import show, write
from pyspark.sql import SparkSession

from holdfast.spark import GroupStateTimeout, stateful

AMOUNTS = [10.0, 11.0, 9.0, 10.5, 9.5, 10.0, 10.2, 250.0, 9.8, 10.1, 9.9]
PAYMENTS = [[{"user_id": "ann", "amount": amount}] for amount in AMOUNTS]  # one per batch: there is no order within one


def detect_anomalies(key, values, state):
    history = state.get if state.exists else {"values": [], "mean": 0, "stddev": 0}
    outputs = []
    for value in values:
        if history["stddev"] > 0:
            z_score = abs(value.amount - history["mean"]) / history["stddev"]
            if z_score > 3:
                outputs.append({"user_id": key, "amount": value.amount, "z_score": z_score})
        history["values"].append(value.amount)
        if len(history["values"]) > 100:
            history["values"].pop(0)
        history["mean"] = sum(history["values"]) / len(history["values"])
        variance = sum((x - history["mean"]) ** 2 for x in history["values"]) / len(history["values"])
        history["stddev"] = variance**0.5
    state.update(history)
    return iter(outputs)


def main(spark: SparkSession, directory: Path) -> list[Any]:
    files = write(directory / "payments", PAYMENTS)
    payments = spark.readStream.schema("user_id string, amount double").option("maxFilesPerTrigger", 1).json(str(files))
    result = (
        stateful(payments)
        .groupByKey(lambda x: x.user_id)
        .flatMapGroupsWithState(detect_anomalies, outputMode="append", timeoutConf=GroupStateTimeout.NoTimeout)
    )
    query = result.writeStream.format("memory").queryName("anomalies").trigger(availableNow=True).start()
    query.awaitTermination()
    return spark.table("anomalies").collect()


if __name__ == "__main__":
    show(main)
