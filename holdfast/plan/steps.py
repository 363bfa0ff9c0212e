"""Steps: what a pipeline does to a record, as a tree.

A node is a step and the nodes that take what it passes on. The tree is plain data that travels to the tasks;
`compiled` turns it into one function per task. Branches are taken in the order in which they were declared, and every
branch but the last gets a copy of the value, so that none disturbs another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import msgspec

from holdfast.errors import FixTheRecord
from holdfast.plan.record import Headers, copied
from holdfast.plan.sinks import Encoder, Sink
from holdfast.state.documents import State

Function = Callable[..., Any]
Flow = Callable[[Any], Any]
"""Takes a value and carries it through the rest of the tree."""


class Call(msgspec.Struct, frozen=True):
    """A user function on every record: `apply`, `update` or `filter`."""

    verb: str
    function: Function
    stateful: bool = False
    expand: bool = False
    metadata: bool = False
    store: str = "default"

    @property
    def label(self) -> str:
        return f"{self.verb}({getattr(self.function, '__name__', type(self.function).__name__)})"


class Emit(msgspec.Struct, frozen=True):
    """Put the value into the outbox of a sink, and pass it on."""

    sink: Sink

    @property
    def label(self) -> str:
        return self.sink.label


class Node(msgspec.Struct):
    """A step and what comes after it. The root has no step."""

    step: Call | Emit | None = None
    children: list[Node] = []

    def walk(self) -> Iterator[Call | Emit]:
        """The steps of the tree, in the order in which a record meets them."""
        if self.step is not None:
            yield self.step
        for child in self.children:
            yield from child.walk()


class Current(Protocol):
    """The record that is being processed, as the compiled steps see it."""

    key: Any
    timestamp: int
    headers: Headers | None
    step: str

    def opener(self, store: str) -> Callable[[], State]:
        """What gives the state of the current record's key."""

    def encoder(self, sink: Sink) -> Encoder: ...


def compiled(node: Node, current: Current) -> Flow:
    """One function that carries a value through the tree below `node`."""
    flows = [_step_flow(child, current) for child in node.children]
    if not flows:
        return _end
    if len(flows) == 1:
        return flows[0]
    *first, last = flows

    def branches(value: Any) -> None:
        for flow in first:
            flow(copied(value))
        last(value)

    return branches


def _end(value: Any) -> None:
    """Where nothing comes after."""


def _step_flow(node: Node, current: Current) -> Flow:
    step = node.step
    onward = compiled(node, current)
    if isinstance(step, Emit):
        return _emit_flow(step, onward, current)
    assert isinstance(step, Call)
    call = _bound(step, current)
    label = step.label

    def apply(value: Any) -> None:
        current.step = label
        onward(call(value))

    def expand(value: Any) -> None:
        current.step = label
        results: Any = call(value)
        if isinstance(results, str | bytes | dict) or not hasattr(results, "__iter__"):
            raise FixTheRecord(
                f"{label} with expand=True must return a list or another iterable of values, "
                f"not {type(results).__qualname__}"
            )
        for result in results:
            onward(result)
            current.step = label

    def update(value: Any) -> None:
        current.step = label
        call(value)
        onward(value)

    def choose(value: Any) -> None:
        current.step = label
        if call(value):
            onward(value)

    if step.verb == "apply":
        return expand if step.expand else apply
    return update if step.verb == "update" else choose


def _emit_flow(step: Emit, onward: Flow, current: Current) -> Flow:
    add = current.encoder(step.sink).add
    label = step.label

    def emit(value: Any) -> None:
        current.step = label
        add(value, current.key, current.timestamp, current.headers)

    def emit_and_go_on(value: Any) -> None:
        current.step = label
        add(value, current.key, current.timestamp, current.headers)
        onward(value)

    return emit if onward is _end else emit_and_go_on


def _bound(step: Call, current: Current) -> Flow:
    """The user's function as one of a single value."""
    function = step.function
    if step.stateful:
        state = current.opener(step.store)
        if step.metadata:
            return lambda value: function(value, current.key, current.timestamp, current.headers, state())
        return lambda value: function(value, state())
    if step.metadata:
        return lambda value: function(value, current.key, current.timestamp, current.headers)
    return function
