"""A function that fails when most of a batch is done: the run ends with its exception, and the batch leaves no trace."""

from __future__ import annotations

import random
from typing import Any

import pytest
from scene import Scene, count_messages, counted, ends, totals

from holdfast import State
from holdfast.sinks import kafka

PARTITIONS = 4
SHARE = 100
"""Records that a batch takes of each partition."""
TIMES = 5


class NotToday(Exception):
    """What the function raises on the order that it was told to fail on."""


@pytest.mark.parametrize("publish", ["driver", "tasks"])
def test_a_batch_whose_function_fails_near_its_end_is_visible_nowhere(
    scene: Scene, publish: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka, "LARGE", 10**9 if publish == "driver" else 0)
    seed = random.randrange(10**6)
    print("seed", seed)
    choice = random.Random(seed)
    scene.create(scene.source, PARTITIONS)
    fed: list[list[Any]] = []
    for partition in range(PARTITIONS):
        fed.append([(b"%d-%d" % (partition, n % 7), {"amount": 10_000 * partition + n}) for n in range(16 * SHARE)])
        scene.feed(*fed[partition], partition=partition)
    at = [0] * PARTITIONS
    for _ in range(TIMES):
        partition, batches = choice.randrange(PARTITIONS), choice.randrange(3)
        at = [offset + batches * SHARE for offset in at]
        poisoned = at[partition] + int(choice.uniform(0.6, 0.8) * SHARE)
        order = fed[partition][poisoned][1]["amount"]

        def failing(value: Any, state: State, order: int = order) -> dict[str, Any]:
            counting = count_messages(value, state)
            if value["amount"] == order:
                raise NotToday(f"order {order}")
            return counting

        app = scene.counting(failing, max_batch_rows=PARTITIONS * SHARE)
        with pytest.raises(NotToday, match=f"order {order}") as caught:
            app.run(available_now=True)
        place = caught.value.holdfast_place  # type: ignore[attr-defined]
        assert (place.source, place.partition, place.position) == (scene.source, partition, poisoned)
        taken = [record for records, offset in zip(fed, at, strict=True) for record in records[:offset]]
        assert scene.head().position["offsets"] == at  # type: ignore[index]
        assert totals(app) == ends(counted(taken))
        assert scene.by_key() == counted(taken)
        assert len(scene.read(committed=False)) == len(taken), "not even what is not committed"
    app = scene.counting(max_batch_rows=PARTITIONS * SHARE)
    app.run(available_now=True)
    assert scene.by_key() == counted([record for records in fed for record in records])
