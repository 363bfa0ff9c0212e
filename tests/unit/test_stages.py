"""Changes of key: where records go, what state they see there, and what may be declared."""

from __future__ import annotations

import enum
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import State, StreamingDataFrame
from holdfast.dataframe import frame_of
from holdfast.errors import InvalidPipeline, MissingKey, PlanMismatch
from holdfast.log.manifest import AttemptId, Chain, InstanceId, ManifestId
from holdfast.log.recipe import Recipe
from holdfast.plan.pipeline import Pipeline
from holdfast.plan.program import program_of
from holdfast.plan.record import Chunk
from holdfast.runtime.exchange import Inbox, Letters, LostMailError, Outcome, Parcel, Post, Waybill, gathered, sender
from holdfast.runtime.job import Job, Receipt
from holdfast.runtime.task import run_task
from holdfast.sources.iterable import IterableSource
from holdfast.state.codecs import JsonCodec
from holdfast.testing import Harness, LocalRunner, MemoryStorage, MemoryStores, run

KEYS = st.one_of(
    st.text(),
    st.binary(),
    st.integers(),
    st.booleans(),
    st.floats(allow_nan=False),
    st.tuples(st.text(), st.integers()),
)


def count(value: Any, state: State) -> Any:
    state.set("n", state.get("n", 0) + 1)
    return state.get("n")


# -- state by the new key ------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(KEYS, KEYS), max_size=12), st.integers(1, 3), st.integers(1, 4))
def test_every_record_meets_the_state_of_its_new_key(records: list[Any], partitions: int, later: int) -> None:
    def build(sdf: StreamingDataFrame) -> StreamingDataFrame:
        return sdf.group_by(lambda value: value, name="new", partitions=later).apply(count, stateful=True)

    harness = run(build, records, partitions=partitions)
    expected: dict[Any, int] = {}
    for _, new in records:
        expected[type(new), new] = expected.get((type(new), new), 0) + 1
    found = {(type(key), key): document["n"] for key, document in harness.state("new").items()}
    assert found == {(kind, 0.0 if new == 0 and kind is float else new): n for (kind, new), n in expected.items()}


def test_numbers_and_texts_that_look_alike_are_different_keys() -> None:
    values = run(
        lambda sdf: sdf.group_by(lambda value: value, name="new").apply(count, stateful=True),
        [(None, 1), (None, "1"), (None, True), (None, 1.0), (None, 1)],
    ).values
    assert values == [1, 1, 1, 1, 2]


def test_none_is_not_a_key() -> None:
    with pytest.raises(MissingKey) as caught:
        run(lambda sdf: sdf.group_by("city"), [("a", {"city": None})])
    assert "group_by" in str(caught.value.holdfast_place)  # type: ignore[attr-defined]


