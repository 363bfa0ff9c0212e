"""Numbered orders, and what must become of them: a plain fold over the input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from zlib import crc32

from holdfast import State

USERS = 40
GUESTS = 20_000
"""Of this many orders, every second one is a guest's: one who comes once, and whose state nobody reads again."""


class Orders(Sequence[dict[str, Any]]):
    """As many as anyone takes; each is made from its number."""

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [order(n) for n in range(*index.indices(len(self)))]
        return order(index)


def order(n: int) -> dict[str, Any]:
    chance = crc32(n.to_bytes(8, "big"))
    user = f"guest-{n:05}" if n < GUESTS and n % 2 else f"user-{chance % USERS}"
    return {"n": n, "user": user, "amount": 1 + chance // USERS % 1000}


def running_total(order: dict[str, Any], state: State) -> dict[str, Any]:
    total = state.get("total", 0) + order["amount"]
    state.set("total", total)
    return {**order, "total": total}


def fold(count: int) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """Every user's total, and the rows that came out, after `count` orders."""
    totals: dict[str, int] = {}
    rows = []
    for one in Orders()[:count]:
        totals[one["user"]] = totals.get(one["user"], 0) + one["amount"]
        rows.append({**one, "total": totals[one["user"]]})
    return totals, rows
