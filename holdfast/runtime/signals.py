"""Signals: the first one asks a run to end in good order, the second does what it always does."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

logger = logging.getLogger("holdfast")


@contextmanager
def signals_to(stop: Callable[[], None], wanted: bool) -> Iterator[None]:
    """While the block runs, SIGINT and SIGTERM call `stop`; a second one does what it did before."""
    if not wanted or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def handle(number: int, frame: Any) -> None:
        logger.info("%s: finishing the batch in flight; again to stop at once", signal.Signals(number).name)
        stop()
        restore()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        restore()
