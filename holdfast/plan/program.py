"""The program: everything about a pipeline that a task has to know, checked and frozen.

Plain data; it travels to the workers once per run. Its stores, sinks and partitions must fit the checkpoint, which is
checked against the last manifest before anything runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec

from holdfast.errors import CodecMismatch, InvalidPipeline, PlanMismatch
from holdfast.log.manifest import Manifest
from holdfast.plan.record import Record
from holdfast.plan.sinks import Sink
from holdfast.plan.steps import Call, Emit, Node
from holdfast.sources.base import Source
from holdfast.state.codecs import Codec

ErrorCallback = Callable[[Exception, Record, logging.Logger], bool]


class Program(msgspec.Struct, frozen=True):
    """A pipeline, ready to run."""

    app: str
    source: Any
    """A `Source`."""
    root: Node
    stores: tuple[str, ...]
    sinks: tuple[Sink, ...]
    codec: Any
    """A `Codec`, the same for all stores of an application."""
    partitions: int
    on_error: ErrorCallback | None = None
    on_consumer_error: ErrorCallback | None = None
    """For records that could not be made; without it they are `on_error`'s, too."""
    dead_letters: Sink | None = None
    """Where records go that failed and were not skipped; one of the sinks."""
    changelogs: dict[str, str] = {}
    """By store: the id of the changelog topic that follows it."""
    message_limits: dict[str, int] = {}
    """By sink: the most bytes that its topic takes."""
    document_limit: int | None = None
    """The most bytes that a document may have, as far as a changelog topic takes it."""

    def codecs(self) -> dict[str, str]:
        return dict.fromkeys(self.stores, self.codec.name)


def stores_of(root: Node) -> tuple[str, ...]:
    """The stores of a pipeline, in the order in which a record meets them."""
    return tuple(dict.fromkeys(step.store for step in root.walk() if isinstance(step, Call) and step.stateful))


def program_of(
    app: str,
    source: Source,
    root: Node,
    codec: Codec,
    partitions: int,
    on_error: ErrorCallback | None = None,
    on_consumer_error: ErrorCallback | None = None,
    dead_letters: Sink | None = None,
) -> Program:
    steps = list(root.walk())
    if not steps:
        raise InvalidPipeline("the pipeline has no steps: add at least one, such as apply() or print()")
    sinks = [step.sink for step in steps if isinstance(step, Emit)]
    if dead_letters is not None:
        sinks.append(dead_letters)
    return Program(
        app, source, root, stores_of(root), tuple(sinks), codec, partitions, on_error, on_consumer_error, dead_letters
    )


def check_fits(program: Program, head: Manifest) -> None:
    """Refuse a program that cannot go on from this checkpoint."""
    if len(head.partitions) != program.partitions:
        raise PlanMismatch(
            f"the checkpoint has {len(head.partitions)} state partitions, the program asks for {program.partitions}: "
            "keys would be looked for in the wrong one. Leave partitions= out, or begin a new checkpoint",
            checkpoint=len(head.partitions),
            program=program.partitions,
        )
    if head.source != program.source.kind:
        raise PlanMismatch(
            f"the checkpoint was read from a source of kind {head.source!r}, the program has one of kind "
            f"{program.source.kind!r}: its position means nothing there. Begin a new checkpoint",
            checkpoint=head.source,
            program=program.source.kind,
        )
    for store, codec in program.codecs().items():
        known = head.codecs.get(store, codec)
        if known != codec:
            raise CodecMismatch(
                f"store {store!r} was written with codec {known}, the program uses {codec}: use the first one, or clear the "
                "state with app.clear_state()",
                store=store,
                written=known,
                asked=codec,
            )
