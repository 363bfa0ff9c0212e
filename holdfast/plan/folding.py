"""Functions that take a state and return the next one, as functions of a `State`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.errors import FixTheRecord
from holdfast.plan.record import copied
from holdfast.state.documents import State
from holdfast.state.value import VALUE

_ABSENT: Any = object()


class Folding:
    """`function(key, value, state) -> (output, new state)` as the function of a stateful step."""

    def __init__(self, label: str, function: Callable[[Any, Any, Any], Any], default: Any) -> None:
        self._label = label
        self._function = function
        self._default = default

    def __call__(self, value: Any, key: Any, timestamp: int, headers: Any, state: State) -> Any:
        before = state.get(VALUE, _ABSENT)
        is_new = before is _ABSENT
        if is_new:
            before = self._default() if callable(self._default) else copied(self._default)
        result = self._function(key, value, before)
        if type(result) is not tuple or len(result) != 2:
            raise FixTheRecord(
                f"{self._label} must return a pair: the output and the new state, or None to drop the state"
            )
        output, after = result
        if after is not None:
            state.set(VALUE, after)
        elif not is_new:
            state.delete(VALUE)
        return output


class Choosing:
    """`function(value)` says which of several branches get the value: a number, or several."""

    def __init__(self, label: str, function: Callable[[Any], Any], branches: int) -> None:
        self._label = label
        self._function = function
        self._branches = branches

    def __call__(self, value: Any) -> tuple[frozenset[int], Any]:
        chosen = self._function(value)
        numbers = frozenset((int(chosen),)) if isinstance(chosen, int) else frozenset(chosen)
        if not numbers.issubset(range(self._branches)):
            raise FixTheRecord(f"{self._label} must return numbers from 0 to {self._branches - 1}")
        return numbers, value


class IsFor:
    """Whether a value is for one branch."""

    def __init__(self, branch: int) -> None:
        self._branch = branch

    def __call__(self, chosen: tuple[frozenset[int], Any]) -> bool:
        return self._branch in chosen[0]


def value_of(chosen: tuple[frozenset[int], Any]) -> Any:
    return chosen[1]


def is_there(value: Any) -> bool:
    return value is not None
