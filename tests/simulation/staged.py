"""The program of some schedules: three stages in one job, with timers and values that end, and what must come of it.

Stage 1 sums by the rest of the record's number, and sets two timers for every record, one on each clock. Stage 2 counts by parity
what the timers of stage 1 have sent. Records of a key come to stage 1 from several partitions, in an order that nobody promises,
so what is checked is that each counts once, not when. What stage 1 was sent is what stage 0 put out: a timer carries the nonce.

Event time depends on the input alone, which is not in its order. So the watermark of every version follows from where the
version before it stood, and from the watermark which timers have fired, and in which version.
"""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from holdfast.log.manifest import Chain, Manifest
from holdfast.plan.messages import MessageForm
from holdfast.plan.pipeline import Pipeline
from holdfast.plan.program import watermark_of
from holdfast.plan.steps import Call, Node
from holdfast.runtime.view import StateView
from holdfast.state.codecs import JsonCodec
from holdfast.stores.memory import MemoryStore

if TYPE_CHECKING:
    from world import World

FIRED = "fired"
RESTS = 3
DELAY = 30
"""Of the watermark: some records are later than it allows for."""
GAP = 20
"""From the event time of a record to its timer."""
LASTS = 40
"""How long by event time a value is there."""


def event_time(n: int) -> int:
    """Of the record with this number."""
    return 10 * n + 25 * (n * 7 % 3)


def add_stages(pipeline: Pipeline, node: Node, form: MessageForm | None) -> None:
    pipeline.watermark = watermark_of(DELAY, None)
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
    assert timestamp == event_time(row["n"])
    now = max(timestamp, state._documents.now.watermark_ms)
    assert state.exists("lasting") == (state.get("end", 0) > now), "a value has ended too early or too late"
    state.set("lasting", row["n"], ttl=timedelta(milliseconds=LASTS), clock="event")
    state.set("end", timestamp + LASTS)
    state.set_timer(f"processing {row['n']} {row['nonce']}", -1, clock="processing")
    state.set_timer(f"event {row['n']} {row['nonce']}", timestamp + GAP, clock="event")
    return []


def tell(key: int, name: str, state: Any) -> list[dict[str, Any]]:
    clock, n, nonce = name.split()
    return [{"clock": clock, "n": int(n), "nonce": nonce, "rest": key}]


def count(row: dict[str, Any], state: Any) -> None:
    state.set(row["clock"], state.get(row["clock"], 0) + 1)


def taken(manifest: Manifest) -> int:
    """How many records were committed so far."""
    if manifest.position is not None:
        return int(manifest.position["taken"])
    return 0 if manifest.spark is None else int(manifest.spark.offsets.split("-")[1])


def check_stages(world: World, manifests: list[Manifest]) -> None:
    """`manifests`: all of the chain, the newest first."""

    def state(store: str) -> dict[Any, Any]:
        return dict(StateView(Chain(world.storage), store, JsonCodec(), new_store=MemoryStore).items())

    head = manifests[0]
    since = max(world.cleared_at, default=0)
    records = range(since, len(world.input))
    sums = {key: (found["records"], found["sum"]) for key, found in state("rest").items() if "sum" in found}
    expected: dict[int, tuple[int, int]] = {}
    for n in records:
        so_far = expected.get(n % RESTS, (0, 0))
        expected[n % RESTS] = (so_far[0] + 1, so_far[1] + n)
    assert sums == expected, "a record was counted twice or not at all"
    check_watermarks(manifests)
    for key, found in state("rest").items():
        lasts = "end" in found and found["end"] > head.watermark_ms
        assert ("lasting" in found) == lasts, f"a value of {key} has ended too early or too late"
    due = {n for n in range(len(world.input)) if event_time(n) + GAP < watermark_after(head)}
    fired = Counter((row["clock"], row["n"]) for row in world.fired())
    assert all(times == 1 for times in fired.values()), "a timer has fired twice"
    assert fired.keys() >= {("processing", n) for n in records}, "a timer has not fired"
    assert fired.keys() >= {("event", n) for n in records if n in due}, "a timer by event time has not fired"
    assert {n for clock, n in fired if clock == "event"} <= due, "a timer by event time has fired too early"
    assert {n for _, n in fired} <= set(range(len(world.input)))
    check_when_fired(world, manifests)
    nonces = {row["n"]: str(row["nonce"]) for row in world.rows()}
    assert all(row["nonce"] == nonces[row["n"]] for row in world.fired()), "stages are of different attempts"
    if not world.cleared_at:
        counts = {(key, clock): count for key, found in state("parity").items() for clock, count in found.items()}
        assert counts == Counter((n % 2, clock) for clock, n in fired)


def watermark_after(manifest: Manifest) -> int:
    """The watermark of a batch that continues a version."""
    times = [event_time(n) for n in range(taken(manifest))]
    return max(0, max(times, default=0) - DELAY)


def check_watermarks(manifests: list[Manifest]) -> None:
    for manifest, before in pairwise(manifests):
        expected = watermark_after(before) if manifest.kind == "batch" else before.watermark_ms
        assert manifest.watermark_ms == expected, f"version {manifest.version} has another watermark"


def check_when_fired(world: World, manifests: list[Manifest]) -> None:
    """A timer fires in the first version that is past it, after the one that has set it; or in that one, if it was past already."""
    if world.kafka is not None:
        return  # a consumer sees no versions
    chain = [(manifest.version, taken(manifest), manifest.watermark_ms or 0) for manifest in reversed(manifests)]
    for version, (_, rows) in world.tables[FIRED].versions.items():
        for n in (row["n"] for row in rows if row["clock"] == "event"):
            own = next(number for number, so_far, _ in chain if so_far > n)
            past = [number for number, _, watermark in chain if number >= own and watermark > event_time(n) + GAP]
            first = past[: 2 if past[:1] == [own] else 1]
            assert version in first, f"the timer of {n} has fired in version {version}, not in {first}"
