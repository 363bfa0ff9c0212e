"""Verification where checkpoints are unusual: restored from Kafka, or losing their oldest versions while they are read."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from rig import Rig

from holdfast.log import paths, verify
from holdfast.log.files import FileRef, checksum
from holdfast.log.manifest import Chain, Manifest, ManifestId, new_id
from holdfast.log.snapshot import versions
from holdfast.log.storage import Missing
from holdfast.log.verify import Finding, Verification
from holdfast.runtime.batch import Proposal
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


def test_what_lies_before_the_first_snapshot_is_read_too_as_long_as_it_is_there() -> None:
    rig = Rig(every=5, keep=2)
    rig.run(8)
    assert versions(rig.storage) == [5]
    whole = Verification(rig.storage)
    assert list(whole.findings()) == []
    assert (whole.tally.first, whole.tally.versions, whole.tally.counters) == (0, rig.head.version + 1, "recomputed")
    rig.storage.objects[paths.manifest(2)] = b"{}"
    assert [(finding.kind, finding.name) for finding in found(rig.storage)] == [("damage", paths.manifest(2))]


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


# -- snapshots -------------------------------------------------------------------------------------------------------


def with_snapshots() -> MemoryStorage:
    """A chain that begins at a snapshot."""
    rig = Rig(every=3)
    rig.run(14)
    storage: MemoryStorage = rig.storage
    assert len(storage.names(paths.SNAPSHOTS)) == 2
    assert paths.manifest(0) not in storage.objects
    return storage


def test_a_chain_may_begin_at_a_snapshot() -> None:
    storage = with_snapshots()
    assert found(storage) == []


def test_every_file_of_a_snapshot_that_is_damaged_or_missing_is_named() -> None:
    storage = with_snapshots()
    for name in storage.names(paths.SNAPSHOT_FILES):
        whole = storage.objects[name]
        for damaged in (whole[:-1], bytes([whole[0] ^ 1]) + whole[1:]):
            storage.objects[name] = damaged
            assert [(finding.kind, finding.name) for finding in found(storage)] == [("damage", name)]
        del storage.objects[name]
        assert [(finding.kind, finding.name) for finding in found(storage)] == [("damage", name)]
        storage.objects[name] = whole


def test_a_snapshot_whose_list_is_damaged_is_named() -> None:
    storage = with_snapshots()
    for name in storage.names(paths.SNAPSHOTS):
        whole = storage.objects[name]
        storage.objects[name] = whole.replace(b"1", b"2", 1)
        damaged = [finding.name for finding in found(storage) if finding.kind == "damage"]
        assert damaged == [name]
        storage.objects[name] = whole


def test_one_snapshot_is_not_missed_while_there_is_another_and_both_are() -> None:
    storage = with_snapshots()
    older, newer = storage.names(paths.SNAPSHOTS)
    for name in (older, newer):
        whole = storage.objects.pop(name)
        assert {finding.kind for finding in found(storage)} <= {"orphan"}
        storage.objects[name] = whole
    del storage.objects[older], storage.objects[newer]
    assert next(finding.name for finding in found(storage) if finding.kind == "damage") == paths.manifest(0)


def test_what_an_upload_has_left_is_an_orphan() -> None:
    storage = with_snapshots()
    name = paths.snapshot_file(12, 0, new_id(), 0)
    storage.put(name, b"half")
    assert [(finding.kind, finding.name) for finding in found(storage)] == [("orphan", name)]


def test_a_manifest_before_the_oldest_snapshot_is_on_its_way_out() -> None:
    storage = with_snapshots()
    storage.put(paths.manifest(1), b"of a run that was overtaken long ago")
    assert [(finding.kind, finding.name) for finding in found(storage)] == [("orphan", paths.manifest(1))]


# -- files of Spark's ------------------------------------------------------------------------------------------------


def run_with_spark_files(rig: Rig, batches: int) -> None:
    """Every version names a file of its own, that of the version before, and one that all of them name."""
    for version in range(rig.head.version + 1, rig.head.version + 1 + batches):
        known = rig.head.spark_files
        data = {"metadata": b"one for all", f"offsets/{version}": b"%d" % version}
        for name in data.keys() - known.keys():
            ref = FileRef(paths.spark_file(version, new_id()), len(data[name]), checksum(data[name]), 0)
            rig.storage.put(ref.name, data[name])
            known = {**known, name: ref}
        wanted = {"metadata", f"offsets/{version - 1}", f"offsets/{version}"}
        assert rig.head.position is not None
        end = {"taken": rig.head.position["taken"] + 10}
        files = {name: ref for name, ref in known.items() if name in wanted}
        rig.driver.run_batch(Proposal(end=end, spark_files=files))


def test_every_file_of_spark_that_is_damaged_or_missing_is_named_once() -> None:
    rig = Rig(every=3, keep=1)
    run_with_spark_files(rig, 8)
    assert found(rig.storage) == []
    names = rig.storage.names(paths.SPARK_FILES)
    assert len(names) > 3 and paths.version_of(names[0]) == 1
    for name in names:
        whole = rig.storage.objects[name]
        for damaged in (whole + b"x", bytes([whole[0] ^ 1]) + whole[1:], None):
            if damaged is None:
                del rig.storage.objects[name]
            else:
                rig.storage.objects[name] = damaged
            assert [(finding.kind, finding.name) for finding in found(rig.storage)] == [("damage", name)]
        rig.storage.objects[name] = whole


def test_a_file_of_spark_that_no_commit_names_is_an_orphan_and_its_own_directory_is_not() -> None:
    rig = Rig(every=3, keep=1)
    run_with_spark_files(rig, 4)
    name = paths.spark_file(5, new_id())
    rig.storage.put(name, b"planned")
    rig.storage.put(f"{paths.SPARK_FILES}metadata", b"of Spark itself, on a local disk")
    assert [(finding.kind, finding.name) for finding in found(rig.storage)] == [("orphan", name)]


# -- beside retention ------------------------------------------------------------------------------------------------


class Beside(MemoryStorage):
    """What a reader sees: one checkpoint, and from its call of a number on a later one."""

    def __init__(self, before: dict[str, bytes], after: dict[str, bytes], number: int) -> None:
        super().__init__()
        self.objects = before
        self._after = after
        self._left = number

    def get(self, name: str) -> bytes:
        self._count()
        return super().get(name)

    def sizes(self, prefix: str) -> dict[str, int]:
        self._count()
        return super().sizes(prefix)

    def _count(self) -> None:
        self._left -= 1
        if self._left == 0:
            self.objects = self._after

    @property
    def has_changed(self) -> bool:
        return self._left <= 0


def damage_of(verification: Verification) -> list[str]:
    return [finding.message for finding in verification.findings() if finding.kind == "damage"]


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("batches", [3, 6, 30], ids=lambda batches: f"{batches}-batches")
def test_what_retention_removes_at_any_moment_of_a_verification_is_not_missing(keep: int, batches: int) -> None:
    rig = Rig(every=3, keep=keep)
    run_with_spark_files(rig, 9)
    before = dict(rig.storage.objects)
    run_with_spark_files(rig, batches)
    assert before.keys() - rig.storage.objects.keys(), "nothing was removed"
    for number in range(1, 1_000):
        storage = Beside(before, rig.storage.objects, number)
        verification = Verification(storage)
        assert damage_of(verification) == [], f"before call {number}"
        assert verification.tally.last is not None
        if not storage.has_changed:
            break
    assert number > 20, "hardly anything was read"


def test_at_no_moment_of_retention_is_anything_missing() -> None:
    rig = Rig(every=3, keep=1)
    rig.run(5)
    delete = rig.storage.delete
    looks = []

    def watched(name: str) -> None:
        delete(name)
        looks.append(damage_of(Verification(rig.storage)))

    rig.storage.delete = watched
    rig.run(5)
    assert len(looks) > 10
    assert not any(looks)


@pytest.mark.parametrize("what", ["manifest", "delta"])
def test_what_is_needed_is_missed_though_retention_goes_on(what: str) -> None:
    rig = Rig(every=3, keep=2)
    rig.run(11)
    delta = rig.chain.read(10).partitions[0].delta
    assert delta is not None
    lost = paths.manifest(10) if what == "manifest" else delta.name

    before = dict(rig.storage.objects)
    rig.storage.delete(lost)
    rig.run(3)
    assert versions(rig.storage) == [9, 12]
    (said,) = damage_of(Verification(Beside(before, rig.storage.objects, 8)))
    assert said.startswith(f"{lost} is missing")
