"""Ctrl-C and SIGTERM end the program in good order: quietly, with the batch in flight finished."""

from __future__ import annotations

import signal
from pathlib import Path

from life import Life
from truth import check_exact, taken


def test_a_signal_ends_the_run_after_the_batch_in_flight_and_without_a_word(tmp_path: Path) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        with Life(tmp_path, "--orders", 10**9) as life:
            life.wait_for_commits(2)
            life.process.send_signal(number)
            assert life.end() == 0, life.said()
            assert not life.said(), life.said()
        check_exact(tmp_path, taken(tmp_path))  # all that was committed is delivered too


def test_a_signal_while_spark_starts_ends_the_run_before_it_has_begun(tmp_path: Path) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        with Life(tmp_path, "--orders", 10**9) as life:
            life.wait_for(lambda: any("java" in command for _, command in life.descendants()))
            life.process.send_signal(number)
            assert life.end() == 0, life.said()
            assert not life.said(), life.said()
    assert taken(tmp_path) == 0
