"""What the program must have left behind, recomputed from its input topic by a plain fold, and what it did leave.

Everything is read without Spark: the state from the log, the rest as any consumer sees it that reads what is committed.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
from confluent_kafka import Message
from program import PARTITIONS, USERS
from scene import Scene

from holdfast.kafka import names
from holdfast.kafka.changelog import MILESTONE, Milestone, decode_milestone
from holdfast.state.codecs import JsonCodec
from holdfast.state.documents import read_document
from holdfast.state.keys import decode_key

Totals = dict[bytes, list[dict[str, int]]]
"""By user: everything that has to be said about them, in order."""


def put_orders(scene: Scene, count: int) -> None:
    """Create the input topic and fill it with `count` orders of `USERS` users."""
    choice = random.Random(7)
    scene.create(scene.source, PARTITIONS)
    scene.feed(
        *(
            (f"user-{choice.randrange(USERS)}", {"order": order, "amount": choice.randrange(1, 1000)})
            for order in range(count)
        )
    )


def check_all_taken(scene: Scene) -> None:
    """Exact, and nothing is left in the input topic."""
    assert position(scene) == [len(messages) for messages in scene.read_partitions(scene.source)]
    check_exact(scene)


def check_exact(scene: Scene) -> None:
    """State, output, changelog and consumer group: each order up to the last commit once, in order, and nothing else."""
    offsets = position(scene)
    totals = fold(taken(scene, offsets))
    last = {user: {name: said[-1][name] for name in ("sequence", "total")} for user, said in totals.items()}
    check_same("state", dict(scene.app(spark=None).state().items()), last)
    check_same("output", scene.by_key(), totals)
    documents, milestones = changelog(scene)
    check_same("changelog", documents, last)
    assert [milestone.offsets[0] for milestone in milestones] == offsets
    assert {milestone.version for milestone in milestones} == {scene.head().version}
    assert scene.committed() == offsets


def check_same(what: str, found: Mapping[bytes, Any], expected: Mapping[bytes, Any]) -> None:
    """Equality of large things, with a small message."""
    wrong = [user for user in sorted(found.keys() | expected.keys()) if found.get(user) != expected.get(user)]
    if wrong:
        one = wrong[0]
        raise AssertionError(
            f"{what}: {len(wrong)} users are wrong; {one!r} has\n{found.get(one)}\nbut should have\n{expected.get(one)}"
        )


def position(scene: Scene) -> list[int]:
    """The offsets of the last commit."""
    found = scene.head().position
    assert found is not None
    return list(found["offsets"])


def taken(scene: Scene, offsets: list[int]) -> Iterator[Message]:
    """The input up to these offsets."""
    for messages, end in zip(scene.read_partitions(scene.source), offsets, strict=True):
        yield from (message for message in messages if message.offset() < end)


def fold(messages: Iterable[Message]) -> Totals:
    totals: Totals = {}
    for message in messages:
        order = msgspec.json.decode(message.value())
        said = totals.setdefault(message.key(), [])
        total = (said[-1]["total"] if said else 0) + order["amount"]
        said.append({"order": order["order"], "sequence": len(said) + 1, "total": total})
    return totals


def changelog(scene: Scene) -> tuple[dict[bytes, dict[str, int]], list[Milestone]]:
    """What the changelog topic adds up to: the documents, and the last milestone of each partition."""
    topic = names.changelog(scene.name, (scene.source,), "default")
    documents: dict[bytes, dict[str, int]] = {}
    milestones = []
    for partition, messages in enumerate(scene.read_partitions(topic)):
        latest = {message.key(): message.value() for message in messages}
        milestones.append(decode_milestone(topic, partition, latest.pop(MILESTONE)))
        for key, value in latest.items():  # a kind byte before the key, 8 bytes of version before the document
            documents[decode_key(key[1:])] = read_document(value[8:], JsonCodec(), 0)
    return documents, milestones
