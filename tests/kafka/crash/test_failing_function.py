"""A function that fails when most of a batch is done: the run ends with its exception, and the batch leaves no trace."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from broker import Broker
from program import PARTITIONS
from stage import BATCH, Stage
from truth import check_all_taken, check_exact, position, put_orders

TIMES = 10
SHARE = BATCH // PARTITIONS
"""Records that a batch takes of each partition."""


@pytest.mark.timeout(600)
def test_a_batch_whose_function_fails_near_its_end_is_visible_nowhere(
    broker: Broker, tmp_path_factory: pytest.TempPathFactory, choice: random.Random
) -> None:
    stages = [Stage(broker, tmp_path_factory.mktemp(publish)) for publish in ("driver", "tasks")]
    with ThreadPoolExecutor(2) as pool:
        done = [
            pool.submit(fail_often, stage, publish, random.Random(choice.random()))
            for stage, publish in zip(stages, ("driver", "tasks"), strict=True)
        ]
        for one in done:
            one.result()


def fail_often(stage: Stage, publish: str, choice: random.Random) -> None:
    put_orders(stage, 20 * BATCH)
    for _ in range(TIMES // 2):
        fail_once(stage, publish, choice)
    stage.run_to_end(publish)
    check_all_taken(stage)


def fail_once(stage: Stage, publish: str, choice: random.Random) -> None:
    """A life whose function fails at 60 to 80 % of the share that one partition has of the first, second or third batch."""
    before = position(stage) if stage.commits() else [0] * PARTITIONS
    partition, batches = choice.randrange(PARTITIONS), choice.randrange(3)
    expected = [offset + batches * SHARE for offset in before]
    poisoned = expected[partition] + int(choice.uniform(0.6, 0.8) * SHARE)
    order = msgspec.json.decode(stage.read_partitions(stage.source)[partition][poisoned].value())["order"]
    with stage.life(publish, "--fail-on", order) as life:
        assert life.end() == 1, life.said()
        place = f"{stage.source}, partition {partition}, position {poisoned}, "
        assert f"NotToday: order {order}\nat {place}" in life.said(), life.said()
    assert position(stage) == expected
    if stage.head().version:
        check_exact(stage)
    assert len(stage.read(committed=False)) == len(stage.read())
