"""A topic as a source: what is read, how much at once, and what is refused."""

from __future__ import annotations

import json
import logging
import threading
import time
from typing import Any

import pytest
from confluent_kafka.admin import NewPartitions
from scene import PATIENCE_S, Scene, await_that, counted, ends, orders, totals

from holdfast import Application, State
from holdfast.errors import OffsetsLost, TopicMismatch, UnsupportedValue

RECORDS = orders("ab", range(5))
EARLIER_MS = time.time_ns() // 1_000_000 - 3_600_000  # a while ago, but not so long that retention takes the record


def listing(app: Application, topic: Any) -> list[Any]:
    """What a run that takes all there is gives for each record: value, key, timestamp, headers."""
    seen: list[Any] = []
    frame = app.dataframe(topic)
    frame = frame.apply(lambda value, key, timestamp, headers: [value, key, timestamp, headers], metadata=True)
    frame.inspect(seen.append)
    app.run(available_now=True)
    return seen


def test_the_first_example_of_the_design_runs_as_written(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.create("orders")
    scene.create("totals")
    monkeypatch.chdir(scene.directory)

    def count_messages(value: dict[str, Any], state: State) -> dict[str, Any]:
        total = state.get("total", default=0) + 1
        state.set("total", total)
        return {**value, "total": total}

    app = Application("orders", broker_address=scene.broker.address, spark=scene.spark)
    sdf = app.dataframe(app.topic("orders"))
    sdf = sdf.apply(count_messages, stateful=True)
    sdf.to_topic(app.topic("totals"))
    running = threading.Thread(target=app.run)
    running.start()
    try:
        begun = scene.directory / "state" / "orders" / "checkpoint" / "commits"
        await_that(lambda: begun.exists() and any(begun.glob("*.json")))
        scene.feed((b"ann", {"amount": 3}), (b"bob", {"amount": 4}), (b"ann", {"amount": 5}), topic="orders")
        await_that(lambda: len(scene.read("totals")) == 3)
    finally:
        app.stop()
        running.join(PATIENCE_S)
    assert scene.by_key("totals") == {
        b"ann": [{"amount": 3, "total": 1}, {"amount": 5, "total": 2}],
        b"bob": [{"amount": 4, "total": 1}],
    }


# -- where it begins ---------------------------------------------------------------------------------------------------


def test_a_new_application_begins_at_the_end_unless_told_otherwise(scene: Scene) -> None:
    scene.create(scene.source)
    scene.feed((b"a", {"amount": 1}))
    scene.counting(auto_offset_reset="latest").run(timeout=0.2)  # fixes the beginning
    scene.feed((b"a", {"amount": 2}))
    app = scene.counting(auto_offset_reset="earliest")  # too late
    app.run(available_now=True)
    assert totals(app) == {b"a": (1, 2)}


def test_a_second_run_goes_on_where_the_first_ended(scene: Scene) -> None:
    scene.create(scene.source, 2)
    for half in (RECORDS[:5], RECORDS[5:]):
        scene.feed(*half)
        scene.counting().run(available_now=True)
    assert totals(scene.counting()) == ends(counted(RECORDS))
    assert scene.by_key() == counted(RECORDS)


def test_a_topic_and_partitions_of_it_may_be_empty(scene: Scene) -> None:
    scene.create(scene.source, 4)
    scene.counting().run(available_now=True)
    assert scene.head().version == 0
    scene.feed(*RECORDS, partition=2)
    app = scene.counting()
    app.run(available_now=True)
    assert totals(app) == ends(counted(RECORDS))
    assert scene.head().position["offsets"] == [0, 0, 10, 0]


# -- what a record is --------------------------------------------------------------------------------------------------


def test_keys_and_values_are_read_with_their_deserializers(scene: Scene) -> None:
    scene.create(scene.source)
    scene.feed(((-7).to_bytes(4, "big", signed=True), b"own"))
    app = scene.app()
    topic = app.topic(
        scene.source, key_deserializer="integer", value_deserializer=lambda data: data.decode().upper().encode()
    )
    ((value, key, _, _),) = listing(app, topic)
    assert (value, key) == (b"OWN", -7)


def test_a_step_sees_key_timestamp_and_headers(scene: Scene) -> None:
    app = scene.app()
    topic = app.topic(scene.source, key_deserializer="string")
    with app.get_producer() as producer:
        producer.produce(topic, b"1", b"k", headers=[("x", b"1"), ("x", None)], timestamp=EARLIER_MS)
        producer.produce(topic, b"2", timestamp=EARLIER_MS + 1)
    first, second = listing(app, topic)
    assert first == [1, "k", EARLIER_MS, [["x", b"1"], ["x", None]]]
    assert second == [2, None, EARLIER_MS + 1, None]


def test_event_time_comes_from_the_timestamp_extractor(scene: Scene) -> None:
    def extract(value: Any, headers: Any, timestamp: int, timestamp_type: int) -> int:
        assert timestamp_type == 1
        return int(value["at"] + timestamp + int(headers[0][1]))

    app = scene.app()
    topic = app.topic(scene.source, timestamp_extractor=extract)
    with app.get_producer() as producer:
        producer.produce(topic, b'{"at": 5}', headers={"more": "70"}, timestamp=EARLIER_MS)
    ((_, _, timestamp, _),) = listing(app, topic)
    assert timestamp == EARLIER_MS + 75


def test_tombstones_go_in_and_out(scene: Scene) -> None:
    scene.create(scene.source)
    scene.feed((b"a", {"amount": 1}), (b"a", None), (None, None))
    app = scene.app()
    app.dataframe(app.topic(scene.source)).to_topic(app.topic(scene.target))
    app.run(available_now=True)
    assert sorted((message.key() or b"", message.value()) for message in scene.read() if message.value() is None) == [
        (b"", None),
        (b"a", None),
    ]
    assert len(scene.read()) == 3


def test_messages_of_more_than_a_megabyte_go_in_and_out(scene: Scene) -> None:
    text = "x" * 3_000_000
    for topic in (scene.source, scene.target):
        scene.create(topic, max_message_bytes=str(4 << 20))
    app = scene.app()
    topic = app.topic(scene.source)
    with app.get_producer() as producer:
        for n in range(3):
            producer.produce(topic, json.dumps({"n": n, "text": text}), b"a")
    app.dataframe(topic).update(remember, stateful=True).to_topic(app.topic(scene.target))
    app.run(available_now=True)
    assert scene.values() == [{"n": n, "text": text} for n in range(3)]


def remember(value: dict[str, Any], state: State) -> None:
    state.set("length", len(value["text"]))


def test_an_output_too_large_for_its_topic_is_an_error_of_its_record(scene: Scene) -> None:
    scene.create(scene.source)
    scene.create(scene.target, max_message_bytes="10000")
    scene.feed(*[(b"a", {"length": length}) for length in (10, 20_000, 30)])

    def grow(value: dict[str, Any], state: State) -> str:
        state.set("n", state.get("n", default=0) + 1)
        return "x" * value["length"]

    for skip in (False, True):
        app = scene.app(on_processing_error=(lambda error, record, logger: True) if skip else None)
        app.dataframe(app.topic(scene.source)).apply(grow, stateful=True).to_topic(app.topic(scene.target))
        if skip:
            app.run(available_now=True)
            continue
        with pytest.raises(UnsupportedValue, match=r"max\.message\.bytes") as caught:
            app.run(available_now=True)
        assert caught.value.holdfast_place.position == 1
        assert scene.head().version == 0
    assert [len(value) for value in scene.values()] == [10, 30]
    assert app.state().get(b"a") == {"n": 2}


def test_a_state_too_large_for_its_changelog_is_an_error_before_the_commit(scene: Scene) -> None:
    scene.create(scene.source)
    scene.feed((b"a", {"text": "x" * 900_000}), (b"a", {"text": "y" * 900_000}))

    def gather(value: dict[str, Any], state: State) -> None:
        state.set("all", state.get("all", default="") + value["text"])

    app = scene.app()
    app.dataframe(app.topic(scene.source)).update(gather, stateful=True)
    with pytest.raises(UnsupportedValue, match="changelog topic takes"):
        app.run(available_now=True)
    assert scene.head().version == 0


# -- transactions and gaps -------------------------------------------------------------------------------------------


def test_aborted_records_are_not_read_and_gaps_do_not_matter(scene: Scene) -> None:
    """Batches of three offsets: some hold nothing but aborted records, some end among them."""
    scene.create(scene.source)
    scene.transact(*RECORDS[:4], commit=True)
    scene.transact(*orders("ab", [100] * 4), commit=False)
    scene.transact(*RECORDS[4:7], commit=True)
    scene.feed(*RECORDS[7:])
    scene.transact(*orders("ab", [100] * 3), commit=False)  # the topic ends with aborted records
    app = scene.counting(max_batch_rows=3)
    app.run(available_now=True)
    assert scene.by_key() == counted(RECORDS)
    assert totals(app) == ends(counted(RECORDS))
    head = scene.head()
    assert head.position["offsets"] == [4 + 1 + 8 + 1 + 3 + 1 + 3 + 6 + 1]
    assert head.version == -(-28 // 3)


def test_an_open_transaction_is_waited_for(scene: Scene) -> None:
    from confluent_kafka import Producer

    scene.create(scene.source)
    scene.feed(RECORDS[0])
    producer = Producer(scene.broker.client_settings() | {"transactional.id": scene.named("slow"), "linger.ms": 0})
    producer.init_transactions(PATIENCE_S)
    producer.begin_transaction()
    producer.produce(scene.source, json.dumps(RECORDS[1][1]).encode(), RECORDS[1][0])
    producer.flush(PATIENCE_S)
    scene.feed(RECORDS[2])  # lies beyond the open one
    scene.counting().run(available_now=True)
    assert scene.by_key() == counted(RECORDS[:1])
    producer.commit_transaction(PATIENCE_S)
    scene.counting().run(available_now=True)
    assert scene.by_key() == counted(RECORDS[:3])


def test_a_tail_of_aborted_records_that_grows_while_the_run_lives(scene: Scene) -> None:
    scene.create(scene.source)
    scene.feed(*RECORDS[:2])
    app = scene.counting()
    running = threading.Thread(target=app.run, kwargs={"count": 3})
    running.start()
    try:
        for at in (2, 9, 16):
            await_that(lambda at=at: scene.committed() == [at])
            scene.transact(*orders("ab", [100] * 3), commit=False)
        await_that(lambda: scene.committed() == [23])
        scene.feed(RECORDS[2])
        running.join(PATIENCE_S)
        assert not running.is_alive()
    finally:
        app.stop()
        running.join(PATIENCE_S)
    assert scene.by_key() == counted(RECORDS[:3])


# -- how much at once, and how long ----------------------------------------------------------------------------------


def test_a_batch_is_never_larger_than_asked(scene: Scene) -> None:
    scene.create(scene.source, 2)
    scene.feed(*orders("a", range(12)), partition=0)
    scene.feed(*orders("b", range(2)), partition=1)
    scene.counting(max_batch_rows=4).run(available_now=True)
    rows = [
        sum(commit.rows_in for commit in scene.manifest(version).partitions)
        for version in range(1, scene.head().version + 1)
    ]
    assert max(rows) <= 4 and sum(rows) == 14
    assert scene.manifest(1).position["offsets"] == [2, 2]  # a long partition does not keep a short one waiting


def test_a_count_is_exact(scene: Scene) -> None:
    scene.create(scene.source, 2)
    scene.feed(*orders("abcdef", range(5)))
    for until, rows in ((7, 3), (14, 1_000)):
        scene.counting(max_batch_rows=rows).run(count=7)
        assert sum(len(values) for values in scene.by_key().values()) == until


def test_an_idle_run_makes_no_versions_and_ends_after_its_timeout(scene: Scene) -> None:
    scene.create(scene.source)
    scene.feed(*RECORDS)
    began = time.monotonic()
    scene.counting().run(timeout=1.0)
    assert time.monotonic() - began > 1.0
    assert scene.head().version == 1


def test_batches_wait_for_the_commit_interval(scene: Scene) -> None:
    scene.create(scene.source)
    scene.feed(RECORDS[0])
    app = scene.counting(commit_interval=1.5)
    running = threading.Thread(target=app.run, kwargs={"count": len(RECORDS)})
    running.start()
    try:
        await_that(lambda: len(scene.read()) == 1 if scene.target in scene.topics() else False)
        for record in RECORDS[1:]:
            scene.feed(record)
        running.join(PATIENCE_S)
        assert not running.is_alive()
    finally:
        app.stop()
        running.join(PATIENCE_S)
    assert scene.by_key() == counted(RECORDS)
    assert scene.head().version <= 3


def test_a_full_batch_does_not_wait_for_the_commit_interval(scene: Scene) -> None:
    scene.create(scene.source)
    scene.feed(*RECORDS)
    app = scene.counting(commit_interval=600, max_batch_rows=2)
    running = threading.Thread(target=app.run, kwargs={"count": len(RECORDS)})
    running.start()
    running.join(PATIENCE_S)
    app.stop()
    assert not running.is_alive()
    assert scene.by_key() == counted(RECORDS)


# -- a topic that changed --------------------------------------------------------------------------------------------


def test_a_topic_that_was_created_again_is_refused(scene: Scene) -> None:
    scene.create(scene.source)
    scene.feed(*RECORDS)
    scene.counting().run(available_now=True)
    scene.remove_topic(scene.source)
    await_that(lambda: scene.source not in scene.topics())
    scene.create(scene.source)
    scene.feed(*RECORDS)
    with pytest.raises(TopicMismatch, match="deleted and created again") as caught:
        scene.counting().run(available_now=True)
    assert caught.value.topic == scene.source
    assert scene.by_key() == counted(RECORDS)


def test_a_topic_that_has_grown_is_refused(scene: Scene) -> None:
    scene.create(scene.source, 2)
    scene.feed(*RECORDS)
    scene.counting().run(available_now=True)
    scene.admin.create_partitions([NewPartitions(scene.source, 3)])[scene.source].result(PATIENCE_S)
    await_that(lambda: scene.partitions(scene.source) == 3)
    with pytest.raises(TopicMismatch, match="has 3 partitions, the state was built with 2") as caught:
        scene.counting().run(available_now=True)
    assert (caught.value.recorded, caught.value.found) == (2, 3)


def test_a_topic_that_grows_under_a_run_ends_it(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.sources.kafka.IDENTITY_S", 0.2)
    monkeypatch.setattr("holdfast.sources.kafka.DOUBT_S", 0.5)
    scene.create(scene.source)
    scene.feed(*RECORDS)
    app = scene.counting()
    failed: list[TopicMismatch] = []

    def run() -> None:
        try:
            app.run()
        except TopicMismatch as error:
            failed.append(error)

    running = threading.Thread(target=run)
    running.start()
    try:
        await_that(lambda: scene.committed() == [10])
        scene.admin.create_partitions([NewPartitions(scene.source, 2)])[scene.source].result(PATIENCE_S)
        running.join(PATIENCE_S)
        assert not running.is_alive()
    finally:
        app.stop()
        running.join(PATIENCE_S)
    assert [error.found for error in failed] == [2]


def test_records_that_were_deleted_unread_are_an_error_that_says_which_or_a_recorded_gap(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.create(scene.source, 2)
    first, rest = orders("b", range(4)), orders("b", range(3))
    scene.feed(*first, partition=1)
    scene.counting().run(available_now=True)
    scene.feed(*orders("b", [100] * 5), *rest, partition=1)
    scene.delete_records(scene.source, 1, 9)
    with pytest.raises(OffsetsLost, match='on_data_loss="skip"') as caught:
        scene.counting().run(available_now=True)
    error = caught.value
    assert (error.topic, error.partition, error.since, error.to) == (scene.source, 1, 4, 9)
    version = scene.head().version
    assert scene.head().position["offsets"] == [0, 4]
    with caplog.at_level(logging.WARNING, "holdfast"):
        scene.counting(on_data_loss="skip").run(timeout=0.5)
    assert f"the records of topic {scene.source}, partition 1 from 4 to 9 are gone" in caplog.text
    assert scene.manifest(version + 1).position["lost"] == [[1, 4, 9]]
    assert scene.head().version == version + 1  # and it is reported once
    assert scene.by_key() == counted(first + rest)
    assert scene.committed() == [0, 12]
    scene.feed(*orders("b", [100] * 2), partition=1)
    scene.delete_records(scene.source, 1, 14)  # a gap at the end of the topic
    scene.counting(on_data_loss="skip").run(available_now=True)
    assert scene.head().position == {**scene.head().position, "offsets": [0, 14], "lost": [[1, 12, 14]]}


# -- lag ---------------------------------------------------------------------------------------------------------------


def test_the_consumer_group_shows_the_true_lag(scene: Scene) -> None:
    scene.create(scene.source, 3)
    for partition, records in enumerate((5, 2, 0)):
        scene.feed(*orders("a", range(records)), partition=partition)
    scene.counting(max_batch_rows=2).run(count=4)
    assert scene.committed() == scene.head().position["offsets"]
    assert sum(scene.committed()) == 4
    scene.counting().run(available_now=True)
    assert scene.committed() == scene.head().position["offsets"] == [5, 2, 0]
    app = scene.app(name=scene.named("stateless"))
    app.dataframe(app.topic(scene.source)).apply(lambda value: value).print()
    app.run(available_now=True)
    assert scene.committed(group=scene.named("stateless")) == [5, 2, 0]
