"""Errors: they arrive as themselves, with their place, without a payload; and nothing of the batch is visible."""

from __future__ import annotations

import inspect
import logging
import pickle
from typing import Any

import pytest

from holdfast import Application, Place, Record, State, errors
from holdfast.errors import (
    FixTheProgram,
    FixTheRecord,
    HoldfastError,
    MendTheMachine,
    MissingKey,
    StopAndLook,
    UnsupportedKey,
    UnsupportedValue,
    UserFunctionFailed,
)
from holdfast.pickling import dumps, loads
from holdfast.stores.base import DamagedStore, Mark, WrongVersion
from holdfast.testing import Harness

CANARY = "canary-4711"
GROUPS = (FixTheProgram, FixTheRecord, StopAndLook, MendTheMachine)
ALL = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, HoldfastError)]


def made(kind: type[HoldfastError]) -> HoldfastError:
    if kind is errors.Fenced:
        return errors.Fenced(7, "host:1")
    return kind("what happened", version=7, holder="host:1")


# -- the tree ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copier", [lambda error: pickle.loads(pickle.dumps(error)), lambda error: loads(dumps(error))])
@pytest.mark.parametrize("kind", ALL)
def test_every_error_survives_pickling_with_its_facts(kind: type[HoldfastError], copier: Any) -> None:
    error: Any = made(kind)
    error.add_note("a note")
    copy = copier(error)
    assert type(copy) is kind
    assert (str(copy), copy.version, copy.holder, copy.__notes__) == (str(error), 7, "host:1", ["a note"])


def test_an_error_with_arguments_of_its_own_survives_pickling() -> None:
    copy: Any = pickle.loads(pickle.dumps(WrongVersion(Mark(1, "a"), Mark(2, "b"), Mark(3, "c"))))
    assert (copy.held, copy.since, copy.to) == (Mark(1, "a"), Mark(2, "b"), Mark(3, "c"))
    assert type(pickle.loads(pickle.dumps(DamagedStore("x", path="p")))) is DamagedStore


@pytest.mark.parametrize("kind", [kind for kind in ALL if kind not in (HoldfastError, *GROUPS)])
def test_every_error_says_in_one_way_what_has_to_be_done_next(kind: type[HoldfastError]) -> None:
    assert sum(issubclass(kind, group) for group in GROUPS) == 1
    assert kind.__doc__


def test_the_tree_is_sorted_by_what_the_user_has_to_do() -> None:
    sorted_names = {group.__name__: {kind.__name__ for kind in ALL if issubclass(kind, group)} for group in GROUPS}
    assert sorted_names == {
        "FixTheProgram": {
            "FixTheProgram", "InvalidPipeline", "UnknownOption", "InvalidName", "CodecMismatch", "PlanMismatch",
        },
        "FixTheRecord": {
            "FixTheRecord", "MissingKey", "UnsupportedKey", "UnsupportedValue", "UserFunctionFailed", "Undecodable",
            "NoState", "NoWatermark", "InvalidTimeout",
        },
        "StopAndLook": {
            "StopAndLook", "Fenced", "RunIsAlive", "ForeignCheckpoint", "ForeignTarget", "SourceMismatch", "FutureFormat",
            "Damaged", "ZombieTask", "IncompleteJob", "TopicMismatch", "OffsetsLost", "EarlierLife", "MarkerLost",
            "IncompleteChangelog", "NotThere",
        },
        "MendTheMachine": {
            "MendTheMachine", "StorageFull", "StorageReadOnly", "StorageFailed", "MissingSettings", "JobFailed", "SparkLost",
            "BrokerAway", "KafkaRefused", "NoTopic", "StorageRefused", "UnsafeStorage",
        },
    }  # fmt: skip


# -- a user function that raises ---------------------------------------------------------------------------------


class OrderRefused(Exception):
    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message, code)
        self.code = code


