"""What the examples of GroupState share: where their rows come from, how one runs by itself, and a clock that runs faster."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pyspark.sql import SparkSession

from holdfast import Application, application
from holdfast.times import now_ms


def write(directory: Path, batches: list[list[dict[str, Any]]]) -> Path:
    """One file per batch; Spark takes files in the order of their times."""
    directory.mkdir()
    for number, rows in enumerate(batches):
        file = directory / f"{number}.json"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        os.utime(file, (number, number))
    return directory


@contextmanager
def time_lapse(factor: int) -> Iterator[None]:
    """Let the clock of queries that start here run so much faster: nobody wants to watch an example for an hour.

    It replaces Holdfast's own clock, which a real program has no reason to do.
    """
    began, clock = now_ms(), application.now_ms
    application.now_ms = lambda: began + (now_ms() - began) * factor
    try:
        yield
    finally:
        application.now_ms = clock


def show(example: Callable[[SparkSession, Path], list[Any]]) -> None:
    """Run an example on a session of its own and print its rows."""
    with TemporaryDirectory() as directory:
        session = Application("example", state_dir=directory).spark
        for row in example(session, Path(directory)):
            print(row)
        session.stop()
