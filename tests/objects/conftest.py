"""One S3 server for all tests of this process; every test has a bucket of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from gateway import Gateway


@pytest.fixture(scope="session")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with Gateway(tmp_path_factory.mktemp("gateway") / "data") as gateway:
        yield gateway


@pytest.fixture
def bucket(gateway: Gateway) -> str:
    return gateway.bucket()
