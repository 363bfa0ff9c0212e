"""Records that fail: skipped by a callback, or put aside in a dead letter topic.

Without either, the first bad record ends the run with its error. A callback that returns something true skips the
record; every other one goes to the dead letter topic as it came, with headers that say where it came from and why it
failed. Skipped or put aside, it leaves no trace in the state or in any other output.
"""

import os
import tempfile
import time

from holdfast import Application, State

RUN = f"{time.time():.0f}"  # names of its own for every run of this example
SETTINGS = {
    "broker_address": os.environ.get("BROKER_ADDRESS", "localhost:9092"),
    "auto_offset_reset": "earliest",
    "state_dir": tempfile.mkdtemp(),
}


def refunds_are_fine(error: Exception, record, logger) -> bool:
    return isinstance(error, ValueError) and record.value["cents"] < 0


app = Application(
    f"orders-{RUN}",
    dead_letter_topic=f"failed-{RUN}",
    on_processing_error=refunds_are_fine,  # about steps that raise; on_consumer_error= about bytes that are not JSON
    **SETTINGS,
)
orders = app.topic(f"orders-{RUN}")


def add_up(order: dict, state: State) -> int:
    state.set("total", state.get("total", default=0) + order["cents"])
    if order["cents"] < 0:
        raise ValueError("a refund")  # the state that was just set is set back
    return state.get("total")


app.dataframe(orders).apply(add_up, stateful=True).print()


def explain(value: bytes, key: bytes, timestamp: int, headers: list[tuple[str, bytes]]) -> str:
    why = {name.removeprefix("holdfast."): text.decode() for name, text in headers}
    return f"{value!r} at offset {why['offset']}, step {why['step']}: {why['error']}, {why['message']}"


if __name__ == "__main__":
    with app.get_producer() as producer:
        for value in ('{"cents": 300}', '{"cents": -50}', "not JSON", '{"euros": 3}', '{"cents": 400}'):
            producer.produce(orders, value, key="ann")
    app.run(available_now=True)

    reader = Application(f"reader-{RUN}", spark=app.spark, **SETTINGS)
    failed = reader.dataframe(reader.topic(f"failed-{RUN}", value_deserializer="bytes"))
    failed.apply(explain, metadata=True).print()
    reader.run(available_now=True)
