"""The contract of `holdfast/stores/base.py`, for every store that lies on this host; then what only a disk can do.

The model is a dict and a mark. Kills are real: a child process is SIGKILLed while it applies versions.
"""

from __future__ import annotations

import inspect
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import pytest
from damage import rotted
from holding import contents, mark
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rocksdict import DbClosedError

from holdfast.errors import Damaged, StorageFailed, StorageFull, StorageReadOnly
from holdfast.stores.base import EMPTY, Change, DamagedStore, Mark, Store, WrongVersion
from holdfast.stores.memory import MemoryStore
from holdfast.stores.rocksdb import MAX_RUNS, RocksDBStore, named_errors

SEED = int(os.environ.get("HOLDFAST_SEED", random.SystemRandom().randrange(1 << 32)))

Model = dict[bytes, bytes]


@pytest.fixture
def chance() -> random.Random:
    print(f"HOLDFAST_SEED={SEED}")  # pytest shows it when the test fails
    return random.Random(SEED)


class Kind(Protocol):
    """How the contract suite makes a store, opens a checkpoint, and lets a store rest between two batches."""

    def new(self, path: Path) -> Store: ...
    def open(self, path: Path) -> Store: ...
    def rest(self, store: Store) -> Store: ...


class Memory:
    def new(self, path: Path) -> Store:
        return MemoryStore()

    def open(self, path: Path) -> Store:
        return MemoryStore.open(path)

    def rest(self, store: Store) -> Store:
        return store


class RocksDB:
    def new(self, path: Path) -> Store:
        return RocksDBStore(path)

    open = new

    def rest(self, store: Store) -> Store:
        assert isinstance(store, RocksDBStore)
        store.close()
        return RocksDBStore(store.path)


@pytest.fixture(params=[Memory(), RocksDB()], ids=["memory", "rocksdb"])
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


def apply_to(model: Model, changes: list[Change]) -> None:
    for key, value in changes:
        if value is None:
            model.pop(key, None)
        else:
            model[key] = value


# -- one contract ----------------------------------------------------------------------------------------------------

KEYS = st.builds(lambda letter, rest: letter + rest, st.sampled_from([b"d", b"t"]), st.binary(max_size=3))
DELTAS = st.lists(st.tuples(KEYS, st.none() | st.binary(max_size=4)), max_size=12)
STEPS = st.lists(
    st.one_of(
        DELTAS.map(lambda changes: ("apply", changes)),
        st.just(("again", None)),
        st.just(("wrong", None)),
        st.just(("rest", None)),
        st.just(("wipe", None)),
        st.tuples(st.just("scan"), st.tuples(KEYS, st.none() | KEYS)),
        st.just(("checkpoint", None)),
    ),
    max_size=14,
)


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(steps=STEPS, asked=st.lists(KEYS, max_size=6))
def test_a_store_behaves_like_a_dict_with_a_mark(
    kind: Kind, tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, object]], asked: list[bytes]
) -> None:
    home = tmp_path_factory.mktemp("store")
    store = kind.new(home / "store")
    model: Model = {}
    version = -1
    last: list[Change] = []
    for n, (what, detail) in enumerate(steps):
        match what:
            case "apply":
                last = detail  # type: ignore[assignment]
                store.apply(last, mark(version), mark(version + 1))
                apply_to(model, last)
                version += 1
            case "again" if version >= 0:
                store.apply([(b"dnever", b"seen")], mark(version - 1), mark(version))
            case "wrong":
                with pytest.raises(WrongVersion):
                    store.apply([(b"dnever", b"seen")], Mark(version, "another"), mark(version + 1))
            case "rest":
                store = kind.rest(store)
            case "wipe":
                store.wipe()
                model, version = {}, -1
            case "scan":
                start, end = detail  # type: ignore[misc]
                found = list(store.scan(start, end))
                assert found == sorted((k, v) for k, v in model.items() if start <= k and (end is None or k < end))
            case "checkpoint":
                store.checkpoint(home / f"checkpoint-{n}")
                copy = kind.open(home / f"checkpoint-{n}")
                assert (copy.mark(), contents(copy)) == (mark(version), model)
                copy.close()
        assert store.mark() == mark(version)
        assert store.get_many(asked) == [model.get(key) for key in asked]
    assert list(store.scan(b"", None)) == sorted(model.items())
    store.close()
    shutil.rmtree(home)


