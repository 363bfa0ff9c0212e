"""On a cluster a state partition stays where its store is, and moves only when that place is lost; snapshots go on beside it."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from conftest import HOSTS, Cluster

from holdfast import Application, Persistence
from holdfast.log.snapshot import newest_snapshot
from holdfast.state.keys import encode_key, partition_of

PARTITIONS = 6
ROWS = 600
KEYS = 40
BATCHES = 24
KILL_AFTER = 12


@pytest.mark.timeout(280)
def test_partitions_stay_put_and_only_those_of_a_killed_worker_move(cluster: Cluster, tmp_path: Path) -> None:
    def total(order: dict[str, Any], state: Any) -> dict[str, Any]:
        state.set("total", state.get("total", 0) + order["amount"])
        return {**order, "total": state.get("total"), "host": os.environ["SPARK_LOCAL_IP"]}

    orders: list[dict[str, Any]] = [{"n": n, "user": f"u{n % KEYS}", "amount": n} for n in range(ROWS)]
    seen: list[dict[str, Any]] = []
    killed: list[str] = []

    def look(order: dict[str, Any]) -> None:
        seen.append(order)
        if order["n"] >= ROWS * KILL_AFTER // BATCHES and not killed:
            killed.append(HOSTS[0])
            cluster.kill(HOSTS[0])

    place = Persistence(tmp_path / "checkpoint", snapshot_every=5)
    app = Application(
        "placed",
        state_dir=tmp_path / "state",
        persistence=place,
        partitions=PARTITIONS,
        max_batch_rows=ROWS // BATCHES,
        spark_config=cluster.settings,
    )
    app.dataframe(app.from_iterable(orders, key="user")).apply(total, stateful=True).inspect(look)
    try:
        app.run()
    finally:
        app.spark.stop()

    assert killed, "no worker was killed"
    before = places([row for row in seen if row["n"] < ROWS * KILL_AFTER // BATCHES])
    after = places([row for row in seen if row["n"] >= ROWS * (KILL_AFTER + 2) // BATCHES])
    assert set().union(*before.values()) == set(HOSTS), "the work was not spread over the workers"
    assert all(len(hosts) == 1 for hosts in before.values()), f"a partition moved while nothing was lost: {before}"
    for partition, hosts in before.items():
        if killed[0] in hosts:
            assert killed[0] not in after[partition]
        else:
            assert after[partition] == hosts, f"partition {partition} moved from {hosts} to {after[partition]}"

    expected: dict[str, int] = defaultdict(int)
    for order in orders:
        expected[order["user"]] += order["amount"]
    assert {user: state["total"] for user, state in app.state().items()} == expected
    assert sorted(row["n"] for row in seen) == list(range(ROWS))
    taken = newest_snapshot(place.storage)
    assert taken is not None and taken.version > KILL_AFTER, "no snapshot was taken after a worker was lost"


def places(rows: list[dict[str, Any]]) -> dict[int, set[str]]:
    """By partition: the hosts that its rows were processed on."""
    found: dict[int, set[str]] = defaultdict(set)
    for row in rows:
        found[partition_of(encode_key(row["user"]), PARTITIONS)].add(row["host"])
    return found
