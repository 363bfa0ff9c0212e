"""`State`, as DESIGN section 4 has it."""

from __future__ import annotations

import pickle
from collections import Counter, OrderedDict
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from enum import IntEnum, StrEnum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import RocksDBOptions, State
from holdfast.errors import CodecMismatch, UnsupportedKey, UnsupportedValue
from holdfast.testing import Crash, Harness, run

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
keys = (
    st.text().filter(lambda text: not text.startswith("\0"))
    | st.binary()
    | st.integers()
    | st.booleans()
    | st.floats(allow_nan=False).map(lambda number: number + 0.0)  # -0.0 and 0.0 are one key
)


class Colour(IntEnum):
    RED = 1


class Word(StrEnum):
    YES = "yes"


def in_turn(*functions: Callable[[State], Any], options: RocksDBOptions | None = None) -> list[Any]:
    """What the functions return of the state of one key, each called in a batch of its own."""
    got = []

    def call(index: int, state: State) -> None:
        got.append(functions[index](state))

    harness = Harness(lambda sdf: sdf.update(call, stateful=True), rocksdb_options=options)
    for index in range(len(functions)):
        harness.feed(("key", index))
        harness.run()
    return got


def together(*functions: Callable[[State], Any]) -> list[Any]:
    """The same, all in one batch, each for a record of its own."""
    got = []

    def call(index: int, state: State) -> None:
        got.append(functions[index](state))

    run(lambda sdf: sdf.update(call, stateful=True), [("key", index) for index in range(len(functions))])
    return got


both = pytest.mark.parametrize("play", [in_turn, together], ids=["in the next batch", "in this batch"])


# -- the verbs -------------------------------------------------------------------------------------------------


@both
def test_what_was_never_set_is_the_default(play: Any) -> None:
    assert play(lambda state: (state.get("x"), state.get("x", 7), state.get("x", default=[]))) == [(None, 7, [])]


@both
def test_a_stored_none_is_none_and_not_the_default(play: Any) -> None:
    assert play(lambda state: state.set("x", None), lambda state: (state.get("x", 7), state.exists("x")))[1] == (
        None,
        True,
    )


@both
def test_what_was_deleted_is_the_default_again(play: Any) -> None:
    _, _, after = play(
        lambda state: state.set("x", 1),
        lambda state: state.delete("x"),
        lambda state: (state.get("x", "default"), state.exists("x")),
    )
    assert after == ("default", False)


def test_to_delete_what_is_not_there_does_nothing() -> None:
    harness = run(lambda sdf: sdf.update(lambda _, state: state.delete("x"), stateful=True), [("key", 1)])
    assert list(harness.state().items()) == []


def test_a_key_whose_last_entry_is_deleted_is_gone() -> None:
    def flip(value: int, state: State) -> None:
        state.delete("x") if state.exists("x") else state.set("x", value)

    harness = run(lambda sdf: sdf.update(flip, stateful=True), [("a", 1), ("b", 1)])
    harness.feed(("a", 2))
    harness.run()
    assert dict(harness.state().items()) == {"b": {"x": 1}}
    assert harness.state().get("a") is None


@both
def test_a_later_set_replaces_an_earlier_one(play: Any) -> None:
    assert (
        play(lambda state: state.set("x", {"a": 1}), lambda state: state.set("x", 2), lambda state: state.get("x"))[-1]
        == 2
    )


@both
@pytest.mark.parametrize("data", [b"", b"\0\xff", bytearray(b"ab"), memoryview(b"cd")])
def test_bytes_come_back_as_the_bytes_they_were(play: Any, data: Any) -> None:
    _, back = play(lambda state: state.set_bytes("x", data), lambda state: state.get_bytes("x"))
    assert type(back) is bytes and back == bytes(data)


@both
def test_bytes_that_were_never_set_are_the_default(play: Any) -> None:
    assert play(lambda state: (state.get_bytes("x"), state.get_bytes("x", b"d"))) == [(None, b"d")]


def test_what_is_no_bytes_is_refused_by_set_bytes() -> None:
    with pytest.raises(UnsupportedValue, match="takes bytes, not str"):
        in_turn(lambda state: state.set_bytes("x", "text"))  # type: ignore[arg-type]


