"""The program that the tests disturb: running totals per user, from a topic to a topic, followed by a changelog topic.

    python program.py <home> --broker <address> --name <app> --source <topic> --target <topic> --batch <rows>
        --publish driver|tasks     who publishes a version
        --lose-answer <version>    the commit of this version's transaction is done, but nobody hears of it, once

It ends when it has taken what is in the topic, and prints nothing by itself. What must come out of it is in `truth.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from holdfast import Application, State, TopicConfig, failpoints
from holdfast.sinks import kafka as publishing

PARTITIONS = 4
USERS = 1_000


def running_total(order: dict[str, Any], state: State) -> dict[str, Any]:
    sequence, total = state.get("sequence", 0) + 1, state.get("total", 0) + order["amount"]
    state.set("sequence", sequence)
    state.set("total", total)
    return {"order": order["order"], "sequence": sequence, "total": total}


def answer_lost(version: int, claim: Path) -> Callable[[str, int], None]:
    """A failpoint hook: the transaction of `version` is committed, and its answer never arrives; in one process only."""

    def lose(reached: str, at: int) -> None:
        if reached == "publish.answered" and at == version:
            try:
                claim.touch(exist_ok=False)
            except FileExistsError:
                return
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))

    return lose


def arming(hook: Callable[[str, int], None]) -> Callable[[Any], Any]:
    """A step that arms the worker in which it runs."""

    def arm(value: Any) -> Any:
        failpoints.arm(hook)
        return value

    return arm


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("home", type=Path)
    for name in ("--broker", "--name", "--source", "--target"):
        arguments.add_argument(name, required=True)
    arguments.add_argument("--batch", type=int, required=True)
    arguments.add_argument("--publish", choices=["driver", "tasks"], required=True)
    arguments.add_argument("--lose-answer", type=int)
    given = arguments.parse_args()

    publishing.LARGE = 0 if given.publish == "tasks" else 10**9
    app = Application(
        given.name,
        broker_address=given.broker,
        auto_offset_reset="earliest",
        state_dir=given.home,
        max_batch_rows=given.batch,
        loglevel="WARNING",
    )
    frame = app.dataframe(app.topic(given.source))
    if given.lose_answer is not None:
        hook = answer_lost(given.lose_answer, given.home / f"answer-lost@{given.lose_answer}")
        failpoints.arm(hook)
        frame = frame.apply(arming(hook))
    target = app.topic(given.target, config=TopicConfig(num_partitions=PARTITIONS))
    frame.apply(running_total, stateful=True).to_topic(target)
    app.run(available_now=True)


if __name__ == "__main__":
    main()
