"""Pins: what a reader still needs, so that retention leaves it for a while.

A pin is a bounded lease. It names the oldest version that its owner wants to read, and the time at which it ends by
itself, so a reader that was killed holds up nothing for long. A pin protects a reader from starting again, not from wrong
answers: whoever meets a file that is gone starts again from the newest manifest, with or without one. So a clock that jumps
can delay retention by the length of a lease, or make a reader start again, and no more.

Layout: pins/<id>.json: {"version": <version>, "expires_ms": <ms since 1970 UTC>}.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress

import msgspec

from holdfast.errors import MendTheMachine
from holdfast.log import paths
from holdfast.log.manifest import new_id
from holdfast.log.storage import Missing, Storage
from holdfast.times import now_ms

LEASE_MS = 10 * 60 * 1000

logger = logging.getLogger("holdfast")


class Pin(msgspec.Struct, frozen=True):
    """One lease."""

    version: int
    expires_ms: int


class Lease:
    """A hold on everything that leads to `version`, until it is let go or not renewed."""

    def __init__(self, storage: Storage, version: int, clock: Callable[[], int] | None = None) -> None:
        self._storage = storage
        self._version = version
        self._clock = clock or now_ms
        self._name: str | None = None
        self._expires_ms = 0
        self.renew()

    def renew(self) -> None:
        """Hold on for another while, if half of the last one is over, or the clock was put back: then the last one is not valid.

        A checkpoint that cannot be written is read without.
        """
        now = self._clock()
        if self._name is not None and LEASE_MS // 2 < self._expires_ms - now <= LEASE_MS:
            return
        before, self._name, self._expires_ms = self._name, paths.pin(new_id()), now + LEASE_MS
        try:
            self._storage.put(self._name, msgspec.json.encode(Pin(self._version, self._expires_ms)))
            if before is not None:
                self._storage.delete(before)
        except MendTheMachine as error:
            logger.debug("reading without a pin", exc_info=error)

    def end(self) -> None:
        try:
            if self._name is not None:
                self._storage.delete(self._name)
        except MendTheMachine as error:
            logger.debug("a pin is left to end by itself", exc_info=error)


def oldest_pin(storage: Storage, now_ms: int) -> int | None:
    """The oldest version that anyone holds; pins that have ended are removed, if that is possible."""
    held = []
    for name in storage.names(paths.PINS):
        try:
            pin = msgspec.json.decode(storage.get(name), type=Pin)
        except Missing:
            continue
        except (msgspec.DecodeError, UnicodeDecodeError):
            pin = Pin(0, 0)  # half of one: nobody counts on it
        if pin.expires_ms <= now_ms or pin.expires_ms > now_ms + 2 * LEASE_MS:
            with suppress(MendTheMachine):  # it holds up nothing, and whoever comes next tries again
                storage.delete(name)
        else:
            held.append(pin.version)
    return min(held, default=None)