@both
@pytest.mark.parametrize("value", [1, "a", [1]])
def test_what_set_wrote_is_not_for_get_bytes(play: Any, value: Any) -> None:
    with pytest.raises(UnsupportedValue, match=r"written by set\(\): read it with get\(\)"):
        play(lambda state: state.set("x", value), lambda state: state.get_bytes("x"))


@both
def test_what_set_bytes_wrote_is_not_for_get(play: Any) -> None:
    with pytest.raises(UnsupportedValue, match=r"written by set_bytes\(\): read it with get_bytes\(\)"):
        play(lambda state: state.set_bytes("x", b"1"), lambda state: state.get("x"))


# -- an end ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [5, None, [1, {"a": 2}], 2**80])
def test_a_value_with_a_ttl_is_gone_when_that_time_has_passed(value: Any) -> None:
    seen: list[tuple[Any, bool]] = []

    def step(command: str, state: State) -> None:
        if command == "set":
            state.set("x", value, ttl=timedelta(seconds=10))
        seen.append((state.get("x", "gone"), state.exists("x")))

    harness = Harness(lambda sdf: sdf.update(step, stateful=True))
    for at, command in [(1_000, "set"), (10_999, "look"), (11_000, "look")]:
        harness.now_ms = at
        harness.feed(("key", command))
        harness.run()
    assert seen == [(value, True), (value, True), ("gone", False)]
    assert harness.state().get("key") is None


def test_bytes_with_a_ttl_are_gone_when_that_time_has_passed() -> None:
    seen: list[bytes | None] = []

    def step(command: str, state: State) -> None:
        if command == "set":
            state.set_bytes("x", b"1", ttl=timedelta(milliseconds=2))
        seen.append(state.get_bytes("x", b"gone"))

    harness = Harness(lambda sdf: sdf.update(step, stateful=True))
    for at, command in [(0, "set"), (1, "look"), (2, "look")]:
        harness.now_ms = at
        harness.feed(("key", command))
        harness.run()
    assert seen == [b"1", b"1", b"gone"]


def test_a_set_without_ttl_takes_the_end_away() -> None:
    def step(ttl: timedelta | None, state: State) -> None:
        state.set("x", 1, ttl=ttl)

    harness = run(lambda sdf: sdf.update(step, stateful=True), [("key", timedelta(seconds=1)), ("key", None)])
    harness.now_ms = 60_000
    harness.run()
    assert harness.state().get("key") == {"x": 1}


def test_what_has_ended_leaves_the_store_with_the_next_change_of_its_key() -> None:
    def step(value: int, state: State) -> None:
        state.set(str(value), value, ttl=timedelta(seconds=1) if value == 1 else None)

    harness = run(lambda sdf: sdf.update(step, stateful=True), [("key", 1)])
    harness.now_ms = 5_000
    harness.feed(("key", 2))
    harness.run()
    assert harness.state().get("key") == {"2": 2}


@pytest.mark.parametrize("ttl", [timedelta(0), timedelta(seconds=-1), 5])
def test_a_ttl_that_is_no_time_to_come_is_refused(ttl: Any) -> None:
    with pytest.raises(UnsupportedValue, match="ttl is a positive timedelta"):
        in_turn(lambda state: state.set("x", 1, ttl=ttl))


# -- what comes back equals what went in -------------------------------------------------------------------------


@given(json_values)
def test_what_comes_back_equals_what_went_in_now_in_the_next_batch_and_after_a_lost_disk(value: Any) -> None:
    back = []

    def step(command: str, state: State) -> None:
        if command == "set":
            state.set("x", value)
        back.append(state.get("x"))

    harness = run(lambda sdf: sdf.update(step, stateful=True), [("key", "set"), ("key", "get")])
    harness.feed(("key", "get"))
    harness.run()
    harness.restart(lose_local=True)
    harness.feed(("key", "get"))
    harness.run()
    assert [repr(one) for one in back] == [repr(value)] * 4  # repr tells 1, 1.0, True and -0.0 apart, and orders dicts


@both
@pytest.mark.parametrize(
    "value",
    [
        *(True, 1, 1.0, -0.0, 5e-324, 1.7976931348623157e308),
        *(2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64, 10**40),
        *("", "\0", "naïve 𝄞 \u2028"),
        *([], {}, {"": None}, [[[]]], [True, 1, 1.0, "1"], {"big": 2**70, "n": {"m": [-0.0]}}),
    ],
)
def test_a_value_keeps_its_exact_type(play: Any, value: Any) -> None:
    _, back = play(lambda state: state.set("x", value), lambda state: state.get("x"))
    assert repr(back) == repr(value)


