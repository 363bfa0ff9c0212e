"""Steps: what a stage does to a record, as a tree.

A node is a step and the nodes that take what it passes on; where branches were joined again, two nodes have a child in
common. The tree is plain data that travels to the tasks; `compiled` turns it into one function per task. Branches are
taken in the order in which they were declared, and every branch but the last gets a copy of the value, so that none
disturbs another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Protocol

import msgspec

from holdfast.errors import FixTheRecord
from holdfast.plan.record import Headers, copied
from holdfast.plan.sinks import Encoder, Sink
from holdfast.state.cell import Cell
from holdfast.state.documents import State
from holdfast.state.value import StateCell
from holdfast.times import milliseconds

PAGE = 10_000
"""Keys whose state is read at once, where all records of a key are processed together."""

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
    on_timer: Function | None = None
    """Called with (key, name, state) when a timer of the store is due; returns the values that go on, or None."""
    codec: Any = None
    """Of the store; None: the application's."""
    title: str | None = None

    @property
    def label(self) -> str:
        return self.title or f"{self.verb}({_name_of(self.function)})"


class Emit(msgspec.Struct, frozen=True):
    """Put the value into the outbox of a sink, and pass it on."""

    sink: Sink

    @property
    def label(self) -> str:
        return self.sink.label


class Forward(msgspec.Struct, frozen=True):
    """Send the record to a later stage, under a new key."""

    stage: int
    key: Function
    verb: str

    @property
    def label(self) -> str:
        return f"{self.verb}({_name_of(self.key)})"


class SetTimestamp(msgspec.Struct, frozen=True):
    """Give the record another event time: what `function(value, key, timestamp, headers)` returns."""

    function: Function

    @property
    def label(self) -> str:
        return f"set_timestamp({_name_of(self.function)})"


class Gather(msgspec.Struct, frozen=True):
    """All records that a key has in a batch, in one call; and one call when the key's timer is due."""

    function: Callable[[Any, Iterator[Any], Cell, bool], Iterable[Any]]
    """Of the key, the values, the key's cell, and whether its timer is due, in which case there are no values."""
    store: str
    label: str
    codec: Any = None
    drop_late: bool = False
    """Whether records that are not later than the watermark are left out."""


Step = Call | Emit | Forward | SetTimestamp | Gather


def _name_of(function: Function) -> str:
    return getattr(function, "__name__", type(function).__name__)


class Node(msgspec.Struct, eq=False):
    """A step and what comes after it. A root, and where branches are joined, has no step."""

    step: Step | None = None
    children: list[Node] = []

    def walk(self) -> Iterator[Step]:
        """The steps of the tree, each once, in the order in which a record meets them."""
        return (node.step for node in self._nodes() if node.step is not None)

    def reaches(self, other: Node) -> bool:
        """Whether `other` is this node or comes after it."""
        return any(node is other for node in self._nodes())

    def _nodes(self) -> Iterator[Node]:
        met: set[int] = set()
        waiting = [self]
        while waiting:
            node = waiting.pop()
            if id(node) not in met:
                met.add(id(node))
                waiting += reversed(node.children)
                yield node


class Current(Protocol):
    """The record that is being processed, as the compiled steps see it."""

    key: Any
    timestamp: int
    headers: Headers | None
    step: str
    watermark_ms: int | None

    @property
    def route(self) -> bytes:
        """The encoded key."""

    def opener(self, store: str) -> Callable[[], State]:
        """What gives the state of the current record's key."""

    def encoder(self, sink: Sink) -> Encoder: ...

    def forwarder(self, stage: int) -> Callable[[Any, Any], None]:
        """What sends the current record, with a key and a value, to a later stage."""

    def saw(self, timestamp: int) -> None:
        """An event time of the current record that moves the watermark, unless the record fails."""

    def late(self) -> None:
        """The current record is left out: it came after the watermark."""

    def enter(self, route: bytes, timestamp: int) -> None:
        """Make this key the current one, without a record."""

    def prefetch(self, store: str, routes: list[bytes]) -> None:
        """The state of these keys is about to be asked for."""

    def fires(self, store: str, fire: Fire) -> None:
        """Have `fire` called when a timer of `store` is due."""

    def ends(self, ending: Ending) -> None:
        """Have `ending` called after the last record."""


Fire = Callable[[str], None]
"""Takes the name of a timer of the current key."""


class Ending(Protocol):
    """What gathered records through a batch."""

    def routes(self) -> Iterator[bytes]:
        """The keys to call, each once."""

    def call(self, route: bytes) -> None: ...


