"""Topics as sinks: each output once, per key in order, whoever publishes it and whatever Kafka forgets."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException
from scene import Scene, count_messages, counted, orders, totals

from holdfast import failpoints
from holdfast.errors import EarlierLife, ForeignTarget, KafkaRefused, MarkerLost, UnsupportedValue
from holdfast.testing import Crash

RECORDS = orders("abc", range(6))
EARLIER_MS = time.time_ns() // 1_000_000 - 3_600_000


@pytest.fixture(params=["driver", "tasks"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Who publishes."""
    monkeypatch.setattr("holdfast.sinks.kafka.LARGE", 0 if request.param == "tasks" else 20_000)
    return str(request.param)


@pytest.fixture
def by_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.sinks.kafka.LARGE", 0)


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    failpoints.arm(None)


def crash_at(name: str, version: int) -> list[str]:
    """Raise there, once; the list says whether it happened."""
    happened: list[str] = []

    def hook(reached: str, at: int) -> None:
        if (reached, at) == (name, version) and not happened:
            happened.append(reached)
            raise Crash(name)

    failpoints.arm(hook)
    return happened


# -- once and in order --------------------------------------------------------------------------------------------------


def test_each_output_is_there_once_and_in_order_over_several_runs(scene: Scene, way: str) -> None:
    scene.create(scene.source, 2)
    scene.create(scene.target, 3)
    for part in (RECORDS[:7], RECORDS[7:]):
        scene.feed(*part)
        scene.counting(max_batch_rows=6).run(available_now=True)
    assert {scene.manifest(version).published_by for version in range(1, scene.head().version + 1)} == {way}
    assert scene.by_key() == counted(RECORDS)
    homes = [{message.key() for message in messages} for messages in scene.read_partitions()]
    assert sum(map(len, homes)) == len(set.union(*homes)) == 3  # a key has one partition


def test_output_that_is_not_committed_in_the_checkpoint_is_nowhere(scene: Scene) -> None:
    scene.create(scene.source)
    scene.feed(*RECORDS)
    assert (happened := crash_at("commit.begin", 1)) == []
    with pytest.raises(Crash):
        scene.counting().run(available_now=True)
    assert happened
    assert scene.read(committed=False) == []
    failpoints.arm(None)
    scene.counting().run(available_now=True)
    assert scene.by_key() == counted(RECORDS)


@pytest.mark.parametrize("point", ["deliver.begin", "publish.committed"])
def test_a_delivery_that_was_interrupted_is_finished_by_the_next_run(scene: Scene, point: str) -> None:
    scene.create(scene.source)
    scene.feed(*RECORDS)
    happened = crash_at(point, 2)
    with pytest.raises(Crash):
        scene.counting(max_batch_rows=6).run(available_now=True)
    assert happened
    scene.counting().run(available_now=True)
    assert scene.by_key() == counted(RECORDS)


def test_a_commit_whose_answer_was_lost_doubles_nothing(scene: Scene) -> None:
    scene.create(scene.source)
    scene.feed(*RECORDS)
    lost = []

    def hook(reached: str, version: int) -> None:
        if reached == "publish.answered" and version == 2 and not lost:
            lost.append(version)
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))

    failpoints.arm(hook)
    scene.counting(max_batch_rows=6).run(available_now=True)
    assert lost == [2]
    assert scene.by_key() == counted(RECORDS)


def test_a_transaction_that_failed_is_repeated(scene: Scene) -> None:
    scene.create(scene.source)
    scene.feed(*RECORDS)
    failed = []

    def hook(reached: str, version: int) -> None:
        if reached == "publish.marked" and version == 2 and len(failed) < 2:
            failed.append(version)
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))

    failpoints.arm(hook)
    scene.counting(max_batch_rows=6).run(available_now=True)
    assert failed == [2, 2]
    assert scene.by_key() == counted(RECORDS)


