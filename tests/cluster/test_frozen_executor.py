"""An executor that stops answering is given up, and its partition goes to another one on the same disk, while the task of the first
still has the store open. That task finishes long after its successor has committed: nobody sees what it did.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import executors
import pytest
from conftest import Cluster

from holdfast import Application, Persistence, State
from holdfast.log import paths
from holdfast.state.keys import encode_key, partition_of

ROWS = 240
BATCH = 60
FROZEN_IN = 1
USERS = 40
PARTITIONS = 6
VICTIM = "u7"


@pytest.mark.timeout(280)
def test_two_executors_that_want_one_partition_take_a_slot_each(cluster: Cluster, tmp_path: Path) -> None:
    claim, released = tmp_path / "claim", tmp_path / "released"
    marks = tmp_path / "marks"
    marks.mkdir()

    def total(order: dict[str, Any], state: State) -> dict[str, Any]:
        if order["n"] // BATCH == FROZEN_IN and order["user"] == VICTIM:
            (marks / str(executors.mine())).touch()
            if executors.is_first(claim):
                executors.freeze_mine(until=released)
        state.set("total", state.get("total", 0) + order["n"])
        return {**order, "total": state.get("total")}

    orders = [{"n": n, "user": f"u{n % USERS}"} for n in range(ROWS)]
    seen: list[dict[str, Any]] = []

    def look(order: dict[str, Any]) -> None:
        seen.append(order)
        if order["n"] // BATCH > FROZEN_IN:
            released.touch()

    place = Persistence(tmp_path / "checkpoint", snapshot_every=10**6)
    app = Application(
        "frozen",
        state_dir=tmp_path / "state",
        persistence=place,
        partitions=PARTITIONS,
        max_batch_rows=BATCH,
        spark_config={
            **cluster.settings,
            "spark.executor.heartbeatInterval": "500ms",
            "spark.storage.blockManagerHeartbeatTimeoutMs": "6s",
            "spark.network.timeoutInterval": "1s",
        },
    )
    app.dataframe(app.from_iterable(orders, key="user")).apply(total, stateful=True).inspect(look)

    version, partition = FROZEN_IN + 1, partition_of(encode_key(VICTIM), PARTITIONS)
    attempts = paths.delta(version, partition, "")[: -len(".arrow")]

    def finished() -> list[str]:
        """The attempts that got to the end of the task in question."""
        return [name for name in place.storage.names(paths.DELTAS) if name.startswith(attempts)]

    try:
        app.run()
        assert claim.exists(), "no executor was frozen"
        assert len(list(marks.iterdir())) > 1, "no other executor took the partition"
        limit = time.monotonic() + executors.PATIENCE_S
        while len(finished()) < 2:
            assert time.monotonic() < limit, "the task that was given up has not finished"
            time.sleep(0.05)
    finally:
        app.spark.stop()

    assert list((tmp_path / "state").glob(f"**/{partition}/slot-1.lock")), "nobody was in the way"
    totals: Counter[str] = Counter()
    rows = [{**order, "total": add(totals, order)} for order in orders]
    assert {user: state["total"] for user, state in app.state().items()} == totals
    assert sorted(seen, key=lambda order: order["n"]) == rows


def add(totals: Counter[str], order: dict[str, Any]) -> int:
    totals[order["user"]] += order["n"]
    return totals[order["user"]]
