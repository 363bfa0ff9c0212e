"""A pipeline as it is being declared: a source, a tree of steps, and what delivers each sink.

Front doors add to it; every mistake that can be seen without running is reported by the call that makes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from holdfast.errors import InvalidPipeline
from holdfast.log.paths import checked_name
from holdfast.plan.functions import check_function
from holdfast.plan.messages import MessageForm
from holdfast.plan.schema import arrow_schema, to_ddl
from holdfast.plan.sinks import Sink
from holdfast.plan.steps import Call, Emit, Node
from holdfast.sources.base import Source

TargetFactory = Callable[[Any], Any]
"""From the run's context (runtime/context.py) to a `Target`."""


class Pipeline:
    """What an application will run."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.root = Node(None, [])
        self.targets: dict[str, TargetFactory | None] = {}
        """By sink; None: it is published with everything else that goes to Kafka."""

    def add_call(self, parent: Node, step: Call) -> Node:
        _check_call(step)
        if step.stateful:
            checked_name("store", step.store)
        return _child(parent, step)

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


def _child(parent: Node, step: Call | Emit) -> Node:
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
