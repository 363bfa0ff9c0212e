"""Deltas and outboxes: Arrow IPC files that a task writes before it returns its receipt.

A file is named and checked by a `FileRef`, which travels in the receipt and rests in the manifest: length and
checksum are verified on every read, so a damaged file is an error with its path and never a wrong value.

Delta, format 1: columns `key` (binary) and `value` (binary, null deletes the key), sorted by key, each key once.
Outbox, format 1: what the sink's encoder wrote, in the order in which it was emitted.
The schema metadata of both holds `holdfast.format` and `holdfast.kind`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import msgspec
import pyarrow as pa

from holdfast.errors import Damaged, FutureFormat
from holdfast.log.storage import Missing, Storage
from holdfast.stores.base import Change

FORMAT = 1


class FileRef(msgspec.Struct, frozen=True):
    """A file that a commit names."""

    name: str
    length: int
    checksum: str
    """blake2b of the whole file, 16 bytes in hex."""
    rows: int


def write_delta(storage: Storage, name: str, keys: list[bytes], values: list[bytes | None]) -> FileRef:
    """Keys in order, each once."""
    table = pa.table({"key": pa.array(keys, pa.binary()), "value": pa.array(values, pa.binary())})
    return write_table(storage, name, table, kind="delta")


def read_delta(storage: Storage, ref: FileRef) -> Iterator[Change]:
    return changes_of(read_table(storage, ref, kind="delta"))


def changes_of(delta: pa.Table) -> Iterator[Change]:
    keys: Iterable[bytes] = delta.column("key").to_pylist()
    return zip(keys, delta.column("value").to_pylist(), strict=True)


def write_table(storage: Storage, name: str, table: pa.Table, kind: str) -> FileRef:
    metadata = {"holdfast.format": str(FORMAT), "holdfast.kind": kind}
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema.with_metadata(metadata)) as writer:
        writer.write_table(table)
    data = sink.getvalue().to_pybytes()
    ref = FileRef(name, len(data), checksum(data), table.num_rows)
    storage.put(name, data)
    return ref


def read_bytes(storage: Storage, ref: FileRef) -> bytes:
    """The file, checked to be the one that a commit names."""
    try:
        data = storage.get(ref.name)
    except Missing:
        raise Damaged(f"{ref.name} is missing, though a commit names it", name=ref.name) from None
    if len(data) != ref.length or checksum(data) != ref.checksum:
        raise Damaged(
            f"{ref.name} is damaged: {len(data)} bytes where the commit says {ref.length}"
            + ("" if len(data) != ref.length else ", with another checksum")
            + "; restore the file from a backup",
            name=ref.name,
        )
    return data


def read_table(storage: Storage, ref: FileRef, kind: str) -> pa.Table:
    data = read_bytes(storage, ref)
    table = pa.ipc.open_file(pa.BufferReader(data)).read_all()
    metadata = table.schema.metadata or {}
    written = int(metadata.get(b"holdfast.format", b"0"))
    if written > FORMAT:
        raise FutureFormat(
            f"{ref.name} has format {written}; this version of Holdfast reads up to {FORMAT}: upgrade it",
            name=ref.name,
            format=written,
        )
    if metadata.get(b"holdfast.kind") != kind.encode():
        raise Damaged(f"{ref.name} is not a file of kind {kind!r}", name=ref.name)
    return table


def checksum(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
