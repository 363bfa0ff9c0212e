"""What the unit tests share. No JVM, no network, no sleeping."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import settings

from holdfast import Application, failpoints
from holdfast.runtime import session

settings.register_profile("unit", deadline=None, max_examples=40, print_blob=True)
settings.load_profile("unit")


@pytest.fixture(autouse=True)
def _no_failpoint_is_left_armed() -> Iterator[None]:
    yield
    failpoints.arm(None)


@pytest.fixture(autouse=True, scope="session")
def _no_jvm_is_started() -> Iterator[None]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        pytest.fail("a unit test asked for a Spark session")

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(session, "build_session", refuse)
        yield


@pytest.fixture
def app(tmp_path: Path) -> Application:
    return Application("app", state_dir=tmp_path, loglevel=None)
