"""No space and no permission, for the checkpoint and for the local disk, also in a snapshot and its upload.

A batch that meets it ends with an error that names the place; a snapshot that meets it is given up with a warning. When the
disk is mended, everything goes on exactly.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from disks import NoMount, as_nobody, closed_to_writers, full, give_to_nobody, small_disk
from machine import Machine

from holdfast.errors import StorageFull, StorageReadOnly
from holdfast.log import paths
from holdfast.log.snapshot import versions


@pytest.fixture
def disk(home: Path) -> Iterator[Path]:
    try:
        with small_disk(home / "disk") as place:
            yield place
    except NoMount as refused:
        pytest.skip(f"mounting a small disk is not permitted: {refused}")


@pytest.mark.parametrize("what", ["checkpoint", "local"])
@pytest.mark.parametrize("time", range(3))
def test_a_disk_that_is_full_in_a_batch_or_in_a_snapshot_loses_nothing(
    home: Path,
    disk: Path,
    choice: random.Random,
    caplog: pytest.LogCaptureFixture,
    what: str,
    time: int,
) -> None:
    machine = Machine(home, every=2, **{what: disk / what})
    machine.run(choice.randint(2, 5))
    spare = choice.randrange(10)
    print("spare pages:", spare)
    ended = ""
    with full(disk, spare):
        try:
            machine.run(12)
        except StorageFull as error:
            ended = str(error)
        assert machine.taken
    assert str(disk) in ended or "No space left on device" in caplog.text, "the disk was large enough"
    machine.check_goes_on(4)


@pytest.mark.parametrize("folder", [paths.SNAPSHOT_FILES, paths.SNAPSHOTS])
def test_a_full_disk_that_only_an_upload_meets_does_not_stop_the_batches(
    home: Path, caplog: pytest.LogCaptureFixture, folder: str
) -> None:
    machine = Machine(home, every=2)
    try:
        with small_disk(machine.checkpoint / folder) as disk, full(disk):
            machine.check_goes_on(4)
            assert versions(machine.storage) == []
            assert "No space left on device" in caplog.text
    except NoMount as refused:
        pytest.skip(f"mounting a small disk is not permitted: {refused}")
    machine.check_goes_on(4)
    assert versions(machine.storage)


FOLDERS = [
    paths.COMMITS,
    paths.DELTAS,
    paths.OUTBOX,
    paths.DELIVERED,
    paths.SNAPSHOTS,
    paths.SNAPSHOT_FILES,
    "slot",
    "copy",
]


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root, to give its rights up")
@pytest.mark.parametrize("folder", FOLDERS)
def test_a_directory_that_refuses_writers_is_named_and_loses_nothing(
    home: Path, memory: Path, choice: random.Random, caplog: pytest.LogCaptureFixture, folder: str
) -> None:
    memory.chmod(0o777)
    home.parent.chmod(0o777)
    machine = Machine(home, every=2)
    machine.run(choice.randint(3, 5))
    give_to_nobody(home)
    if folder == "slot":
        (closed, *_) = machine.local.glob("*/0/slot-0")
    elif folder == "copy":
        (closed,) = machine.local.glob("*/0")
    else:
        closed = machine.checkpoint / folder
    ended = ""
    with as_nobody(), closed_to_writers(closed):
        try:
            machine.run(5)
        except StorageReadOnly as error:
            ended = str(error)
    assert str(closed) in ended or "Permission denied" in caplog.text, "nobody was refused"
    assert ended or folder in (paths.SNAPSHOTS, paths.SNAPSHOT_FILES, "copy"), "a batch has not noticed"
    machine.check_goes_on(5)
    assert versions(machine.storage)
