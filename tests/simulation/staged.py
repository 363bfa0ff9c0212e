"""The program of some schedules: three stages in one job, with timers and values that end, and what must come of it.

Stage 1 sums by the rest of the record's number, and sets a timer for every record. Stage 2 counts by parity what the timers of
stage 1 have sent. Records of a key come to stage 1 from several partitions, in an order that nobody promises, so what
is checked is that each counts once, not when. What stage 1 was sent is what stage 0 put out: a timer carries the nonce.
"""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from holdfast.log.manifest import Chain
from holdfast.plan.messages import MessageForm
from holdfast.plan.pipeline import Pipeline
from holdfast.plan.steps import Call, Node
from holdfast.runtime.view import StateView
from holdfast.state.codecs import JsonCodec
from holdfast.stores.memory import MemoryStore

if TYPE_CHECKING:
    from world import World

FIRED = "fired"
RESTS = 3


def add_stages(pipeline: Pipeline, node: Node, form: MessageForm | None) -> None:
    source = pipeline.stages[0]
    rest = pipeline.add_stage(source, node, lambda row: row["n"] % RESTS, "group_by", "rest", 2)
    summed = Call("apply", add_up, stateful=True, metadata=True, expand=True, store="rest", on_timer=tell)
    sent = pipeline.add_call(rest, rest.entry, summed)
    if form is None:
        pipeline.add_sink(sent, FIRED, "values", lambda context: None)
    else:
        pipeline.add_sink(sent, FIRED, form, None)
    parity = pipeline.add_stage(rest, sent, lambda row: row["n"] % 2, "group_by", "parity", 2)
    pipeline.add_call(parity, parity.entry, Call("apply", count, stateful=True, store="parity"))


def add_up(row: dict[str, Any], key: int, timestamp: int, headers: Any, state: Any) -> list[Any]:
    last = state.get(row["key"], -1)
    assert last < row["n"], "records of one key and one partition have changed their order"
    state.set(row["key"], row["n"])
    state.set("records", state.get("records", 0) + 1)
    state.set("sum", state.get("sum", 0) + row["n"])
    state.set("passing", row["n"], ttl=timedelta(milliseconds=1))
    state.set_timer(f"{row['n']} {row['nonce']}", timestamp - 1, clock="processing")
    return []


def tell(key: int, name: str, state: Any) -> list[dict[str, Any]]:
    n, nonce = name.split()
    return [{"n": int(n), "nonce": nonce, "rest": key}]


def count(row: dict[str, Any], state: Any) -> None:
    state.set("count", state.get("count", 0) + 1)


def check_stages(world: World) -> None:
    def state(store: str) -> dict[Any, Any]:
        return dict(StateView(Chain(world.storage), store, JsonCodec(), new_store=MemoryStore).items())

    since = max(world.cleared_at, default=0)
    records = range(since, len(world.input))
    sums = {key: (found["records"], found["sum"]) for key, found in state("rest").items() if "sum" in found}
    expected: dict[int, tuple[int, int]] = {}
    for n in records:
        so_far = expected.get(n % RESTS, (0, 0))
        expected[n % RESTS] = (so_far[0] + 1, so_far[1] + n)
    assert sums == expected, "a record was counted twice or not at all"
    fired = Counter(row["n"] for row in world.fired())
    assert all(times == 1 for times in fired.values()), "a timer has fired twice"
    assert fired.keys() >= set(records), "a timer has not fired"
    assert fired.keys() <= set(range(len(world.input)))
    nonces = {row["n"]: str(row["nonce"]) for row in world.rows()}
    assert all(row["nonce"] == nonces[row["n"]] for row in world.fired()), "stages are of different attempts"
    if not world.cleared_at:
        assert {key: found["count"] for key, found in state("parity").items()} == Counter(n % 2 for n in records)
