"""Manifests: the chain of commits, and what may continue it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harnesses import head_of
from msgspec.structs import replace

from holdfast import Application, Persistence, State
from holdfast.errors import (
    CodecMismatch,
    Damaged,
    Fenced,
    ForeignCheckpoint,
    ForeignTarget,
    FutureFormat,
    PlanMismatch,
    RunIsAlive,
    StopAndLook,
    StorageFailed,
    StorageFull,
    StorageReadOnly,
)
from holdfast.log import files, paths
from holdfast.log.manifest import Chain, Manifest, ManifestId, cleared, decode, encode, new_id
from holdfast.log.storage import Exists, LocalStorage, Missing
from holdfast.runtime.locks import FileLock
from holdfast.testing import Crash, Harness, MemoryStorage


def count(value: Any, state: State) -> int:
    state.set("n", state.get("n", 0) + 1)
    return int(state.get("n"))


def counting(batches: int = 2, build: Any = None, **options: Any) -> Harness:
    """A harness that has counted some records of two keys."""
    harness = Harness(build or (lambda sdf: sdf.apply(count, stateful=True)), **options)
    for _ in range(batches):
        harness.feed(("a", 0), ("b", 0))
        harness.run()
    return harness


def successor(of: Harness, **options: Any) -> Harness:
    """Another run on the same checkpoint, fed with the same records."""
    other = Harness(options.pop("build", None) or (lambda sdf: sdf.apply(count, stateful=True)), **options)
    other.storage = of.storage
    other.feed(*[("a", 0), ("b", 0)] * 10)
    return other


def rewrite(harness: Harness, change: Callable[[Manifest], Manifest]) -> None:
    """Replace the last manifest behind the protocol's back."""
    head = head_of(harness)
    harness.storage.objects[paths.manifest(head.version)] = encode(change(head))


# -- the chain ---------------------------------------------------------------------------------------------------


def test_every_manifest_names_its_parent_and_shares_one_instance() -> None:
    chain = Chain(counting(3).storage)
    manifests = [chain.read(version) for version in range(4)]
    assert [manifest.parent for manifest in manifests] == [None, *[manifest.id for manifest in manifests[:-1]]]
    assert len({manifest.instance for manifest in manifests}) == 1
    assert [manifest.kind for manifest in manifests] == ["start", "batch", "batch", "batch"]
    assert [manifest.position for manifest in manifests] == [{"taken": n} for n in (0, 2, 4, 6)]


def test_an_empty_checkpoint_has_no_head() -> None:
    assert Chain(MemoryStorage()).head() is None


def test_a_manifest_comes_back_from_its_bytes() -> None:
    head = head_of(counting())
    assert decode("name", encode(head)) == head


def test_the_manifest_tells_how_many_keys_and_bytes_there_are() -> None:
    def grow(value: str, state: State) -> None:
        state.set("x", value) if value else state.delete("x")

    harness = Harness(lambda sdf: sdf.update(grow, stateful=True))
    sizes = []
    for value in ("short", "much longer", "", "short"):
        harness.feed(("a", value), ("b", "stays"))
        harness.run()
        (commit,) = head_of(harness).partitions
        sizes.append((commit.keys, commit.bytes))
    stored = sum(len(key) + len(value) for key, value in harness._stores.stores.popitem()[1].scan(b"", None))
    assert [keys for keys, _ in sizes] == [2, 2, 1, 2]
    assert sizes[0][1] < sizes[1][1] and sizes[2][1] < sizes[0][1] and sizes[0][1] == sizes[3][1]
    assert stored == sizes[2][1]  # the local store applies a version when the next one begins


def test_a_gap_in_the_chain_is_damage() -> None:
    harness = counting(3)
    harness.storage.delete(paths.manifest(2))
    with pytest.raises(Damaged, match=r"commits/0*2\.json is missing: the chain of commits is broken there"):
        harness.restart()


def test_a_parent_that_is_not_the_one_the_child_continues_is_damage() -> None:
    harness = counting(3)
    stranger = replace(Chain(harness.storage).read(2), id=ManifestId(new_id()))
    harness.storage.objects[paths.manifest(2)] = encode(stranger)
    with pytest.raises(Damaged, match="is not the commit that version 3 continues"):
        harness.restart()


def test_a_manifest_under_the_name_of_another_is_damage() -> None:
    harness = counting(2)
    harness.storage.objects[paths.manifest(2)] = harness.storage.objects[paths.manifest(1)]
    with pytest.raises(Damaged, match="is the manifest of version 1"):
        harness.restart()