class Unpicklable(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


def refuse_three(value: Any, state: State) -> Any:
    state.set("last", value)
    if value == 3:
        raise OrderRefused("too many", code=42)
    return value


def failing(function: Any = refuse_three, **options: Any) -> Harness:
    harness = Harness(lambda sdf: sdf.inspect(print).apply(function, stateful=True), partitions=2, **options)
    harness.feed(*[("ann", n) for n in (1, 2, 3)])
    return harness


def test_the_user_s_exception_reaches_the_caller_as_itself() -> None:
    with pytest.raises(OrderRefused, match="too many") as caught:
        failing().run()
    assert caught.value.code == 42
    assert caught.value.args == ("too many", 42)


def test_it_carries_the_place_of_its_record_and_the_traceback_of_its_task() -> None:
    with pytest.raises(OrderRefused) as caught:
        failing().run()
    place: Place = caught.value.holdfast_place  # type: ignore[attr-defined]
    assert (place.source, place.position, place.key, place.step) == ("harness", 2, "ann", "apply(refuse_three)")
    where, traceback = caught.value.__notes__
    assert where == f"at harness, partition {place.partition}, position 2, key 'ann', step apply(refuse_three)"
    assert "in refuse_three" in traceback


def test_an_exception_keeps_the_notes_that_it_had() -> None:
    def fail(value: Any, state: State) -> None:
        error = ValueError("x")
        error.add_note("mine")
        raise error

    with pytest.raises(ValueError, match="x") as caught:
        failing(fail).run()
    assert caught.value.__notes__[0] == "mine"


def test_an_exception_that_cannot_travel_is_named_with_its_class_and_message() -> None:
    def fail(value: Any, state: State) -> None:
        raise Unpicklable("this", "that")

    with pytest.raises(UserFunctionFailed, match=r"Unpicklable: this and that") as caught:
        failing(fail).run()
    assert caught.value.kind == "Unpicklable"  # type: ignore[attr-defined]
    assert caught.value.holdfast_place.position == 0  # type: ignore[attr-defined]


def test_an_exception_that_cannot_be_shown_is_no_reason_to_run_the_job_again() -> None:
    calls = []

    def fail(value: Any, state: State) -> None:
        calls.append(value)
        raise Unspeakable

    with pytest.raises(Unspeakable):
        failing(fail).run()
    assert calls == [1]


def test_the_place_names_the_step_and_the_long_key_is_cut() -> None:
    harness = Harness(lambda sdf: sdf.apply(lambda n: [n], expand=True).filter(len).update(print))
    harness.feed(("k" * 500, 1))
    with pytest.raises(TypeError) as caught:
        harness.run()
    assert caught.value.holdfast_place.step == "filter(len)"  # type: ignore[attr-defined]
    assert caught.value.holdfast_place.key == "k" * 500  # type: ignore[attr-defined]
    assert len(caught.value.__notes__[0]) < 200


def test_a_generator_that_fails_late_is_blamed_for_it_and_not_the_step_after_it() -> None:
    def items(value: Any) -> Any:
        yield 1
        raise KeyError

    harness = Harness(lambda sdf: sdf.apply(items, expand=True).update(lambda _: None))
    harness.feed(1)
    with pytest.raises(KeyError) as caught:
        harness.run()
    assert caught.value.holdfast_place.step == "apply(items)"  # type: ignore[attr-defined]


def test_nothing_of_a_batch_that_failed_is_visible() -> None:
    harness = failing()
    with pytest.raises(OrderRefused):
        harness.run()
    assert (harness.values, harness.rows, list(harness.state().items())) == ([], {}, [])
    assert harness.storage.names("commits/") == ["commits/00000000000000000000.json"]


def test_the_batches_before_a_failing_one_stay_and_the_mended_program_goes_on() -> None:
    broken = [True]

    def total(value: int, state: State) -> int:
        if value == 4 and broken[0]:
            raise OrderRefused("four")
        state.set("sum", state.get("sum", 0) + value)
        return int(state.get("sum"))

    harness = failing(total)
    harness.run()
    harness.feed(("ann", 4), ("bob", 5))
    with pytest.raises(OrderRefused):
        harness.run()
    assert harness.values == [1, 3, 6]
    assert dict(harness.state().items()) == {"ann": {"sum": 6}}
    broken[0] = False
    harness.restart()
    harness.run()
    assert sorted(harness.values) == [1, 3, 5, 6, 10]
    assert dict(harness.state().items()) == {"ann": {"sum": 10}, "bob": {"sum": 5}}


# -- on_processing_error -----------------------------------------------------------------------------------------


def test_the_callback_gets_the_exception_the_record_and_a_logger_and_true_skips() -> None:
    calls: list[Any] = []

    def skip(exc: Exception, record: Record, logger: logging.Logger) -> bool:
        calls.append((exc, record, logger))
        return True

    harness = Harness(lambda sdf: sdf.apply(refuse_three, stateful=True), on_processing_error=skip)
    harness.feed(("ann", 2, 10), ("ann", 3, 20), ("ann", 4, 30))
    harness.run()
    ((exc, record, logger),) = calls
    assert type(exc) is OrderRefused and isinstance(logger, logging.Logger)
    assert record == Record(3, "ann", 20, None, "harness", 0, 1)
    assert harness.values == [2, 4]
    assert harness.state().get("ann") == {"last": 4}


@pytest.mark.parametrize("answer", [False, None])
def test_any_other_answer_lets_the_exception_end_the_run(answer: Any) -> None:
    harness = failing(on_processing_error=lambda exc, record, logger: answer)
    with pytest.raises(OrderRefused) as caught:
        harness.run()
    assert caught.value.holdfast_place.position == 2  # type: ignore[attr-defined]
    assert (harness.values, list(harness.state().items())) == ([], [])


def test_a_callback_that_raises_ends_the_run_with_its_own_exception() -> None:
    def fail(exc: Exception, record: Record, logger: logging.Logger) -> bool:
        raise LookupError("in the callback")

    with pytest.raises(LookupError, match="in the callback") as caught:
        failing(on_processing_error=fail).run()
    assert caught.value.holdfast_place.position == 2  # type: ignore[attr-defined]


def test_what_a_sink_refuses_can_be_skipped_too() -> None:
    harness = Harness(
        lambda sdf: sdf.to_table("t", schema="a int").apply(lambda row: row["a"]), on_processing_error=lambda *_: True
    )
    harness.feed({"a": 1}, {"a": "x"}, {"b": 1}, "no row", {"a": 2})
    harness.run()
    assert harness.rows["table:t"] == [{"a": 1}, {"a": 2}]
    assert harness.values == [1, 2]


# -- keys and times ----------------------------------------------------------------------------------------------


def test_a_stateful_step_needs_a_key() -> None:
    harness = Harness(lambda sdf: sdf.update(lambda _: None).apply(refuse_three, stateful=True))
    harness.feed(("ann", 1), 2)
    with pytest.raises(MissingKey) as caught:
        harness.run()
    place: Place = caught.value.holdfast_place  # type: ignore[attr-defined]
    assert (place.position, place.key, place.step) == (1, None, "apply(refuse_three)")


def test_a_stateless_step_needs_none() -> None:
    harness = Harness(lambda sdf: sdf.apply(lambda n: n + 1), partitions=2)
    harness.feed(1, 2)
    harness.run()
    assert sorted(harness.values) == [2, 3]


def test_a_record_without_a_key_that_never_reaches_the_stateful_step_is_no_error() -> None:
    harness = Harness(lambda sdf: sdf.filter(lambda n: n < 2).apply(refuse_three, stateful=True))
    harness.feed(("ann", 1), 2)
    harness.run()
    assert harness.values == [1]


@pytest.mark.parametrize(
    ("options", "record", "kind"),
    [
        ({"key": "id"}, {"a": CANARY}, FixTheRecord),
        ({"key": "id"}, [CANARY], FixTheRecord),
        ({"key": lambda value: value["id"]}, {"a": CANARY}, KeyError),
        ({"key": lambda value: [value]}, CANARY, UnsupportedKey),
        ({"timestamp": "at"}, {"a": CANARY}, FixTheRecord),
        ({"timestamp": "at"}, {"at": CANARY}, FixTheRecord),
        ({"timestamp": "at"}, {"at": True}, FixTheRecord),
        ({"timestamp": lambda value: 1 // 0}, {"at": 5}, ZeroDivisionError),
    ],
)
def test_a_key_or_time_that_cannot_be_had_is_a_fault_of_its_record_alone(
    app: Application, options: dict[str, Any], record: Any, kind: type[Exception]
) -> None:
    faults = app.from_iterable([record], **options).chunk(0, [record], 0, 1).faults
    assert {index: type(fault) for index, fault in faults.items()} == {0: kind}
    assert CANARY not in str(faults[0])


def test_a_failing_key_or_time_function_stops_at_the_source_with_its_place() -> None:
    class Fussy(str):
        """A key that the harness's source cannot encode."""

    harness = Harness(lambda sdf: sdf.apply(str))
    harness.feed(("fine", 1), (Fussy("x"), 2))
    with pytest.raises(UnsupportedKey) as caught:
        harness.run()
    place: Place = caught.value.holdfast_place  # type: ignore[attr-defined]
    assert (place.position, place.step) == (1, "source")


def test_a_record_without_a_time_can_be_skipped() -> None:
    harness = Harness(lambda sdf: sdf.apply(str), on_processing_error=lambda *_: True)
    harness.feed(("a", 1, 10), ("a", 2, "noon"), ("a", 3, 30))
    harness.run()
    assert harness.values == ["1", "3"]


# -- no payload --------------------------------------------------------------------------------------------------


def boom(value: Any, state: State) -> None:
    raise RuntimeError("the step failed")


def bad_state(value: Any, state: State) -> None:
    state.set("x", {value["secret"]})


@pytest.mark.parametrize(
    "build",
    [
        lambda sdf: sdf.update(boom, stateful=True),
        lambda sdf: sdf.update(bad_state, stateful=True),
        lambda sdf: sdf.apply(lambda value: value["missing"]),
        lambda sdf: sdf.to_table("t", schema="id int"),
        lambda sdf: sdf.to_table("t", schema="secret int"),
        lambda sdf: sdf.to_table("t", schema="secret array<int>"),
        lambda sdf: sdf.apply(lambda value: [value["secret"]]).to_table("t"),
        lambda sdf: sdf.apply(lambda value: {"a": {value["secret"]: 1, 2: 3}}).to_table("t"),
        lambda sdf: sdf.apply(lambda value: [{"a": 1}, {"a": value["secret"]}], expand=True).to_table("t"),
        lambda sdf: sdf.apply(lambda value: {value["secret"], "\ud800"}),
        lambda sdf: sdf.apply(lambda value: value["secret"] + "\ud800"),
        lambda sdf: sdf.apply(lambda value: value["secret"], expand=True),
    ],
)
def test_no_payload_shows_in_an_error_its_notes_or_the_log(build: Any, caplog: pytest.LogCaptureFixture) -> None:
    harness = Harness(build)
    harness.feed(("ann", {"secret": CANARY}))
    with caplog.at_level(logging.DEBUG), pytest.raises(Exception) as caught:  # noqa: PT011  (of many kinds)
        harness.run()
    shown = [str(caught.value), repr(caught.value), *caught.value.__notes__, caplog.text]
    assert [text for text in shown if CANARY in text] == []
    assert "position 0, key 'ann'" in caught.value.__notes__[0]


def test_no_number_shows_when_the_rows_of_a_table_have_no_type_in_common() -> None:
    harness = Harness(lambda sdf: sdf.to_table("t"))
    harness.feed({"a": 1.5}, {"a": 2**60 + 4711})
    with pytest.raises(UnsupportedValue) as caught:
        harness.run()
    assert str(2**60 + 4711) not in "".join([str(caught.value), *caught.value.__notes__])
    assert caught.value.holdfast_place.position == 1  # type: ignore[attr-defined]