def test_many_keys_come_back_in_the_order_they_were_asked_for(
    kind: Kind, tmp_path: Path, chance: random.Random
) -> None:
    store = kind.new(tmp_path / "store")
    model = {b"d%d" % n: b"%d" % n for n in range(5_000)}
    store.apply(model.items(), EMPTY, mark(0))
    store = kind.rest(store)
    asked = [b"d%d" % chance.randrange(6_000) for _ in range(3_000)]
    assert store.get_many(asked) == [model.get(key) for key in asked]
    store.close()


def test_a_copy_is_not_changed_by_what_comes_after_it_and_never_overwrites(kind: Kind, tmp_path: Path) -> None:
    store = kind.new(tmp_path / "store")
    store.apply([(b"da", b"1")], EMPTY, mark(0))
    store.checkpoint(tmp_path / "copy")
    store.apply([(b"da", b"2")], mark(0), mark(1))
    with pytest.raises(FileExistsError):
        store.checkpoint(tmp_path / "copy")
    copy = kind.open(tmp_path / "copy")
    assert (copy.mark(), contents(copy)) == (mark(0), {b"da": b"1"})
    copy.close()
    store.close()
    store.close()


def test_a_delta_that_fails_half_way_changes_nothing(kind: Kind, tmp_path: Path) -> None:
    def broken() -> Iterator[Change]:
        yield b"da", b"1"
        raise RuntimeError("the delta file ended")

    store = kind.new(tmp_path / "store")
    with pytest.raises(RuntimeError):
        store.apply(broken(), EMPTY, mark(0))
    assert (store.mark(), contents(store)) == (EMPTY, {})
    store.close()


def test_a_store_becomes_what_was_made_ready_beside_it(kind: Kind, tmp_path: Path) -> None:
    store, other = kind.new(tmp_path / "store"), kind.new(tmp_path / "other")
    store.apply([(b"da", b"old")], EMPTY, mark(0))
    other.apply([(b"db", b"1")], EMPTY, mark(0))
    other.apply([(b"da", b"2")], mark(0), mark(1))
    staging = store.staging()
    staging.rmdir()
    other.checkpoint(staging)
    with pytest.raises(Damaged):
        store.replace(Mark(1, "another"))
    assert (store.mark(), contents(store)) == (mark(0), {b"da": b"old"})
    store.replace(mark(1))
    store.apply([(b"dc", b"3")], mark(1), mark(2))
    store = kind.rest(store)
    assert (store.mark(), contents(store)) == (mark(2), {b"da": b"2", b"db": b"1", b"dc": b"3"})
    assert not list(store.staging().iterdir())
    store.close()
    other.close()


def test_a_store_does_not_become_half_a_checkpoint(kind: Kind, tmp_path: Path) -> None:
    store = kind.new(tmp_path / "store")
    store.apply([(b"da", b"1")], EMPTY, mark(0))
    staging = store.staging()
    staging.rmdir()
    store.checkpoint(staging)
    largest = max(staging.iterdir(), key=lambda path: path.stat().st_size)
    for path in staging.iterdir():
        if path.suffix in (".sst", ".msgpack") or path == largest:
            path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(Damaged):
        store.replace(mark(0))
    assert (store.mark(), contents(store)) == (mark(0), {b"da": b"1"})
    store.close()


def test_a_store_does_not_become_a_checkpoint_with_a_rotten_block(tmp_path: Path) -> None:
    store = RocksDBStore(tmp_path / "store")
    store.apply([(b"d%04d" % n, b"value-%d" % n) for n in range(2_000)], EMPTY, mark(0))
    staging = store.staging()
    staging.rmdir()
    store.checkpoint(staging)
    store.wipe()
    (table,) = staging.glob("*.sst")
    rotted(table, table.read_bytes().index(b"value-1000"))
    with pytest.raises(DamagedStore, match=f"damaged blocks in {table.name}"):
        store.replace(mark(0))
    assert (store.mark(), contents(store)) == (EMPTY, {})
    store.close()
    assert not list(tmp_path.glob("*.check"))


