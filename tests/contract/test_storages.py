"""The contract of `Storage` in `holdfast/log/storage.py`, for a local disk, memory and a real S3 server."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from gateway import Gateway

from holdfast import vault
from holdfast.log.location import storage_at
from holdfast.log.object_storage import PART
from holdfast.log.storage import Exists, Missing, Storage
from holdfast.pickling import dumps, loads
from holdfast.testing.memory import MemoryStorage

LARGE = bytes(random.Random(1).randbytes(1 << 20)) * ((2 * PART >> 20) + 1) + b"the end"


@pytest.fixture(params=["local", "memory", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    if request.param == "local":
        yield storage_at(tmp_path / "deep" / "checkpoint")
    elif request.param == "memory":
        yield MemoryStorage()
    else:
        gateway: Gateway = request.getfixturevalue("gateway")
        yield storage_at(f"s3://{gateway.bucket()}/deep/checkpoint", gateway.options())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "file"


def test_what_was_put_is_there_under_its_name(storage: Storage) -> None:
    storage.put("commits/1", b"one")
    storage.put("commits/2", b"")
    assert (storage.get("commits/1"), storage.get("commits/2")) == (b"one", b"")


def test_a_name_is_written_once(storage: Storage) -> None:
    storage.put("a/x", b"1")
    with pytest.raises(Exists):
        storage.put("a/x", b"2")
    assert storage.get("a/x") == b"1"


def test_what_is_not_there_is_missing(storage: Storage, file: Path) -> None:
    storage.put("a/y", b"1")
    for name in ("a/x", "b/x"):
        with pytest.raises(Missing):
            storage.get(name)
        with pytest.raises(Missing):
            storage.get_file(name, file)


def test_what_was_deleted_is_missing_and_its_name_is_free(storage: Storage) -> None:
    storage.put("a/x", b"1")
    storage.delete("a/x")
    storage.delete("a/x")
    storage.delete("b/never")
    with pytest.raises(Missing):
        storage.get("a/x")
    storage.put("a/x", b"2")
    assert storage.get("a/x") == b"2"


def test_many_are_deleted_together_and_nothing_else(storage: Storage) -> None:
    names = [f"a/{number:05}" for number in range(1100)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: storage.put(name, b""), names))
    storage.delete_all([])
    storage.delete_all([*names[1:], "a/never", "b/never"])
    assert storage.names("a/") == names[:1]
    storage.delete_all(names[:3])
    assert storage.names("a/") == []


def test_a_listing_has_what_is_right_below_a_prefix_in_order_and_with_its_length(storage: Storage) -> None:
    for name in ("a/2", "a/1", "a/10", "a/deeper/3", "ab/4", "b/5"):
        storage.put(name, b"x" * len(name))
    assert storage.names("a/") == ["a/1", "a/10", "a/2"]
    assert storage.sizes("a/") == {"a/1": 3, "a/10": 4, "a/2": 3}
    assert storage.names("a/deeper/") == ["a/deeper/3"]
    assert storage.names("none/") == []
    assert storage.sizes("none/") == {}


def test_a_listing_may_be_longer_than_a_page_of_it(storage: Storage) -> None:
    names = [f"a/{number:05}" for number in range(1100)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: storage.put(name, b""), names))
    assert storage.names("a/") == names


@pytest.mark.parametrize("content", [b"", b"small", LARGE], ids=["empty", "small", "large"])
def test_a_file_goes_in_and_comes_out_as_it_is(storage: Storage, file: Path, content: bytes) -> None:
    file.write_bytes(content)
    storage.put_file("a/x", file)
    out = file.with_name("out")
    out.write_bytes(b"what was there before, and longer" * 10)
    storage.get_file("a/x", out)
    assert out.read_bytes() == content
    assert storage.get("a/x") == content
    assert storage.sizes("a/") == {"a/x": len(content)}


@pytest.mark.parametrize("content", [b"small", LARGE], ids=["small", "large"])
def test_a_file_does_not_take_a_name_that_is_taken(storage: Storage, file: Path, content: bytes) -> None:
    storage.put("a/x", b"1")
    file.write_bytes(content)
    with pytest.raises(Exists):
        storage.put_file("a/x", file)
    assert storage.get("a/x") == b"1"


def test_of_many_threads_that_put_one_name_exactly_one_succeeds(storage: Storage) -> None:
    def put(number: int) -> bool:
        try:
            storage.put("a/x", b"%d" % number)
        except Exists:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        won = [number for number, succeeded in enumerate(pool.map(put, range(40))) if succeeded]
    assert [storage.get("a/x")] == [b"%d" % number for number in won]


def test_it_travels_to_another_process(storage: Storage) -> None:
    if isinstance(storage, MemoryStorage):
        pytest.skip("a dict stays where it is")
    loads(dumps(vault.Carried(storage))).thing.put("a/x", b"1")
    assert storage.get("a/x") == b"1"
