"""The one value of a key, kept in a document like any other."""

from __future__ import annotations

from typing import Any

from holdfast.state.cell import Clock
from holdfast.state.documents import State

VALUE = "value"
"""The sub-key that the value lies under."""
TIMER = "timer"


class StateCell:
    """A `Cell` over the state of a key."""

    __slots__ = ("_state",)

    def __init__(self, state: State) -> None:
        self._state = state

    @property
    def exists(self) -> bool:
        return self._state.exists(VALUE)

    @property
    def value(self) -> Any:
        return self._state.get(VALUE)

    @property
    def timer(self) -> tuple[Clock, int] | None:
        return self._state._timers().get(TIMER)

    @property
    def time_ms(self) -> int:
        return self._state._documents.now.time_ms

    @property
    def watermark_ms(self) -> int | None:
        return self._state._documents.now.watermark_ms

    def update(self, value: Any) -> None:
        self._state.set(VALUE, value)

    def remove(self) -> None:
        self._state.delete(VALUE)

    def set_timer(self, clock: Clock, due_ms: int) -> None:
        self._state._set_timer(TIMER, clock, due_ms)

    def clear_timer(self) -> None:
        self._state._drop_timer(TIMER)
