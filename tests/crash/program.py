"""The program that the crash tests kill: running totals over generated orders, in state and in a table.

    python program.py <home> --orders N       from an iterable
    python program.py <home> --files          what is in <home>/in, through Spark
        --stages                              and on through two more stages, with timers and values that end
        --worker-dies-at n                    there, the worker that counts order n is killed, once

It prints nothing by itself. What must come out of it is in `truth.py`, recomputed from the same orders.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

from holdfast import Application, State, StreamingDataFrame
from holdfast.runtime.session import build_session

NAME = "orders"
SCHEMA = "n bigint, user string, amount bigint"
USERS = 23
CITIES = 10
RESTS = 8
BATCH = 50


def orders(count: int) -> Iterator[dict[str, Any]]:
    """The first `count` orders; more orders begin with the same ones."""
    return islice(_endless(), count)


def _endless() -> Iterator[dict[str, Any]]:
    choice = random.Random(7)
    n = 0
    while True:
        yield {"n": n, "user": f"user-{choice.randrange(USERS)}", "amount": choice.randrange(1, 1000)}
        n += 1


def running_total(order: dict[str, Any], state: State) -> dict[str, Any]:
    total = state.get("total", 0) + order["amount"]
    state.set("total", total)
    return {**order, "total": total}


# -- the stages after the first one ---------------------------------------------------------------------------------------


def add_stages(totals: StreamingDataFrame, home: Path, dies_at: int | None) -> None:
    """Sums by city, where every order sets a timer; and what the timers send, counted by another key, in a second table."""
    fired = (
        totals.apply(with_city)
        .group_by("city", partitions=3)
        .apply(add_up, stateful=True, metadata=True, expand=True, on_timer=tell)
    )
    rests = fired.group_by(rest, name="rest", partitions=2)
    if dies_at is not None:
        rests = rests.apply(dying_at(dies_at, worker_claim(home)))
    rests.apply(count, stateful=True).to_table(str(counts(home)))


def with_city(order: dict[str, Any]) -> dict[str, Any]:
    return {**order, "city": f"city-{order['n'] % CITIES}"}


def add_up(order: dict[str, Any], key: str, timestamp: int, headers: Any, state: State) -> list[Any]:
    assert state.get(order["user"], -1) < order["n"], (
        "the orders of a user come from one partition and keep their order"
    )
    assert state.get("passing", timestamp) == timestamp, "a value is seen in a batch after its end"
    state.set("sum", state.get("sum", 0) + order["amount"])
    state.set(order["user"], order["n"], ttl=timedelta(days=1))
    state.set("passing", timestamp, ttl=timedelta(milliseconds=1))
    state.set_timer(str(order["n"]), timestamp, clock="processing")  # it fires in the next batch
    return []


def tell(city: str, name: str, state: State) -> list[dict[str, Any]]:
    return [{"n": int(name), "city": city}]


def rest(row: dict[str, Any]) -> int:
    return int(row["n"] % RESTS)


def count(row: dict[str, Any], state: State) -> dict[str, Any]:
    number = state.get("count", 0) + 1
    state.set("count", number)
    return {**row, "number": number}


def dying_at(n: int, claim: Path) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A step that kills the process in which it meets order `n`; the first one only."""

    def pass_on(row: dict[str, Any]) -> dict[str, Any]:
        if row["n"] == n and not claim.exists():
            claim.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return row

    return pass_on


# -- where everything is ---------------------------------------------------------------------------------------------------


def application(home: Path, spark: Any = None) -> Application:
    return Application(NAME, spark=spark, state_dir=home, partitions=2, max_batch_rows=BATCH, loglevel="WARNING")


def inbox(home: Path) -> Path:
    """Where the variant that reads files finds them."""
    return home / "in"


def table(home: Path) -> Path:
    return home / "totals"


def counts(home: Path) -> Path:
    """The second table of the three stages."""
    return home / "counts"


def worker_claim(home: Path) -> Path:
    """Is there once a worker has died as it was told to."""
    return home / "claim-worker"


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("home", type=Path)
    arguments.add_argument("--orders", type=int)
    arguments.add_argument("--files", action="store_true")
    arguments.add_argument("--stages", action="store_true")
    arguments.add_argument("--worker-dies-at", type=int)
    given = arguments.parse_args()
    if given.files:  # in a JVM that does not compile for later: it lives for a few batches
        app = application(given.home, build_session(NAME, warehouse=given.home / "warehouse", only_plans=True))
        source: Any = app.from_files(inbox(given.home), format="json", schema=SCHEMA, key="user", files_per_batch=1)
    else:
        app = application(given.home)
        source = app.from_iterable(lambda: orders(given.orders), key="user")
    totals = app.dataframe(source).apply(running_total, stateful=True).to_table(str(table(given.home)))
    if given.stages:
        add_stages(totals, given.home, given.worker_dies_at)
    app.run(available_now=given.files)


if __name__ == "__main__":
    main()
