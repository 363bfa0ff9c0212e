"""What a store holds, and of which version."""

from __future__ import annotations

from holdfast.stores.base import EMPTY, Mark, Store


def mark(version: int) -> Mark:
    return EMPTY if version < 0 else Mark(version, f"attempt-{version}")


def contents(store: Store) -> dict[bytes, bytes]:
    return dict(store.scan(b"", None))