def test_the_way_of_publishing_may_change_from_batch_to_batch(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.sinks.kafka.LARGE", 9)
    scene.create(scene.source, 2)
    records = []
    for many in (1, 5, 1, 5):
        records += (more := orders("abc", range(many)))
        scene.feed(*more)
        scene.counting().run(available_now=True)
    assert [scene.manifest(version).published_by for version in (1, 2, 3, 4)] == ["driver", "tasks"] * 2
    assert scene.by_key() == counted(records)


def test_at_least_once_goes_the_same_way_without_transactions(scene: Scene, by_tasks: None) -> None:
    scene.create(scene.source, 2)
    for part in (RECORDS[:7], RECORDS[7:]):
        scene.feed(*part)
        scene.counting(processing_guarantee="at-least-once").run(available_now=True)
    assert scene.by_key() == counted(RECORDS)
    assert sum(scene.committed()) == len(RECORDS)
    ends = [messages[-1].offset() + 1 if messages else 0 for messages in scene.read_partitions()]
    assert sum(ends) == len(RECORDS)  # no markers of transactions in between


def test_at_least_once_may_repeat_after_a_crash_and_loses_nothing(scene: Scene) -> None:
    scene.create(scene.source)
    scene.feed(*RECORDS)
    happened = crash_at("publish.produced", 1)
    app = scene.counting(processing_guarantee="at-least-once")
    with pytest.raises(Crash):
        app.run(available_now=True)
    assert happened
    scene.counting(processing_guarantee="at-least-once").run(available_now=True)
    for key, said in counted(RECORDS).items():
        assert scene.by_key()[key][-len(said) :] == said


# -- what a message is ----------------------------------------------------------------------------------------------------


def test_key_timestamp_and_headers_are_passed_on(scene: Scene) -> None:
    app = scene.app()
    source = app.topic(scene.source)
    with app.get_producer() as producer:
        producer.produce(source, b"1", b"k", headers=[("x", b"1"), ("x", None)], timestamp=EARLIER_MS)
        producer.produce(source, b"2")
    app.dataframe(source).to_topic(app.topic(scene.target))
    app.run(available_now=True)
    first, second = scene.read()
    assert (first.key(), first.value(), first.timestamp()[1]) == (b"k", b"1", EARLIER_MS)
    assert first.headers() == [("x", b"1"), ("x", None)]
    assert (second.key(), second.headers()) == (None, None)


def test_a_key_of_the_values_own_and_serializers(scene: Scene) -> None:
    scene.create(scene.source)
    scene.feed((b"a", {"user": "ann", "amount": 3}), (b"b", {"user": "ann", "amount": 4}))
    app = scene.app()
    target = app.topic(scene.target, key_serializer="string", value_serializer="integer")
    frame = app.dataframe(app.topic(scene.source))
    frame.to_topic(app.topic(scene.named("second"), key_serializer="string"), key=lambda value: value["user"])
    frame.apply(lambda value: value["amount"]).to_topic(target, key=lambda amount: f"k{amount}")
    app.run(available_now=True)
    assert [(message.key(), message.value()) for message in scene.read()] == [
        (b"k3", (3).to_bytes(4, "big")),
        (b"k4", (4).to_bytes(4, "big")),
    ]
    assert list(scene.by_key(scene.named("second"))) == [b"ann"]


def test_several_topics_and_other_sinks_in_one_pipeline(scene: Scene) -> None:
    """All outputs of a version, and the state, are out together."""
    scene.create(scene.source, 2)
    scene.feed(*RECORDS)
    seen: list[Any] = []
    app = scene.app(max_batch_rows=5)
    frame = app.dataframe(app.topic(scene.source)).apply(count_messages, stateful=True)
    frame.inspect(seen.append)
    for name in ("one", "two"):
        frame.filter(lambda value, name=name: (value["n"] % 2 == 0) == (name == "two")).to_topic(
            app.topic(scene.named(name))
        )
    frame.to_topic(app.topic(scene.named("two")))  # a topic may be written to by two branches
    app.run(available_now=True)
    all_of_them = [value for values in counted(RECORDS).values() for value in values]
    odd, even = ([value for value in all_of_them if value["n"] % 2 == rest] for rest in (1, 0))
    by_amount = lambda values: sorted(values, key=lambda value: sorted(value.items()))  # noqa: E731
    assert by_amount(scene.values(scene.named("one"))) == by_amount(odd)
    assert by_amount(scene.values(scene.named("two"))) == by_amount(even + all_of_them)
    assert by_amount(seen) == by_amount(all_of_them)


def test_an_iterable_goes_to_a_topic(scene: Scene, by_tasks: None) -> None:
    numbers = [{"user": f"u{n % 3}", "amount": n} for n in range(20)]
    for until in (10, 20):
        app = scene.app(partitions=2, max_batch_rows=10)
        frame = app.dataframe(app.from_iterable(numbers[:until], key="user")).apply(count_messages, stateful=True)
        frame.to_topic(app.topic(scene.target, key_serializer="string"))
        app.run()
    expected = counted((number["user"].encode(), {"amount": number["amount"]}) for number in numbers)
    assert scene.by_key() == expected
    assert totals(app) == {key.decode(): (said[-1]["n"], said[-1]["sum"]) for key, said in expected.items()}


# -- times that a topic refuses -------------------------------------------------------------------------------------------


def ahead(scene: Scene, minutes: int, **settings: Any) -> Any:
    """An application that gives the records of key b another event time."""

    def later(value: Any, key: Any, timestamp: int, headers: Any) -> int:
        return timestamp + (minutes * 60_000 if key == b"b" else 0)

    app = scene.app(**settings)
    frame = app.dataframe(app.topic(scene.source)).apply(count_messages, stateful=True)
    frame.set_timestamp(later).to_topic(app.topic(scene.target))
    return app


def test_an_event_time_that_the_topic_would_refuse_is_an_error_of_its_record(scene: Scene) -> None:
    """A broker takes what is up to an hour ahead, unless its settings say otherwise."""
    scene.create(scene.source)
    scene.feed(*RECORDS)
    with pytest.raises(UnsupportedValue, match=r"message\.timestamp\.after\.max\.ms") as caught:
        ahead(scene, 61).run(available_now=True)
    assert (caught.value.holdfast_place.position, caught.value.holdfast_place.key) == (1, b"b")
    assert scene.head().version == 0
    letters = scene.named("letters")
    scene.create(letters)
    ahead(scene, 61, dead_letter_topic=letters).run(available_now=True)
    expected = counted(RECORDS)
    assert len(scene.read(letters)) == len(expected.pop(b"b"))
    assert scene.by_key() == expected


@pytest.mark.parametrize("minutes", [59, 61])
def test_a_topic_with_the_broker_s_own_times_takes_any(scene: Scene, minutes: int) -> None:
    scene.create(scene.source)
    scene.create(scene.target, **({"message_timestamp_type": "LogAppendTime"} if minutes > 60 else {}))
    scene.feed(*RECORDS)
    ahead(scene, minutes).run(available_now=True)
    assert scene.by_key() == counted(RECORDS)


@pytest.mark.parametrize("guarantee", ["exactly-once", "at-least-once"])
def test_a_topic_that_changed_its_mind_after_the_commit_is_named_at_once(scene: Scene, guarantee: str) -> None:
    scene.create(scene.source)
    scene.create(scene.target)
    scene.feed(*RECORDS)
    happened = crash_at("deliver.begin", 1)
    with pytest.raises(Crash):
        ahead(scene, 30, processing_guarantee=guarantee).run(available_now=True)
    assert happened
    scene.alter(scene.target, message_timestamp_after_max_ms="60000")
    began = time.monotonic()
    with pytest.raises(KafkaRefused, match=r"raise the topic's message\.timestamp\.before\.max\.ms or"):
        ahead(scene, 30, processing_guarantee=guarantee).run(available_now=True)
    assert time.monotonic() - began < 60
    scene.alter(scene.target, message_timestamp_after_max_ms="3600000")
    ahead(scene, 30, processing_guarantee=guarantee).run(available_now=True)
    assert {key: said[-6:] for key, said in scene.by_key().items()} == counted(RECORDS)


# -- what Kafka remembers ------------------------------------------------------------------------------------------------


def test_notes_that_are_gone_are_mended_if_the_checkpoint_knows_that_all_is_out(
    scene: Scene, by_tasks: None, caplog: pytest.LogCaptureFixture
) -> None:
    scene.create(scene.source, 2)
    scene.feed(*RECORDS[:9])
    scene.counting().run(available_now=True)
    scene.forget_notes()
    scene.feed(*RECORDS[9:])
    with caplog.at_level(logging.WARNING, "holdfast"):
        scene.counting().run(available_now=True)
    assert "has lost its notes; the checkpoint knows that all is out" in caplog.text
    assert scene.by_key() == counted(RECORDS)
    assert scene.committed() == scene.head().position["offsets"]


def test_notes_that_are_gone_with_the_mark_are_an_error_with_true_advice(scene: Scene) -> None:
    """It is out, and nothing says so any more. A person looks, and then does."""
    scene.create(scene.source)
    scene.feed(*RECORDS)
    happened = crash_at("deliver.done", 1)
    with pytest.raises(Crash):
        scene.counting().run(available_now=True)
    assert happened
    scene.forget_notes()
    with pytest.raises(MarkerLost) as caught:
        scene.counting().run(available_now=True)
    assert caught.value.version == 1
    assert scene.by_key() == counted(RECORDS)
    words = str(caught.value).split()
    name = next(word for word in words if word.startswith("delivered/"))
    content = str(caught.value).partition("with the content ")[2].partition(";")[0]
    (scene.checkpoint / name).parent.mkdir(exist_ok=True)
    (scene.checkpoint / name).write_text(content)
    scene.feed(*RECORDS)
    scene.counting().run(available_now=True)
    assert scene.by_key() == counted(RECORDS + RECORDS)


def test_without_a_checkpoint_traces_of_an_earlier_life_are_an_error(scene: Scene) -> None:
    scene.create(scene.source)
    scene.feed(*RECORDS)
    scene.counting().run(available_now=True)
    scene.lose(scene.home)
    with pytest.raises(EarlierLife, match=r'run\(recover="changelog"\)') as caught:
        scene.counting().run(available_now=True)
    assert caught.value.version == 1
    assert not (scene.checkpoint / "commits").exists()  # so the next start says the same
    assert scene.by_key() == counted(RECORDS)


def test_another_checkpoint_of_the_same_name_is_refused(scene: Scene, tmp_path: Path) -> None:
    """Two checkpoints that began before either had published: the second to run would skip or double."""
    scene.create(scene.source)
    for directory in ("one", "two"):
        scene.counting(state_dir=tmp_path / directory).run(available_now=True)
        scene.forget_notes()
    scene.feed(*RECORDS)
    scene.counting(state_dir=tmp_path / "one").run(available_now=True)
    with pytest.raises(ForeignTarget, match="another instance"):
        scene.counting(state_dir=tmp_path / "two").run(available_now=True)
    assert scene.by_key() == counted(RECORDS)


def test_a_checkpoint_put_back_from_an_older_copy_is_refused(scene: Scene, tmp_path: Path) -> None:
    import shutil

    scene.create(scene.source)
    scene.feed(*RECORDS[:9])
    scene.counting().run(available_now=True)
    shutil.copytree(scene.checkpoint, tmp_path / "copy")
    scene.feed(*RECORDS[9:])
    scene.counting().run(available_now=True)
    scene.lose(scene.home)
    shutil.copytree(tmp_path / "copy", scene.checkpoint)
    with pytest.raises(ForeignTarget, match="older copy") as caught:
        scene.counting().run(available_now=True)
    assert (caught.value.out, caught.value.head) == (2, 1)
    assert scene.by_key() == counted(RECORDS)


def test_something_else_in_the_group_is_refused(scene: Scene) -> None:
    from confluent_kafka import Consumer, TopicPartition

    scene.create(scene.source)
    scene.feed(*RECORDS)
    scene.counting().run(available_now=True)
    consumer = Consumer(scene.broker.client_settings() | {"group.id": scene.name})
    consumer.commit(offsets=[TopicPartition(f"holdfast__{scene.name}--notes", 0, 7)], asynchronous=False)
    consumer.close()
    with pytest.raises(ForeignTarget, match="something else commits there"):
        scene.counting().run(available_now=True)
