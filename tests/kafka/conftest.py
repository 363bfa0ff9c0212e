"""One broker and one Spark session for all tests of this process. A test that disturbs its broker starts one of its own."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from broker import Broker
from scene import Scene

from holdfast.runtime.session import build_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session", name="broker")
def shared_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("broker")) as broker:
        yield broker


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    session = build_session("tests", master="local[2]", warehouse=tmp_path_factory.mktemp("warehouse"), only_plans=True)
    yield session
    session.stop()


@pytest.fixture
def topic_name() -> str:
    """A name that no other test uses."""
    return f"topic-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def scene(broker: Broker, spark: SparkSession, tmp_path: Path) -> Scene:
    return Scene(broker, spark, tmp_path)
