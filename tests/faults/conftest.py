"""The fault tests. Their processes and their chance are those of tests/crash, the program is their own."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "crash"))

from chance import choice

__all__ = ["choice"]
