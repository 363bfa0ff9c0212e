"""The program on Spark, with a snapshot every few batches:

python spark_program.py <home> --orders N
"""

from __future__ import annotations

import argparse
from pathlib import Path

from machine import BATCH, NAME
from orders import Orders, running_total

from holdfast import Application, Persistence

EVERY = 6


def application(home: Path) -> Application:
    place = Persistence(home / NAME / "checkpoint", snapshot_every=EVERY, keep=1)
    return Application(NAME, state_dir=home, persistence=place, partitions=2, max_batch_rows=BATCH, loglevel="WARNING")


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("home", type=Path)
    arguments.add_argument("--orders", type=int, required=True)
    given = arguments.parse_args()
    app = application(given.home)
    app.dataframe(app.from_iterable(Orders()[: given.orders], key="user")).apply(running_total, stateful=True)
    app.run()


if __name__ == "__main__":
    main()
