"""The planner: a ranged source as Spark sees it, a Python Data Source that only says how far a batch may go.

It runs in a process of Spark's own, so it is given only what it needs: the source's `Outlook`, where to begin and how
many rows a batch may have. What it says of a batch's start is never used: the manifest chain owns positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from holdfast.log.manifest import Position
from holdfast.pickling import dumps, loads
from holdfast.sources.base import Outlook

NAME = "holdfast"


class Planner(DataSource):
    """`spark.readStream.format("holdfast").option("plan", plan_option(...))`."""

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> str:
        return "nothing int"

    def streamReader(self, schema: Any) -> DataSourceStreamReader:  # noqa: N802  (Spark's name)
        return _Reader(*loads(bytes.fromhex(self.options["plan"])))


def plan_option(outlook: Outlook, start: Position, rows: int) -> str:
    return dumps((outlook, start, rows)).hex()


class _Reader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, outlook: Outlook, start: Position, rows: int) -> None:
        self._outlook = outlook
        self._start = start
        self._rows = rows

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        return self._start

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadMaxRows(self._rows)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        return self._outlook.propose(start, self._rows)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """A ranged source that ends, ends by itself."""

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        return []

    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        return iter(())
