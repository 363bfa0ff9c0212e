"""What the program must have left behind, recomputed from its input by a plain fold, and what it did leave.

Everything is read without Spark: the state from the log, the table from its parquet files, counters from the chain.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
from program import BATCH, NAME, application, orders, table

from holdfast.log.manifest import Chain, Manifest
from holdfast.log.storage import LocalStorage


def check_exact(home: Path, count: int) -> None:
    """State, table and counters after the first `count` orders, each taken exactly once and in order."""
    totals, rows = fold(count)
    assert state(home) == totals
    assert sorted(table_rows(home), key=lambda row: row["n"]) == rows
    manifests = chain(home)
    assert sum(commit.rows_in for manifest in manifests for commit in manifest.partitions) == count
    assert sum(commit.rows_out for manifest in manifests for commit in manifest.partitions) == count
    assert sum(commit.keys for commit in manifests[-1].partitions) == len(totals)


def fold(count: int, since: int = 0) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """Every user's total and the rows of the table after `count` orders, if the state was empty at order `since`."""
    totals: dict[str, int] = {}
    rows = []
    for order in islice(orders(count), since, None):
        totals[order["user"]] = totals.get(order["user"], 0) + order["amount"]
        rows.append({**order, "total": totals[order["user"]]})
    return totals, rows


def put_orders(inbox: Path, files: int) -> None:
    """Put the first orders into this many files of one batch each; those that are there stay."""
    inbox.mkdir(exist_ok=True)
    for number in range(files):
        file = inbox / f"{number}.json"
        if not file.exists():
            batch = islice(orders((number + 1) * BATCH), number * BATCH, None)
            file.write_bytes(b"\n".join(map(msgspec.json.encode, batch)))
            os.utime(file, (number + 1, number + 1))  # Spark takes the oldest first


def state(home: Path) -> dict[str, int]:
    return {user: document["total"] for user, document in application(home).state().items()}


def table_rows(home: Path) -> list[dict[str, Any]]:
    """The rows of every version; each version has those that its manifest counts, and no version is on its way."""
    rows: list[dict[str, Any]] = []
    for manifest in chain(home):
        version = table(home) / f"holdfast_version={manifest.version}"
        found = [row for file in sorted(version.glob("*.parquet")) for row in pq.ParquetFile(file).read().to_pylist()]
        assert len(found) == sum(commit.rows_out for commit in manifest.partitions), version
        rows += found
    expected = {
        "_holdfast.json",
        *(f"holdfast_version={manifest.version}" for manifest in chain(home) if emitted(manifest)),
    }
    assert {path.name for path in table(home).iterdir()} == expected
    return rows


def emitted(manifest: Manifest) -> bool:
    return any(commit.outboxes for commit in manifest.partitions)


def chain(home: Path) -> list[Manifest]:
    """Every manifest, oldest first, each checked to continue the one before it."""
    return list(_back_from_head(Chain(LocalStorage(home / NAME / "checkpoint"))))[::-1]


def taken(home: Path) -> int:
    """How many orders the last commit has taken."""
    position = chain(home)[-1].position
    assert position is not None
    return int(position["taken"])


def _back_from_head(chain: Chain) -> Iterator[Manifest]:
    manifest = chain.head()
    while manifest is not None:
        yield manifest
        manifest = chain.parent_of(manifest) if manifest.version else None
