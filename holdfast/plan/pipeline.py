"""A pipeline as it is being declared: sources, stages with a tree of steps each, and what delivers each sink.

Front doors add to it; every mistake that can be seen without running is reported by the call that makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

from holdfast.errors import InvalidPipeline
from holdfast.log.paths import checked_name
from holdfast.plan.functions import check_function
from holdfast.plan.messages import MessageForm
from holdfast.plan.schema import arrow_schema, to_ddl
from holdfast.plan.sinks import Sink
from holdfast.plan.steps import Call, Emit, Forward, Gather, Node, SetTimestamp, Step
from holdfast.sources.base import Source

TargetFactory = Callable[[Any], Any]
"""From the run's context (runtime/context.py) to a `Target`."""
FIRST = "source"
"""The stage that reads the sources."""


class Stage:
    """The steps between two changes of key, as they are being declared."""

    def __init__(self, index: int, name: str, parent: int | None = None, partitions: int | None = None) -> None:
        self.index = index
        self.name = name
        self.parent = parent
        """The stage that its records come from; None: the source."""
        self.partitions = partitions
        """None: as many as the first one has."""
        self.root = Node(None, [Node(None, [])])
        """Its children are where records come in: of the first stage one per source, in the order of `source.names`."""

    @property
    def entry(self) -> Node:
        """Where the records of a later stage come in."""
        return self.root.children[0]


