"""Options of the state stores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.errors import UnknownOption


class RocksDBOptions:
    """How state is stored.

    Parameters
    ----------
    dumps, loads
        Another codec than JSON for the values, given together: every value passes through them, and that they fit each other
        is the caller's promise. A store remembers its codec by name and refuses another.

    >>> import pickle
    >>> options = RocksDBOptions(dumps=pickle.dumps, loads=pickle.loads)
    """

    def __init__(
        self,
        *,
        dumps: Callable[[Any], bytes] | None = None,
        loads: Callable[[bytes], Any] | None = None,
        **unknown: Any,
    ) -> None:
        if unknown:
            raise UnknownOption(f"RocksDBOptions() has no option {next(iter(unknown))!r}; the options are dumps, loads")
        if (dumps is None) != (loads is None):
            raise UnknownOption("dumps and loads are given together, or neither")
        for name, function in (("dumps", dumps), ("loads", loads)):
            if function is not None and not callable(function):
                raise UnknownOption(f"{name} must be a function, not {type(function).__qualname__}")
        self.dumps = dumps
        self.loads = loads
