"""Where Spark's Python workers come from, in a session that Holdfast builds."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.runtime import daemon
from holdfast.runtime.session import settings_for

DAEMON = "spark.python.daemon.module"


def test_workers_of_one_machine_are_forked_from_a_process_that_has_imported_holdfast() -> None:
    assert settings_for("app", "local[2]", False, Path())[DAEMON] == daemon.__name__


def test_on_a_cluster_nothing_is_assumed_of_what_executors_can_import() -> None:
    assert DAEMON not in settings_for("app", "spark://host:7077", False, Path())


@pytest.mark.parametrize(("error", "speaks"), [(BrokenPipeError(), False), (ValueError("odd"), True)])
def test_a_worker_says_why_it_dies_unless_its_query_was_stopped(
    error: Exception, speaks: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        raise error
    except Exception:
        daemon._Traceback.print_exc()
    assert (type(error).__name__ in capsys.readouterr().err) == speaks
