"""State as a file: one line or row per key, at one version.

The file appears under its name when it is whole, and replaces one that was there.

JSON Lines: {"key": ..., "state": ...}, both in the JSON of state/plain.py.
Parquet: `key` string, the key itself if it is a str and otherwise its JSON; `key_type` string; `state` string, as JSON. The
metadata of the schema says which store and version it is.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from holdfast.errors import UnknownOption
from holdfast.state.plain import json_of

Format = Literal["jsonl", "parquet"]
Items = Iterable[tuple[Any, Any]]
PAGE = 10_000


def line_of(key: Any, state: Any) -> str:
    return json_of({"key": key, "state": state})


def write_lines(path: Path, items: Items) -> int:
    """How many there were."""
    count = 0
    with _whole(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        for key, state in items:
            file.write(line_of(key, state) + "\n")
            count += 1
    return count


def write_parquet(path: Path, items: Items, facts: Mapping[str, str]) -> int:
    """How many there were. `facts`: what the metadata of the schema says."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    fields = [pa.field(name, pa.string(), nullable=False) for name in ("key", "key_type", "state")]
    schema = pa.schema(fields, metadata={f"holdfast.{name}": fact for name, fact in facts.items()})
    count = 0
    remaining = iter(items)
    with _whole(path) as temporary, pq.ParquetWriter(temporary, schema) as writer:
        while page := list(islice(remaining, PAGE)):
            rows = [
                (key if type(key) is str else json_of(key), type(key).__name__, json_of(state)) for key, state in page
            ]
            arrays = [pa.array(column, pa.string()) for column in zip(*rows, strict=True)]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))
            count += len(page)
    return count


def format_of(path: Path, asked: Format | None) -> Format:
    """By the end of the file's name, unless somebody has said."""
    if asked is not None:
        return asked
    if path.suffix == ".jsonl":
        return "jsonl"
    if path.suffix == ".parquet":
        return "parquet"
    raise UnknownOption(f"{path.name}: say --format jsonl or --format parquet, or let the name end so")


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
