"""Changelog topics: what they are called, what is in them, and what is refused."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from scene import Scene, await_that, count_messages, counted, ends, orders, totals

from holdfast import Application, State
from holdfast.errors import IncompleteChangelog, TopicMismatch
from holdfast.kafka.changelog import MILESTONE, Milestone
from holdfast.state.keys import decode_key

RECORDS = orders("abc", range(4))


def changelog(scene: Scene, store: str = "default") -> str:
    return f"changelog__{scene.name}--{scene.source}--{store}"


def records(scene: Scene, partition: int = 0, store: str = "default") -> list[tuple[Any, int | None]]:
    """(key, version) of each document in a partition of the changelog; of a tombstone, (key, None)."""
    return [
        (
            decode_key(message.key().removeprefix(b"d")),
            None if message.value() is None else int.from_bytes(message.value()[:8], "big"),
        )
        for message in scene.read_partitions(changelog(scene, store))[partition]
        if message.key() != MILESTONE
    ]


def milestones(scene: Scene, partition: int = 0) -> list[Milestone]:
    messages = scene.read_partitions(changelog(scene))[partition]
    return [msgspec.json.decode(one.value(), type=Milestone) for one in messages if one.key() == MILESTONE]


def forget_zeros(value: dict[str, Any], state: State) -> dict[str, Any]:
    """Counts like `count_messages`, but an amount of 0 deletes the state of its key."""
    if value["amount"] == 0:
        for name in ("n", "sum"):
            if state.exists(name):
                state.delete(name)
        return value
    return count_messages(value, state)


def recovered(scene: Scene, step: Callable[..., Any] = count_messages, **settings: Any) -> Application:
    """The application after its checkpoint was lost and taken back from Kafka."""
    scene.lose(scene.home)
    app = scene.counting(step, **settings)
    app.run(available_now=True, recover="changelog")
    return app


# -- what there is ---------------------------------------------------------------------------------------------------------


def test_every_store_has_a_compacted_topic_with_the_partitions_of_the_source(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.create(scene.source, 3)
    app = scene.app()
    frame = app.dataframe(app.topic(scene.source)).apply(count_messages, stateful=True)
    frame.update(count_messages, stateful=True, store="second")
    with caplog.at_level(logging.INFO, "holdfast"):
        app.run(available_now=True)
    topics = {changelog(scene), changelog(scene, "second")}
    assert scene.topics() == {scene.source, f"holdfast__{scene.name}--notes", *topics}
    for topic in topics:
        assert scene.partitions(topic) == 3
        assert scene.settings(topic)["cleanup.policy"] == "compact"
        assert f"{topic}: partitions=3, replication-factor=1, cleanup.policy=compact" in caplog.text
    assert f"holdfast__{scene.name}--notes: partitions=4, replication-factor=the default" in caplog.text


def test_a_batch_adds_one_record_per_changed_key_and_a_milestone(scene: Scene) -> None:
    scene.create(scene.source, 2)
    scene.feed(*orders("ab", range(3)), partition=0)
    scene.feed(*orders("c", range(2)), partition=1)
    scene.counting().run(available_now=True)
    scene.feed(*orders("b", range(3)), partition=0)
    scene.counting().run(available_now=True)
    assert records(scene) == [(b"a", 1), (b"b", 1), (b"b", 2)]
    assert records(scene, 1) == [(b"c", 1)]
    head = scene.head()
    first, last = milestones(scene)
    assert (first.version, first.offsets, last.version, last.offsets) == (1, (6,), 2, (9,))
    assert (last.app, last.instance, last.manifest) == (scene.name, head.instance, head.id)
    assert (last.topics, last.stores, last.cleared) == (head.position["topics"], ("default",), 0)
    assert [stone.offsets for stone in milestones(scene, 1)] == [(2,), (2,)]  # also where nothing came


def test_a_deleted_key_becomes_a_tombstone(scene: Scene) -> None:
    scene.create(scene.source)
    scene.feed(*orders("ab", [1]))
    scene.counting(forget_zeros).run(available_now=True)
    scene.feed((b"a", {"amount": 0}))
    scene.counting(forget_zeros).run(available_now=True)
    assert records(scene) == [(b"a", 1), (b"b", 1), (b"a", None)]
    assert totals(recovered(scene, forget_zeros)) == {b"b": (1, 1)}


def test_a_stateless_application_has_no_changelog(scene: Scene) -> None:
    scene.create(scene.source)
    scene.feed(*RECORDS)
    app = scene.app()
    app.dataframe(app.topic(scene.source)).to_topic(app.topic(scene.target))
    app.run(available_now=True)
    assert scene.topics() == {scene.source, scene.target, f"holdfast__{scene.name}--notes"}


# -- off and on --------------------------------------------------------------------------------------------------------------


def test_changelogs_that_are_off_are_warned_of_and_not_written(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    scene.create(scene.source)
    scene.feed(*RECORDS)
    scene.counting(use_changelog_topics=False).run(available_now=True)
    assert "if the checkpoint is lost, state and position are lost with it" in caplog.text
    assert changelog(scene) not in scene.topics()
    scene.lose(scene.home)
    for on in (False, True):  # and nothing pretends otherwise
        with pytest.raises(IncompleteChangelog):
            scene.counting(use_changelog_topics=on).run(available_now=True, recover="changelog")


def test_changelogs_that_are_turned_on_get_the_state_that_is_there(scene: Scene, monkeypatch: Any) -> None:
    monkeypatch.setattr("holdfast.kafka.backfill.CHUNK", 2)
    scene.create(scene.source, 2)
    scene.feed(*RECORDS)
    scene.counting(use_changelog_topics=False).run(available_now=True)
    scene.counting().run(available_now=True)
    assert scene.head().kind == "backfilled"
    assert sorted(records(scene) + records(scene, 1)) == [(b"a", 2), (b"b", 2), (b"c", 2)]
    app = recovered(scene)
    assert totals(app) == ends(counted(RECORDS))
    assert scene.by_key() == counted(RECORDS)


def test_what_happened_while_changelogs_were_off_is_in_them_afterwards(scene: Scene) -> None:
    """Keys that came, changed and went meanwhile."""
    scene.create(scene.source, 2)
    before, meanwhile = orders("abcd", [1]), [*orders("bce", [5]), (b"d", {"amount": 0})]
    scene.feed(*before)
    scene.counting(forget_zeros).run(available_now=True)
    scene.feed(*meanwhile)
    scene.counting(forget_zeros, use_changelog_topics=False).run(available_now=True)
    expected = {b"a": (1, 1), b"b": (2, 6), b"c": (2, 6), b"e": (1, 5)}
    scene.feed((b"c", {"amount": 0}))
    app = scene.counting(forget_zeros)
    app.run(available_now=True)
    del expected[b"c"]
    assert totals(app) == expected
    said = scene.by_key()
    assert totals(recovered(scene, forget_zeros)) == expected
    assert scene.by_key() == said


def test_a_changelog_that_was_left_behind_is_not_taken_for_the_state(scene: Scene) -> None:
    """It was on, then off, and then the checkpoint was lost: what it holds is old, and its position would send again."""
    scene.create(scene.source)
    scene.feed(*RECORDS[:6])
    scene.counting().run(available_now=True)
    scene.feed(*RECORDS[6:])
    scene.counting(use_changelog_topics=False).run(available_now=True)
    with pytest.raises(IncompleteChangelog, match="were off in between") as caught:
        recovered(scene)
    assert (caught.value.partition, caught.value.changelog, caught.value.out) == (0, 6, 12)
    assert scene.by_key() == counted(RECORDS)


# -- by hand -------------------------------------------------------------------------------------------------------------------


def test_where_creation_is_off_the_error_lists_what_to_create_and_that_is_enough(scene: Scene) -> None:
    scene.create(scene.source, 2)
    scene.feed(*RECORDS)
    created: list[str] = []
    for _ in ("the user's", "ours"):
        with pytest.raises(TopicMismatch, match="auto_create_topics is off") as caught:
            scene.counting(auto_create_topics=False).run(available_now=True)
        assert scene.topics() == {scene.source, *created}  # nothing was created
        created += [create_as_said(scene, line) for line in str(caught.value).splitlines()[1:]]
    scene.counting(auto_create_topics=False).run(available_now=True)
    assert created == [scene.target, f"holdfast__{scene.name}--notes", changelog(scene)]
    assert scene.by_key() == counted(RECORDS)


def create_as_said(scene: Scene, line: str) -> str:
    """Do what a line of the error says; the name of the topic."""
    match = re.fullmatch(
        r"  (?P<name>\S+): partitions=(?P<count>\d+), replication-factor=(1|the default)(?P<more>.*)", line
    )
    assert match is not None, line
    settings = dict(setting.split("=") for setting in match["more"].removeprefix(", ").split(", ") if setting)
    scene.broker.create_topic(match["name"], int(match["count"]), settings)
    return match["name"]


def test_a_topic_of_ours_with_other_settings_is_refused_by_name(scene: Scene) -> None:
    scene.create(scene.source, 2)
    scene.create(changelog(scene), 3, cleanup_policy="delete")
    scene.create(f"holdfast__{scene.name}--notes", 1)
    with pytest.raises(TopicMismatch) as caught:
        scene.counting().run(available_now=True)
    assert set(caught.value.topics) == {changelog(scene), f"holdfast__{scene.name}--notes"}
    for line in (
        f"  {changelog(scene)}: partitions=2, replication-factor=1, cleanup.policy=compact (it has 3 partitions)",
        f"  {changelog(scene)}: partitions=2, replication-factor=1, cleanup.policy=compact (cleanup.policy is delete)",
        f"  holdfast__{scene.name}--notes: partitions=3, replication-factor=the default (it has 1 partitions)",
    ):
        assert line in str(caught.value).splitlines()


# -- a changelog that is another --------------------------------------------------------------------------------------------


def test_a_changelog_that_was_replaced_is_refused_until_it_is_filled_again(scene: Scene) -> None:
    scene.create(scene.source)
    scene.feed(*RECORDS[:6])
    scene.counting().run(available_now=True)
    scene.remove_topic(changelog(scene))
    await_that(lambda: changelog(scene) not in scene.topics())
    scene.feed(*RECORDS[6:])
    with pytest.raises(TopicMismatch, match="was deleted and created again") as caught:
        scene.counting().run(available_now=True)
    assert caught.value.topic == changelog(scene)
    scene.counting(use_changelog_topics=False).run(available_now=True)  # what the error advises
    scene.remove_topic(changelog(scene))
    await_that(lambda: changelog(scene) not in scene.topics())
    scene.counting().run(available_now=True)
    assert totals(recovered(scene)) == ends(counted(RECORDS))
    assert scene.by_key() == counted(RECORDS)


def test_a_changelog_that_was_emptied_is_refused(scene: Scene) -> None:
    scene.create(scene.source)
    scene.feed(*RECORDS)
    scene.counting().run(available_now=True)
    scene.alter(changelog(scene), cleanup_policy="compact,delete")  # else Kafka deletes nothing on demand
    scene.delete_records(changelog(scene), 0, 2)
    scene.alter(changelog(scene), cleanup_policy="compact")
    with pytest.raises(TopicMismatch, match=r"records were deleted from changelog topic .* partitions \[0\]"):
        scene.counting().run(available_now=True)


def test_without_a_checkpoint_either_nothing_is_restored_from_it(scene: Scene) -> None:
    scene.create(scene.source)
    scene.feed(*RECORDS)
    scene.counting().run(available_now=True)
    scene.alter(changelog(scene), cleanup_policy="compact,delete")
    scene.delete_records(changelog(scene), 0, -1)
    scene.alter(changelog(scene), cleanup_policy="compact")
    with pytest.raises(IncompleteChangelog):
        recovered(scene)


def test_a_cleared_state_stays_cleared_after_a_restore(scene: Scene) -> None:
    scene.create(scene.source, 2)
    scene.feed(*RECORDS)
    scene.counting().run(available_now=True)
    scene.counting().clear_state()
    scene.counting().run(available_now=True)  # tells the changelog
    assert [stone.cleared for stone in milestones(scene)] == [0, 2]
    assert totals(recovered(scene)) == {}
    scene.feed(*orders("a", [7]))
    scene.counting().run(available_now=True)
    app = recovered(scene)
    assert totals(app) == {b"a": (1, 7)}
    assert scene.by_key()[b"a"] == [*counted(RECORDS)[b"a"], {"amount": 7, "n": 1, "sum": 7}]
