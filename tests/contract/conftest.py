"""The contract of storages is also that of an object store, whose server is that of tests/objects."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from gateway import Gateway


@pytest.fixture(scope="session")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with Gateway(tmp_path_factory.mktemp("gateway") / "data") as gateway:
        yield gateway
