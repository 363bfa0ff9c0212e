"""The same on Spark, where uploads are made in worker processes, and one of them is killed."""

from __future__ import annotations

import shutil
from pathlib import Path

import life
import pytest
import spark_program
from life import run_armed
from machine import BATCH, Machine
from orders import fold
from spark_program import EVERY, application

from holdfast.log.snapshot import versions

ORDERS = 2 * EVERY * BATCH


def test_a_worker_that_dies_in_an_upload_costs_a_snapshot_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(life, "program", spark_program)
    code, said = run_armed(tmp_path, "upload.file", EVERY, "--orders", ORDERS)
    assert code == 0, said
    assert f"the snapshot of version {EVERY} could not be taken" in said
    machine = Machine(tmp_path)
    shutil.rmtree(machine.local)
    count = ORDERS + EVERY * BATCH
    with life.Life(tmp_path, "--orders", count) as last:
        assert last.end() == 0, last.said()
    assert {user: state["total"] for user, state in application(tmp_path).state().items()} == fold(count)[0]
    assert versions(machine.storage)
    assert not machine.damage()
