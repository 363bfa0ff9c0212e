"""Several keyed stages and timers, from topic to topic: the changelogs of all stages are one version, and come back as one."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
from scene import Scene

from holdfast import Application, State
from holdfast.errors import TopicMismatch
from holdfast.kafka.changelog import MILESTONE, decode_milestone

USERS = [f"u{n}" for n in range(6)]


def records(numbers: range) -> list[tuple[str, dict[str, Any]]]:
    return [(USERS[n % 6], {"n": n, "city": f"c{n % 4}"}) for n in numbers]


def count(value: dict[str, Any], state: State) -> dict[str, Any]:
    state.set("n", state.get("n", 0) + 1)
    return value


def add_up(value: dict[str, Any], key: str, timestamp: int, headers: Any, state: State) -> list[Any]:
    state.set("sum", state.get("sum", 0) + value["n"])
    state.set("passing", 1, ttl=timedelta(milliseconds=1))
    state.set_timer(str(value["n"]), timestamp + 10_000_000 if value["n"] >= 1000 else 0, clock="event")
    return []


def tell(key: str, name: str, state: State) -> list[Any]:
    return [{"n": int(name), "city": key}]


def staged(scene: Scene, **settings: Any) -> Application:
    app = scene.app(watermark_delay=0, **settings)
    frame = app.dataframe(app.topic(scene.source)).apply(count, stateful=True)
    fired = frame.group_by("city", partitions=3).apply(add_up, stateful=True, metadata=True, expand=True, on_timer=tell)
    fired.group_by(lambda value: value["n"] % 2, name="parity", partitions=1).apply(count, stateful=True)
    fired.to_topic(app.topic(scene.target))
    return app


def check(scene: Scene, app: Application, numbers: list[int]) -> None:
    assert {key: found["n"] for key, found in app.state().items()} == Counter(USERS[n % 6].encode() for n in numbers)
    sums: Counter[str] = Counter()
    for n in numbers:
        sums[f"c{n % 4}"] += n
    assert {key: found["sum"] for key, found in app.state("city").items()} == {key: sums[key] for key in sums}
    fired = [n for n in numbers if n < 1000]
    assert sorted(value["n"] for value in scene.values()) == fired, "each timer once"
    assert {key: found["n"] for key, found in app.state("parity").items()} == Counter(n % 2 for n in fired)
    assert scene.committed() == scene.head().position["offsets"]  # type: ignore[index]


@pytest.mark.parametrize("lost", ["nothing", "local", "everything"])
def test_all_stages_come_back_together(scene: Scene, lost: str) -> None:
    scene.create(scene.source, 2)
    scene.feed(*records(range(1, 30)))
    scene.feed(*records(range(1000, 1006)))  # their timers are due after the restore
    staged(scene, max_batch_rows=10).run(available_now=True)
    before = scene.head()
    assert [(stage.name, stage.partitions) for stage in before.stages] == [("source", 2), ("city", 3), ("parity", 1)]
    if lost == "local":
        scene.lose(scene.local)
    elif lost == "everything":
        scene.lose(scene.home)
    scene.feed(*records(range(30, 40)))
    app = staged(scene)
    app.run(available_now=True, recover="changelog" if lost == "everything" else None)
    check(scene, app, [*range(1, 40), *range(1000, 1006)])
    head = scene.head()
    assert head.instance == before.instance
    assert head.watermark_ms is not None and head.watermark_ms >= (before.watermark_ms or 0)
    assert sum(commit.keys for commit in head.partitions) == 6 + 4 + 2
    due = [commit.event_due_ms for commit in head.partitions if commit.event_due_ms is not None]
    assert due, "the timers that are not due are still there"


def test_the_changelogs_of_the_stages_have_the_partitions_of_their_stage_and_one_version(scene: Scene) -> None:
    scene.create(scene.source, 2)
    scene.feed(*records(range(1, 30)))
    staged(scene).run(available_now=True)
    head = scene.head()
    for store, partitions in (("default", 2), ("city", 3), ("parity", 1)):
        topic = f"changelog__{scene.name}--{scene.source}--{store}"
        found = scene.read_partitions(topic)
        assert len(found) == partitions
        for partition, messages in enumerate(found):
            last = [message.value() for message in messages if message.key() == MILESTONE][-1]
            stone = decode_milestone(topic, partition, last or b"")
            assert stone.version == head.version
            assert list(stone.offsets) == head.position["offsets"]  # type: ignore[index]
            assert stone.watermark_ms == head.watermark_ms


def test_a_program_with_other_stages_cannot_take_them_back(scene: Scene) -> None:
    scene.create(scene.source, 2)
    scene.feed(*records(range(1, 10)))
    app = scene.app()
    app.dataframe(app.topic(scene.source)).apply(count, stateful=True)
    app.run(available_now=True)
    scene.lose(scene.home)
    with pytest.raises(TopicMismatch, match=r"notes: partitions=7.*it has 3 partitions"):
        staged(scene).run(available_now=True, recover="changelog")
