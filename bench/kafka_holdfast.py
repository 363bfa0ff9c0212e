"""Holdfast as a contender of the Kafka benchmark: a running total per user, from topic to topic, exactly once.

Runs until SIGTERM, or to the end of what is there. Its log goes to stderr, each line with the time in seconds.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import Any

from holdfast import Application, Persistence


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--broker", required=True)
    parser.add_argument("--group", required=True)
    parser.add_argument("--input", required=True, help="a topic")
    parser.add_argument("--output", help="a topic; without it the totals are only kept")
    parser.add_argument("--state", type=Path, required=True, help="a directory")
    parser.add_argument("--max-batch-rows", type=int, help="by default Holdfast's own")
    parser.add_argument("--two-stages", action="store_true", help="a total by a second key, too")
    parser.add_argument("--to-the-end", action="store_true", help="process what is there now")
    parser.add_argument("--snapshot-every", type=int, help="batches; by default Holdfast's own rule")
    parser.add_argument("--recover", action="store_true", help="take the state back from the changelog topic")
    options = parser.parse_args()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(created).3f %(message)s")
    logging.getLogger("py4j").setLevel(logging.CRITICAL)  # it tells of every stop
    more = {} if options.max_batch_rows is None else {"max_batch_rows": options.max_batch_rows}
    app = Application(
        options.group,
        broker_address=options.broker,
        auto_offset_reset="earliest",
        processing_guarantee="exactly-once",
        use_changelog_topics=True,
        state_dir=options.state,
        persistence=Persistence(options.state / options.group / "checkpoint", snapshot_every=options.snapshot_every),
        spark_config={"spark.master": "local[2]"},
        loglevel="INFO",
        **more,
    )
    totals = app.dataframe(app.topic(options.input)).apply(running_total, stateful=True)
    if options.two_stages:
        totals = totals.group_by(another_key, name="another").apply(total_of_totals, stateful=True)
    if options.output is not None:
        totals.to_topic(app.topic(options.output))
    app.run(available_now=options.to_the_end, recover="changelog" if options.recover else None)


def running_total(value: dict[str, Any], state: Any) -> dict[str, Any]:
    total = state.get("total", 0) + value["amount"]
    state.set("total", total)
    return {"user": value["user"], "total": total, "sent": value["sent"]}


def another_key(value: dict[str, Any]) -> str:
    return str(value["user"][::-1])


def total_of_totals(value: dict[str, Any], state: Any) -> dict[str, Any]:
    total = state.get("total", 0) + value["total"]
    state.set("total", total)
    return {"user": value["user"], "total": total, "sent": value["sent"]}


if __name__ == "__main__":
    main()
