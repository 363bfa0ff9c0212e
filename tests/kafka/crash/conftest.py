"""The crash tests with a broker. Their processes and their chance are those of tests/crash, the program is their own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from broker import Broker

sys.path.append(str(Path(__file__).parents[2] / "crash"))

from chance import choice
from stage import Stage

__all__ = ["choice"]


@pytest.fixture
def stage(broker: Broker, tmp_path: Path) -> Stage:
    return Stage(broker, tmp_path)
