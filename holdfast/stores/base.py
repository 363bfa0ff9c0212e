"""Local stores: where the keyed state of one partition rests between batches. One contract for all of them.

A store is a follower: it holds exactly what the committed deltas up to its `version` say, and nothing else. It is
never the truth. When it cannot prove what it holds it is wiped and built again from the log.

The rules that an implementation keeps, and that the contract suite checks:
- the values of a version and its mark become visible together, also after a kill: a store that is opened again is
  at some version that was applied, whole, not necessarily the last one;
- `apply` of the version that the store already has changes nothing; `apply` on any other than the version it
  continues is refused and changes nothing;
- keys and values are bytes, keys are ordered bytewise, an empty value is a value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from holdfast.errors import Damaged, StopAndLook

Change = tuple[bytes, bytes | None]
"""A key and its new value; None deletes the key."""


class Mark(NamedTuple):
    """Which commit a store holds: the version and the attempt whose delta won it."""

    version: int
    attempt: str


EMPTY = Mark(-1, "")
"""The mark of a store to which nothing was applied yet."""


class WrongVersion(StopAndLook):
    """A delta was applied to a store that is not at the version which the delta continues."""

    def __init__(self, held: Mark, since: Mark, to: Mark) -> None:
        super().__init__(f"the store is at {held}, so it cannot go from {since} to {to}", held=held, since=since, to=to)


class DamagedStore(Damaged):
    """A local store cannot be read. Nothing is lost: it is wiped and built again from the log."""


class Store(Protocol):
    """The contract. Not thread-safe: one task uses it at a time."""

    def mark(self) -> Mark:
        """What the store holds; `EMPTY` when it is new."""

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values in the order of `keys`, None where there is none. Sorted keys are fastest."""

    def scan(self, start: bytes, end: bytes | None) -> Iterator[tuple[bytes, bytes]]:
        """The entries with start <= key < end in key order; to the last one if `end` is None."""

    def apply(self, changes: Iterable[Change], since: Mark, to: Mark) -> None:
        """Go from `since` to `to` in one atomic step. Nothing if the store is at `to`; `WrongVersion` otherwise."""

    def checkpoint(self, directory: Path) -> None:
        """Write a copy of the store as it is to `directory`, which must not exist; it opens as a store."""

    def staging(self) -> Path:
        """A directory for the files of another checkpoint on their way here; it outlives what the store outlives."""

    def unstage(self) -> None:
        """Remove `staging()`, if there is one: nobody will come back for what is in it."""

    def replace(self, mark: Mark) -> None:
        """Become the checkpoint in `staging()`, which goes.

        It is read to its end before. `DamagedStore`, and nothing changed, if that fails or if it has another mark.
        """

    def wipe(self) -> None:
        """Forget everything: the store is `EMPTY` and open afterwards."""

    def close(self) -> None:
        """Let go of the store. Closing twice is harmless."""
