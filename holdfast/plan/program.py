"""The program: everything about a pipeline that a task has to know, checked and frozen.

Plain data; it travels to the workers once per run. Its stores, sinks and partitions must fit the checkpoint, which is
checked against the last manifest before anything runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import msgspec
from typing_extensions import TypeIs

from holdfast.errors import CodecMismatch, InvalidPipeline, PlanMismatch
from holdfast.log.manifest import Manifest, StageShape
from holdfast.plan.messages import TopicLimits
from holdfast.plan.pipeline import Pipeline
from holdfast.plan.record import Record
from holdfast.plan.schema import arrow_schema, decided_schema
from holdfast.plan.sinks import Sink
from holdfast.plan.steps import Call, Emit, Forward, Gather, Node, SetTimestamp, Step
from holdfast.state.codecs import Codec
from holdfast.state.durations import duration_ms

ErrorCallback = Callable[[Exception, Record, logging.Logger], bool]


class Stage(msgspec.Struct, frozen=True):
    """The steps between two changes of key. Each of its state partitions is a task."""

    index: int
    name: str
    level: int
    """How many shuffles come before it. The stages of a level run together."""
    first: int
    """The number of its first state partition: they are numbered through all stages."""
    partitions: int
    root: Node
    stores: tuple[str, ...]
    timed_stores: frozenset[str]
    """Those with somebody to call when a timer is due."""
    gathered_stores: frozenset[str]
    """Those that are asked for at the end of a batch."""
    sinks: tuple[Sink, ...]

    @property
    def range(self) -> range:
        """Its state partitions."""
        return range(self.first, self.first + self.partitions)


class Watermark(msgspec.Struct, frozen=True):
    """How the watermark follows the event times."""

    delay_ms: int
    """How far it stays behind the latest one."""
    idle_ms: int | None = None
    """How long nothing may come before it goes on with the wall clock; None: for ever."""


def watermark_of(delay: timedelta | int | str | None, idle: timedelta | int | str | None) -> Watermark | None:
    """The options `watermark_delay` and `idle_timeout`, as users write them; None: there is no watermark."""
    delay_ms, idle_ms = (None if given is None else duration_ms(given) for given in (delay, idle))
    if min(delay_ms or 0, idle_ms or 0) < 0:
        raise InvalidPipeline("watermark_delay and idle_timeout cannot be negative")
    return None if delay_ms is None else Watermark(delay_ms, idle_ms)


def check_idle_timeout(idle: timedelta | int | str | None, watermark: Watermark | None) -> None:
    """Once everything is declared."""
    if idle is not None and watermark is None:
        raise InvalidPipeline(
            "idle_timeout= moves a watermark, and there is none: give watermark_delay= to the application or to a dataframe()"
        )


class Program(msgspec.Struct, frozen=True):
    """A pipeline, ready to run."""

    app: str
    source: Any
    """A `Source`."""
    stages: tuple[Stage, ...]
    """In the order of their levels."""
    codec: Any
    """A `Codec`, of the stores that have none of their own."""
    own_codecs: dict[str, Any] = {}
    """By store."""
    watermark: Watermark | None = None
    sets_timestamps: frozenset[int] = frozenset()
    """The sources to whose records a step gives event times: then those of the source do not move the watermark."""
    on_error: ErrorCallback | None = None
    on_consumer_error: ErrorCallback | None = None
    """For records that could not be made; without it they are `on_error`'s, too."""
    dead_letters: Sink | None = None
    """Where records go that failed and were not skipped; one of the sinks."""
    changelogs: dict[str, str] = {}
    """By store: the id of the changelog topic that follows it."""
    message_limits: dict[str, TopicLimits] = {}
    """By sink: what its topic takes."""
    document_limit: int | None = None
    """The most bytes that a document may have, as far as a changelog topic takes it."""

    @property
    def partitions(self) -> int:
        """State partitions of the first stage, which reads the source."""
        return self.stages[0].partitions

    @property
    def in_order(self) -> bool:
        """Whether positions of the source order all of its records, not only those of a partition."""
        return getattr(self.source, "is_ordered", False)

    def is_quiet(self, span: Any, partition: int) -> bool:
        """Whether a batch over `span` only rebuilds the state of a partition; of a later stage, if that is so everywhere."""
        is_quiet = getattr(self.source, "is_quiet", None)
        if is_quiet is None:
            return False
        reading = self.partitions
        return bool(is_quiet(span, slice(partition, None, reading) if partition < reading else slice(None)))

    @property
    def all_partitions(self) -> int:
        return sum(stage.partitions for stage in self.stages)

    @property
    def stores(self) -> tuple[str, ...]:
        return tuple(store for stage in self.stages for store in stage.stores)

    @property
    def sinks(self) -> tuple[Sink, ...]:
        return tuple({sink.id: sink for stage in self.stages for sink in stage.sinks}.values())

    @property
    def levels(self) -> list[range]:
        """The state partitions that run together, level by level."""
        last = self.stages[-1].level
        found = []
        for level in range(last + 1):
            stages = [stage for stage in self.stages if stage.level == level]
            found.append(range(stages[0].first, stages[-1].range.stop))
        return found

    def stage_of(self, partition: int) -> Stage:
        """The stage that a state partition belongs to."""
        return next(stage for stage in self.stages if partition in stage.range)

    def codec_of(self, store: str) -> Any:
        """The `Codec` of a store."""
        return self.own_codecs.get(store, self.codec)

    def codecs(self) -> dict[str, str]:
        return {store: self.codec_of(store).name for store in self.stores}

    def shapes(self) -> tuple[StageShape, ...]:
        """The stages as a manifest records them."""
        return tuple(StageShape(stage.name, stage.partitions, stage.stores) for stage in self.stages)


