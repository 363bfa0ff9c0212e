"""Lets the tests import `world`, and keeps what thousands of runs would log off the terminal."""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Only for its test: another one of the process may look for a line of the log."""
    log = logging.getLogger("holdfast")
    level = log.level
    log.setLevel(logging.CRITICAL)
    yield
    log.setLevel(level)