class Text(str):
    pass


@pytest.mark.parametrize(
    "value",
    [
        *({1: "a"}, {"a": {None: 1}}, {Text("a"): 1}),
        *(datetime(2024, 1, 1, tzinfo=UTC), {1, 2}, (1, 2), [(1,)], b"bytes", [b"bytes"], 1j, len),
        *(float("nan"), float("inf"), -float("inf"), [float("nan")], {"a": float("inf")}),
        *(Counter("aab"), OrderedDict(a=1), Colour.RED, [Colour.RED], Word.YES, Text("a"), {"a": Text("b")}),
        *("\ud800", ["\ud800"], {"\ud800": 1}),
    ],
    ids=ascii,
)
def test_what_json_would_change_is_refused_when_it_is_set_and_the_record_is_named(value: Any) -> None:
    with pytest.raises(UnsupportedValue) as caught:
        in_turn(lambda state: state.set("before", 1), lambda state: state.set("x", value))
    place = caught.value.holdfast_place  # type: ignore[attr-defined]
    assert (place.source, place.partition, place.position, place.key, place.step) == (
        "harness",
        0,
        1,
        "key",
        "update(call)",
    )


def test_a_value_that_contains_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(UnsupportedValue, match="contains itself"):
        in_turn(lambda state: state.set("x", value))


def test_a_refused_set_leaves_the_value_before_it() -> None:
    def step(value: Any, state: State) -> Any:
        try:
            state.set("x", value)
        except UnsupportedValue:
            return "refused"
        return "set"

    harness = run(lambda sdf: sdf.apply(step, stateful=True), [("key", 1), ("key", {2})])
    assert harness.values == ["set", "refused"]
    assert harness.state().get("key") == {"x": 1}


@both
def test_a_value_that_is_changed_without_set_is_not_saved(play: Any) -> None:
    def change(state: State) -> None:
        state.get("x").append("changed")
        state.get("x").append("changed again")

    *_, last = play(lambda state: state.set("x", ["as set"]), change, lambda state: state.get("x"))
    assert last == ["as set"]


@both
def test_a_value_that_is_changed_after_set_is_kept_as_it_was_set(play: Any) -> None:
    def set_and_change(state: State) -> Any:
        value = {"inner": [1]}
        state.set("x", value)
        value["inner"].append(2)
        return state.get("x")

    assert play(set_and_change, lambda state: state.get("x")) == [{"inner": [1]}, {"inner": [1]}]


# -- whose state it is -------------------------------------------------------------------------------------------


def count(value: Any, state: State) -> int:
    total: int = state.get("n", 0) + 1
    state.set("n", total)
    return total


def test_a_key_never_sees_the_state_of_another() -> None:
    different = ["1", 1, True, 1.0, b"1", ("1",), (1,), "", b"", ()]
    harness = run(lambda sdf: sdf.apply(count, stateful=True), [(key, 0) for key in different] * 2, partitions=3)
    assert sorted(harness.values) == [1] * len(different) + [2] * len(different)
    assert sorted(repr(key) for key, _ in harness.state().items()) == sorted(map(repr, different))
    assert [harness.state().get(key) for key in different] == [{"n": 2}] * len(different)


def test_stores_of_different_names_do_not_see_each_other() -> None:
    harness = run(
        lambda sdf: sdf.apply(count, stateful=True).apply(count, stateful=True, store="other"), [("a", 0), ("a", 0)]
    )
    assert harness.values == [1, 2]
    assert (harness.state().get("a"), harness.state("other").get("a")) == ({"n": 2}, {"n": 2})


def test_a_store_whose_name_begins_with_another_s_is_not_part_of_it() -> None:
    def build(sdf: Any) -> None:
        sdf.update(count, stateful=True, store="a")
        sdf.update(count, stateful=True, store="ab")

    harness = run(build, [("b", 0), ("", 0)])
    assert dict(harness.state("a").items()) == {"b": {"n": 1}, "": {"n": 1}}


def test_steps_that_name_the_same_store_share_it_within_a_record() -> None:
    harness = run(
        lambda sdf: sdf.update(lambda value, state: state.set("last", value), stateful=True, store="s").filter(
            lambda value, state: state.get("last") % 2 == 0, stateful=True, store="s"
        ),
        [("a", 1), ("a", 2), ("b", 3), ("b", 4)],
    )
    assert harness.values == [2, 4]


