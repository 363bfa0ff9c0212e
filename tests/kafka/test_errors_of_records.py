"""Records that fail: what ends the run, what is skipped, what goes to the dead-letter topic, and what is never shown."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
from scene import Scene, count_messages, counted, orders, totals

from holdfast import State, failpoints
from holdfast.errors import Undecodable
from holdfast.testing import Crash

GOOD = orders("ab", [1, 2])
CANARY = "hunter2-in-the-payload"
BROKEN = b'{"amount": "' + CANARY.encode()


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    failpoints.arm(None)


def picky(value: dict[str, Any], state: State) -> dict[str, Any]:
    """Counts, and fails on negative amounts, after the state has changed."""
    said = count_messages(value, state)
    if value["amount"] < 0:
        raise ValueError("it is negative")
    return said


def broken_in_between(scene: Scene) -> None:
    """Five records in one partition; the third is not JSON, the fourth makes the step fail."""
    scene.create(scene.source, 2)
    for key, value in (GOOD[0], GOOD[1], (b"a", BROKEN), (b"b", {"amount": -1}), GOOD[2]):
        scene.feed((key, value), partition=1)


EXPECTED = counted(GOOD[:3])


# -- what ends a run ------------------------------------------------------------------------------------------------------


def test_a_value_that_is_not_json_ends_the_run_with_its_place_and_without_its_payload(
    scene: Scene, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    broken_in_between(scene)
    with pytest.raises(Undecodable) as caught:
        scene.counting().run(available_now=True)
    place = caught.value.holdfast_place
    assert (place.source, place.partition, place.position, place.step) == (scene.source, 1, 2, "source")
    shown = "".join(traceback.format_exception(caught.value))
    assert f"{scene.source}, partition 1, position 2" in shown
    printed = "".join(capfd.readouterr())
    for text in (str(caught.value), repr(caught.value), shown, caplog.text, printed):
        assert CANARY not in text
    assert scene.head().version == 0
    assert scene.read(committed=False) == []


def test_a_step_that_fails_ends_the_run_and_leaves_nothing(scene: Scene) -> None:
    scene.create(scene.source, 2)
    scene.feed(*GOOD, (b"a", {"amount": -1}), *GOOD, partition=0)
    app = scene.counting(picky)
    with pytest.raises(ValueError, match="it is negative") as caught:
        app.run(available_now=True)
    assert caught.value.holdfast_place.position == 4
    assert totals(app) == {}
    assert scene.read(committed=False) == []
    assert scene.committed() == [-1, -1]


# -- callbacks --------------------------------------------------------------------------------------------------------------


def test_callbacks_skip_what_they_are_asked_about(scene: Scene) -> None:
    broken_in_between(scene)
    asked = scene.directory / "asked"

    def note(which: str) -> Any:
        def callback(error: Exception, record: Any, logger: logging.Logger) -> bool:
            with asked.open("a") as file:
                file.write(f"{which} {type(error).__name__} {record.source} {record.partition} {record.position}\n")
            return True

        return callback

    app = scene.counting(picky, on_processing_error=note("processing"), on_consumer_error=note("consumer"))
    app.run(available_now=True)
    assert asked.read_text().splitlines() == [
        f"consumer Undecodable {scene.source} 1 2",
        f"processing ValueError {scene.source} 1 3",
    ]
    assert scene.by_key() == EXPECTED
    assert totals(app) == {b"a": (2, 3), b"b": (1, 1)}
    assert sum(commit.skipped for commit in scene.head().partitions) == 2


def test_a_consumer_error_is_a_processing_error_where_nobody_else_cares(scene: Scene) -> None:
    broken_in_between(scene)
    scene.counting(picky, on_processing_error=lambda error, record, logger: True).run(available_now=True)
    assert scene.by_key() == EXPECTED


def test_a_callback_that_does_not_skip_ends_the_run(scene: Scene) -> None:
    broken_in_between(scene)
    with pytest.raises(Undecodable):
        scene.counting(on_consumer_error=lambda error, record, logger: False).run(available_now=True)
    assert scene.head().version == 0


# -- dead letters -------------------------------------------------------------------------------------------------------------


def test_a_dead_letter_is_the_record_as_it_came_with_where_and_why(scene: Scene) -> None:
    broken_in_between(scene)
    scene.counting(picky, dead_letter_topic=scene.named("dead")).run(available_now=True)
    first, second = scene.read(scene.named("dead"))
    assert (first.key(), first.value()) == (b"a", BROKEN)
    assert (second.key(), second.value()) == (b"b", b'{"amount": -1}')
    origin = {"holdfast.topic": scene.source.encode(), "holdfast.partition": b"1"}
    assert dict(first.headers()) == origin | {
        "holdfast.offset": b"2",
        "holdfast.step": b"source",
        "holdfast.error": b"Undecodable",
        "holdfast.message": dict(first.headers())["holdfast.message"],
    }
    assert CANARY.encode() not in dict(first.headers())["holdfast.message"]
    assert dict(second.headers()) == origin | {
        "holdfast.offset": b"3",
        "holdfast.step": b"apply(picky)",
        "holdfast.error": b"ValueError",
        "holdfast.message": b"it is negative",
    }
    assert scene.by_key() == EXPECTED
    assert totals(scene.counting(picky)) == {b"a": (2, 3), b"b": (1, 1)}


def test_a_dead_letter_keeps_its_headers_and_its_key_of_bytes(scene: Scene) -> None:
    app = scene.app(dead_letter_topic=scene.named("dead"))
    topic = app.topic(scene.source, key_deserializer="integer")
    with app.get_producer() as producer:
        producer.produce(topic, b"null", b"too long for an integer", headers=[("trace", b"1")])
        producer.produce(topic, b"no JSON", b"\0\0\0\7")
    app.dataframe(topic).print()
    app.run(available_now=True)
    first, second = scene.read(scene.named("dead"))
    assert (first.key(), first.headers()[0]) == (b"too long for an integer", ("trace", b"1"))
    assert (second.key(), second.headers()[0][0]) == (b"\0\0\0\7", "holdfast.topic")


@pytest.mark.parametrize("way", ["driver", "tasks"])
def test_dead_letters_come_once_and_in_order_through_a_crash(
    scene: Scene, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.sinks.kafka.LARGE", 0 if way == "tasks" else 20_000)
    scene.create(scene.source)
    amounts = [n if n % 3 else -n for n in range(1, 25)]
    scene.feed(*orders("a", amounts))
    crashed = []

    def hook(reached: str, version: int) -> None:
        if (reached, version) == ("deliver.done", 2) and not crashed:
            crashed.append(version)
            raise Crash("here")

    failpoints.arm(hook)
    with pytest.raises(Crash):
        scene.counting(picky, max_batch_rows=5, dead_letter_topic=scene.named("dead")).run(available_now=True)
    app = scene.counting(picky, max_batch_rows=5, dead_letter_topic=scene.named("dead"))
    app.run(available_now=True)
    assert crashed
    assert [value["amount"] for value in scene.values(scene.named("dead"))] == [n for n in amounts if n < 0]
    assert scene.by_key() == counted(orders("a", [n for n in amounts if n > 0]))
    assert totals(app) == {b"a": (16, sum(n for n in amounts if n > 0))}


def test_what_a_callback_skips_is_no_dead_letter(scene: Scene) -> None:
    broken_in_between(scene)
    dead = scene.named("dead")
    app = scene.counting(
        picky, dead_letter_topic=dead, on_processing_error=lambda error, record, logger: isinstance(error, ValueError)
    )
    app.run(available_now=True)
    assert [message.value() for message in scene.read(dead)] == [BROKEN]
    assert scene.by_key() == EXPECTED