class Pipeline:
    """What an application will run."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.stages = [Stage(0, FIRST)]
        self._entries = {source.names[0]: self.stages[0].entry}
        """By name of a source: where its records come in."""
        self.targets: dict[str, TargetFactory | None] = {}
        """By sink; None: it is published with everything else that goes to Kafka."""
        self.watermark: Any = None
        """A `Watermark`."""
        self._delayed = False
        """Whether a frame has given it."""
        self._stores: dict[str, int] = {}
        """By store: its stage."""
        self._origins: dict[str, frozenset[str]] = {}
        """By store of the first stage: the sources whose records reach it."""
        self._codecs: dict[str, Any] = {}
        self._timed: dict[str, str] = {}
        """By store: the step that its timers belong to."""

    def entry(self, source: Source) -> Node:
        """Where the records of a source come in."""
        return self._entries[source.names[0]]

    def add_source(self, source: Source) -> None:
        """Read another source in the same batches."""
        (name,) = source.names
        if name in self._entries:
            raise InvalidPipeline(f"{name} is already read: keep the first dataframe and branch it")
        self.source = self.source.joined(source)
        self._entries[name] = Node(None, [])
        self.stages[0].root.children = [self._entries[known] for known in self.source.names]

    def delay(self, watermark: Any) -> None:
        """Of several frames the one with the longest delay decides."""
        if not self._delayed or watermark.delay_ms > self.watermark.delay_ms:
            self.watermark = watermark
        self._delayed = True

    def steps(self) -> Iterator[Step]:
        """All of them, stage by stage."""
        for stage in self.stages:
            yield from stage.root.walk()

    def add_call(self, stage: Stage, parent: Node, step: Call) -> Node:
        _check_call(step)
        if step.stateful:
            self._claim(step.store, stage, parent, step.codec)
        if step.on_timer is not None:
            if not step.stateful:
                raise InvalidPipeline(f"{step.verb}(on_timer=) needs stateful=True")
            check_function(f"{step.verb}(on_timer=)", step.on_timer, ["key", "name", "state"], yields=True)
            self._claim_timers(step.store, step.label)
        return _child(parent, step)

    def add_gather(self, stage: Stage, parent: Node, step: Gather) -> Node:
        self._claim(step.store, stage, parent, step.codec)
        self._claim_timers(step.store, step.label)
        return _child(parent, step)

    def add_timestamps(self, parent: Node, step: SetTimestamp) -> Node:
        check_function("set_timestamp()", step.function, ["value", "key", "timestamp", "headers"])
        return _child(parent, step)

    def join(self, one: Node, other: Node) -> Node:
        """Where two branches of a stage come together."""
        node = Node(None, [])
        one.children.append(node)
        other.children.append(node)
        return node

    def add_stage(
        self, stage: Stage, parent: Node, key: Callable[[Any], Any], verb: str, name: str | None, partitions: int | None
    ) -> Stage:
        """Send the flow at `parent` on, under a new key; what comes after it is another stage."""
        check_function(f"{verb}()", key, ["value"])
        if partitions is not None and (type(partitions) is not int or partitions < 1):
            raise InvalidPipeline(f"{verb}(partitions={partitions!r}): it is a positive number")
        index = len(self.stages)
        name = checked_name("stage", f"{verb}-{index}" if name is None else name)
        if name == FIRST:
            raise InvalidPipeline(f"{verb}(): {FIRST!r} is the first stage; give this one another name=")
        if name in {known.name for known in self.stages}:
            raise InvalidPipeline(f"{verb}(): there is a stage {name!r} already; give this one another name=")
        added = Stage(index, name, stage.index, partitions)
        self.stages.append(added)
        _child(parent, Forward(index, key, verb))
        return added

    def _claim_timers(self, store: str, label: str) -> None:
        if self._timed.setdefault(store, label) != label:
            raise InvalidPipeline(
                f"the timers of store {store!r} belong to {self._timed[store]}: give {label} a store of its own"
            )

    def _claim(self, store: str, stage: Stage, parent: Node, codec: Any) -> None:
        """A store belongs to the stage that first named it and, in the first one, to the same sources; it has one codec."""
        checked_name("store", store)
        known = self._codecs.setdefault(store, codec)
        if (known is None) != (codec is None):
            raise InvalidPipeline(
                f"store {store!r} is used by another kind of step already: give this one another name"
            )
        owner = self._stores.setdefault(store, stage.index)
        if owner != stage.index:
            raise InvalidPipeline(
                f"store {store!r} is used before and after a change of key, which makes it two stores: give this one another name"
            )
        if stage.index == 0:
            here = frozenset(name for name, entry in self._entries.items() if entry.reaches(parent))
            origins = self._origins.setdefault(store, here)
            if origins != here:
                raise InvalidPipeline(
                    f"store {store!r} holds state by the keys of {_all(origins)}, this step has the records of {_all(here)}: "
                    "give it another store= (or, in stateful_map(), another name)"
                )

    def add_sink(
        self,
        parent: Node,
        name: str,
        form: Literal["rows", "values"] | MessageForm,
        target: TargetFactory | None,
        schema: Any = None,
    ) -> Node:
        """Tap the flow at `parent` for a sink whose id begins with `name`."""
        number = sum(known.split("#")[0] == name for known in self.targets)
        identity = f"{name}#{number + 1}" if number else name
        ddl = None if schema is None else to_ddl(arrow_schema(schema))
        self.targets[identity] = target
        return _child(parent, Emit(Sink(identity, len(self.targets) - 1, form, ddl)))


def _all(names: frozenset[str]) -> str:
    return " and ".join(sorted(names))


def _child(parent: Node, step: Step) -> Node:
    node = Node(step, [])
    parent.children.append(node)
    return node


def _check_call(step: Call) -> None:
    for option in ("stateful", "expand", "metadata"):
        if type(getattr(step, option)) is not bool:
            raise InvalidPipeline(f"{step.verb}({option}=) is True or False")
    arguments = ["value", *["key", "timestamp", "headers"] * step.metadata, *["state"] * step.stateful]
    what = step.label if callable(step.function) else f"{step.verb}()"
    check_function(what, step.function, arguments, yields=step.expand)


def option(verb: str, name: str, given: str, allowed: tuple[str, ...]) -> str:
    """`given`, if it is allowed."""
    if given not in allowed:
        raise InvalidPipeline(f"{verb}({name}={given!r}): it is one of {', '.join(allowed)}")
    return given
