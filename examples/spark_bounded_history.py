"""The last rows of a user, at most so many: state that does not grow without end.

Run it: python examples/spark_bounded_history.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from course import show, write
from pyspark.sql import SparkSession

from holdfast.spark import GroupStateTimeout, stateful

MOST = 1000
ORDERS = [[{"user_id": "ann", "amount": float(n)} for n in range(batch, batch + 400)] for batch in (0, 400, 800)]


def bounded_state(key, values, state):
    history = state.get if state.exists else []
    for value in values:
        history.append(value)
        if len(history) > MOST:
            history = history[-MOST:]
    state.update(history)
    return (key, len(history))


def main(spark: SparkSession, directory: Path) -> list[Any]:
    files = write(directory / "orders", ORDERS)
    orders = spark.readStream.schema("user_id string, amount double").option("maxFilesPerTrigger", 1).json(str(files))
    result = (
        stateful(orders)
        .groupByKey(lambda x: x.user_id)
        .mapGroupsWithState(bounded_state, outputMode="update", timeoutConf=GroupStateTimeout.NoTimeout)
    )
    query = result.writeStream.format("memory").queryName("bounded_history").trigger(availableNow=True).start()
    query.awaitTermination()
    progress = query.lastProgress
    if progress and "stateOperators" in progress:
        for operator in progress["stateOperators"]:
            print(f"State rows: {operator.get('numRowsTotal', 0)}, memory: {operator.get('memoryUsedBytes', 0)}")
    return spark.table("bounded_history").collect()


if __name__ == "__main__":
    show(main)
