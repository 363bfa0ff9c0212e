"""Files of every class, one after the other, are truncated, changed or removed.

The next run is exact, or it ends with an error that names the file and goes on exactly once the file is back. Never is there
a wrong value, neither in the state nor in the output. Verification finds whatever a restore would stumble over.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from damage import KINDS, Damage, deleted, rotted
from machine import NAME, Machine, run_batch
from orders import fold

from holdfast.errors import HoldfastError
from holdfast.log import paths
from holdfast.log.files import FileRef
from holdfast.log.pins import LEASE_MS, Pin
from holdfast.log.snapshot import versions
from holdfast.runtime.batch import Driver
from holdfast.runtime.spark_files import SparkFiles
from holdfast.testing import Crash

BATCHES = 10
EVERY, KEEP = 3, 2
MOST = 9
"""Files of a class that are damaged, chosen at random."""


@pytest.fixture
def ready(home: Path, tmp_path: Path) -> Machine:
    """A machine with snapshots, files of Spark's, a pin, and a last version that was committed and not delivered."""
    machine = Machine(home, every=EVERY, keep=KEEP)
    driver = machine.start()
    for _ in range(BATCHES):
        run_batch(driver, planned(machine, driver, tmp_path / "spark"))
    deliver = machine.shelf.deliver

    def refuse(*_: object) -> None:
        raise Crash("before delivery")

    machine.shelf.deliver = refuse  # type: ignore[method-assign]
    with pytest.raises(Crash):
        run_batch(driver, planned(machine, driver, tmp_path / "spark"))
    machine.shelf.deliver = deliver  # type: ignore[method-assign]
    machine.storage.put(paths.pin("reader"), msgspec.json.encode(Pin(BATCHES, machine.clock() + LEASE_MS)))
    return machine


def planned(machine: Machine, driver: Driver, directory: Path) -> dict[str, FileRef]:
    """What the next commit names of a checkpoint of Spark's that is at the same batch."""
    version = driver.head.version + 1
    for name in ("metadata", f"offsets/{version}"):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(f"{name} of Spark")
    return SparkFiles(machine.storage).keep(directory, version, version, driver.head.spark_files)


def outcomes(ready: Machine, home: Path, files: list[Path], choice: random.Random, keeps_disk: bool) -> Counter[str]:
    """What became of each of `files` of the machine being damaged; 'found' counts those that verification names."""
    counted: Counter[str] = Counter()
    for number, file in enumerate(choice.sample(files, min(MOST, len(files)))):
        damage: Damage = choice.choice(KINDS)
        place = home.with_name(f"damaged-{number}")
        shutil.copytree(home, place)
        victim = place / file
        whole = victim.read_bytes()
        if not whole and damage is not deleted:
            continue
        if not keeps_disk:
            shutil.rmtree(place / NAME / "local")
        damage(victim, choice)
        assert not victim.exists() or victim.read_bytes() != whole, "nothing was damaged"
        counted["damaged"] += 1
        machine = Machine(place, every=EVERY, keep=KEEP)
        counted["found"] += any(finding.name.endswith(victim.name) for finding in machine.damage())
        failure = None
        try:
            machine.run(2)
            state = machine.state()
        except HoldfastError as error:
            failure = str(error)
        if failure is not None:
            assert victim.name in failure, f"{damage.__name__} {file}: {failure}"
            counted["named"] += 1
            victim.write_bytes(whole)
            machine.check_goes_on()
        else:
            counted["exact"] += 1
            totals, rows = fold(machine.taken)
            assert state == totals, f"{damage.__name__} {file}"
            assert sorted(machine.shelf.rows(), key=lambda row: row["n"]) == rows, f"{damage.__name__} {file}"
    return counted


@pytest.mark.parametrize("keeps_disk", [True, False], ids=["disk-kept", "disk-lost"])
@pytest.mark.parametrize("what", [*paths.CLASSES, "pins"])
def test_a_damaged_file_of_the_checkpoint_is_named_or_not_needed(
    ready: Machine, home: Path, choice: random.Random, what: str, keeps_disk: bool
) -> None:
    folder = ready.checkpoint / paths.CLASSES.get(what, paths.PINS)
    files = sorted(path.relative_to(home) for path in folder.iterdir())
    counted = outcomes(ready, home, files, choice, keeps_disk)
    print(what, dict(counted))
    assert counted["damaged"] == counted["named"] + counted["exact"] > 0
    if what == "files of Spark" or (what in ("manifests", "deltas", "outboxes") and not keeps_disk):
        assert counted["named"], "nothing that was damaged was needed"
    if what in ("deltas", "outboxes", "snapshot files", "files of Spark"):
        assert counted["found"], "verification has found nothing"


def test_a_damaged_file_of_a_local_store_is_made_good(ready: Machine, home: Path, choice: random.Random) -> None:
    files = sorted(path.relative_to(home) for path in ready.local.glob("*/*/**/*") if path.is_file())
    assert {path.name.split("-")[0] for path in files} >= {"CURRENT", "MANIFEST", "OPTIONS", "checksums.json"}
    counted = outcomes(ready, home, files, choice, keeps_disk=True)
    print(dict(counted))
    assert counted["damaged"] == counted["exact"] > 0


ROTS = 6
LATE = 20
"""The version of the first snapshot, after a compaction: there are tables with blocks that no batch reads."""


@pytest.mark.parametrize("place", ["a guest", "anywhere"])
def test_a_bit_that_flips_in_a_table_of_a_local_store_never_gets_into_the_checkpoint(
    home: Path, choice: random.Random, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    Machine(home, every=LATE).run(LATE - 2)
    noticed = 0
    for number in range(ROTS):
        machine = Machine(Path(shutil.copytree(home, home.with_name(f"rotten-{number}"))), every=LATE, keep=1)
        table = max(machine.local.glob("*/*/slot-0/*.sst"), key=lambda path: path.stat().st_size)
        data = table.read_bytes()
        rotted(table, data.index(b"guest-") if place == "a guest" else choice.randrange(len(data)))
        caplog.clear()
        machine.run(LATE)
        noticed += "damaged" in caplog.text or "it will be built again" in caplog.text
        assert versions(machine.storage), "no snapshot was taken"
        assert paths.version_of(machine.storage.names(paths.DELTAS)[0]) >= LATE, "the deltas are still there"
        shutil.rmtree(machine.local)
        machine.check_goes_on()
    print(f"noticed {noticed} of {ROTS}")
    assert noticed == ROTS or (noticed and place == "anywhere")  # a bloom filter may be damaged: it is not used, then
