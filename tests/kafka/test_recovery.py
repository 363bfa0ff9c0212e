"""The ladder of recovery, rung by rung: whatever is lost, state and position fit together and no output is doubled.

Every test loses something after some records, adds more, and compares with a recomputation from all of them.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from scene import Scene, await_that, count_messages, counted, ends, orders, totals

from holdfast import Application, failpoints
from holdfast.errors import EarlierLife, StopAndLook
from holdfast.kafka.changelog import MILESTONE
from holdfast.log.storage import LocalStorage
from holdfast.log.verify import Verification
from holdfast.testing import Crash

FIRST, SECOND = orders("abcde", range(4)), orders("bcdef", range(10, 13))
ALL = FIRST + SECOND


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    failpoints.arm(None)


@pytest.fixture
def begun(scene: Scene) -> Scene:
    """A scene whose application has processed the first records of two partitions."""
    scene.create(scene.source, 2)
    scene.feed(*FIRST)
    scene.counting(max_batch_rows=8).run(available_now=True)
    return scene


def changelog(scene: Scene, store: str = "default") -> str:
    return f"changelog__{scene.name}--{scene.source}--{store}"


def check_goes_on(scene: Scene, **how: Any) -> Application:
    """More records come, and everything is as if nothing had happened."""
    scene.feed(*SECOND)
    app = scene.counting()
    app.run(available_now=True, **how)
    assert totals(app) == ends(counted(ALL))
    assert scene.by_key() == counted(ALL)
    assert scene.committed() == scene.head().position["offsets"]
    assert [
        finding for finding in Verification(LocalStorage(scene.checkpoint)).findings() if finding.kind == "damage"
    ] == []
    return app


# -- the local store -----------------------------------------------------------------------------------------------------


def test_a_local_store_that_is_lost_is_built_again(begun: Scene) -> None:
    begun.lose(begun.local)
    check_goes_on(begun)


def test_a_local_store_that_is_stale_is_brought_up(begun: Scene, tmp_path: Path) -> None:
    shutil.copytree(begun.local, tmp_path / "copy")
    more = orders("abcz", [50])
    begun.feed(*more)
    begun.counting().run(available_now=True)
    begun.lose(begun.local)
    shutil.copytree(tmp_path / "copy", begun.local)
    begun.feed(*SECOND)
    app = begun.counting()
    app.run(available_now=True)
    assert totals(app) == ends(counted(FIRST + more + SECOND))
    assert begun.by_key() == counted(FIRST + more + SECOND)


def test_a_local_store_that_is_damaged_is_noticed_and_built_again(
    begun: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    tables = sorted(begun.local.rglob("*.sst"))
    assert tables, "the local stores have no files to damage"
    for table in tables:
        data = bytearray(table.read_bytes())
        for at in range(0, len(data), 7):
            data[at] ^= 0xFF
        table.write_bytes(data)
    check_goes_on(begun)


# -- the checkpoint --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["driver", "tasks"])
def test_state_and_position_come_back_from_kafka_alone(
    scene: Scene, way: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("holdfast.sinks.kafka.LARGE", 0 if way == "tasks" else 20_000)
    scene.create(scene.source, 2)
    scene.feed(*FIRST)
    scene.counting(max_batch_rows=8).run(available_now=True)
    scene.lose(scene.home)
    with caplog.at_level(logging.INFO, "holdfast"):
        check_goes_on(scene, recover="changelog")
    assert scene.manifest(scene.head().version).published_by == way
    assert "restoring, " in caplog.text
    assert all(word in caplog.text for word in ("records done", "to go", "records/s", "s left", "state is whole again"))
    scene.lose(scene.home)  # and once more, from what the restored application has written
    app = scene.counting()
    app.run(available_now=True, recover="changelog")
    assert totals(app) == ends(counted(ALL))
    assert scene.by_key() == counted(ALL)


def test_processing_starts_only_when_the_state_is_whole(begun: Scene) -> None:
    begun.lose(begun.home)
    begun.feed(*SECOND)
    versions = []

    def hook(reached: str, version: int) -> None:
        if reached == "batch.begin":
            versions.append((version, begun.head().kind))

    failpoints.arm(hook)
    begun.counting().run(available_now=True, recover="changelog")
    (version, kind) = versions[0]
    assert kind == "restored"
    assert begun.manifest(version - 1).partitions[0].keys + begun.manifest(version - 1).partitions[1].keys == 5


def test_all_stores_come_back(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.sinks.kafka.LARGE", 0)

    def build() -> Application:
        app = scene.app()
        frame = app.dataframe(app.topic(scene.source)).apply(count_messages, stateful=True)
        frame = frame.filter(lambda value: value["amount"] % 2 == 0)
        frame.apply(count_messages, stateful=True, store="even").to_topic(app.topic(scene.target))
        return app

    scene.create(scene.source, 2)
    even = [(key, value) for key, value in ALL if value["amount"] % 2 == 0]
    for records, how in ((FIRST, {}), (SECOND, {"recover": "changelog"})):
        scene.feed(*records)
        app = build()
        app.run(available_now=True, **how)
        if records is FIRST:
            scene.lose(scene.home)
    assert totals(app) == ends(counted(ALL))
    assert totals(app, "even") == ends(counted(even))
    assert scene.by_key() == counted(even)


def test_a_version_that_was_published_by_one_partition_only(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks publish one transaction per partition. One has, the other has not, and then everything else is lost."""
    from holdfast.sinks import kafka as sink

    scene.create(scene.source, 2)
    scene.feed(*FIRST)
    scene.counting().run(available_now=True)
    scene.feed(*orders("abcdef", [20]))
    monkeypatch.setattr(sink, "LARGE", 0)
    whole = sink._publish_task

    def half(route: Any, manifest: Any) -> Callable[..., None]:
        task = whole(route, manifest)

        def publish(partition: int, storage: Any, stores: Any) -> None:
            if partition != 1:
                raise StopAndLook("this partition does not come to it")
            task(partition, storage, stores)

        return publish

    monkeypatch.setattr(sink, "_publish_task", half)
    with pytest.raises(StopAndLook, match="does not come to it"):
        scene.counting().run(available_now=True)
    before = scene.committed()
    monkeypatch.setattr(sink, "_publish_task", whole)
    scene.lose(scene.home)
    scene.feed(*SECOND)
    app = scene.counting()
    app.run(available_now=True, recover="changelog")
    everything = FIRST + orders("abcdef", [20]) + SECOND
    assert totals(app) == ends(counted(everything))
    assert scene.by_key() == counted(everything)
    assert before[1] > 0 and scene.committed() == scene.head().position["offsets"]