def stores_of(root: Node) -> tuple[str, ...]:
    """The stores of a stage, in the order in which a record meets them."""
    return tuple(dict.fromkeys(step.store for step in root.walk() if keeps_state(step)))


def keeps_state(step: Step) -> TypeIs[Call | Gather]:
    return isinstance(step, Gather) or (isinstance(step, Call) and step.stateful)


def program_of(
    app: str,
    pipeline: Pipeline,
    codec: Codec,
    partitions: int,
    on_error: ErrorCallback | None = None,
    on_consumer_error: ErrorCallback | None = None,
    dead_letters: Sink | None = None,
) -> Program:
    """`partitions`: of the first stage, and of all that do not say otherwise."""
    if not any(True for _ in pipeline.steps()):
        raise InvalidPipeline("the pipeline has no steps: add at least one, such as apply() or print()")
    steps = list(pipeline.steps())
    return Program(
        app=app,
        source=pipeline.source,
        stages=tuple(_stages(pipeline, partitions, dead_letters)),
        codec=codec,
        own_codecs={step.store: step.codec for step in steps if keeps_state(step) and step.codec is not None},
        watermark=pipeline.watermark,
        sets_timestamps=frozenset(
            origin for origin, entry in enumerate(pipeline.stages[0].root.children) if _sets_timestamps(pipeline, entry)
        ),
        on_error=on_error,
        on_consumer_error=on_consumer_error,
        dead_letters=dead_letters,
    )


def _sets_timestamps(pipeline: Pipeline, entry: Node) -> bool:
    """Whether a record that comes in here can meet a `SetTimestamp`, in this stage or in a later one."""
    return any(
        isinstance(step, SetTimestamp)
        or (isinstance(step, Forward) and _sets_timestamps(pipeline, pipeline.stages[step.stage].root))
        for step in entry.walk()
    )


def _stages(pipeline: Pipeline, partitions: int, dead_letters: Sink | None) -> Iterator[Stage]:
    levels: list[int] = []
    for declared in pipeline.stages:
        levels.append(0 if declared.parent is None else levels[declared.parent] + 1)
    first = 0
    for declared in sorted(pipeline.stages, key=lambda stage: levels[stage.index]):
        steps = list(declared.root.walk())
        sinks = [step.sink for step in steps if isinstance(step, Emit)]
        gathered = {step.store for step in steps if isinstance(step, Gather)}
        stage = Stage(
            index=declared.index,
            name=declared.name,
            level=levels[declared.index],
            first=first,
            partitions=declared.partitions or partitions,
            root=declared.root,
            stores=stores_of(declared.root),
            timed_stores=frozenset(
                gathered | {step.store for step in steps if isinstance(step, Call) and step.on_timer is not None}
            ),
            gathered_stores=frozenset(gathered),
            sinks=(*sinks, dead_letters) if dead_letters is not None else tuple(sinks),
        )
        first += stage.partitions
        yield stage


def check_fits(program: Program, head: Manifest) -> None:
    """Refuse a program that cannot go on from this checkpoint."""
    stages = [(stage.name, stage.partitions) for stage in head.stages]
    asked = [(stage.name, stage.partitions) for stage in program.stages]
    if len(stages) == len(asked) == 1 and stages != asked:
        raise PlanMismatch(
            f"the checkpoint has {stages[0][1]} state partitions, the program asks for {program.partitions}: "
            "keys would be looked for in the wrong one. Leave partitions= out, or begin a new checkpoint",
            checkpoint=stages[0][1],
            program=program.partitions,
        )
    if stages != asked:
        raise PlanMismatch(
            f"the checkpoint has the stages {_listed(stages)}, the program {_listed(asked)}: state would be looked for in the "
            "wrong place. Change the keys back, or begin a new checkpoint",
            checkpoint=len(head.partitions),
            program=program.all_partitions,
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
    for sink in program.sinks:
        pinned = head.schemas.get(sink.id)
        if sink.schema is None or pinned is None:
            continue
        if decided_schema(arrow_schema(sink.schema)) != arrow_schema(pinned):
            raise PlanMismatch(
                f"{sink.id} was written with the schema {pinned!r}, the program gives {sink.schema!r}: what is there would "
                "not fit. Give the first one, or write to another place",
                checkpoint=pinned,
                program=sink.schema,
            )


def _listed(stages: list[tuple[str, int]]) -> str:
    return ", ".join(f"{name} with {partitions} partitions" for name, partitions in stages)
