"""The fault tests. Their program is their own."""

from __future__ import annotations

import gc
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from chance import choice

__all__ = ["choice"]


@pytest.fixture(scope="session")
def memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A place for files in memory, if the machine has one: the disk is not what is tested."""
    place = Path("/dev/shm")
    parent = place if place.is_dir() else tmp_path_factory.mktemp("memory")
    with tempfile.TemporaryDirectory(prefix="holdfast-faults-", dir=parent) as directory:
        yield Path(directory)
        gc.collect()  # views let go of their stores


@pytest.fixture
def home(memory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(tempfile, "tempdir", str(memory))  # where views keep their stores
    place = Path(tempfile.mkdtemp(dir=memory))
    yield place / "home"
    shutil.rmtree(place)