def compiled(root: Node, current: Current) -> list[Flow]:
    """For each child of `root`, where records come in, a function that carries a value through the tree below it."""
    known: dict[int, Flow] = {}
    return [_below(entry, current, known) for entry in root.children]


def _below(node: Node, current: Current, known: dict[int, Flow]) -> Flow:
    """`known`: the flows of nodes that were compiled already, since two branches may come together in one."""
    flows = []
    for child in node.children:
        if id(child) not in known:
            known[id(child)] = _step_flow(child, current, known)
        flows.append(known[id(child)])
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


def _step_flow(node: Node, current: Current, known: dict[int, Flow]) -> Flow:
    step = node.step
    onward = _below(node, current, known)
    match step:
        case None:
            return onward
        case Emit():
            return _emit_flow(step, onward, current)
        case Forward():
            return _forward_flow(step, current)
        case SetTimestamp():
            return _timestamp_flow(step, onward, current)
        case Gather():
            return _gather_flow(step, onward, current)
        case Call():
            if step.on_timer is not None:
                current.fires(step.store, _timer_fire(step, step.on_timer, onward, current))
            return _call_flow(step, onward, current)


def _call_flow(step: Call, onward: Flow, current: Current) -> Flow:
    call = _bound(step, current)
    label = step.label

    def apply(value: Any) -> None:
        current.step = label
        onward(call(value))

    def expand(value: Any) -> None:
        current.step = label
        for result in _several(f"{label} with expand=True", call(value)):
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


def _forward_flow(step: Forward, current: Current) -> Flow:
    key_of, label, send = step.key, step.label, current.forwarder(step.stage)

    def forward(value: Any) -> None:
        current.step = label
        send(key_of(value), value)

    return forward


def _timestamp_flow(step: SetTimestamp, onward: Flow, current: Current) -> Flow:
    function, label = step.function, step.label

    def set_timestamp(value: Any) -> None:
        current.step = label
        before = current.timestamp
        current.timestamp = milliseconds(function(value, current.key, before, current.headers))
        current.saw(current.timestamp)
        try:
            onward(value)
        finally:
            current.timestamp = before  # for the branches beside this one, and the records after it

    return set_timestamp


def _timer_fire(step: Call, on_timer: Function, onward: Flow, current: Current) -> Fire:
    state = current.opener(step.store)
    label = f"on_timer({_name_of(on_timer)})"

    def fire(name: str) -> None:
        current.step = label
        results: Any = on_timer(current.key, name, state())
        for value in () if results is None else _several(label, results):
            onward(value)
            current.step = label

    return fire


def _several(what: str, results: Any) -> Iterable[Any]:
    if isinstance(results, str | bytes | dict) or not hasattr(results, "__iter__"):
        raise FixTheRecord(f"{what} must return a list or another iterable of values, not {type(results).__qualname__}")
    found: Iterable[Any] = results
    return found


def _gather_flow(step: Gather, onward: Flow, current: Current) -> Flow:
    gathering = _Gathering(step, onward, current)
    current.ends(gathering)
    current.fires(step.store, gathering.fire)
    return gathering.take_unless_late if step.drop_late else gathering.take


class _Gathering:
    """The records of a batch by key, for a `Gather`."""

    def __init__(self, step: Gather, onward: Flow, current: Current) -> None:
        self._step = step
        self._onward = onward
        self._current = current
        self._state = current.opener(step.store)
        self._groups: dict[bytes, list[Any]] = {}
        self._times: dict[bytes, int] = {}

    def take(self, value: Any) -> None:
        current = self._current
        current.step = self._step.label
        route = current.route
        group = self._groups.get(route)
        if group is None:
            self._groups[route] = [value]
            self._times[route] = current.timestamp
        else:
            group.append(value)
            if current.timestamp > self._times[route]:
                self._times[route] = current.timestamp

    def take_unless_late(self, value: Any) -> None:
        current = self._current
        if current.watermark_ms is not None and current.timestamp <= current.watermark_ms:
            current.late()
        else:
            self.take(value)

    def routes(self) -> Iterator[bytes]:
        waiting = iter(list(self._groups))
        while page := list(islice(waiting, PAGE)):
            self._current.prefetch(self._step.store, page)
            yield from page

    def call(self, route: bytes) -> None:
        self._current.enter(route, self._times[route])
        self._pass_on(iter(self._groups.pop(route)), is_due=False)

    def fire(self, name: str) -> None:
        self._pass_on(iter(()), is_due=True)

    def _pass_on(self, values: Iterator[Any], *, is_due: bool) -> None:
        current, label = self._current, self._step.label
        current.step = label
        for value in self._step.function(current.key, values, StateCell(self._state()), is_due):
            self._onward(value)
            current.step = label


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
