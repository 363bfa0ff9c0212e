"""Users who view, add to the cart and purchase, in this order: a sequence kept in state.

Run it: python examples/spark_sequences.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from course import show, write
from pyspark.sql import SparkSession

from holdfast.spark import GroupStateTimeout, stateful

STEPS = [
    [("ann", "view"), ("ann", "add_to_cart"), ("bob", "view"), ("bob", "purchase")],
    [("ann", "purchase"), ("ann", "view"), ("bob", "add_to_cart")],
]
EVENTS = [
    [
        {"user_id": user, "event_type": kind, "timestamp": f"2024-05-01T09:{minute:02}:{second:02}Z"}
        for second, (user, kind) in enumerate(steps)
    ]
    for minute, steps in enumerate(STEPS)
]


def detect_sequence(key, events, state):
    sequence = state.get if state.exists else []
    outputs = []
    for event in sorted(events, key=lambda event: event.timestamp):
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
