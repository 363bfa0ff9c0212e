"""One S3 server for all tests of this process; every test has a bucket of its own."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest
from gateway import Gateway
from proxy import Proxy


@pytest.fixture(scope="session")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with Gateway(tmp_path_factory.mktemp("gateway") / "data") as gateway:
        yield gateway


@pytest.fixture
def bucket(gateway: Gateway) -> str:
    return gateway.bucket()


@pytest.fixture
def proxy(gateway: Gateway) -> Iterator[Proxy]:
    with Proxy(gateway) as proxy:
        yield proxy


@pytest.fixture
def choice() -> random.Random:
    seed = int(os.environ.get("FAULT_SEED") or random.randrange(2**32))
    print(f"FAULT_SEED={seed}")
    return random.Random(seed)
