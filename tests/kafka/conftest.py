"""One broker for all tests of this process. A test that disturbs its broker starts one of its own."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from broker import Broker


@pytest.fixture(scope="session", name="broker")
def shared_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("broker")) as broker:
        yield broker


@pytest.fixture
def topic_name() -> str:
    """A name that no other test uses."""
    return f"topic-{uuid.uuid4().hex[:12]}"
