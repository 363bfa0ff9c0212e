"""Cells: the one value that a key holds, for steps that keep one value per key instead of a dictionary.

`stateful_map` and `GroupState` are written against `Cell`; what is behind it is a document of the same form as `State`'s.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

Clock = Literal["event", "processing"]


class Cell(Protocol):
    """The value of the current key in one store, and its timer. Changes are undone if the call raises."""

    @property
    def exists(self) -> bool:
        """Whether the key has a value, be it None."""

    @property
    def value(self) -> Any:
        """The value; None if there is none. Decoded anew at each call: changing it in place saves nothing."""

    @property
    def timer(self) -> tuple[Clock, int] | None:
        """The clock of the key's timer and when it is due, in ms; None if there is none. It may be there without a value."""

    @property
    def time_ms(self) -> int:
        """The batch's processing time."""

    @property
    def watermark_ms(self) -> int | None:
        """The batch's watermark; None if the program has none."""

    def update(self, value: Any) -> None:
        """Set the value. `UnsupportedValue` if the store's codec would change it."""

    def remove(self) -> None:
        """Drop the value. The timer stays."""

    def set_timer(self, clock: Clock, due_ms: int) -> None:
        """Replace the key's timer. It fires in the first batch whose clock is later than `due_ms`, once."""

    def clear_timer(self) -> None:
        """The key has no timer any more."""
