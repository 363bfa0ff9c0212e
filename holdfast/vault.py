"""Vault: settings that hold secrets, by token. They are in the memory of processes and nowhere else.

What knows a secret is pickled as a random token. What the token stands for is known in the process that locked it away,
and in any other only after `unlock`. Who carries the settings there does so in memory, never by a file: see `Carried`.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

Settings = dict[str, Any]
Thing = TypeVar("Thing")

_known: dict[str, Settings] = {}
"""By token: all settings that were locked away or unlocked in this process."""


def lock_away(settings: Mapping[str, Any]) -> str:
    """A new token for `settings`."""
    token = secrets.token_hex(16)
    _known[token] = dict(settings)
    return token


def is_known(token: str) -> bool:
    return token in _known


def settings_of(token: str) -> Settings:
    """What a token stands for."""
    try:
        return _known[token]
    except KeyError:
        raise AssertionError(
            "settings are used in a process where they were not unlocked; this is a bug in Holdfast"
        ) from None


def unlock(known: Mapping[str, Mapping[str, Any]]) -> None:
    """Make the tokens of another process usable in this one: `unlock(connection.secrets())`."""
    _known.update((token, dict(settings)) for token, settings in known.items())


def secrets_of(thing: Any) -> dict[str, Settings]:
    """What another process has to `unlock` before it uses `thing`; nothing if there is no secret in it."""
    return thing.secrets() if hasattr(thing, "secrets") else {}


class Carried(Generic[Thing]):
    """A thing together with its secrets, for the closure of a job, which stays in memory. Unpickling unlocks it."""

    def __init__(self, thing: Thing) -> None:
        self.thing = thing

    def __reduce__(self) -> tuple[Any, ...]:
        return _carried, (self.thing, secrets_of(self.thing))


def _carried(thing: Thing, known: dict[str, Settings]) -> Carried[Thing]:
    unlock(known)
    return Carried(thing)
