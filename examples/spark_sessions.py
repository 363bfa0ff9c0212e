"""Sessions of a user that end after 30 minutes without an event, with flatMapGroupsWithState.

Run it: python examples/spark_sessions.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from course import show, write
from pyspark.sql import SparkSession

from holdfast.spark import GroupStateTimeout, stateful

# One event of a user per batch: rows of one batch have no order, and a session follows the order of its events.
EVENTS = [
    [{"user_id": "ann", "timestamp": "2024-05-01T09:00:00Z"}, {"user_id": "bob", "timestamp": "2024-05-01T09:10:00Z"}],
    [{"user_id": "ann", "timestamp": "2024-05-01T09:20:00Z"}, {"user_id": "bob", "timestamp": "2024-05-01T12:00:00Z"}],
    [{"user_id": "ann", "timestamp": "2024-05-01T09:45:00Z"}],
    [{"user_id": "ann", "timestamp": "2024-05-01T11:00:00Z"}],
]


def detect_sessions(user_id, events, state):
    session = state.get if state.exists else {"start": None, "end": None, "count": 0}
    outputs = []
    for event in events:
        event_time = event.timestamp
        if session["start"] is None:
            session = {"start": event_time, "end": event_time, "count": 1}
        elif (event_time - session["end"]).seconds > 1800:  # for gaps of less than a day
            outputs.append(
                {
                    "user_id": user_id,
                    "session_start": session["start"],
                    "session_end": session["end"],
                    "event_count": session["count"],
                }
            )
            session = {"start": event_time, "end": event_time, "count": 1}
        else:
            session["end"] = event_time
            session["count"] += 1
    state.update(session)
    return iter(outputs)


def main(spark: SparkSession, directory: Path) -> list[Any]:
    files = write(directory / "events", EVENTS)
    events = (
        spark.readStream.schema("user_id string, timestamp timestamp").option("maxFilesPerTrigger", 1).json(str(files))
    )
    result = (
        stateful(events)
        .groupByKey(lambda x: x.user_id)
        .flatMapGroupsWithState(
            detect_sessions, outputMode="append", timeoutConf=GroupStateTimeout.ProcessingTimeTimeout
        )
    )
    query = result.writeStream.format("memory").queryName("sessions").trigger(availableNow=True).start()
    query.awaitTermination()
    return spark.table("sessions").collect()


if __name__ == "__main__":
    show(main)
