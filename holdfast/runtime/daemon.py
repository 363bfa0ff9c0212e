"""The process that Spark forks its Python workers from, with everything in it that they import.

`spark.python.daemon.module` names it in the sessions that Holdfast builds for one machine. A worker is there in
milliseconds instead of half a second, and is not looked through for garbage after each task but for what is its own.
"""

from __future__ import annotations

import gc

import pyspark.worker
from pyspark.daemon import manager

import holdfast.runtime.anchor
import holdfast.stores.slots

__all__ = ["holdfast", "pyspark"]

if __name__ == "__main__":
    gc.freeze()
    manager()
