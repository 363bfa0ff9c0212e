"""What a run hands to the targets of its sinks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Context(msgspec.Struct, frozen=True):
    """The surroundings of a run on the driver."""

    spark: SparkSession
    warehouse: Path
    """Where tables live that are given by name."""
