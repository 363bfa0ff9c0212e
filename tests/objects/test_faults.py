"""What an object store may do to a request, and what becomes of a commit then."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from proxy import PACE, Proxy

from holdfast import State
from holdfast.errors import Fenced, StorageFailed
from holdfast.log import object_storage, paths
from holdfast.log.files import read_delta, write_delta
from holdfast.log.location import storage_at
from holdfast.log.manifest import Chain, ManifestId, new_id
from holdfast.log.object_storage import PART
from holdfast.log.storage import Exists, Storage
from holdfast.testing import Harness

FAULTS = [("unavailable", 7), ("conflict", 2), ("timeout", 1), ("late", 1), ("lost", 1), ("lost", 5), ("silent", 1)]
KINDS = ["unavailable", "late", "lost", "silent", "cut"]


@pytest.fixture(autouse=True)
def _a_request_is_given_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_storage, "REQUEST_S", 1.5)


@pytest.fixture
def storage(proxy: Proxy, bucket: str) -> Storage:
    return storage_at(f"s3://{bucket}/orders", proxy.options())


def total(value: int, state: State) -> int:
    state.set("total", state.get("total", 0) + value)
    return int(state.get("total"))


def harness_on(storage: Storage) -> Harness:
    harness = Harness(lambda sdf: sdf.apply(total, stateful=True))
    harness.storage = storage  # type: ignore[assignment]
    return harness


def commits_of(storage: Storage) -> list[str]:
    return [name.removeprefix("commits/").lstrip("0") for name in storage.names("commits/")]


# -- commits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["commits", "deltas", "outbox", "delivered"])
@pytest.mark.parametrize(("kind", "times"), FAULTS)
def test_a_batch_survives_what_happens_to_its_puts(
    proxy: Proxy, storage: Storage, kind: str, times: int, part: str
) -> None:
    harness = harness_on(storage)
    harness.restart()
    harness.feed(("ann", 1), ("ann", 2))
    proxy.inject(kind, "PUT", f"/{part}/", times)
    harness.run()
    assert proxy.happened == {kind: times}
    assert harness.values == [1, 3]
    assert commits_of(storage) == [".json", "1.json"]
    harness.restart(lose_local=True)
    assert harness.state().get("ann") == {"total": 3}


@pytest.mark.parametrize("kind", KINDS)
def test_a_restart_survives_what_happens_to_its_reads(proxy: Proxy, storage: Storage, kind: str) -> None:
    harness = harness_on(storage)
    harness.feed(("ann", 1), ("ann", 2))
    harness.run()
    for part in ("/commits/", "/deltas/", "list-type"):
        proxy.inject(kind, "GET", part)
    harness.restart(lose_local=True)
    harness.feed(("ann", 3))
    harness.run()
    assert proxy.happened == {kind: 3}
    assert harness.values == [1, 3, 6]


def test_our_own_manifest_is_known_again_after_its_answer_was_lost(proxy: Proxy, storage: Storage) -> None:
    harness = harness_on(storage)
    harness.run()
    chain = Chain(storage)
    head = chain.head()
    assert head is not None
    following = replace(head, version=head.version + 1, id=ManifestId(new_id()), parent=head.id)
    proxy.inject("lost", "PUT", "/commits/")
    assert chain.commit(following) == following
    assert proxy.happened == {"lost": 1}


def test_another_s_manifest_is_not_taken_for_ours(proxy: Proxy, storage: Storage) -> None:
    harness = harness_on(storage)
    harness.run()
    chain = Chain(storage)
    head = chain.head()
    assert head is not None
    ours, theirs = (
        replace(head, version=head.version + 1, id=ManifestId(new_id()), parent=head.id, holder=holder)
        for holder in ("ours", "theirs")
    )
    chain.commit(theirs)
    proxy.inject("lost", "PUT", "/commits/")
    with pytest.raises(Fenced, match="was committed by theirs"):
        chain.commit(ours)
    assert proxy.happened == {"lost": 1}


def test_batches_are_exact_whatever_happens_to_any_request(
    proxy: Proxy, storage: Storage, choice: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_chance(method: str, path: str) -> str | None:
        kind = choice.choice(["unavailable", "conflict", "lost", "cut"]) if choice.random() < 0.25 else None
        if kind is None or (kind == "conflict" and method != "PUT") or (kind == "cut" and method != "GET"):
            return None
        proxy.happened[kind] += 1
        return kind

    monkeypatch.setattr(proxy, "fault", by_chance)
    harness = harness_on(storage)
    expected: list[int] = []
    totals: dict[str, int] = {}
    for _ in range(20):
        for _ in range(choice.randrange(4)):
            user, amount = choice.choice("abc"), choice.randrange(100)
            harness.feed((user, amount))
            totals[user] = totals.get(user, 0) + amount
            expected.append(totals[user])
        harness.run()
        if choice.random() < 0.3:
            harness.restart(lose_local=choice.random() < 0.5)
    assert harness.values == expected
    assert {user: document["total"] for user, document in harness.state().items()} == totals
    assert set(proxy.happened) == {"unavailable", "conflict", "lost", "cut"}, "a fault never happened"


# -- the storage itself ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "times"), FAULTS)
def test_what_a_task_puts_is_there_once_and_whole(proxy: Proxy, storage: Storage, kind: str, times: int) -> None:
    proxy.inject(kind, "PUT", "/deltas/", times)
    ref = write_delta(storage, "deltas/1", [b"a", b"b"], [b"1", None])
    assert list(read_delta(storage, ref)) == [(b"a", b"1"), (b"b", None)]
    assert proxy.happened == {kind: times}


@pytest.mark.parametrize("kind", ["unavailable", "lost", "silent"])
def test_a_name_that_is_another_s_is_taken_however_often_it_is_asked_for(
    proxy: Proxy, storage: Storage, kind: str
) -> None:
    storage.put("a/x", b"theirs")
    proxy.inject(kind, "PUT", "/a/x")
    with pytest.raises(Exists):
        storage.put("a/x", b"ours")
    assert storage.get("a/x") == b"theirs"
    assert proxy.happened == {kind: 1}


def test_a_put_that_took_longer_than_we_wait_is_sent_once_more(
    proxy: Proxy, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_storage, "PATIENCE_S", 0.5)
    proxy.inject("silent", "PUT", "/a/x")
    storage.put("a/x", b"1")
    assert storage.get("a/x") == b"1"
    assert proxy.happened == {"silent": 1}


@pytest.mark.parametrize("kind", ["unavailable", "lost"])
def test_a_large_file_survives_what_happens_to_its_parts(
    proxy: Proxy, storage: Storage, kind: str, tmp_path: Path
) -> None:
    content = random.Random(2).randbytes(2 * PART + 5)
    file = tmp_path / "file"
    file.write_bytes(content)
    for method, part in (("POST", "?uploads"), ("PUT", "partNumber=2"), ("POST", "?uploadId")):
        proxy.inject(kind, method, part)
    storage.put_file("a/x", file)
    proxy.inject("cut", "GET", "/a/x")
    storage.get_file("a/x", tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == content
    assert proxy.happened == {kind: 3, "cut": 1}


@pytest.mark.parametrize("call", ["get", "get_file"])
def test_what_flows_slowly_and_steadily_arrives_however_long_it_takes(
    proxy: Proxy, bucket: str, tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_storage, "PATIENCE_S", 0.5)
    storage = storage_at(f"s3://{bucket}/orders", proxy.options())
    content = random.Random(3).randbytes(int(2.5 * object_storage.REQUEST_S * PACE))
    file = tmp_path / "file"
    file.write_bytes(content)
    storage.put_file("a/x", file)
    proxy.inject("slow", "GET", "/a/x", 100)
    if call == "get":
        assert storage.get("a/x") == content
    else:
        storage.get_file("a/x", tmp_path / "out")
        assert (tmp_path / "out").read_bytes() == content
    assert proxy.happened["slow"] > 1, "it did not take longer than one request may"


@pytest.mark.parametrize("parts", [1, 2])
def test_what_is_sent_slowly_and_steadily_is_put(proxy: Proxy, storage: Storage, parts: int) -> None:
    content = random.Random(5).randbytes(int(1.5 * object_storage.REQUEST_S * PACE) + (parts - 1) * PART)
    proxy.inject("slow", "PUT", "/deltas/", 100)
    storage.put("deltas/1", content)
    assert storage.get("deltas/1") == content
    assert proxy.happened == {"slow": parts}


def test_a_large_delta_goes_in_parts_and_a_large_commit_does_not(proxy: Proxy, storage: Storage, bucket: str) -> None:
    """Parts have no condition, and two writers may want the same version."""
    content = random.Random(6).randbytes(PART + 1)
    proxy.inject("unavailable", "POST", "uploads")
    storage.put(paths.delta(1, 0, new_id()), content)
    assert proxy.happened == {"unavailable": 1}
    proxy.inject("unavailable", "POST", "uploads")
    storage.put(paths.manifest(1), content)
    with pytest.raises(Exists):  # the server answers before it has all of it, which the proxy does not bear
        storage_at(f"s3://{bucket}/orders", proxy.gateway.options()).put(paths.manifest(1), content[::-1])
    assert proxy.happened == {"unavailable": 1}


@pytest.mark.parametrize("kind", ["unavailable", "lost"])
def test_what_is_to_be_deleted_is_gone(proxy: Proxy, storage: Storage, kind: str) -> None:
    storage.put("a/x", b"1")
    proxy.inject(kind, "POST", "delete")
    storage.delete("a/x")
    assert storage.names("a/") == []
    assert proxy.happened == {kind: 1}


def test_many_are_deleted_by_few_requests(proxy: Proxy, storage: Storage) -> None:
    names = [f"a/{number}" for number in range(20)]
    for name in names:
        storage.put(name, b"")
    for kind in ("unavailable", "lost", "late"):  # the requests after the third one would be seen as late, too
        proxy.inject(kind, "POST", "delete", 1 if kind != "late" else 100)
    storage.delete_all(names)
    assert storage.names("a/") == []
    assert proxy.happened == {"unavailable": 1, "lost": 1, "late": 1}


def test_where_a_store_stops_at_a_name_that_is_not_there_the_others_go_all_the_same(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Azure and Google do."""

    def stops(store: Any, names: list[str]) -> None:
        raise FileNotFoundError

    storage.put("a/x", b"1")
    monkeypatch.setattr(object_storage, "_delete", stops)
    storage.delete_all(["a/never", "a/x"])
    assert storage.names("a/") == []


@pytest.mark.parametrize(
    "call",
    [
        lambda storage: storage.put("a/x", b"1"),
        lambda storage: storage.get("a/x"),
        lambda storage: storage.names("a/"),
        lambda storage: storage.delete("a/x"),
    ],
    ids=["put", "get", "names", "delete"],
)
def test_a_store_that_stays_away_is_an_error_after_a_while(
    proxy: Proxy, storage: Storage, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_storage, "PATIENCE_S", 1.0)
    for method in ("PUT", "GET", "POST"):
        proxy.inject("unavailable", method, "", 1000)
    with pytest.raises(StorageFailed, match=r"failed \(503 SlowDown\); look at the store"):
        call(storage)
    assert proxy.happened["unavailable"] > 4
