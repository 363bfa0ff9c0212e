"""The program of test_secrets.py: it hears its password on standard input, runs until that ends, then fails on purpose."""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from typing import Any

from holdfast import Application, ConnectionConfig, State


def count(value: dict[str, Any], state: State) -> dict[str, Any]:
    state.set("n", state.get("n", default=0) + 1)
    return {**value, "n": state.get("n")}


def fail(value: dict[str, Any]) -> dict[str, Any]:
    raise ValueError("the step has failed")


def application(name: str, config: ConnectionConfig, **more: Any) -> Application:
    return Application(
        name, broker_address=config, auto_offset_reset="earliest", state_dir="state", loglevel="DEBUG", **more
    )


def run(config: ConnectionConfig) -> Application:
    """Everything that a run does with Kafka, until standard input ends."""
    app = application("guarded", config, spark_ui=True, spark_config={"spark.ui.port": "0"}, dead_letter_topic="dead")
    topic = app.topic("orders")
    print("REPR", repr(app), repr(topic), repr(config), vars(app), flush=True)
    with app.get_producer() as producer:
        producer.flush()
    frame = app.dataframe(topic).apply(count, stateful=True)
    frame.inspect(lambda value: print("COMMITTED", flush=True) if value["amount"] == 19 else None)
    frame.to_topic(app.topic("totals"))
    print("UI", app.spark.sparkContext.uiWebUrl, flush=True)
    threading.Thread(target=lambda: (sys.stdin.read(), app.stop()), daemon=True).start()
    app.run()
    return app


def run_and_fail(config: ConnectionConfig, before: Application) -> None:
    app = application("failing", config, spark=before.spark)
    app.dataframe(app.topic("orders")).apply(fail).to_topic(app.topic("totals"))
    app.run(available_now=True)


def main() -> int:
    config = ConnectionConfig(
        os.environ["BROKER_ADDRESS"],
        security_protocol="sasl_plaintext",
        sasl_mechanism="PLAIN",
        sasl_username="ann",
        sasl_password=json.loads(sys.stdin.readline())["password"],
    )
    try:
        run_and_fail(config, run(config))
    except Exception as error:
        print(repr(error), vars(error), flush=True)
        traceback.print_exc()
        return 0 if isinstance(error, ValueError) else 1
    return 2


if __name__ == "__main__":
    sys.exit(main())