def test_staging_can_be_given_up(kind: Kind, tmp_path: Path) -> None:
    store = kind.new(tmp_path / "store")
    store.unstage()
    (store.staging() / "file").touch()
    store.unstage()
    assert not list(store.staging().iterdir())
    store.close()


def test_a_broken_copy_in_memory_form_is_damage(tmp_path: Path) -> None:
    store = MemoryStore()
    store.apply([(b"da", b"1")], EMPTY, mark(0))
    store.checkpoint(tmp_path / "copy")
    file = next((tmp_path / "copy").iterdir())
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(Damaged):
        MemoryStore.open(tmp_path / "copy")


# -- kills -------------------------------------------------------------------------------------------------------------

KILLS = 7


def delta_of(version: int) -> list[Change]:
    """What version `version` changes: some thousand keys, always the same ones."""
    chance = random.Random(version)
    return [
        (b"d%d" % chance.randrange(3_000), None if chance.random() < 0.2 else b"%d" % version) for _ in range(2_000)
    ]


def apply_until_killed(path: Path) -> None:
    """The child's work: open, a few versions, close, say so; for ever."""
    while True:
        store = RocksDBStore(path)
        for _ in range(random.randrange(1, 5)):
            version = store.mark().version
            store.apply(delta_of(version + 1), mark(version), mark(version + 1))
        version = store.mark().version
        store.close()
        print(version, flush=True)


CHILD = "\n".join(
    [
        "from __future__ import annotations",
        "import random, sys",
        "from pathlib import Path",
        "from holdfast.stores.base import EMPTY, Mark",
        "from holdfast.stores.rocksdb import RocksDBStore",
        *map(inspect.getsource, (mark, delta_of, apply_until_killed)),
        "apply_until_killed(Path(sys.argv[1]))",
    ]
)
"""A program of its own, since importing this file takes longer than most of the lives it is given."""