def test_a_lost_head_whose_output_was_delivered_is_damage_and_not_the_past() -> None:
    harness = counting(2)
    harness.storage.delete(paths.manifest(2))
    with pytest.raises(Damaged, match=r"is missing, though delivered/0*2\.json says"):
        harness.restart()


@pytest.mark.parametrize("damage", ["cut", "empty", "flip", "grow"])
def test_a_damaged_manifest_is_never_read_as_another(damage: str) -> None:
    data = encode(head_of(counting()))
    variants = {
        "cut": [data[:length] for length in range(1, len(data), 11)],
        "empty": [b"", b"{}", b"null", b"\xff\xfe"],
        "flip": [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in range(0, len(data), 3)],
        "grow": [data + b" ", data + b"\n", b" " + data],
    }[damage]
    for variant in variants:
        with pytest.raises(Damaged) as caught:
            decode("commits/x.json", variant)
        assert caught.value.name == "commits/x.json"  # type: ignore[attr-defined]


# -- the put decides ---------------------------------------------------------------------------------------------


class Unreliable(MemoryStorage):
    """Each put goes as the next word says; then all is well."""

    def __init__(self, objects: dict[str, bytes], *script: str) -> None:
        super().__init__()
        self.objects = objects
        self.script = list(script)

    def put(self, name: str, data: bytes) -> None:
        word = self.script.pop(0) if self.script else "ok"
        if word == "answer lost":
            super().put(name, data)
        if word != "ok":
            raise {"full": StorageFull, "read-only": StorageReadOnly}.get(word, StorageFailed)(word)
        super().put(name, data)


def attempt(*script: str) -> tuple[Manifest, Unreliable, list[float]]:
    """Commit one more version over an unreliable storage."""
    harness = counting()
    storage = Unreliable(harness.storage.objects, *script)
    pauses: list[float] = []
    head = Chain(storage, pause=pauses.append).commit(cleared(head_of(harness)))
    return head, storage, pauses


def test_a_commit_whose_answer_was_lost_has_happened_and_is_not_fenced_by_itself() -> None:
    manifest, storage, pauses = attempt("answer lost")
    assert Chain(storage).head() == manifest
    assert pauses == []


def test_a_commit_that_failed_is_tried_again_with_growing_pauses() -> None:
    manifest, storage, pauses = attempt("failed", "failed", "answer lost")
    assert Chain(storage).head() == manifest
    assert len(pauses) == 2 and pauses[0] < pauses[1]


def test_a_commit_that_fails_again_and_again_is_given_up_with_the_storage_s_error() -> None:
    with pytest.raises(StorageFailed):
        attempt(*["failed"] * 5)


