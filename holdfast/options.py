"""Options that users give by name, checked before anything is done with them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from holdfast.errors import UnknownOption


def positive(option: str, given: Any) -> None:
    """A whole number of things."""
    if type(given) is not int or given < 1:
        raise UnknownOption(f"{option}={given!r}: it is a positive number")


def amount(option: str, given: Any, what: str) -> None:
    """A number, also 0 or a fraction."""
    if isinstance(given, bool) or not isinstance(given, int | float) or given < 0:
        raise UnknownOption(f"{option}={given!r}: it is {what}")


def one_of(option: str, given: Any, *allowed: str) -> Any:
    if given not in allowed:
        raise UnknownOption(f"{option}={given!r}: it is one of {', '.join(allowed)}")
    return given


def instance(option: str, given: Any, kind: type) -> None:
    if not isinstance(given, kind):
        raise UnknownOption(f"{option} is a holdfast.{kind.__name__}")


def unknown(of: str, name: str, options: Iterable[str]) -> UnknownOption:
    """The error for an option that does not exist; names the nearest one that does."""
    known = list(options)
    near = difflib.get_close_matches(name, known, 1)
    hint = f"; did you mean {near[0]!r}?" if near else f"; the options are {', '.join(known)}"
    return UnknownOption(f"{of} has no option {name!r}{hint}", option=name)