def test_a_killed_store_comes_back_whole_at_a_version_that_was_applied(tmp_path: Path, chance: random.Random) -> None:
    path = tmp_path / "store"
    models: list[Model] = [{}]  # models[v + 1] is version v
    kills = between = 0
    for n in range(KILLS):
        with subprocess.Popen([sys.executable, "-c", CHILD, str(path)], stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            said = [child.stdout.readline()] if n % 3 else []  # every third may be killed before it gets anywhere
            time.sleep(chance.uniform(0.0, 0.25))
            child.kill()
            said += child.stdout.readlines()
        kills += child.returncode == -signal.SIGKILL
        store = RocksDBStore(path)
        held = store.mark()
        while len(models) <= held.version + 1:
            models.append(dict(models[-1]))
            apply_to(models[-1], delta_of(len(models) - 2))
        assert held == mark(held.version)
        assert contents(store) == models[held.version + 1]
        closed = int(said[-1]) if said else -1
        assert held.version >= closed, "what was closed was lost"
        between += held.version == closed
        store.close()
    assert kills == KILLS, "a crash test that did not crash proves nothing"
    assert len(models) > 10, "the children hardly ran"
    print(f"{len(models) - 1} versions, {between} of {kills} kills left exactly what was closed last")


# -- damage --------------------------------------------------------------------------------------------------------


def built(path: Path, versions: int = 4, keys: int = 4_000) -> list[Model]:
    """A store of several tables, closed after each version; the contents at every version."""
    models: list[Model] = []
    for version in range(versions):
        model = dict(models[-1]) if models else {}
        changes: list[Change] = [(b"d%05d" % n, b"%d-%d" % (version, n)) for n in range(version, keys, version + 1)]
        apply_to(model, changes)
        models.append(model)
        store = RocksDBStore(path)
        store.apply(changes, mark(version - 1), mark(version))
        store.close()
    return models


def truncate(file: Path, chance: random.Random) -> None:
    os.truncate(file, chance.randrange(file.stat().st_size))


def flip(file: Path, chance: random.Random) -> None:
    content = bytearray(file.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    file.write_bytes(content)


def delete(file: Path, chance: random.Random) -> None:
    file.unlink()


@pytest.mark.parametrize("harm", [truncate, flip, delete])
@pytest.mark.parametrize("victim", ["*.sst", "CURRENT", "MANIFEST-*"])
def test_damage_is_named_and_never_read_as_a_value(
    tmp_path: Path, chance: random.Random, victim: str, harm: Callable[[Path, random.Random], None]
) -> None:
    models = built(tmp_path / "whole")
    damage: list[Damaged] = []
    for n in range(12 if harm is not delete else 3):
        path = tmp_path / f"store-{n}"
        shutil.copytree(tmp_path / "whole", path)
        file = chance.choice(sorted(path.glob(victim)))
        harm(file, chance)
        damage += [found] if (found := damage_in(path, models)) else []
    assert damage, "nothing that was damaged was noticed"
    assert all(found.path.parent == tmp_path for found in damage)  # type: ignore[attr-defined]


def damage_in(path: Path, models: list[Model]) -> Damaged | None:
    """What opening and reading the store says; if nothing, then it holds some version, whole, by both ways to read."""
    try:
        store = RocksDBStore(path)
    except Damaged as damage:
        return damage
    try:
        held = store.mark()
        expected = models[held.version] if held.version >= 0 else {}
        assert list(store.scan(b"", None)) == sorted(expected.items())
        asked = sorted(models[-1])
        assert store.get_many(asked) == [expected.get(key) for key in asked]
    except Damaged as damage:
        store.wipe()
        assert (store.mark(), contents(store)) == (EMPTY, {})
        return damage
    finally:
        store.close()
    return None


@pytest.mark.parametrize(
    ("text", "kind_of_error"),
    [
        ("IO error: No space left on device: While appending to file: /x/000001.sst", StorageFull),
        ("IO error: Read-only file system: While open a file for appending: /x/LOG", StorageReadOnly),
        ("IO error: Permission denied: While mkdir if missing: /x", StorageReadOnly),
        ("Corruption: block checksum mismatch", Damaged),
        ("IO error: No such file or directory: While open a file for random read: /x/000001.sst", Damaged),
        ("IO error: While lock file: /x/LOCK: Resource temporarily unavailable", StorageFailed),
    ],
)
def test_errors_of_the_machine_have_names(text: str, kind_of_error: type[Exception]) -> None:
    with pytest.raises(kind_of_error) as caught, named_errors(Path("/x")):
        raise Exception(text)
    assert pickle.loads(pickle.dumps(caught.value)).path == Path("/x")


def test_a_store_that_is_open_elsewhere_is_not_taken_for_damaged(tmp_path: Path) -> None:
    store = RocksDBStore(tmp_path / "store")
    with pytest.raises(StorageFailed):
        RocksDBStore(tmp_path / "store")
    store.close()
    with pytest.raises(DbClosedError):
        store.mark()


def test_a_scan_that_was_left_half_way_does_not_keep_the_store_open(tmp_path: Path) -> None:
    models = built(tmp_path / "store")
    store = RocksDBStore(tmp_path / "store")
    left = store.scan(b"", None)
    assert next(left) == min(models[-1].items())
    store.close()
    again = RocksDBStore(tmp_path / "store")
    assert list(again.scan(b"d00700", b"d03000")) == sorted(
        (key, value) for key, value in models[-1].items() if b"d00700" <= key < b"d03000"
    )
    again.close()


# -- hundreds of opens ---------------------------------------------------------------------------------------------


def test_opening_again_and_again_leaves_no_pile_of_files(tmp_path: Path) -> None:
    path = tmp_path / "store"
    for version in range(25):
        store = RocksDBStore(path)
        store.apply(
            [(b"d%d" % n, b"%d" % version) for n in range(version, version + 50)], mark(version - 1), mark(version)
        )
        store.close()
    names = [file.name for file in path.iterdir()]
    assert sum(name.startswith("LOG") for name in names) == 1
    assert sum(name.endswith(".sst") for name in names) <= MAX_RUNS
    assert len(names) <= MAX_RUNS + 10


def test_the_bloom_filter_is_still_there_when_a_store_is_opened_again(tmp_path: Path) -> None:
    built(tmp_path / "store", versions=2)
    assert "filter_policy: bloomfilter" in (tmp_path / "store" / "LOG").read_text(errors="replace")
