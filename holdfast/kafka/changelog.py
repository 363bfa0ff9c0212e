"""The records of a changelog topic, format 1.

One topic per store, one partition per state partition. A version adds, in one transaction:
- for every changed key a record: key = kind byte + encoded key, value = the version (8 bytes, big-endian) + the document;
  null if the key was deleted;
- one milestone per partition: key = `\\0milestone`, value = JSON, see `Milestone`.
Compaction keeps the last of each, which is all that a restore needs: the documents, and in the milestone the version that
they add up to, where the source stood, and the version at which the state was last empty. A document that is older than
that is not part of the state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.errors import FutureFormat, IncompleteChangelog
from holdfast.log.files import changes_of
from holdfast.state.documents import DUES, document_prefix, stored_dues
from holdfast.state.timers import entries
from holdfast.stores.base import Change

FORMAT = 1
MILESTONE = b"\0milestone"
_VERSION = 8


class Milestone(msgspec.Struct, frozen=True, kw_only=True):
    """What the changelog of one partition adds up to."""

    format: int = FORMAT
    app: str
    instance: str
    version: int
    manifest: str
    cleared: int
    """The version at which the state was last emptied: documents that are not later are void."""
    time_ms: int
    topics: dict[str, str]
    """By source topic: its id."""
    offsets: tuple[int, ...]
    """The next offset of the partition in each source topic. If records change their key, and with it the partition, within a
    version: of all partitions, as in a manifest; then none stands for itself, and all milestones must be of one version."""
    outs: tuple[int, ...]
    """The offsets up to which the output is out: later than `offsets` while state is rebuilt, otherwise the same."""
    watermark_ms: int | None = None
    event_ms: tuple[int | None, ...] = ()
    """As in a manifest."""
    codec: str
    keys: int = 0
    """Documents of the partition, in all stores."""
    bytes: int = 0
    """Their size."""
    stores: tuple[str, ...]
    """All stores of the application: their changelogs stand at the same version."""


def encode_milestone(milestone: Milestone) -> bytes:
    return msgspec.json.encode(milestone)


def decode_milestone(topic: str, partition: int, data: bytes) -> Milestone:
    try:
        header = msgspec.json.decode(data, type=dict[str, Any])
        written = int(header.get("format", 0))
        if written <= FORMAT:
            return msgspec.json.decode(data, type=Milestone)
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError):
        raise IncompleteChangelog(
            f"topic {topic}, partition {partition}: its last milestone cannot be read; something else writes to this topic",
            topic=topic,
            partition=partition,
        ) from None
    raise FutureFormat(
        f"topic {topic} has format {written}; this version of Holdfast reads up to {FORMAT}: upgrade it", format=written
    )


def records(store: str, version: int, changes: Iterable[Change]) -> Iterator[tuple[bytes, bytes | None]]:
    """The changes of one store as (key, value) of its changelog."""
    prefix = document_prefix(store)
    skip, number = len(prefix), version.to_bytes(_VERSION, "big")
    for key, value in changes:
        if key.startswith(prefix):
            yield b"d" + key[skip:], None if value is None else number + value


def documents(store: str, cleared: int, latest: Mapping[bytes, bytes | None]) -> pa.Table:
    """The last records of a changelog partition by key, as changes of the store: `key` and `value`, null: deleted.

    What is not later than `cleared` is void. Column by column, because a restore has millions of them.
    """
    keys = pa.array(latest.keys(), pa.binary())
    values = pa.array(latest.values(), pa.binary())
    oldest = pa.scalar((cleared + 1).to_bytes(_VERSION, "big"), pa.binary())
    valid = pc.and_(pc.not_equal(keys, MILESTONE), pc.fill_null(pc.greater_equal(values, oldest), True))
    changes = pa.table(
        {
            "key": pc.binary_replace_slice(keys, 0, 1, document_prefix(store)),
            "value": pc.binary_replace_slice(values, 0, _VERSION, b""),
        }
    )
    return changes.filter(valid)


def index_of(store: str, changes: pa.Table) -> pa.Table:
    """The index of timers that belongs to these documents, as changes of the store."""
    names = pc.match_substring(changes["value"], pattern=DUES)
    timed = changes.filter(pc.fill_null(names, False))
    skip = len(document_prefix(store))
    keys = [
        entry
        for key, value in changes_of(timed)
        if value is not None
        for entry in entries(store, key[skip:], stored_dues(value) or [None, None])
    ]
    return pa.table({"key": pa.array(keys, pa.binary()), "value": pa.array([b""] * len(keys), pa.binary())})
