"""Two drivers on one checkpoint: the put of the manifest decides, and the loser changes nothing."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from life import Life, run_to_end
from program import BATCH, NAME, application, table
from truth import chain, check_exact, fold, state, table_rows, taken

from holdfast.errors import RunIsAlive


def test_of_two_drivers_at_once_exactly_one_goes_on(tmp_path: Path) -> None:
    count = 40 * BATCH
    with Life(tmp_path, "--orders", count) as one, Life(tmp_path, "--orders", count) as other:
        codes = {one.end(): one, other.end(): other}
    assert set(codes) == {0, 1}, one.said() + other.said()
    assert "holdfast.errors.Fenced: version" in codes[1].said()
    check_exact(tmp_path, count)


def test_a_driver_that_wakes_up_after_its_successor_took_over_changes_nothing(tmp_path: Path) -> None:
    with Life(tmp_path, "--orders", 10**9) as sleeper:
        sleeper.wait_for_commits(3)
        sleeper.process.send_signal(signal.SIGSTOP)
        count = taken(tmp_path) + 4 * BATCH
        run_to_end(tmp_path, "--orders", count)
        check_exact(tmp_path, count)
        after_successor = everything(tmp_path)
        sleeper.process.send_signal(signal.SIGCONT)
        assert sleeper.end() == 1
        # Asleep before its tasks opened their stores, these find the successor's versions there (ZombieTask); asleep after,
        # the put of its manifest finds the successor's. The chain has gone on in both cases, so both say Fenced.
        assert "holdfast.errors.Fenced: version" in sleeper.said(), sleeper.said()
    assert everything(tmp_path) == after_successor
    check_exact(tmp_path, count)


def everything(home: Path) -> dict[Path, bytes]:
    """Every file of the chain and of the table."""
    roots = [home / NAME / "checkpoint" / "commits", home / NAME / "checkpoint" / "delivered", table(home)]
    return {path: path.read_bytes() for root in roots for path in root.rglob("*") if path.is_file()}


def test_state_is_cleared_only_when_no_run_is_alive_and_the_position_stays(tmp_path: Path) -> None:
    app = application(tmp_path)
    with Life(tmp_path, "--orders", 10**9) as life:
        life.wait_for_commits(2)
        with pytest.raises(RunIsAlive, match=NAME):
            app.clear_state()
        life.wait_for_commits(3)
        life.kill()
    cleared_at = taken(tmp_path)
    app.clear_state()
    assert state(tmp_path) == {}
    assert taken(tmp_path) == cleared_at

    count = cleared_at + 2 * BATCH
    run_to_end(tmp_path, "--orders", count)
    totals, rows = fold(count, since=cleared_at)
    assert state(tmp_path) == totals
    assert sorted(table_rows(tmp_path), key=lambda row: row["n"]) == fold(cleared_at)[1] + rows
    assert [manifest.kind for manifest in chain(tmp_path)].count("clear") == 1
