"""Options that users give by name, checked before anything is done with them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, TypeVar

from holdfast.errors import UnknownOption

T = TypeVar("T")


def positive(option: str, given: Any) -> int:
    """A whole number of things."""
    if type(given) is not int or given < 1:
        raise UnknownOption(f"{option}={given!r}: it is a positive number")
    return given


def amount(option: str, given: Any, what: str) -> float:
    """A number, also 0 or a fraction."""
    if isinstance(given, bool) or not isinstance(given, int | float) or given < 0:
        raise UnknownOption(f"{option}={given!r}: it is {what}")
    return float(given)


def one_of(option: str, given: Any, *allowed: str) -> Any:
    if given not in allowed:
        raise UnknownOption(f"{option}={given!r}: it is one of {', '.join(allowed)}")
    return given


def instance(option: str, given: Any, kind: type[T]) -> T | None:
    """One of ours; None: it is not given."""
    if given is not None and not isinstance(given, kind):
        raise UnknownOption(f"{option} is a holdfast.{kind.__name__}")
    return given


def unknown(of: str, name: str, options: Iterable[str]) -> UnknownOption:
    """The error for an option that does not exist; names the nearest one that does."""
    known = list(options)
    near = difflib.get_close_matches(name, known, 1)
    hint = f"; did you mean {near[0]!r}?" if near else f"; the options are {', '.join(known)}"
    return UnknownOption(f"{of} has no option {name!r}{hint}", option=name)