def test_a_changelog_that_was_compacted(scene: Scene) -> None:
    scene.create(scene.source)
    scene.create(
        changelog(scene),
        cleanup_policy="compact",
        segment_ms="100",
        min_cleanable_dirty_ratio="0.001",
        delete_retention_ms="0",
        max_compaction_lag_ms="200",
    )
    records = orders("abc", range(30))
    scene.feed(*records)
    scene.counting(max_batch_rows=9).run(available_now=True)
    versions = scene.head().version
    assert versions == 10
    assert scene.counting().state().get(b"a") == {"n": 30, "sum": 435}
    written = 4 * versions  # three keys and a milestone each

    def documents() -> int:
        return len([message for message in scene.read(changelog(scene)) if message.key() != MILESTONE])

    await_that(lambda: nudged(scene) and documents() < 3 * versions / 2)
    assert len(scene.read(changelog(scene))) < written
    scene.lose(scene.home)
    more = orders("bcd", [7])
    scene.feed(*more)
    app = scene.counting()
    app.run(available_now=True, recover="changelog")
    assert totals(app) == ends(counted(records + more))
    assert scene.by_key() == counted(records + more)
    scene.counting().run(available_now=True)  # a changelog that was compacted is not one that was emptied


def nudged(scene: Scene) -> bool:
    """A segment is closed when a record comes after its time, and only closed ones are compacted."""
    scene.feed((b"\0nudge", None), topic=changelog(scene), partition=0)
    return True


