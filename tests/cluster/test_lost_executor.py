"""On a cluster an executor takes with it what its tasks have sent to the next stage. Others have received it by then.

Spark computes what is missing again, and a function that uses chance sends something else then. Of the two only one may
be seen, in the state of both stages and in the output.
"""

from __future__ import annotations

import secrets
from collections import Counter
from pathlib import Path
from typing import Any

import executors
import pytest
from conftest import Cluster

from holdfast import Application, State

ROWS = 360
BATCH = 120
KILLED_IN = 1
USERS = 40
LOTS = 60


@pytest.mark.timeout(280)
def test_an_executor_that_dies_after_its_stage_leaves_one_truth_though_the_function_is_random(
    cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    killed = tmp_path / "killed"

    def draw(order: dict[str, Any], state: State) -> dict[str, Any]:
        if order["n"] // BATCH == KILLED_IN:
            (marks / str(executors.mine())).touch()
        nonce = secrets.token_hex(8)
        state.set("sum", state.get("sum", 0) + order["n"])
        state.set(order["n"], nonce)
        return {**order, "nonce": nonce}

    def add_up(order: dict[str, Any], state: State) -> dict[str, Any]:
        if order["n"] // BATCH == KILLED_IN and executors.is_first(tmp_path / "claim"):
            killed.write_text(str(executors.kill_another({int(mark.name) for mark in marks.iterdir()})))
        state.set("sum", state.get("sum", 0) + order["n"])
        state.set(order["n"], order["nonce"])
        return order

    orders = [{"n": n, "user": f"u{n % USERS}", "lot": f"lot-{n % LOTS}"} for n in range(ROWS)]
    seen: list[dict[str, Any]] = []
    app = Application(
        "random",
        state_dir=tmp_path / "state",
        partitions=6,
        max_batch_rows=BATCH,
        spark_config={
            **cluster.settings,
            "spark.shuffle.io.maxRetries": "1",  # whoever is gone is gone
            "spark.shuffle.io.retryWait": "100ms",
        },
    )
    drawn = app.dataframe(app.from_iterable(orders, key="user")).apply(draw, stateful=True)
    drawn.group_by("lot", partitions=12).apply(add_up, stateful=True).inspect(seen.append)
    try:
        app.run()
    finally:
        app.spark.stop()

    assert killed.exists(), "no executor was killed"
    users, lots = dict(app.state().items()), dict(app.state("lot").items())
    assert {user: state.pop("sum") for user, state in users.items()} == sums(orders, "user")
    assert {lot: state.pop("sum") for lot, state in lots.items()} == sums(orders, "lot")
    assert sorted(order["n"] for order in seen) == list(range(ROWS))
    nonces = {n: nonce for state in users.values() for n, nonce in state.items()}
    assert nonces.keys() == set(range(ROWS))
    assert {n: nonce for state in lots.values() for n, nonce in state.items()} == nonces
    assert {order["n"]: order["nonce"] for order in seen} == nonces
    assert f"the job of version {KILLED_IN + 1} was lost; running it again" in caplog.messages, "there was no mixture"


def sums(orders: list[dict[str, Any]], field: str) -> dict[str, int]:
    found: Counter[str] = Counter()
    for order in orders:
        found[order[field]] += order["n"]
    return dict(found)
