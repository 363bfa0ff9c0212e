"""Persistence.none(): a checkpoint that is there as long as somebody holds it, and then nowhere."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast import Application, Persistence, persistence
from holdfast.log.storage import Exists

HERE = Path(__file__).parents[2]


@pytest.fixture(params=["memory", "disk"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where such checkpoints lie; on a machine without a file system in memory, the temporary directory."""
    monkeypatch.setattr(persistence, "_IN_MEMORY", tmp_path if request.param == "memory" else tmp_path / "missing")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_it_is_a_checkpoint_like_any_other_while_somebody_holds_it(place: Path) -> None:
    nowhere = Persistence.none()
    nowhere.storage.put("commits/1", b"one")
    gc.collect()
    assert nowhere.storage.get("commits/1") == b"one"
    with pytest.raises(Exists):
        nowhere.storage.put("commits/1", b"two")
    assert [nowhere.directory] == list(place.iterdir())


def test_nothing_is_left_when_nobody_holds_it_any_more(place: Path) -> None:
    nowhere, other = Persistence.none(), Persistence.none()
    nowhere.storage.put("commits/1", b"one")
    del nowhere
    gc.collect()
    assert list(place.iterdir()) == [other.directory], "two of them have nothing in common"


def test_an_application_has_everything_there(place: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    state_dir = tmp_path_factory.mktemp("state")
    app = Application("app", persistence=Persistence.none(), state_dir=state_dir, loglevel=None)
    (directory,) = place.iterdir()
    assert all(path.is_relative_to(directory) for path in (app._local, app._warehouse, app._run_directory))
    app._local.mkdir(parents=True)
    (app._local / "store").write_bytes(b"state")
    app._storage.put("commits/1", b"one")
    del app
    gc.collect()
    assert list(place.iterdir()) == list(state_dir.iterdir()) == []


@pytest.mark.parametrize("end", ["", "sys.exit(3)", "raise ValueError"])
def test_nothing_is_left_when_the_program_has_ended(end: str, tmp_path: Path) -> None:
    program = (
        "import pathlib, sys\n"
        "from holdfast import Application, Persistence, persistence\n"
        f"persistence._IN_MEMORY = pathlib.Path({str(tmp_path)!r})\n"
        "app = Application('app', persistence=Persistence.none(), loglevel=None)\n"
        "app._storage.put('commits/1', b'one')\n"
        f"print(len(list(persistence._IN_MEMORY.rglob('commits/1'))), flush=True)\n{end}"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(HERE)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, bool(done.returncode)) == ("1\n", bool(end)), done.stderr
    assert list(tmp_path.iterdir()) == []