@pytest.mark.parametrize("is_ordered", [True, False])
def test_records_of_one_partition_keep_their_order_through_three_stages(
    is_ordered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several parcels from each sender, the last one first: of a source that is put in order by position, and of one where the
    numbers of the parcels alone give the order."""
    monkeypatch.setattr("holdfast.sources.iterable.CHUNK", 7)
    monkeypatch.setattr("holdfast.runtime.exchange.CHUNK", 3)
    task, most = LocalRunner.task, 0

    def backwards(self: LocalRunner, job: Job, partition: int, mail: list[Any]) -> Any:
        nonlocal most
        most = max([most, *(item.parcels for item in mail if isinstance(item, Waybill))])
        return task(self, job, partition, mail[::-1])

    monkeypatch.setattr(LocalRunner, "task", backwards)

    def build(sdf: StreamingDataFrame) -> StreamingDataFrame:
        return (
            sdf.group_by(lambda n: n % 3, name="a", partitions=2)
            .apply(lambda n: n + 100)
            .group_by(lambda n: n % 2, name="b", partitions=3)
            .group_by(lambda n: 0, name="c", partitions=1)
        )

    harness = Harness(build)
    harness._program.source.is_ordered = is_ordered
    harness.feed(*range(40))
    harness.run()
    values = harness.values
    assert most > 1
    for rest in range(6):
        mine = [n for n in values if n % 6 == rest]
        assert mine == sorted(mine)
    assert sorted(values) == [n + 100 for n in range(40)]


@pytest.mark.parametrize("is_ordered", [True, False])
def test_records_come_before_timers_in_every_stage(is_ordered: bool) -> None:
    """Of a source that is put in order by position, and of one where parcels alone give the order."""

    def arm(value: str, state: State) -> list[str]:
        state.set_timer("first", 1, clock="processing")
        state.set_timer("second", 2, clock="processing")
        return [value]

    def build(sdf: StreamingDataFrame) -> StreamingDataFrame:
        armed = sdf.apply(arm, stateful=True, expand=True, on_timer=lambda key, name, state: [name])
        return armed.group_by(lambda value: 0, name="b").group_by(lambda value: 0, name="c")

    harness = Harness(build)
    harness._program.source.is_ordered = is_ordered
    for batch in (1, 2):
        harness.feed(("k", f"a{batch}"), ("k", f"b{batch}"))
        harness.run()
        harness.now_ms += 10
    harness.run()
    assert harness.values == ["a1", "b1", "a2", "b2", "first", "second"]


def test_values_travel_as_they_are() -> None:
    class Order:
        def __init__(self, n: int) -> None:
            self.n = n

    given = [{"t": (1, 2), "s": {3}, "n": None}, {"t": (), "s": set(), "n": 2**70}]
    seen: list[Any] = []
    run(lambda sdf: sdf.group_by(lambda v: 1, name="k").update(seen.append).apply(str), given)
    assert seen == given
    orders = run(
        lambda sdf: sdf.apply(Order).group_by(lambda order: order.n, name="n").apply(lambda order: order.n), [5]
    )
    assert orders.values == [5]


def test_a_value_that_is_changed_after_it_was_sent_arrives_as_it_was() -> None:
    def several(value: int) -> Any:
        box: dict[str, int] = {}
        for n in range(3):
            box["n"] = n
            yield box

    values = run(lambda sdf: sdf.apply(several, expand=True).group_by("n").apply(lambda box: box["n"]), [0]).values
    assert sorted(values) == [0, 1, 2]


def test_key_timestamp_and_headers_are_those_of_the_record() -> None:
    def show(value: Any, key: Any, timestamp: int, headers: Any) -> Any:
        return [value, key, timestamp, headers]

    values = run(lambda sdf: sdf.group_by("city").apply(show, metadata=True), [("ann", {"city": "Rome"}, 77)]).values
    assert values == [[{"city": "Rome"}, "Rome", 77, None]]


def test_where_a_key_goes_does_not_depend_on_the_process() -> None:
    program = (
        "from holdfast.state.keys import encode_key, partition_of\n"
        "print([partition_of(encode_key(k), 7) for k in ('ann', b'x', 1, True, 1.0, ('a', 2))])"
    )
    root = Path(__file__).parents[2]
    runs = {
        subprocess.run(
            [sys.executable, "-c", program], env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(root)},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("0", "1", "random")
    }  # fmt: skip
    assert len(runs) == 1


def test_branches_may_change_the_key_each_in_its_way_and_be_one_commit() -> None:
    def build(sdf: StreamingDataFrame) -> None:
        sdf.group_by("a").apply(count, stateful=True)
        sdf.group_by("b", partitions=3).apply(count, stateful=True)
        sdf.apply(count, stateful=True)

    harness = run(build, [("x", {"a": n % 2, "b": n % 3}) for n in range(12)], partitions=2)
    assert {key: found["n"] for key, found in harness.state("a").items()} == {0: 6, 1: 6}
    assert {key: found["n"] for key, found in harness.state("b").items()} == {0: 4, 1: 4, 2: 4}
    assert {key: found["n"] for key, found in harness.state().items()} == {"x": 12}
    head = Chain(harness.storage).head()
    assert head is not None
    assert [(stage.name, stage.partitions, stage.stores) for stage in head.stages] == [
        ("source", 2, ("default",)), ("a", 2, ("a",)), ("b", 3, ("b",)),
    ]  # fmt: skip


def test_frames_that_are_joined_pass_the_steps_after_it_together() -> None:
    def build(sdf: StreamingDataFrame) -> StreamingDataFrame:
        large, small = sdf.filter(lambda n: n > 2), sdf.filter(lambda n: n <= 2).apply(lambda n: n * 10)
        return large.concat(small).group_by(lambda n: n % 2, name="parity").apply(count, stateful=True)

    harness = run(build, [1, 2, 3, 4])
    assert sorted(harness.values) == [1, 1, 2, 3]
    assert {key: found["n"] for key, found in harness.state("parity").items()} == {0: 3, 1: 1}


def test_a_failure_in_a_later_stage_names_the_record_of_the_source() -> None:
    def fail(value: dict[str, Any]) -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no") as caught:
        run(lambda sdf: sdf.group_by("city").apply(fail), [("ann", {"city": "Rome"})])
    place = caught.value.holdfast_place  # type: ignore[attr-defined]
    assert (place.source, place.position, place.key, place.step) == ("harness", 0, "Rome", "apply(fail)")


def test_a_skipped_record_of_a_later_stage_leaves_its_trace_in_the_first_only() -> None:
    def fail_at_two(value: dict[str, Any], state: State) -> int:
        count(value, state)
        if value["n"] == 2:
            raise ValueError("no")
        return int(value["n"])

    harness = Harness(
        lambda sdf: sdf.update(count, stateful=True).group_by("city").apply(fail_at_two, stateful=True),
        on_processing_error=lambda error, record, logger: True,
    )
    harness.feed(*(("ann", {"city": "Rome", "n": n}) for n in (1, 2, 3)))
    harness.run()
    assert harness.values == [1, 3]
    assert harness.state().get("ann") == {"n": 3}
    assert harness.state("city").get("Rome") == {"n": 2}


def test_stages_survive_a_restart_and_a_lost_disk() -> None:
    harness = Harness(lambda sdf: sdf.group_by("city", partitions=3).apply(count, stateful=True), partitions=2)
    for round_ in range(3):
        harness.feed(*(("ann", {"city": f"c{n}"}) for n in range(5)))
        harness.run()
        harness.restart(lose_local=round_ == 1)
    assert {key: found["n"] for key, found in harness.state("city").items()} == {f"c{n}": 3 for n in range(5)}


def test_a_field_may_have_the_name_of_the_first_stage() -> None:
    harness = run(
        lambda sdf: sdf.update(count, stateful=True).group_by("source").apply(count, stateful=True),
        [("x", {"source": n % 2}) for n in range(4)],
    )
    assert harness.values == [1, 1, 2, 2]
    head = Chain(harness.storage).head()
    assert head is not None
    assert [(stage.name, stage.stores) for stage in head.stages] == [
        ("source", ("default",)), ("group_by-source", ("group_by-source",)),
    ]  # fmt: skip


def test_another_plan_of_stages_is_refused() -> None:
    def two(sdf: StreamingDataFrame) -> StreamingDataFrame:
        return sdf.group_by("city").apply(count, stateful=True)

    def other(sdf: StreamingDataFrame) -> StreamingDataFrame:
        return sdf.group_by("town").apply(count, stateful=True)

    harness = Harness(two)
    harness.feed(("a", {"city": "Rome", "town": "Rome"}))
    harness.run()
    changed = Harness(other)
    changed.storage = harness.storage
    with pytest.raises(PlanMismatch, match="city with 1 partitions"):
        changed.restart()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda sdf: sdf.group_by(5), "field name or a function"),
        (lambda sdf: sdf.group_by("a", partitions=0), "positive"),
        (lambda sdf: sdf.group_by("a").group_by("a"), "a stage 'a' already"),
        (lambda sdf: sdf.group_by("a", name="source"), "'source' is the first stage"),
        (lambda sdf: sdf.key_by(str, name="source"), "'source' is the first stage"),
        (lambda sdf: sdf.key_by("a"), "takes a function"),
        (lambda sdf: sdf.concat(5), "frame of the same application"),
        (lambda sdf: sdf.concat(sdf.group_by("a")), "join them first"),
        (lambda sdf: sdf.apply(count, stateful=True, store="x").group_by("a").apply(count, stateful=True, store="x"), "two stores"),
        (lambda sdf: sdf.apply(str, on_timer=lambda key, name, state: None), "needs stateful=True"),
        (lambda sdf: sdf.map("name"), "takes a function"),
        (lambda sdf: sdf.map("a", "b", "c"), "a name and a function"),
        (lambda sdf: sdf.split("x", lambda v: 0, 0), "positive"),
    ],
)  # fmt: skip
def test_a_mistake_is_reported_by_the_call_that_makes_it(build: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(InvalidPipeline, match=message):
        Harness(build)


# -- what travels between stages ----------------------------------------------------------------------------------------


def letters_of(*values: Any, position: int = 0) -> bytes:
    post = Post()
    record = SimpleNamespace(timestamp=0, index=0)
    send = sender([post], record)
    for record.index, value in enumerate(values):
        send(1, value)
    return post.sealed(Chunk([], [], None, [position] * len(values)), 0, keeps_raw=False)


class Colour(enum.IntEnum):
    RED = 1


class City(enum.StrEnum):
    ROME = "rome"


@dataclass
class Point:
    x: int


@given(st.lists(st.sampled_from(list(range(16))), min_size=1))
def test_values_arrive_as_they_were_when_they_were_sent(chosen: list[int]) -> None:
    nan = float("nan")
    kinds: list[Any] = [
        {"a": 1, "b": "x", "c": None, "d": 2.5, "e": b"y", "f": True, "g": 2**60, "h": nan},
        [1, [2]], (1, (2,)), {1, 2}, {"deep": {"x": [1]}}, bytearray(b"z"), {"c": Colour.RED}, Point(3), "text",
        {Colour.RED: 1}, 2**80, "\ud800", {"\ud800": "\ud800"}, {"a": 2**64}, b"\xc1", City.ROME,
    ]  # fmt: skip
    letters = letters_of(*(kinds[index] for index in chosen))
    kinds[1].append(3)
    kinds[4]["deep"]["x"].append(2)
    kinds[0]["a"] = 5
    expected = [repr(kind) for kind in kinds]
    expected[0], expected[1], expected[4] = expected[0].replace("5", "1", 1), "[1, [2]]", "{'deep': {'x': [1]}}"
    (chunk,) = Letters.opened(letters).chunks(is_quiet=False, origin=0)
    assert [repr(value) for value in chunk.values] == [expected[index] for index in chosen]
    assert [type(value) for value in chunk.values] == [type(kinds[index]) for index in chosen]


class Id(bytes):
    """Of a type that marshal knows and its own."""


@pytest.mark.parametrize(
    "sent",
    [
        [{Id(b"a"): 1}],
        [{b"a": 1}, {Id(b"a"): 2}],
        [{"rome": 1}, {City.ROME: 2}],
        [{City.ROME: 1}, {"rome": 2}],
        [{3: 1}, {True: 3}, {None: 4}, {b"b": 5}, {0.5: 6}],
        [{("a", Id(b"a")): 1}],
        [{Colour.RED: 1}, 7, {}, {"a": [1]}],
    ],
)  # fmt: skip
def test_keys_of_dicts_arrive_as_they_are(sent: list[Any]) -> None:
    (chunk,) = Letters.opened(letters_of(*sent)).chunks(is_quiet=False, origin=0)
    assert chunk.values == sent
    kinds = [[type(key) for key in value] if type(value) is dict else None for value in sent]
    assert [[type(key) for key in value] if type(value) is dict else None for value in chunk.values] == kinds


class Token(bytes):
    """What marshal would take for its bytes, as it does a scalar of numpy."""


def test_keys_of_dicts_may_be_of_classes_that_look_like_bytes_from_outside() -> None:
    sent = [{Token(b"3"): 1}, {b"3": 2}, {"a": 3}]
    for some in (sent, sent[:1], sent[1:], sent[:0:-1]):
        (chunk,) = Letters.opened(letters_of(*some)).chunks(is_quiet=False, origin=0)
        assert chunk.values == some
        assert [[type(key) for key in value] for value in chunk.values] == [
            [type(key) for key in value] for value in some
        ]


def parcel(sender: int, number: int, attempt: str = "one") -> Parcel:
    letters = letters_of((sender, number), position=number)
    return pickle.loads(pickle.dumps(Parcel(sender, AttemptId(attempt), number, False, 0, letters)))


def bill(sender: int, parcels: int, attempt: str = "one") -> Waybill:
    return Waybill(sender, AttemptId(attempt), parcels, False, (), {sender: AttemptId(attempt)})


@given(st.permutations([parcel(0, 0), parcel(0, 1), parcel(0, 2), parcel(1, 0), parcel(1, 1), bill(0, 3), bill(1, 2)]))
def test_parcels_of_a_sender_are_taken_in_their_order(mail: list[Any]) -> None:
    inbox = Inbox([0, 1], mail)
    taken = [value for chunk in inbox for value in chunk.values]
    assert [number for sender, number in taken if sender == 0] == [0, 1, 2]
    assert [number for sender, number in taken if sender == 1] == [0, 1]
    assert inbox.seen == {0: "one", 1: "one"}


@pytest.mark.parametrize(
    "mail",
    [
        [parcel(0, 0), bill(0, 1)],
        [parcel(0, 0), bill(0, 2), bill(1, 0)],
        [parcel(0, 1), bill(0, 1), bill(1, 0)],
        [parcel(0, 0, "two"), bill(0, 1), bill(1, 0)],
        [parcel(0, 0), bill(0, 1), bill(0, 1), bill(1, 0)],
        [parcel(0, 0), parcel(0, 0, "two"), bill(0, 1), bill(1, 0)],
        [bill(0, 0), bill(1, 0), bill(2, 0)],
    ],
    ids=["no sender", "no parcel", "no first parcel", "another attempt", "two bills", "two attempts", "a stranger"],
)  # fmt: skip
def test_mail_that_is_not_of_one_attempt_of_each_sender_is_lost(mail: list[Any]) -> None:
    with pytest.raises(LostMailError):
        list(Inbox([0, 1], mail))


def receipt(partition: int, attempt: str) -> Receipt:
    return Receipt(version=1, partition=partition, attempt=AttemptId(attempt), span=None)


@pytest.mark.parametrize(
    "outcomes",
    [
        [Outcome((receipt(0, "a"),), {}), Outcome((receipt(0, "b"),), {})],
        [Outcome((receipt(0, "a"),), {0: AttemptId("a")}), Outcome((), {0: AttemptId("b")})],
        [Outcome((receipt(0, "a"),), {}), Outcome((), {0: AttemptId("b")})],
    ],
)
def test_tasks_that_saw_different_attempts_are_no_job(outcomes: list[Outcome]) -> None:
    with pytest.raises(LostMailError):
        gathered(outcomes)


def test_an_error_over_the_work_of_two_attempts_is_a_lost_job() -> None:
    """The function fails at the first record; that the mail is no good shows only at its end."""

    def fail(value: Any) -> None:
        raise ValueError("no")

    pipeline = Pipeline(IterableSource([], None, None))
    frame_of(pipeline).group_by(lambda value: value, name="later").apply(fail)
    pipeline.source.is_ordered = False
    program = program_of("app", pipeline, JsonCodec(), 1)
    start = ManifestId("start")
    recipes = tuple(Recipe(partition, 0, start, 0, start, ()) for partition in range(2))
    job = Job(1, InstanceId("i"), 1_000, None, None, recipes, {})
    mail = [parcel(0, 0), bill(0, 2)]
    with pytest.raises(LostMailError):
        run_task(program, job, 1, Inbox([0], mail), MemoryStorage(), MemoryStores())