# -- an interrupted restore --------------------------------------------------------------------------------------------------


def test_a_restore_that_was_interrupted_goes_on_where_it_was(begun: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.kafka import recovery

    monkeypatch.setattr(recovery, "ROUND", 3)
    begun.lose(begun.home)
    whole = recovery.surely_each
    rounds: list[str] = []

    def interrupted(tasks: Any, what: str, function: Any) -> list[Any]:
        rounds.append(what)
        if len(rounds) == 3:
            raise Crash("in the third round")
        return whole(tasks, what, function)

    monkeypatch.setattr(recovery, "surely_each", interrupted)
    with pytest.raises(Crash):
        begun.counting().run(available_now=True, recover="changelog")
    stopped = begun.head()
    assert (stopped.kind, len(rounds)) == ("restoring", 3)
    with pytest.raises(StopAndLook, match="restore that was interrupted"):
        begun.counting().run(available_now=True)
    check_goes_on(begun, recover="changelog")
    after = begun.manifest(stopped.version + 1)
    assert (after.kind, after.parent) == ("restoring", stopped.id)
    assert after.base == stopped.base  # it did not begin again


# -- the other ways ------------------------------------------------------------------------------------------------------------


def test_a_state_is_built_again_from_the_beginning_without_sending_anything_twice(begun: Scene) -> None:
    begun.lose(begun.home)
    check_goes_on(begun, recover="beginning")


def test_a_rebuild_that_was_interrupted_and_lost_in_its_turn(begun: Scene) -> None:
    """The changelog of an application that is being rebuilt says how far its output was out."""
    begun.lose(begun.home)
    begun.counting(max_batch_rows=4).run(count=8, recover="beginning")
    begun.lose(begun.home)
    check_goes_on(begun, recover="changelog")


def test_with_nothing_recovered_it_begins_anew(begun: Scene) -> None:
    begun.lose(begun.home)
    begun.feed(*SECOND)
    app = begun.counting()
    app.run(available_now=True, recover="nothing")
    assert totals(app) == ends(counted(ALL))
    twice = counted(ALL)
    assert begun.by_key() == {key: counted(FIRST).get(key, []) + twice[key] for key in twice}
    begun.lose(begun.home)
    app = begun.counting()
    app.run(available_now=True, recover="changelog")
    assert totals(app) == ends(counted(ALL))


def test_begun_anew_at_the_end_of_the_topic_nothing_from_before_comes_back(begun: Scene) -> None:
    begun.lose(begun.home)
    begun.counting(auto_offset_reset="latest").run(timeout=0.2, recover="nothing")
    begun.feed(*SECOND)
    begun.counting().run(available_now=True)
    begun.lose(begun.home)
    app = begun.counting()
    app.run(available_now=True, recover="changelog")
    assert totals(app) == ends(counted(SECOND))


def test_a_stateless_application_takes_its_position_back(scene: Scene) -> None:
    def build() -> Application:
        app = scene.app()
        app.dataframe(app.topic(scene.source)).to_topic(app.topic(scene.target))
        return app

    scene.create(scene.source, 2)
    scene.feed(*FIRST)
    build().run(available_now=True)
    scene.lose(scene.home)
    scene.feed(*SECOND)
    with pytest.raises(EarlierLife, match="consumer group"):
        build().run(available_now=True)
    build().run(available_now=True, recover="changelog")
    assert sum(map(len, scene.by_key().values())) == len(ALL)


def test_with_a_checkpoint_recovering_changes_nothing(begun: Scene, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "holdfast"):
        check_goes_on(begun, recover="changelog")
    assert "there is a checkpoint at version" in caplog.text
