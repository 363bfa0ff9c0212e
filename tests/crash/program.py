"""The program that the crash tests kill: running totals over generated orders, in state and in a table.

    python program.py <home> --orders N       from an iterable
    python program.py <home> --files          what is in <home>/in, through Spark

It prints nothing by itself. What must come out of it is in `truth.py`, recomputed from the same orders.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from holdfast import Application, State

NAME = "orders"
SCHEMA = "n bigint, user string, amount bigint"
USERS = 23
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


def application(home: Path) -> Application:
    return Application(NAME, state_dir=home, partitions=2, max_batch_rows=BATCH, loglevel="WARNING")


def inbox(home: Path) -> Path:
    """Where the variant that reads files finds them."""
    return home / "in"


def table(home: Path) -> Path:
    return home / "totals"


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("home", type=Path)
    arguments.add_argument("--orders", type=int)
    arguments.add_argument("--files", action="store_true")
    given = arguments.parse_args()
    app = application(given.home)
    if given.files:
        source = app.from_files(inbox(given.home), format="json", schema=SCHEMA, key="user", files_per_batch=1)
    else:
        source = app.from_iterable(lambda: orders(given.orders), key="user")
    app.dataframe(source).apply(running_total, stateful=True).to_table(str(table(given.home)))
    app.run(available_now=given.files)


if __name__ == "__main__":
    main()
