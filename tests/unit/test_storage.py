"""LocalStorage: created whole, once and durably, or not at all."""

from __future__ import annotations

import errno
import os
import pickle
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from holdfast.errors import HoldfastError, StorageFailed, StorageFull, StorageReadOnly
from holdfast.log.storage import LEFT_S, Exists, LocalStorage, Missing


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "deep" / "checkpoint")


def everything_below(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


def test_what_was_put_is_there_under_its_name(storage: LocalStorage) -> None:
    storage.put("commits/2", b"two")
    storage.put("commits/1", b"")
    storage.put("deltas/1", b"delta")
    assert (storage.get("commits/2"), storage.get("commits/1")) == (b"two", b"")
    assert storage.names("commits/") == ["commits/1", "commits/2"]
    assert everything_below(storage.root) == {"commits/1", "commits/2", "deltas/1"}


def test_a_name_is_written_once(storage: LocalStorage) -> None:
    storage.put("a/x", b"first")
    with pytest.raises(Exists):
        storage.put("a/x", b"second")
    assert storage.get("a/x") == b"first"
    assert everything_below(storage.root) == {"a/x"}


def test_what_is_not_there_is_missing(storage: LocalStorage) -> None:
    assert storage.names("commits/") == []
    with pytest.raises(Missing):
        storage.get("commits/1")
    storage.delete("commits/1")


def test_what_a_killed_put_has_left_is_swept_after_a_day_by_the_clock_of_the_file_system(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.put("a/x", b"1")
    folder = storage.root / "a"
    old, young, foreign = (folder / name for name in (f".{'0' * 16}.tmp", f".{'1' * 16}.tmp", ".metadata.crc"))
    for path in (old, young, foreign):
        path.write_bytes(b"half")
    long_ago = young.stat().st_mtime - LEFT_S - 60
    for path in (old, foreign, folder / "x"):
        os.utime(path, (long_ago, long_ago))
    monkeypatch.setattr("time.time", lambda: 0.0)
    assert storage.sweep("a/") == [4]
    assert everything_below(storage.root) == {"a/x", f"a/{young.name}", f"a/{foreign.name}"}
    assert storage.sweep("b/") == []


def test_a_put_that_was_swept_fails_and_leaves_nothing(storage: LocalStorage) -> None:
    def sleep_too_long(file: Any) -> None:
        os.utime(file.fileno(), (0, 0))
        storage.sweep("a/")

    with pytest.raises(StorageFailed):
        storage._create("a/x", sleep_too_long)
    assert everything_below(storage.root) == set()


def test_what_was_deleted_is_missing(storage: LocalStorage) -> None:
    storage.put("a/x", b"1")
    storage.delete("a/x")
    with pytest.raises(Missing):
        storage.get("a/x")
    storage.put("a/x", b"2")
    assert storage.get("a/x") == b"2"


def test_a_file_on_its_way_has_no_name_yet(storage: LocalStorage) -> None:
    storage.put("a/x", b"1")
    (storage.root / "a" / ".0011223344556677.tmp").write_bytes(b"half")
    assert storage.names("a/") == ["a/x"]


def test_it_travels_to_another_process(storage: LocalStorage) -> None:
    storage.put("a/x", b"1")
    assert pickle.loads(pickle.dumps(storage)).get("a/x") == b"1"


def test_a_file_goes_in_and_comes_out_as_it_is(storage: LocalStorage, tmp_path: Path) -> None:
    given, got = tmp_path / "given", tmp_path / "got"
    given.write_bytes(b"0123456789" * 300_000)
    storage.put_file("files/1", given)
    with pytest.raises(Exists):
        storage.put_file("files/1", given)
    storage.get_file("files/1", got)
    assert got.read_bytes() == given.read_bytes()
    assert storage.sizes("files/") == {"files/1": 3_000_000}
    with pytest.raises(Missing):
        storage.get_file("files/2", got)


# -- two at once -------------------------------------------------------------------------------------------------


def test_of_many_threads_that_put_one_name_exactly_one_succeeds(storage: LocalStorage) -> None:
    barrier = threading.Barrier(4)
    won: list[tuple[int, int]] = []

    def race(who: int) -> None:
        for name in range(25):
            barrier.wait()
            try:
                storage.put(f"a/{name}", b"%d" % who * 1000)
                won.append((name, who))
            except Exists:
                pass

    threads = [threading.Thread(target=race, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [name for name, _ in sorted(won)] == list(range(25))
    for name, who in won:
        assert storage.get(f"a/{name}") == b"%d" % who * 1000


def in_child(work: Callable[[], None]) -> int:
    """Run `work` in a process of its own that is forked from this one."""
    child = os.fork()
    if child:
        return child
    try:
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def test_of_two_processes_that_put_one_name_exactly_one_succeeds(storage: LocalStorage, tmp_path: Path) -> None:
    def race(who: str) -> None:
        for name in range(100):
            try:
                storage.put(f"a/{name}", who.encode() * 1000)
                (tmp_path / f"{who}-{name}").touch()
            except Exists:
                pass

    children = [in_child(lambda: race("left")), in_child(lambda: race("right"))]
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    for name in range(100):
        (winner,) = [who for who in ("left", "right") if (tmp_path / f"{who}-{name}").exists()]
        assert storage.get(f"a/{name}") == winner.encode() * 1000
    assert len(everything_below(storage.root)) == 100


# -- what a disk may say -----------------------------------------------------------------------------------------

codes = pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.ENOSPC, StorageFull),
        (errno.EDQUOT, StorageFull),
        (errno.EROFS, StorageReadOnly),
        (errno.EACCES, StorageReadOnly),
        (errno.EIO, StorageFailed),
    ],
)


def failing_with(code: int) -> Callable[..., NoReturn]:
    def fail(*_: Any, **__: Any) -> NoReturn:
        raise OSError(code, os.strerror(code))

    return fail


@codes
@pytest.mark.parametrize("call", ["open", "fsync", "link"])
def test_what_the_disk_says_becomes_an_error_that_says_what_to_do(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, call: str, code: int, kind: type[HoldfastError]
) -> None:
    storage.put("a/before", b"1")
    with monkeypatch.context() as broken:
        broken.setattr(os, call, failing_with(code))
        with pytest.raises(kind, match="start again") as caught:
            storage.put("a/x", b"data")
    assert caught.value.errno == code  # type: ignore[attr-defined]
    assert caught.value.path == str(storage.root / "a" / "x")  # type: ignore[attr-defined]
    assert everything_below(storage.root) == {"a/before"}
    storage.put("a/x", b"data")
    assert storage.get("a/x") == b"data"


@codes
def test_reading_listing_and_deleting_name_the_disk_too(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[HoldfastError]
) -> None:
    storage.put("a/x", b"1")
    with monkeypatch.context() as broken:
        broken.setattr(Path, "read_bytes", failing_with(code))
        broken.setattr(os, "scandir", failing_with(code))
        broken.setattr(Path, "unlink", failing_with(code))
        for act in (lambda: storage.get("a/x"), lambda: storage.names("a/"), lambda: storage.delete("a/x")):
            with pytest.raises(kind):
                act()


def test_a_directory_that_cannot_be_made_is_an_error_of_the_disk(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageFailed, match="Not a directory"):
        LocalStorage(tmp_path / "file").put("a/x", b"1")


def test_a_disk_that_is_full_in_the_middle_leaves_nothing_behind(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.put("a/before", b"1")

    def work() -> None:
        import resource
        import signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        with pytest.raises(StorageFull):
            storage.put("a/large", b"x" * 100_000)

    assert os.waitpid(in_child(work), 0)[1] == 0
    assert everything_below(tmp_path) == {"a/before"}


# -- durable before it counts ------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(fsync, path) and (link, path), in order."""
    made: list[tuple[str, str]] = []
    fsync, link = os.fsync, os.link

    def noted_fsync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        size = path.stat().st_size if path.is_file() else None
        made.append(("fsync", str(path) if size is None else f"{size} bytes"))
        fsync(descriptor)

    def noted_link(source: Any, target: Any) -> None:
        made.append(("link", str(target)))
        link(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "link", noted_link)
    return made


def test_the_bytes_are_synced_before_the_name_appears_and_the_directory_after_it(
    storage: LocalStorage, calls: list[tuple[str, str]]
) -> None:
    (storage.root / "a").mkdir(parents=True)
    storage.put("a/x", b"12345")
    assert calls == [("fsync", "5 bytes"), ("link", str(storage.root / "a/x")), ("fsync", str(storage.root / "a"))]


def test_a_new_directory_is_synced_into_its_parent_before_anything_is_in_it(
    tmp_path: Path, calls: list[tuple[str, str]]
) -> None:
    LocalStorage(tmp_path / "one" / "two").put("a/x", b"1")
    assert calls == [
        ("fsync", str(tmp_path)),
        ("fsync", str(tmp_path / "one")),
        ("fsync", str(tmp_path / "one/two")),
        ("fsync", "1 bytes"),
        ("link", str(tmp_path / "one/two/a/x")),
        ("fsync", str(tmp_path / "one/two/a")),
    ]


def test_a_name_that_is_taken_is_found_out_without_losing_the_first(
    storage: LocalStorage, calls: list[tuple[str, str]]
) -> None:
    storage.put("a/x", b"1")
    calls.clear()
    with pytest.raises(Exists):
        storage.put("a/x", b"22")
    assert calls == [("fsync", "2 bytes"), ("link", str(storage.root / "a/x"))]