@pytest.mark.parametrize(("word", "kind"), [("full", StorageFull), ("read-only", StorageReadOnly)])
def test_a_full_or_read_only_disk_is_not_tried_again(word: str, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        attempt(word)  # a second try would succeed


def test_a_version_that_another_run_committed_fences_this_one() -> None:
    harness = counting()
    chain = Chain(harness.storage)
    chain.commit(replace(cleared(head_of(harness)), holder="elsewhere:7"))
    before = dict(harness.storage.objects)
    harness.feed(("a", 0))
    with pytest.raises(Fenced, match="committed by elsewhere:7") as caught:
        harness.run()
    assert (caught.value.version, caught.value.holder) == (3, "elsewhere:7")  # type: ignore[attr-defined]
    commits = {name for name in harness.storage.objects if name.startswith("commits/")}
    assert {name: harness.storage.objects[name] for name in before} == before
    assert commits == {name for name in before if name.startswith("commits/")}


def test_of_two_runs_on_one_checkpoint_exactly_one_goes_on() -> None:
    first = counting(1)
    second = successor(first)
    second.restart()
    second.run()
    first.feed(("a", 0))
    with pytest.raises(Fenced):
        first.run()
    second.feed(("a", 0))
    second.run()
    assert second.state().get("a") == {"n": 11}


def test_a_fenced_run_whose_put_also_failed_is_still_fenced() -> None:
    harness = counting()
    chain = Chain(Unreliable(harness.storage.objects, "failed"))
    Chain(harness.storage).commit(cleared(head_of(harness)))
    with pytest.raises(Fenced):
        chain.commit(replace(cleared(Chain(harness.storage).read(2))))


# -- formats to come ---------------------------------------------------------------------------------------------


def test_a_manifest_of_a_future_format_is_named_and_left_alone() -> None:
    harness = counting()
    rewrite(harness, lambda head: replace(head, format=2))
    before = dict(harness.storage.objects)
    with pytest.raises(
        FutureFormat, match="has format 2; this version of Holdfast reads up to 1: upgrade it"
    ) as caught:
        harness.restart()
    assert caught.value.format == 2  # type: ignore[attr-defined]
    assert harness.storage.objects == before


def test_a_delta_of_a_future_format_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as later:
        later.setattr(files, "FORMAT", 2)
        harness = counting(1)
    harness.restart(lose_local=True)
    with pytest.raises(FutureFormat, match=r"deltas/.* has format 2"):
        harness.run()


def test_an_outbox_of_a_future_format_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(lambda sdf: sdf.apply(str))
    harness.feed(1)
    with monkeypatch.context() as later:
        later.setattr(files, "FORMAT", 2)
        harness.crash_at("commit.done")
        with pytest.raises(Crash):
            harness.run()
    with pytest.raises(FutureFormat, match=r"outbox/.* has format 2"):
        harness.restart()


@pytest.mark.parametrize("damage", ["missing", "cut", "flipped", "another's"])
def test_a_damaged_delta_is_named_and_never_read(damage: str) -> None:
    harness = counting(3)
    first, second, _ = harness.storage.names(paths.DELTAS)
    objects = harness.storage.objects
    data = objects.pop(second)
    if damage != "missing":
        middle = len(data) // 2
        flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        objects[second] = {"cut": data[:-1], "flipped": flipped, "another's": objects[first]}[damage]
    harness.restart(lose_local=True)
    with pytest.raises(Damaged, match=second):
        harness.run()


# -- whose checkpoint it is --------------------------------------------------------------------------------------


def test_a_checkpoint_of_another_application_is_refused_and_left_alone() -> None:
    harness = counting()
    rewrite(harness, lambda head: replace(head, app="billing"))
    before = dict(harness.storage.objects)
    with pytest.raises(ForeignCheckpoint, match="belongs to application 'billing', not to 'harness'") as caught:
        harness.restart()
    assert (caught.value.owner, caught.value.app) == ("billing", "harness")  # type: ignore[attr-defined]
    assert harness.storage.objects == before


def test_another_number_of_partitions_is_refused() -> None:
    with pytest.raises(PlanMismatch, match="has 2 state partitions, the program asks for 3"):
        successor(counting(partitions=2), partitions=3).run()


def test_another_kind_of_source_is_refused() -> None:
    harness = counting()
    rewrite(harness, lambda head: replace(head, source="spark"))
    with pytest.raises(PlanMismatch, match="of kind 'spark', the program has one of kind 'iterable'"):
        harness.restart()


def test_undelivered_output_of_a_sink_that_is_gone_stops_the_run_until_it_is_back() -> None:
    def with_table(sdf: Any) -> Any:
        return sdf.to_table("t", schema="a int").apply(lambda row: row["a"])

    harness = Harness(with_table)
    harness.feed({"a": 1})
    harness.crash_at("commit.done")
    with pytest.raises(Crash):
        harness.run()
    without = Harness(lambda sdf: sdf.apply(lambda row: row["a"]))
    without.storage = harness.storage
    with pytest.raises(StopAndLook, match=r"version 1 has undelivered output for \['table:t'\]"):
        without.restart()
    harness.restart()
    without.restart()
    assert harness.rows == {"table:t": [{"a": 1}]}


def test_a_mark_of_another_commit_is_never_taken_for_delivery() -> None:
    harness = counting(1)
    harness.storage.objects[paths.delivered(1)] = b'{"manifest": "another"}'
    with pytest.raises(ForeignTarget, match="marks the output of another commit"):
        harness.restart()


@pytest.mark.parametrize("mark", [b"", b"{", b"[]", b"\xff"])
def test_a_mark_that_cannot_be_read_means_that_the_output_is_delivered_again(mark: bytes) -> None:
    harness = counting(1)
    harness.storage.objects[paths.delivered(1)] = mark
    harness.values.clear()
    harness.restart()
    assert harness.values == [1, 1]


# -- clear -------------------------------------------------------------------------------------------------------


def test_a_clear_empties_the_state_and_keeps_position_and_batch_identity() -> None:
    harness = counting(2, partitions=2)
    before = head_of(harness)
    after = Chain(harness.storage).commit(cleared(before))
    assert list(harness.state().items()) == []
    assert (after.position, after.spark, after.time_ms) == (before.position, before.spark, before.time_ms)
    assert (after.instance, after.schemas, after.source) == (before.instance, before.schemas, before.source)
    assert (after.parent, after.version, after.kind) == (before.id, before.version + 1, "clear")
    assert [(commit.keys, commit.bytes) for commit in after.partitions] == [(0, 0)] * 2


@pytest.mark.parametrize("lose_local", [False, True])
def test_after_a_clear_counting_begins_again_with_the_next_record(lose_local: bool) -> None:
    harness = counting(2, partitions=2)
    Chain(harness.storage).commit(cleared(head_of(harness)))
    harness.restart(lose_local=lose_local)
    harness.feed(("a", 0))
    harness.run()
    assert dict(harness.state().items()) == {"a": {"n": 1}}
    assert sorted(harness.values) == [1, 1, 1, 2, 2]


def test_output_that_was_undelivered_when_the_state_was_cleared_is_delivered_all_the_same() -> None:
    harness = Harness(lambda sdf: sdf.apply(count, stateful=True))
    harness.feed(("a", 0))
    harness.crash_at("commit.done")
    with pytest.raises(Crash):
        harness.run()
    for _ in range(2):
        Chain(harness.storage).commit(cleared(head_of(harness)))
    harness.restart()
    assert harness.values == [1]


def test_after_a_clear_another_codec_is_welcome() -> None:
    import pickle

    from holdfast import RocksDBOptions

    harness = counting()
    other = successor(harness, rocksdb_options=RocksDBOptions(dumps=pickle.dumps, loads=pickle.loads))
    with pytest.raises(CodecMismatch):
        other.restart()
    Chain(harness.storage).commit(cleared(head_of(harness)))
    other.restart()
    other.run()
    assert other.state().get("a") == {"n": 8}


def on_disk(harness: Harness, directory: Path) -> None:
    storage = LocalStorage(directory)
    for name, data in harness.storage.objects.items():
        storage.put(name, data)


def test_clear_state_clears_what_a_view_shows(tmp_path: Path) -> None:
    on_disk(counting(2), tmp_path)
    app = Application("harness", persistence=Persistence(tmp_path), state_dir=tmp_path / "elsewhere", loglevel=None)
    view = app.state()
    assert dict(view.items()) == {"a": {"n": 2}, "b": {"n": 2}}
    app.clear_state()
    assert (list(view.items()), view.get("a")) == ([], None)
    head = Chain(LocalStorage(tmp_path)).head()
    assert head is not None and (head.kind, head.position) == ("clear", {"taken": 4})


def test_clear_state_is_refused_while_a_run_is_alive(tmp_path: Path) -> None:
    on_disk(counting(1), tmp_path)
    app = Application("harness", persistence=Persistence(tmp_path), state_dir=tmp_path / "elsewhere", loglevel=None)
    alive = FileLock(tmp_path / "run.lock")
    assert alive.acquire(shared=True)
    with pytest.raises(RunIsAlive, match="stop it before its state is cleared"):
        app.clear_state()
    alive.release()
    app.clear_state()
    assert list(app.state().items()) == []


def test_clear_state_leaves_the_checkpoint_of_another_application_alone(tmp_path: Path) -> None:
    on_disk(counting(1), tmp_path)
    app = Application("other", persistence=Persistence(tmp_path), state_dir=tmp_path / "elsewhere", loglevel=None)
    with pytest.raises(ForeignCheckpoint):
        app.clear_state()
    assert len(LocalStorage(tmp_path).names("commits/")) == 2


def test_to_clear_an_application_that_never_ran_does_nothing(app: Application) -> None:
    app.clear_state()
    assert list(app.state().items()) == []


def test_memory_storage_keeps_the_promises_of_storage() -> None:
    storage = MemoryStorage()
    storage.put("a/1", b"x")
    with pytest.raises(Exists):
        storage.put("a/1", b"y")
    with pytest.raises(Missing):
        storage.get("a/2")
    storage.put("a/0", b"")
    storage.put("b/0", b"")
    assert (storage.get("a/1"), storage.names("a/")) == (b"x", ["a/0", "a/1"])
    storage.delete("a/1")
    storage.delete("a/1")
    assert storage.names("a/") == ["a/0"]


@pytest.mark.parametrize("folder", [paths.COMMITS, paths.SNAPSHOTS, paths.DELIVERED])
def test_a_file_that_is_not_ours_among_ours_is_an_error_that_names_it(folder: str) -> None:
    storage = MemoryStorage()
    storage.put(f"{folder}notes.txt", b"mine")
    with pytest.raises(Damaged, match=f"{folder}notes.txt is not a file of Holdfast"):
        paths.version_of(storage.names(folder)[-1])
    if folder == paths.COMMITS:
        with pytest.raises(Damaged, match="is in its way"):
            Chain(storage).head()
