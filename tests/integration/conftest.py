"""One Spark session for all tests of this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from holdfast.runtime.session import build_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    session = build_session("tests", master="local[2]", warehouse=tmp_path_factory.mktemp("warehouse"), only_plans=True)
    yield session
    session.stop()


@pytest.fixture
def json_files(tmp_path: Path) -> Path:
    """Three files of ten rows each, in the order of their names."""
    directory = tmp_path / "input"
    directory.mkdir()
    for file in range(3):
        lines = [
            f'{{"user": "u{n % 4}", "code": {n % 4}, "amount": {n}, "at": {n * 1000}}}\n'
            for n in range(file * 10, file * 10 + 10)
        ]
        (directory / f"{file}.json").write_text("".join(lines))
    return directory
