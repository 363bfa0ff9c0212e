"""Several keyed stages in one Spark job, timers and the watermark, on a real Spark."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from holdfast import Application, State
from holdfast.log.manifest import Chain
from holdfast.log.storage import LocalStorage
from holdfast.sources.iterable import IterableSource

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ORDERS = [{"user": f"u{n % 7}", "city": f"c{n % 3}", "n": n} for n in range(300)]


def number(order: dict[str, Any], state: State) -> dict[str, Any]:
    state.set("orders", state.get("orders", 0) + 1)
    return {**order, "of_user": state.get("orders")}


def add_up(order: dict[str, Any], state: State) -> dict[str, Any]:
    state.set("sum", state.get("sum", 0) + order["n"])
    state.set("orders", state.get("orders", 0) + 1)
    return {**order, "of_city": state.get("orders")}


def latest(order: dict[str, Any], state: State) -> dict[str, Any]:
    last = state.get(f"of {order['user']}", 0)
    assert order["of_user"] > last, "the records of a user come from one partition, so they keep their order"
    state.set(f"of {order['user']}", order["of_user"])
    return order


def three_stages(app: Application, source: Any) -> list[dict[str, Any]]:
    seen: list[dict[str, Any]] = []
    frame = app.dataframe(source).apply(number, stateful=True)
    frame = (
        frame.group_by("city", partitions=3).apply(add_up, stateful=True).apply(latest, stateful=True, store="order")
    )
    frame.group_by(lambda order: order["of_city"] % 10, name="tens", partitions=1).apply(add_up, stateful=True)
    frame.inspect(seen.append)
    return seen


def test_two_iterables_are_one_stream_and_go_on_together(spark: SparkSession, tmp_path: Path) -> None:
    def endless() -> Iterator[dict[str, Any]]:
        return iter(ORDERS[1::2])

    def joined(limit: int) -> Application:
        app = Application("joined", state_dir=tmp_path, spark=spark, partitions=2, max_batch_rows=50, loglevel=None)
        one = app.dataframe(app.from_iterable(ORDERS[:limit:2], key="user"))
        one.concat(app.dataframe(app.from_iterable(endless, key="user"))).apply(number, stateful=True)
        return app

    joined(100).run()
    app = joined(300)
    app.run()
    assert {user: found["orders"] for user, found in app.state().items()} == Counter(order["user"] for order in ORDERS)


def check(app: Application, seen: list[dict[str, Any]], orders: list[dict[str, Any]] = ORDERS) -> None:
    assert {user: found["orders"] for user, found in app.state().items()} == Counter(order["user"] for order in orders)
    by_city = {city: (found["orders"], found["sum"]) for city, found in app.state("city").items()}
    assert by_city == {
        city: (len(mine), sum(order["n"] for order in mine))
        for city in sorted({order["city"] for order in orders})
        if (mine := [order for order in orders if order["city"] == city])
    }
    assert sum(found["sum"] for _, found in app.state("tens").items()) == sum(order["n"] for order in orders)
    assert sorted(order["n"] for order in seen) == sorted(order["n"] for order in orders)
    assert app.state("city").get("c1") == dict(app.state("city").items())["c1"]


def test_three_stages_of_an_iterable_are_one_commit(spark: SparkSession, tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []
    for records in (ORDERS[:130], ORDERS):
        app = Application("app", state_dir=tmp_path, spark=spark, partitions=2, max_batch_rows=50)
        found = three_stages(app, app.from_iterable(records, key="user"))
        app.run()
        seen += found
    check(app, seen)
    head = Chain(LocalStorage(tmp_path / "app" / "checkpoint")).head()
    assert head is not None and head.version == 7
    assert [(stage.name, stage.partitions) for stage in head.stages] == [("source", 2), ("city", 3), ("tens", 1)]
    assert len(head.partitions) == 6


def test_three_stages_of_files(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "input").mkdir()
    for start in range(0, 300, 100):
        lines = (json.dumps(order) for order in ORDERS[start : start + 100])
        (tmp_path / "input" / f"{start}.json").write_text("\n".join(lines))
    app = Application("app", state_dir=tmp_path, spark=spark, partitions=2)
    source = app.from_files(
        tmp_path / "input", format="json", schema="user string, city string, n bigint", key="user", files_per_batch=1
    )
    seen = three_stages(app, source)
    app.run(available_now=True)
    check(app, seen)


def test_an_error_in_a_later_stage_leaves_nothing_of_the_batch(spark: SparkSession, tmp_path: Path) -> None:
    def fail(order: dict[str, Any], state: State) -> None:
        state.set("seen", True)
        if order["n"] == 40:
            raise ValueError("no")

    app = Application("app", state_dir=tmp_path, spark=spark, partitions=2, max_batch_rows=1000)
    frame = app.dataframe(app.from_iterable(ORDERS, key="user")).apply(number, stateful=True)
    frame.group_by("city").apply(fail, stateful=True)
    with pytest.raises(ValueError, match="no") as caught:
        app.run()
    place = caught.value.holdfast_place  # type: ignore[attr-defined]
    assert (place.position, place.key, place.step) == (40, "c1", "apply(fail)")
    assert not list(app.state().items()) and not list(app.state("city").items())


# -- timers -----------------------------------------------------------------------------------------------------------------


def remember(value: dict[str, Any], key: str, timestamp: int, headers: Any, state: State) -> list[Any]:
    state.set_timer("idle", int(time.time() * 1000) + 300, clock="processing")
    state.set("seen", value["n"])
    return []


def tell(key: str, name: str, state: State) -> list[Any]:
    return [{"user": key, "last": state.get("seen")}]


class Endless(IterableSource):
    """An iterable that is never over: more may come."""

    def is_over(self, position: Any, proposed: Any = None) -> bool:
        return False


@pytest.mark.parametrize("kind", ["iterable", "files"])
def test_a_timer_fires_though_nothing_comes(spark: SparkSession, tmp_path: Path, kind: str) -> None:
    app = Application("app", state_dir=tmp_path, spark=spark, partitions=2)
    if kind == "files":
        (tmp_path / "input").mkdir()
        (tmp_path / "input" / "a.json").write_text('{"user": "ann", "n": 1}\n{"user": "bob", "n": 2}\n')
        source: Any = app.from_files(tmp_path / "input", format="json", schema="user string, n bigint", key="user")
    else:
        source = Endless([{"user": "ann", "n": 1}, {"user": "bob", "n": 2}], "user", None)
    fired: dict[str, int] = {}
    all_fired = threading.Event()

    def see(row: dict[str, Any]) -> None:
        fired[row["user"]] = row["last"]
        if len(fired) == 2:
            all_fired.set()

    app.dataframe(source).apply(remember, stateful=True, expand=True, metadata=True, on_timer=tell).inspect(see)
    runner = threading.Thread(target=app.run)
    runner.start()
    try:
        assert all_fired.wait(30), fired
    finally:
        app.stop()
        runner.join()
    assert fired == {"ann": 1, "bob": 2}
