"""A batch that touches more keys than memory may hold goes by way of the disk, and nobody can tell."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.log.manifest import Chain
from holdfast.runtime import processing
from holdfast.sources import base, iterable
from holdfast.testing import Harness

RECORDS = st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(-3, 9)), max_size=60)


def count(amount: int, state: Any) -> int:
    total = state.get("total", 0) + amount
    if total < 0:
        state.delete("total")
    else:
        state.set("total", total)
    return total


def outcome(batches: list[list[tuple[str, int]]]) -> tuple[dict[Any, Any], list[Any], list[tuple[int, int]]]:
    """State, output and what the manifests say of keys and bytes."""
    harness = Harness(lambda sdf: sdf.apply(count, stateful=True))
    for batch in batches:
        harness.feed(*batch)
        harness.run()
    chain = Chain(harness.storage)
    commits = [chain.read(version).partitions[0] for version in range(1, len(batches) + 1)]
    return dict(harness.state().items()), harness.values, [(commit.keys, commit.bytes) for commit in commits]


@given(st.lists(RECORDS, min_size=1, max_size=3))
def test_spilling_changes_nothing_that_can_be_seen(batches: list[list[tuple[str, int]]]) -> None:
    expected = outcome(batches)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processing, "SPILL_AFTER", 2)
        for module in (base, iterable):
            patch.setattr(module, "CHUNK", 5)
        assert outcome(batches) == expected


def test_a_batch_of_many_keys_really_spills(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(processing, "SPILL_AFTER", 10)
    monkeypatch.setattr(iterable, "CHUNK", 20)
    with caplog.at_level("INFO", logger="holdfast"):
        state, _, _ = outcome([[(f"k{n % 50}", 1) for n in range(200)]])
    assert "using the disk" in caplog.text
    assert state == {f"k{n}": {"total": 4} for n in range(50)}
