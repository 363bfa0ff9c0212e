"""Users who view, add to the cart and purchase, in this order: a sequence kept in state.

Run it: python examples/spark_sequences.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from course import show, write
from pyspark.sql import SparkSession

from holdfast.spark import GroupStateTimeout, stateful

# One event of a user per batch: rows of one batch have no order.
STEPS = [
    [("ann", "view"), ("bob", "view")],
    [("ann", "add_to_cart"), ("bob", "purchase")],
    [("ann", "purchase"), ("bob", "add_to_cart")],
    [("ann", "view")],
]
TIMES = ["09:00:00", "09:00:30", "09:01:00", "09:01:30"]
EVENTS = [
    [{"user_id": user, "event_type": kind, "timestamp": f"2024-05-01T{time}Z"} for user, kind in steps]
    for time, steps in zip(TIMES, STEPS, strict=True)
]


def detect_sequence(key, events, state):
    sequence = state.get if state.exists else []
    outputs = []
    for event in events:
        sequence.append(event.event_type)
        if len(sequence) >= 3 and sequence[-3:] == ["view", "add_to_cart", "purchase"]:
            outputs.append({"user_id": key, "pattern": "conversion", "timestamp": event.timestamp})
            sequence = []
    state.update(sequence)
    return iter(outputs)


def main(spark: SparkSession, directory: Path) -> list[Any]:
    files = write(directory / "events", EVENTS)
    schema = "user_id string, event_type string, timestamp timestamp"
    events = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).json(str(files))
    result = (
        stateful(events)
        .groupByKey(lambda x: x.user_id)
        .flatMapGroupsWithState(detect_sequence, outputMode="append", timeoutConf=GroupStateTimeout.NoTimeout)
    )
    query = result.writeStream.format("memory").queryName("sequences").trigger(availableNow=True).start()
    query.awaitTermination()
    return spark.table("sequences").collect()


if __name__ == "__main__":
    show(main)
