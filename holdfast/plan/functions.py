"""The user's functions, checked when they are declared: a function that could not be called must not wait for a record."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from holdfast.errors import InvalidPipeline


def check_function(what: str, function: Callable[..., Any], arguments: Sequence[str], *, yields: bool = False) -> None:
    """Refuse what cannot be called with `arguments`, or would return a coroutine or a generator instead of its result."""
    if not callable(function):
        raise InvalidPipeline(f"{what} takes a function, not {type(function).__qualname__}")
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise InvalidPipeline(f"{what}: the function is async; a plain function is needed")
    if inspect.isgeneratorfunction(function) and not yields:
        raise InvalidPipeline(f"{what}: the function is a generator; only apply(expand=True) takes one, and flat_map()")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # a built-in that does not tell
    try:
        signature.bind(*arguments)
    except TypeError:
        raise InvalidPipeline(
            f"{what}: the function is called with ({', '.join(arguments)}), but its signature is {signature}"
        ) from None
