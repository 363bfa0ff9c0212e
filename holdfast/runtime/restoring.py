"""How a restore shows itself: one live line on a terminal, log lines elsewhere."""

from __future__ import annotations

import logging
import sys
import time

logger = logging.getLogger("holdfast")


class RestoreLine:
    """What is done, what is left to do, and how long that will take; amounts are in `unit`."""

    def __init__(self, app: str, what: str, total: float, unit: str) -> None:
        self._app = app
        self._total = total
        self._unit = unit
        self._began = time.monotonic()
        self._live = sys.stderr.isatty()
        logger.info("%s: restoring from %s: %s %s to read", app, what, f"{total:,.0f}", unit)

    def show(self, done: float) -> None:
        rate = done / max(time.monotonic() - self._began, 1e-9)
        left = (self._total - done) / max(rate, 1e-9)
        line = (
            f"{self._app}: restoring, {done:,.0f} {self._unit} done, {self._total - done:,.0f} to go, {rate:,.0f} {self._unit}/s, "
            f"{left:.0f} s left"
        )
        if self._live:
            sys.stderr.write(f"\r{line:<100}")
            sys.stderr.flush()
        else:
            logger.info(line)

    def end(self) -> None:
        if self._live:
            sys.stderr.write("\n")
        logger.info("%s: the state is whole again after %.1f s", self._app, time.monotonic() - self._began)
