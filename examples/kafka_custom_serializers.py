"""Bytes in, bytes out, in forms of your own.

By name there are json, bytes, string, integer and double, for keys and values, in both directions. Anything else is a
function of one argument: bytes to a value, or a value to bytes. Null (a tombstone, a message without a key) stays None
and never reaches it. What a deserializer raises is an error of that one record.
"""

import os
import struct
import tempfile
import time
from typing import NamedTuple

from holdfast import Application, State

RUN = f"{time.time():.0f}"  # names of its own for every run of this example
SETTINGS = {
    "broker_address": os.environ.get("BROKER_ADDRESS", "localhost:9092"),
    "auto_offset_reset": "earliest",
    "state_dir": tempfile.mkdtemp(),
}


class Point(NamedTuple):
    x: float
    y: float


def point(data: bytes) -> Point:
    return Point(*struct.unpack(">dd", data))


def length(state: dict) -> bytes:
    return f"{state['vehicle']}: {state['length']:.1f}".encode()


app = Application(f"tracks-{RUN}", **SETTINGS)
points = app.topic(f"points-{RUN}", key_deserializer="integer", value_deserializer=point)
lengths = app.topic(f"lengths-{RUN}", key_serializer="integer", value_serializer=length, value_deserializer="string")


def travelled(to: Point, vehicle: int, timestamp: int, headers: object, state: State) -> dict:
    x, y = state.get("at", default=[to.x, to.y])
    state.set("length", state.get("length", default=0.0) + ((to.x - x) ** 2 + (to.y - y) ** 2) ** 0.5)
    state.set("at", [to.x, to.y])
    return {"vehicle": vehicle, "length": state.get("length")}


app.dataframe(points).apply(travelled, stateful=True, metadata=True).to_topic(lengths)

if __name__ == "__main__":
    with app.get_producer() as producer:
        for x, y in ((0, 0), (3, 4), (3, 10)):
            producer.produce(points, struct.pack(">dd", x, y), key=struct.pack(">i", 7))
    app.run(available_now=True)

    reader = Application(f"reader-{RUN}", spark=app.spark, **SETTINGS)
    reader.dataframe(reader.topic(lengths.name, value_deserializer="string")).print()
    reader.run(available_now=True)
