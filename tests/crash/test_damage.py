"""Damaged files: each is named by its error or repaired, and never becomes a wrong value.

What the chain names cannot be recomputed, so damage to it stops the run. Local stores and Spark's scratch checkpoint of
a ranged source can be, so they are built again. All but the tests of Spark's checkpoint run without Spark.
"""

from __future__ import annotations

import random
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
from damage import KINDS, Damage, deleted
from inprocess import Machine, run_batch
from life import Life, run_to_end
from msgspec.structs import replace
from program import BATCH, NAME
from truth import chain, check_exact, fold, state, taken

from holdfast.errors import Damaged, ForeignTarget, FutureFormat
from holdfast.log import manifest as manifests
from holdfast.log import paths

VERSIONS = 12  # more than a recipe carries

any_damage = pytest.mark.parametrize("damage", KINDS)


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The home of a machine that has run; never to be touched."""
    home = tmp_path_factory.mktemp("ready")
    Machine(home).run(VERSIONS)
    return home


@pytest.fixture
def machine(ready: Path, tmp_path: Path) -> Machine:
    """A copy of it."""
    shutil.copytree(ready, tmp_path, dirs_exist_ok=True)
    return Machine(tmp_path)


def check_goes_on(machine: Machine, home: Path) -> None:
    """One more batch, and everything is as if nothing had happened."""
    machine.run(1)
    totals, rows = fold(taken(home))
    assert state(home) == totals
    assert sorted(machine.sink.rows(), key=lambda row: row["n"]) == rows


def only(directory: Path, pattern: str) -> Path:
    (path,) = directory.glob(pattern)
    return path


# -- what the chain names ------------------------------------------------------------------------------------------


@any_damage
@pytest.mark.parametrize(("version", "with_local_stores"), [(VERSIONS, True), (VERSIONS, False), (2, False)])
def test_a_damaged_delta_stops_whoever_needs_it(
    machine: Machine, tmp_path: Path, choice: random.Random, damage: Damage, version: int, with_local_stores: bool
) -> None:
    delta = only(machine.checkpoint, f"{paths.DELTAS}{version:020d}-00001-*")
    whole = delta.read_bytes()
    damage(delta, choice)
    if not with_local_stores:
        shutil.rmtree(machine.local)
    with pytest.raises(Damaged, match=delta.name):
        machine.run(1)
    with pytest.raises(Damaged, match=delta.name):
        state(tmp_path)
    assert len(chain(tmp_path)) == VERSIONS + 1
    delta.write_bytes(whole)
    check_goes_on(machine, tmp_path)


@any_damage
@pytest.mark.parametrize("version", [VERSIONS, VERSIONS - 1, 2])
def test_a_damaged_manifest_stops_whoever_needs_it(
    machine: Machine, tmp_path: Path, choice: random.Random, damage: Damage, version: int
) -> None:
    manifest = machine.checkpoint / paths.manifest(version)
    whole = manifest.read_bytes()
    damage(manifest, choice)
    shutil.rmtree(machine.local)
    with pytest.raises(Damaged, match=manifest.name):
        machine.run(1)
    if version < VERSIONS or damage is not deleted:
        with pytest.raises(Damaged, match=manifest.name):
            state(tmp_path)
    manifest.write_bytes(whole)
    check_goes_on(machine, tmp_path)


def test_a_manifest_with_any_byte_changed_is_damaged(machine: Machine, choice: random.Random) -> None:
    name = paths.manifest(VERSIONS)
    whole = (machine.checkpoint / name).read_bytes()
    assert manifests.decode(name, whole).version == VERSIONS
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 1 << choice.randrange(8)
        with pytest.raises(Damaged, match=name):
            manifests.decode(name, bytes(changed))


def test_a_manifest_of_a_future_format_is_not_taken_for_damage(machine: Machine) -> None:
    name = paths.manifest(VERSIONS)
    manifest = manifests.decode(name, (machine.checkpoint / name).read_bytes())
    with pytest.raises(FutureFormat, match=name):
        manifests.decode(name, manifests.encode(replace(manifest, format=manifests.FORMAT + 1)))


def test_a_manifest_in_the_place_of_another_is_damaged(machine: Machine) -> None:
    head = machine.checkpoint / paths.manifest(VERSIONS)
    shutil.copy(machine.checkpoint / paths.manifest(3), head)
    with pytest.raises(Damaged, match=f"{head.name} is the manifest of version 3"):
        machine.run(1)


@any_damage
def test_a_damaged_outbox_is_not_delivered(
    machine: Machine, tmp_path: Path, choice: random.Random, damage: Damage
) -> None:
    machine.sink.closed = True
    with pytest.raises(ConnectionError):
        machine.run(1)
    machine.sink.closed = False
    outbox = only(machine.checkpoint, f"{paths.OUTBOX}{VERSIONS + 1:020d}-00000-*")
    whole = outbox.read_bytes()
    damage(outbox, choice)
    with pytest.raises(Damaged, match=outbox.name):
        machine.start()
    assert not machine.sink.has(VERSIONS + 1)
    outbox.write_bytes(whole)
    check_goes_on(machine, tmp_path)


def test_a_damaged_mark_of_delivery_is_named_or_ignored(
    machine: Machine, tmp_path: Path, choice: random.Random
) -> None:
    """Without a mark the version is delivered again, which a sink bears."""
    mark = machine.checkpoint / paths.delivered(VERSIONS)
    whole = mark.read_bytes()
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 1 << choice.randrange(8)
        mark.write_bytes(changed[: choice.choice([place, len(whole)])])
        with suppress(ForeignTarget):
            machine.start()
    mark.unlink()
    check_goes_on(machine, tmp_path)


# -- what can be built again ---------------------------------------------------------------------------------------


@any_damage
@pytest.mark.parametrize("pattern", ["*.sst", "CURRENT", "MANIFEST-*", "OPTIONS-*"])
def test_a_damaged_local_store_is_built_again(
    machine: Machine, tmp_path: Path, choice: random.Random, damage: Damage, pattern: str
) -> None:
    files = sorted(machine.local.glob(f"*/*/slot-0/{pattern}"))
    assert files
    damage(choice.choice(files), choice)
    check_goes_on(machine, tmp_path)


@pytest.mark.parametrize("pattern", ["*/0/slot-0", "*/1", "*"])
def test_a_lost_local_store_is_built_again(machine: Machine, tmp_path: Path, pattern: str) -> None:
    shutil.rmtree(only(machine.local, pattern))
    check_goes_on(machine, tmp_path)


def test_a_local_store_of_another_history_is_built_again(machine: Machine, tmp_path: Path) -> None:
    """It is at a version of ours, by an attempt that never won: its values are not ours."""
    before = shutil.copytree(machine.checkpoint, tmp_path / "before")
    driver = machine.start()
    for _ in range(2):
        run_batch(driver)  # the store holds the first of these now
    shutil.rmtree(machine.checkpoint)
    before.rename(machine.checkpoint)
    stores = shutil.copytree(machine.local, tmp_path / "theirs")
    shutil.rmtree(machine.local)
    machine.run(2)
    shutil.rmtree(machine.local)
    stores.rename(machine.local)
    check_goes_on(machine, tmp_path)


# -- Spark's own checkpoint ----------------------------------------------------------------------------------------


def test_sparks_checkpoint_of_an_iterable_may_be_damaged_or_gone(tmp_path: Path, choice: random.Random) -> None:
    with Life(tmp_path, "--orders", 10**9) as life:
        life.wait_for_commits(2)
        life.kill()
    spark = tmp_path / NAME / "checkpoint" / paths.SPARK
    left = [path for path in spark.rglob("*") if path.is_file() and path.stat().st_size]
    assert left
    for path in left:
        choice.choice(KINDS)(path, choice)
    count = taken(tmp_path) + 2 * BATCH
    run_to_end(tmp_path, "--orders", count)
    check_exact(tmp_path, count)