# -- sub-keys ----------------------------------------------------------------------------------------------------


@given(st.lists(keys | st.tuples(keys, keys), max_size=6))
def test_sub_keys_of_any_key_type_come_back_as_themselves(names: list[Any]) -> None:
    expected = {repr(name): index for index, name in enumerate(names)}

    def step(command: str, state: State) -> dict[str, Any]:
        if command == "set":
            for index, name in enumerate(names):
                state.set(name, index)
        return {repr(name): state.get(name) for name in names}

    harness = run(lambda sdf: sdf.apply(step, stateful=True), [("key", "set")])
    harness.feed(("key", "get"))
    harness.run()
    assert harness.values == [expected, expected]
    shown = {repr(name) for name in harness.state().get("key") or {}}
    assert shown <= set(expected)  # a dict holds 1, True and 1.0 as one


def test_one_true_one_point_nought_and_the_text_one_are_different_sub_keys() -> None:
    names = [1, True, 1.0, "1", b"1", (1,), ("1",), " 1", "1 ", ""]

    def step(_: Any, state: State) -> list[bool]:
        for index, name in enumerate(names):
            state.set(name, index)
        state.delete(True)
        return [state.get(name) == index for index, name in enumerate(names)]

    harness = run(lambda sdf: sdf.apply(step, stateful=True), [("key", None)])
    assert harness.values == [[name is not True for name in names]]


@pytest.mark.parametrize(
    "name", [None, ["a"], {"a": 1}, float("nan"), (None,), Colour.RED, "\0a", "\ud800", ("\ud800",)]
)
def test_a_sub_key_that_could_not_be_kept_is_refused(name: Any) -> None:
    with pytest.raises(UnsupportedKey, match="sub-key"):
        in_turn(lambda state: state.set(name, 1))


# -- a record that fails -----------------------------------------------------------------------------------------


def fails_after_writing(value: str, state: State) -> str:
    state.set("seen", [*state.get("seen", []), value])
    state.delete("stale")
    state.set_bytes("raw", value.encode())
    if value == "bad":
        raise ValueError
    return value


def test_a_record_that_fails_leaves_no_trace_in_the_state_or_output_of_any_step() -> None:
    def build(sdf: Any) -> Any:
        tapped = sdf.update(lambda value, state: state.set("first", value), stateful=True, store="one").inspect(print)
        return tapped.apply(fails_after_writing, stateful=True, store="two")

    harness = Harness(build, on_processing_error=lambda exc, record, logger: True)
    harness.feed(("a", "good"), ("a", "bad"), ("b", "bad"), ("a", "fine"))
    harness.run()
    assert harness.values == ["good", "fine"]
    assert harness.rows == {"inspect": ["good", "fine"]}
    assert dict(harness.state("one").items()) == {"a": {"first": "fine"}}
    assert dict(harness.state("two").items()) == {"a": {"seen": ["good", "fine"], "raw": b"fine"}}


def test_a_failing_record_brings_back_what_an_earlier_batch_had_set() -> None:
    def step(value: str, state: State) -> None:
        if value == "set":
            state.set("x", 1)
        else:
            state.set("x", 2)
            state.delete("x")
            state.set("x", 3)
            raise ValueError

    harness = Harness(lambda sdf: sdf.update(step, stateful=True), on_processing_error=lambda *_: True)
    for value in ("set", "fail"):
        harness.feed(("a", value))
        harness.run()
    assert harness.state().get("a") == {"x": 1}


def test_what_a_record_expanded_to_before_it_failed_is_forgotten_with_it() -> None:
    def three(value: int, state: State) -> Any:
        for index in range(3):
            state.set(str(index), value)
            if value == 2 and index == 2:
                raise ValueError
            yield value * 10 + index

    harness = Harness(
        lambda sdf: sdf.apply(three, stateful=True, expand=True), on_processing_error=lambda exc, record, logger: True
    )
    harness.feed(("a", 1), ("a", 2))
    harness.run()
    assert harness.values == [10, 11, 12]
    assert harness.state().get("a") == {"0": 1, "1": 1, "2": 1}


