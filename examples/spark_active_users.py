"""Who is active, and who has not been seen for 5 minutes: a timeout by the clock, also while nothing comes.

Run it: python examples/spark_active_users.py
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from course import show, time_lapse, write
from pyspark.sql import SparkSession

from holdfast.spark import GroupStateTimeout, stateful

EVENTS = [
    [
        {"user_id": "ann", "timestamp": "2024-05-01T09:00:00Z"},
        {"user_id": "bob", "timestamp": "2024-05-01T09:01:00Z"},
        {"user_id": "ann", "timestamp": "2024-05-01T09:02:00Z"},
    ],
]


def track_active_users(user_id, events, state):
    if state.hasTimedOut:
        last_activity = state.get
        state.remove()
        return iter([{"user_id": user_id, "status": "inactive", "last_seen": last_activity}])

    latest_time = max(event.timestamp for event in events)
    state.update(latest_time)
    state.setTimeoutDuration("5 minutes")
    return iter([{"user_id": user_id, "status": "active", "last_seen": latest_time}])


def main(spark: SparkSession, directory: Path) -> list[Any]:
    files = write(directory / "events", EVENTS)
    events = spark.readStream.schema("user_id string, timestamp timestamp").json(str(files))
    result = (
        stateful(events)
        .groupByKey(lambda x: x.user_id)
        .flatMapGroupsWithState(
            track_active_users,
            outputMode="append",
            timeoutConf=GroupStateTimeout.ProcessingTimeTimeout,
        )
    )
    with time_lapse(300):  # 5 minutes pass in a second
        query = result.writeStream.format("memory").queryName("active_users").start()
    query.processAllAvailable()
    while spark.table("active_users").filter("status = 'inactive'").count() < 2:
        time.sleep(0.2)
    query.stop()
    return spark.table("active_users").collect()


if __name__ == "__main__":
    show(main)
