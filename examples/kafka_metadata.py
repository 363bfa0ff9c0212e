"""Key, timestamp and headers of a message: read them, use a time of your own, choose the key of the output.

A step with `metadata=True` gets `(value, key, timestamp, headers)`. The timestamp is Kafka's, in ms, unless the topic
has a `timestamp_extractor`. Output keeps key, timestamp and headers of its record, unless `to_topic` makes a key. Mind
that retention goes by timestamp: a topic that keeps a week deletes at once what claims to be older.
"""

import json
import os
import tempfile
import time

from holdfast import Application

RUN = f"{time.time():.0f}"  # names of its own for every run of this example
SETTINGS = {
    "broker_address": os.environ.get("BROKER_ADDRESS", "localhost:9092"),
    "auto_offset_reset": "earliest",
    "state_dir": tempfile.mkdtemp(),
}

app = Application(f"readings-{RUN}", **SETTINGS)
readings = app.topic(
    f"readings-{RUN}",
    key_deserializer="string",
    timestamp_extractor=lambda value, headers, timestamp, timestamp_type: value["measured_at"],
)
by_unit = app.topic(f"by-unit-{RUN}", key_serializer="string", key_deserializer="string")


def describe(value: dict, key: str, timestamp: int, headers: list[tuple[str, bytes]] | None) -> dict:
    unit = dict(headers or []).get("unit", b"?").decode()
    return {"sensor": key, "value": value["value"], "unit": unit, "at": timestamp}


sdf = app.dataframe(readings).apply(describe, metadata=True)
sdf.to_topic(by_unit, key=lambda reading: reading["unit"])

if __name__ == "__main__":
    with app.get_producer() as producer:
        for number, unit in ((21, "degrees"), (400, "lumen")):
            value = json.dumps({"value": number, "measured_at": (int(RUN) - 60) * 1000})  # a minute ago
            producer.produce(readings, value, key="sensor-1", headers={"unit": unit})
    app.run(available_now=True)

    reader = Application(f"reader-{RUN}", spark=app.spark, **SETTINGS)
    reader.dataframe(reader.topic(by_unit.name, key_deserializer="string")).print(metadata=True)
    reader.run(available_now=True)
