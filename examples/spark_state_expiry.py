"""State that expires: the last row of a user, forgotten after an hour without another.

Run it: python examples/spark_state_expiry.py
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from course import show, time_lapse, write
from pyspark.sql import SparkSession

from holdfast.spark import GroupStateTimeout, stateful

ORDERS = [[{"user_id": "ann", "amount": 5.0}, {"user_id": "bob", "amount": 7.5}, {"user_id": "ann", "amount": 2.5}]]


def expire_old_state(key, values, state):
    if state.hasTimedOut:
        state.remove()
        return iter([{"user_id": key, "status": "expired"}])
    for value in values:
        state.update(value)
        state.setTimeoutDuration("1 hour")
    return iter([{"user_id": key, "status": "active"}])


def main(spark: SparkSession, directory: Path) -> list[Any]:
    files = write(directory / "orders", ORDERS)
    orders = spark.readStream.schema("user_id string, amount double").json(str(files))
    result = (
        stateful(orders)
        .groupByKey(lambda x: x.user_id)
        .flatMapGroupsWithState(
            expire_old_state,
            outputMode="append",
            timeoutConf=GroupStateTimeout.ProcessingTimeTimeout,
        )
    )
    with time_lapse(3600):  # an hour passes in a second
        query = result.writeStream.format("memory").queryName("state_expiry").start()
    query.processAllAvailable()
    while spark.table("state_expiry").filter("status = 'expired'").count() < 2:
        time.sleep(0.2)
    query.stop()
    return spark.table("state_expiry").collect()


if __name__ == "__main__":
    show(main)
