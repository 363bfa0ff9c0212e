"""A checkpoint stays within a constant factor of the state, however many batches it has seen: real files and RocksDB.

In memory, if the machine has a place for files there: thousands of syncs would measure nothing but the disk.

Writes what it has measured to build/checkpoint-size.csv, for the plot of the benchmarks.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from rig import Rig

from holdfast.log.storage import LocalStorage
from holdfast.stores.slots import LocalStores

BATCHES = 2_000
EVERY = 50
FACTOR = 8
"""Two snapshots, what was written since the older one, and a third snapshot before the first goes."""


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as directory:
        yield Path(directory)


def test_two_thousand_small_batches_leave_a_checkpoint_of_constant_size(home: Path) -> None:
    rig = Rig(
        LocalStorage(home / "checkpoint", durable=False),
        LocalStores(home / "local"),
        every=EVERY,
        keep=2,
        partitions=1,
        keys=1_000,
        pad=200,
    )
    sizes: list[tuple[int, int, int, int]] = []
    while rig.head.version < BATCHES:
        rig.run(EVERY // 2)
        state = sum(commit.bytes for commit in rig.head.partitions)
        sizes.append((rig.head.version, state, _size(home / "checkpoint"), _size(home / "local")))
    _write(sizes)
    settled = [(state, checkpoint, local) for version, state, checkpoint, local in sizes if version > 4 * EVERY]
    assert max(checkpoint / state for state, checkpoint, _ in settled) < FACTOR
    assert max(local / state for state, _, local in settled) < FACTOR
    rig.stores = LocalStores(home / "another disk")
    rig.start()
    rig.run(1)
    rig.assert_exact()


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def _write(sizes: list[tuple[int, int, int, int]]) -> None:
    build = Path(__file__).parents[2] / "build"
    build.mkdir(exist_ok=True)
    lines = ["batches,state,checkpoint,local", *(",".join(map(str, row)) for row in sizes)]
    (build / "checkpoint-size.csv").write_text("\n".join(lines) + "\n")