commands = st.lists(
    st.one_of(
        st.tuples(st.just("set"), st.sampled_from("ab"), st.sampled_from(["x", 1, "1"]), json_values),
        st.tuples(st.just("delete"), st.sampled_from("ab"), st.sampled_from(["x", 1, "1"]), st.none()),
        st.tuples(st.just("fail"), st.sampled_from("ab"), st.sampled_from(["x", 1, "1"]), json_values),
        st.tuples(st.sampled_from(["batch", "crash", "lost disk"]), st.none(), st.none(), st.none()),
    ),
    max_size=25,
)


@given(commands)
def test_state_is_a_dict_per_key_through_batches_crashes_and_lost_disks(script: list[Any]) -> None:
    model: dict[Any, dict[str, Any]] = {"a": {}, "b": {}}
    wrong = []

    def step(command: tuple[str, Any, Any, Any, dict[str, Any]], state: State) -> None:
        verb, _, name, value, before = command
        for known in ("x", 1, "1"):
            if repr(state.get(known, "none")) != repr(before.get(repr(known), "none")):
                wrong.append(command)
        if verb == "delete":
            state.delete(name)
        else:
            state.set(name, value)
        if verb == "fail":
            raise ValueError

    def build(sdf: Any) -> None:  # returns nothing: the values are not collected, which not all of them could be
        sdf.update(step, stateful=True)

    harness = Harness(build, partitions=2, on_processing_error=lambda *_: True)
    for verb, key, name, value in script:
        if key is not None:
            harness.feed((key, (verb, key, name, value, dict(model[key]))))
            if verb == "set":
                model[key][repr(name)] = value
            elif verb == "delete":
                model[key].pop(repr(name), None)
        elif verb == "crash":
            harness.crash_at("commit.begin")
            with pytest.raises(Crash):
                harness.run()
            harness.restart()
        else:
            harness.run()
            harness.restart(lose_local=verb == "lost disk")
    harness.run()
    assert wrong == []
    for key, expected in model.items():
        kept = {repr(name): repr(value) for name, value in (harness.state().get(key) or {}).items()}
        assert kept == {name: repr(value) for name, value in expected.items()}


# -- codecs ------------------------------------------------------------------------------------------------------

PICKLE = RocksDBOptions(dumps=pickle.dumps, loads=pickle.loads)


def test_with_pickle_everything_that_it_keeps_can_be_state() -> None:
    value = {"when": datetime(2024, 1, 1, tzinfo=UTC), 1: {2, 3}, "pair": (1, 2), "counts": Counter("aab"), "plain": 1}
    assert in_turn(lambda state: state.set("x", value), lambda state: state.get("x"), options=PICKLE)[1] == value


def test_every_value_passes_through_the_codec_that_was_given() -> None:
    options = RocksDBOptions(dumps=lambda value: f"<{value}>".encode(), loads=lambda data: data.decode())
    assert in_turn(lambda state: state.set("x", 1), lambda state: state.get("x"), options=options)[1] == "<1>"


def test_a_value_that_the_codec_cannot_encode_is_refused_when_it_is_set() -> None:
    with pytest.raises(UnsupportedValue, match=r"_pickle.dumps/_pickle.loads cannot encode a function"):
        in_turn(lambda state: state.set("x", lambda: None), options=PICKLE)


def test_a_codec_that_returns_no_bytes_is_refused() -> None:
    with pytest.raises(UnsupportedValue, match="must return bytes, not str"):
        in_turn(lambda state: state.set("x", 1), options=RocksDBOptions(dumps=str, loads=int))  # type: ignore[arg-type]


@pytest.mark.parametrize(("first", "then"), [(None, PICKLE), (PICKLE, None)])
def test_a_store_refuses_another_codec_by_name(first: RocksDBOptions | None, then: RocksDBOptions | None) -> None:
    def build(sdf: Any) -> Any:
        return sdf.update(count, stateful=True, store="counts")

    before = Harness(build, rocksdb_options=first)
    before.feed(("a", 1))
    before.run()
    after = Harness(build, rocksdb_options=then)
    after.storage = before.storage
    with pytest.raises(CodecMismatch) as caught:
        after.run()
    assert {caught.value.written, caught.value.asked} == {"json", "_pickle.dumps/_pickle.loads"}  # type: ignore[attr-defined]
    assert caught.value.store == "counts"  # type: ignore[attr-defined]
    with pytest.raises(CodecMismatch):
        after.state("counts").get("a")
