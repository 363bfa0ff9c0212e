"""The crash tests with a broker. Their program is their own."""

from __future__ import annotations

from pathlib import Path

import pytest
from broker import Broker
from chance import choice
from stage import Stage

__all__ = ["choice"]


@pytest.fixture
def stage(broker: Broker, tmp_path: Path) -> Stage:
    return Stage(broker, tmp_path)
