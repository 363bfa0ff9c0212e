"""Several topics in one application: one state by key, one commit, and all of it comes back from Kafka."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from scene import Scene, count_messages

from holdfast import Application
from holdfast.errors import TopicMismatch

KEYS = [f"k{n}" for n in range(8)]


def records(numbers: range) -> list[tuple[str, dict[str, Any]]]:
    return [(KEYS[n % 8], {"amount": n}) for n in numbers]


def other(scene: Scene) -> str:
    """The second topic: before the first by name, though it is declared after it."""
    return scene.named("and")


def joined(scene: Scene, *, staged: bool = False, **settings: Any) -> Application:
    """Counts the records of each key of both topics; `staged`: by another key."""
    app = scene.app(max_batch_rows=40, **settings)
    orders, returns = app.dataframe(app.topic(scene.source)), app.dataframe(app.topic(other(scene)))
    frame = orders.concat(returns.apply(lambda value: {"amount": -value["amount"]}))
    if staged:
        frame = frame.group_by(lambda value: f"g{abs(value['amount']) % 3}", name="group", partitions=3)
    frame.apply(count_messages, stateful=True).to_topic(
        app.topic(scene.target, key_serializer="string" if staged else "bytes")
    )
    return app


def check(scene: Scene, app: Application, orders: range, returns: range, *, staged: bool = False) -> None:
    amounts = [*orders, *(-n for n in returns)]
    counts: Counter[Any] = Counter()
    sums: Counter[Any] = Counter()
    for n in amounts:
        key = f"g{abs(n) % 3}" if staged else KEYS[abs(n) % 8].encode()
        counts[key] += 1
        sums[key] += n
    state = {key: (found["n"], found["sum"]) for key, found in app.state("group" if staged else "default").items()}
    assert state == {key: (counts[key], sums[key]) for key in counts}
    assert sorted(value["amount"] for value in scene.values()) == sorted(amounts), "every output once"
    for by_key in scene.by_key().values():
        assert [value["n"] for value in by_key] == list(range(1, len(by_key) + 1)), "in the order of the state"
    offsets = [*scene.committed(other(scene)), *scene.committed()]
    assert scene.head().position["offsets"] == offsets  # type: ignore[index]


def fed(scene: Scene, orders: range, returns: range) -> None:
    scene.feed(*records(orders))
    scene.feed(*records(returns), topic=other(scene))


@pytest.mark.parametrize(("lost", "staged"), [("local", False), ("everything", False), ("everything", True)])
def test_two_topics_share_one_state_and_come_back_together(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, lost: str, staged: bool
) -> None:
    monkeypatch.setattr("holdfast.sinks.kafka.LARGE", 20_000 if lost == "local" else 0)  # by the driver, or by tasks
    for topic in (scene.source, other(scene)):
        scene.create(topic, 2)
    fed(scene, range(1, 60), range(1, 30))
    joined(scene, staged=staged).run(available_now=True)
    assert scene.head().version > 2
    if lost == "local":
        scene.lose(scene.local)
    elif lost == "everything":
        scene.lose(scene.home)
    fed(scene, range(60, 80), range(30, 90))
    app = joined(scene, staged=staged)
    app.run(available_now=True, recover="changelog" if lost == "everything" else None)
    check(scene, app, range(1, 80), range(1, 90), staged=staged)


@pytest.mark.parametrize("staged", [False, True])
def test_a_rebuild_from_the_beginning_of_both_sends_nothing_again(scene: Scene, staged: bool) -> None:
    for topic in (scene.source, other(scene)):
        scene.create(topic, 2)
    fed(scene, range(1, 60), range(1, 30))
    joined(scene, staged=staged).run(available_now=True)
    before = sorted(value["amount"] for value in scene.values())
    scene.lose(scene.home)
    app = joined(scene, staged=staged)
    app.run(available_now=True, recover="beginning")
    assert sorted(value["amount"] for value in scene.values()) == before
    fed(scene, range(60, 70), range(30, 40))
    app = joined(scene, staged=staged)
    app.run(available_now=True)
    assert sorted(value["amount"] for value in scene.values()) == sorted([*range(1, 70), *(-n for n in range(1, 40))])


def test_topics_with_other_numbers_of_partitions_are_not_read_together(scene: Scene) -> None:
    scene.create(scene.source, 2)
    scene.create(other(scene), 3)
    with pytest.raises(TopicMismatch, match=r"the same number of partitions.*has 3, .*has 2"):
        joined(scene).run(available_now=True)
    assert not scene.home.exists() or not any(scene.checkpoint.glob("commits/*"))


def test_a_checkpoint_goes_on_with_the_topics_that_it_was_read_from(scene: Scene) -> None:
    for topic in (scene.source, other(scene)):
        scene.create(topic, 2)
    joined(scene).run(available_now=True)
    with pytest.raises(TopicMismatch, match="read the same topics"):
        scene.counting().run(available_now=True)
