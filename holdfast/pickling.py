"""Pickling for the way between processes of one run; never for a file. Functions and lambdas go along."""

from __future__ import annotations

from typing import Any

from pyspark import cloudpickle


def dumps(thing: Any) -> bytes:
    return bytes(cloudpickle.dumps(thing))  # type: ignore[no-untyped-call]


def loads(data: bytes) -> Any:
    return cloudpickle.loads(data)
