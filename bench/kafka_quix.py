"""Quix Streams as a contender of the Kafka benchmark: the program of kafka_holdfast.py, one process of its consumer group.

Runs until SIGTERM. Its log goes to stderr, each line with the time in seconds. Needs the environment of
requirements/quix.txt: Quix Streams and Holdfast ask for different versions of confluent-kafka.

Settings are Quix's own but for those that its documentation speaks of (Configuration, "Processing guarantees"; Checkpointing,
"Configuring the checkpointing"): exactly-once, and the commit interval, which is long for throughput and short for latency.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import Any

from quixstreams import Application


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--broker", required=True)
    parser.add_argument("--group", required=True)
    parser.add_argument("--input", required=True, help="a topic")
    parser.add_argument("--output", help="a topic; without it the totals are only kept")
    parser.add_argument("--state", type=Path, required=True, help="a directory")
    parser.add_argument("--commit-interval", type=float, help="seconds; by default Quix's own")
    options = parser.parse_args()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(created).3f %(message)s")
    more = {} if options.commit_interval is None else {"commit_interval": options.commit_interval}
    app = Application(
        options.broker,
        consumer_group=options.group,
        auto_offset_reset="earliest",
        processing_guarantee="exactly-once",
        use_changelog_topics=True,
        state_dir=options.state,
        loglevel=None,
        **more,
    )
    totals = app.dataframe(app.topic(options.input)).apply(running_total, stateful=True)
    if options.output is not None:
        totals.to_topic(app.topic(options.output))
    app.run()


def running_total(value: dict[str, Any], state: Any) -> dict[str, Any]:
    total = state.get("total", 0) + value["amount"]
    state.set("total", total)
    return {"user": value["user"], "total": total, "sent": value["sent"]}


if __name__ == "__main__":
    main()
