"""What the examples of GroupState share: where their rows come from, and how one runs by itself."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pyspark.sql import SparkSession

from holdfast import Application


def write(directory: Path, batches: list[list[dict[str, Any]]]) -> Path:
    """One file per batch; Spark takes files in the order of their times."""
    directory.mkdir()
    for number, rows in enumerate(batches):
        file = directory / f"{number}.json"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        os.utime(file, (number, number))
    return directory


def show(example: Callable[[SparkSession, Path], list[Any]]) -> None:
    """Run an example on a session of its own and print its rows."""
    with TemporaryDirectory() as directory:
        session = Application("example", state_dir=directory).spark
        for row in example(session, Path(directory)):
            print(row)
        session.stop()
