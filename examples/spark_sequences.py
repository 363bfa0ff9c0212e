"""Users who view, add to the cart and purchase, in this order: a sequence kept in state.

Run it: python examples/spark_sequences.py
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
        session = Application("sequences", state_dir=directory).spark
        for row in main(session, Path(directory)):
            print(row)
        session.stop()
