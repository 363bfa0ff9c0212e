"""The program of test_secrets.py: it hears its password on standard input, runs, and shows what it has to show."""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from typing import Any

from holdfast import Application, ConnectionConfig, State

words = json.loads(sys.stdin.readline())


def count(value: dict[str, Any], state: State) -> dict[str, Any]:
    state.set("n", state.get("n", default=0) + 1)
    return {**value, "n": state.get("n")}


def fail(value: dict[str, Any]) -> dict[str, Any]:
    raise ValueError("the step has failed")


def main() -> int:
    config = ConnectionConfig(
        os.environ["BROKER_ADDRESS"],
        security_protocol="sasl_plaintext",
        sasl_mechanism="PLAIN",
        sasl_username="ann",
        sasl_password=words.pop("password"),
    )
    app = Application(
        "guarded-failing" if words["fail"] else "guarded",
        broker_address=config,
        auto_offset_reset="earliest",
        state_dir="state",
        spark_ui=True,
        spark_config={"spark.ui.port": "0"},
        dead_letter_topic=None if words["fail"] else "dead",
        loglevel="DEBUG",
    )
    topic = app.topic("orders")
    frame = app.dataframe(topic).apply(count, stateful=True)
    if words["fail"]:
        frame = frame.apply(fail)
    frame.inspect(lambda value: print("COMMITTED", flush=True) if value["amount"] == 19 else None)
    frame.to_topic(app.topic("totals"))
    print("REPR", repr(app), repr(topic), repr(config), repr(app._link), vars(app), flush=True)
    threading.Thread(target=stop_when_told, args=(app,), daemon=True).start()
    try:
        if not words["fail"]:
            with app.get_producer() as producer:
                producer.flush()
        print("UI", app.spark.sparkContext.uiWebUrl, flush=True)
        app.run()
    except Exception as error:
        print(repr(error), vars(error), flush=True)
        traceback.print_exc()
        return 1
    return 0


def stop_when_told(app: Application) -> None:
    """When standard input ends."""
    if not words["fail"]:
        sys.stdin.read()
        app.stop()


if __name__ == "__main__":
    sys.exit(main())
