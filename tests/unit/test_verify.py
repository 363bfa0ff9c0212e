"""Verification where checkpoints are unusual: restored from Kafka, or losing their oldest versions while they are read."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.log import paths, verify
from holdfast.log.manifest import Chain, Manifest, ManifestId, new_id
from holdfast.log.storage import Missing
from holdfast.log.verify import Finding, Verification
from holdfast.testing import Harness, MemoryStorage


def count(value: Any, state: Any) -> None:
    state.set("n", state.get("n", 0) + 1)


def harness_of(batches: int) -> Harness:
    harness = Harness(lambda sdf: sdf.update(count, stateful=True), partitions=2)
    for _ in range(batches):
        harness.feed(("ann", 1), ("bob", 1))
        harness.run()
    return harness


def found(storage: Any) -> list[Finding]:
    return list(Verification(storage).findings())


def restored(head: Manifest, version: int, **fields: Any) -> Manifest:
    """The first manifest of a restore that goes on after `version - 1`, which Kafka alone has seen."""
    identity = ManifestId(new_id())
    empty = tuple(replace(commit, delta=None, outboxes={}, keys=0, bytes=0) for commit in head.partitions)
    return replace(
        head,
        version=version,
        id=identity,
        parent=head.id,
        kind="restored",
        base=version,
        base_id=identity,
        partitions=empty,
        **fields,
    )


def test_a_restore_may_begin_after_versions_that_only_kafka_has_seen() -> None:
    harness = harness_of(2)
    chain = Chain(harness.storage)
    head = chain.head()
    assert head is not None
    chain.commit(restored(head, 10))
    assert found(harness.storage) == []
    for version in range(3):
        harness.storage.delete(paths.manifest(version))
    assert {finding.kind for finding in found(harness.storage)} == {"orphan"}


def test_a_restore_that_continues_another_chain_is_named() -> None:
    harness = harness_of(2)
    chain = Chain(harness.storage)
    head = chain.head()
    assert head is not None
    chain.commit(replace(restored(head, 10), parent=ManifestId(new_id())))
    (finding,) = found(harness.storage)
    assert (finding.version, finding.kind) == (10, "damage")
    assert "not a continuation of version 2" in finding.message


class Retiring(MemoryStorage):
    """Loses its oldest versions as soon as one of them is read."""

    def __init__(self, objects: dict[str, bytes], keep: int) -> None:
        super().__init__()
        self.objects = dict(objects)
        self._keep = keep

    def get(self, name: str) -> bytes:
        if name == paths.manifest(2):
            for other in list(self.objects):
                if paths.version_of(other) < self._keep:
                    del self.objects[other]
        try:
            return super().get(name)
        except Missing:
            assert paths.version_of(name) < self._keep
            raise


def test_what_is_retired_while_it_is_read_is_not_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Verification, "_beginning", lambda *_: iter(())
    )  # that a chain may begin there is another matter
    storage = Retiring(harness_of(8).storage.objects, keep=5)
    verification = Verification(storage)
    assert list(verification.findings()) == []
    assert (verification.tally.first, verification.tally.last) == (5, 8)
    assert verification.tally.counters == "not recomputed"


def test_more_keys_than_fit_in_mind_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "COUNTED", 1)
    verification = Verification(harness_of(3).storage)
    assert list(verification.findings()) == []
    assert verification.tally.counters == "not recomputed"


def test_progress_is_told_version_by_version() -> None:
    told: list[tuple[int, int]] = []
    verification = Verification(harness_of(3).storage, lambda tally: told.append((tally.versions, tally.to_read)))
    assert list(verification.findings()) == []
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]
