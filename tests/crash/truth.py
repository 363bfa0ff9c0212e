"""What the program must have left behind, recomputed from its input by a plain fold, and what it did leave.

Everything is read without Spark: the state from the log, the table from its parquet files, counters from the chain.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
from program import BATCH, CITIES, NAME, RESTS, application, counts, orders, rest, table, with_city

from holdfast.log.manifest import Chain, Manifest
from holdfast.log.storage import LocalStorage
from holdfast.sinks.table import table_id


def check_exact(home: Path, count: int) -> None:
    """State, table and counters after the first `count` orders, each taken exactly once and in order."""
    totals, rows = fold(count)
    assert state(home) == totals
    assert sorted(table_rows(home), key=lambda row: row["n"]) == rows
    manifests = chain(home)
    assert sum(commit.rows_in for manifest in manifests for commit in manifest.partitions) == count
    assert sum(commit.rows_out for manifest in manifests for commit in manifest.partitions) == count
    assert sum(commit.keys for commit in manifests[-1].partitions) == len(totals)


def check_stages_exact(home: Path, count: int) -> None:
    """The same for the program with three stages, whose timers have all fired: each once, in the batch after its order."""
    totals, rows = fold(count)
    cities: dict[str, dict[str, int]] = {}
    for order in map(with_city, rows):
        city = cities.setdefault(order["city"], {"sum": 0})
        city["sum"] += order["amount"]
        city[order["user"]] = order["n"]
    rests = Counter(map(rest, rows))
    app = application(home)
    assert state(home) == totals
    assert dict(app.state("city").items()) == cities  # and nothing that has ended
    assert {key: document["count"] for key, document in app.state("rest").items()} == rests

    assert sorted(table_rows(home), key=lambda row: row["n"]) == rows
    taken_in = {row["n"]: version for version, some in versions(home, table(home)).items() for row in some}
    fired = [(row, version) for version, some in versions(home, counts(home)).items() for row in some]
    assert Counter(row["n"] for row, _ in fired) == Counter(range(count)), "a timer has fired twice or not at all"
    assert all(version == taken_in[row["n"]] + 1 for row, version in fired), "a timer has fired in another batch"
    assert all(row["city"] == with_city(row)["city"] for row, _ in fired)
    numbered = Counter((rest(row), row["number"]) for row, _ in fired)
    assert numbered == Counter((key, number + 1) for key, times in rests.items() for number in range(times))

    manifests = chain(home)
    assert sum(commit.rows_in for manifest in manifests for commit in manifest.partitions) == count
    assert sum(commit.rows_out for manifest in manifests for commit in manifest.partitions) == 2 * count
    assert sum(commit.keys for commit in manifests[-1].partitions) == len(totals) + CITIES + RESTS
    assert all(commit.keys for commit in manifests[-1].partitions), "a partition had nothing to do"


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
    return [row for rows in versions(home, table(home)).values() for row in rows]


def versions(home: Path, path: Path) -> dict[int, list[dict[str, Any]]]:
    """The rows of every version; each version has those that its manifest counts, and no version is on its way."""
    rows: dict[int, list[dict[str, Any]]] = {}
    for manifest in chain(home):
        version = path / f"holdfast_version={manifest.version}"
        found = [row for file in sorted(version.glob("*.parquet")) for row in pq.ParquetFile(file).read().to_pylist()]
        assert len(found) == emitted(manifest, path), version
        if found:
            rows[manifest.version] = found
    assert {path.name for path in path.iterdir()} == {"_holdfast.json", *(f"holdfast_version={v}" for v in rows)}
    return rows


def emitted(manifest: Manifest, path: Path) -> int:
    """How many rows a version has for a table."""
    sink = table_id(str(path))
    return sum(commit.outboxes[sink].rows for commit in manifest.partitions if sink in commit.outboxes)


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
