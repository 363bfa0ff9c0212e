"""The checkpoint is lost, and state and position come back from Kafka alone.

Every store is followed by a compacted changelog topic, which also says up to which offset the source was read. Losing
the disk is therefore not losing the state: what was counted is not counted again, and what was not is.
"""

import json
import os
import shutil
import tempfile
import time

from holdfast import Application, State
from holdfast.errors import EarlierLife

BROKER = os.environ.get("BROKER_ADDRESS", "localhost:9092")
RUN = f"{time.time():.0f}"  # names of its own for every run of this example
STATE_DIR = tempfile.mkdtemp()

app = Application(f"visits-{RUN}", broker_address=BROKER, auto_offset_reset="earliest", state_dir=STATE_DIR)
visits = app.topic(f"visits-{RUN}", key_deserializer="string")


def count(visit: dict, state: State) -> str:
    state.set("count", state.get("count", default=0) + 1)
    return f"{visit['page']} was visited {state.get('count')} times"


app.dataframe(visits).apply(count, stateful=True).print()


def visit(page: str, times: int) -> None:
    with app.get_producer() as producer:
        for _ in range(times):
            producer.produce(visits, json.dumps({"page": page}), key=page)


if __name__ == "__main__":
    visit("home", 3)
    app.run(available_now=True)

    shutil.rmtree(STATE_DIR)
    print("-- checkpoint and local stores are gone; one more visit comes in")
    visit("home", 1)
    try:
        app.run(available_now=True)  # a mistyped path must not look like a new beginning
    except EarlierLife as error:
        print(f"-- {type(error).__name__}: {error}")
    app.run(available_now=True, recover="changelog")
    print(f"-- the state is {app.state().get('home')}")
