"""The process that Spark forks its Python workers from, with everything in it that they import.

`spark.python.daemon.module` names it in the sessions that Holdfast builds for one machine. A worker is there in
milliseconds instead of half a second, and is not looked through for garbage after each task but for what is its own.
"""

from __future__ import annotations

import gc
import sys
import traceback
from importlib import import_module
from typing import Any, Final

import pyspark.daemon

WHAT_WORKERS_NEED: Final = ("pyspark.worker", "holdfast.runtime.anchor", "holdfast.stores.slots")


class _Traceback:
    """In place of the module: a worker whose query was stopped says that its pipe is broken, and that means nothing."""

    @staticmethod
    def print_exc() -> None:
        if not isinstance(sys.exception(), BrokenPipeError):
            traceback.print_exc()


def main() -> None:
    for module in WHAT_WORKERS_NEED:
        import_module(module)
    daemon: Any = pyspark.daemon
    daemon.traceback = _Traceback
    gc.freeze()
    daemon.manager()


if __name__ == "__main__":
    main()
