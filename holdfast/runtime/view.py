"""A view of committed state, for people and programs outside the pipeline.

It reads the log, never the local stores, which belong to the tasks: so it works while the application runs, here or in
another process, and it shows exactly one committed version. The view follows the chain: each call sees the last commit.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.errors import CodecMismatch, Damaged, MissingSettings, ZombieTask
from holdfast.log.manifest import Chain, Manifest
from holdfast.log.pins import Lease
from holdfast.log.recipe import recipe_for, steps
from holdfast.state.codecs import Codec
from holdfast.state.documents import document_prefix, read_document
from holdfast.state.keys import decode_key, encode_key, partition_of
from holdfast.state.python_codec import PythonCodec
from holdfast.stores.base import DamagedStore, Store
from holdfast.stores.rocksdb import RocksDBStore

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


TRIES = 5
"""How often a call begins again because what it read was removed."""


class StateView:
    """The state of one store at the last committed version. Made by `Application.state`.

    Guaranteed: what it shows was committed, all of one call at the same version. Not guaranteed: that it is still the
    last version when the call returns.

    >>> import tempfile
    >>> from holdfast import Application
    >>> Application("empty", state_dir=tempfile.mkdtemp()).state("default").get("ann") is None
    True
    """

    def __init__(
        self,
        chain: Chain,
        store: str,
        codec: Codec,
        new_store: Callable[[], Store] | None = None,
        spark: Callable[[], SparkSession] | None = None,
    ) -> None:
        self._chain = chain
        self._name = store
        self._codec = codec
        self._new_store = new_store or self._new_private_store
        self._spark = spark
        self.version: int | None = None
        """What the last call has read; None: there was no checkpoint."""
        self._free: dict[tuple[str, int], list[Store]] = {}
        """By instance and partition: stores of ours that no call uses, to go on with."""
        self._taking = Lock()

    def get(self, key: Any) -> dict[Any, Any] | None:
        """The state of a key as a dict of its sub-keys; None if it has none.

        A dict holds the sub-keys 1, True and 1.0 as one, though they are three in `State`.
        """
        route = encode_key(key)
        head = self._head()
        name = document_prefix(self._name) + route
        for partition in _homes(head, self._name, route) if head is not None else ():
            for found, store in self._settled(partial(_only, partition)):
                (stored,) = store.get_many([name])
                if stored is not None:
                    return read_document(stored, self._codec_of(found), found.time_ms, found.watermark_ms) or None
        return None

    def items(self) -> Iterator[tuple[Any, dict[Any, Any]]]:
        """Every key and its state, in no particular order, all at the version that is the last one now."""
        prefix = document_prefix(self._name)
        for head, store in self._settled(lambda head: _partitions(head, self._name)):
            codec = self._codec_of(head)
            for key, stored in store.scan(prefix, prefix[:-1] + b"\x01"):
                document = read_document(stored, codec, head.time_ms, head.watermark_ms)
                if document:
                    yield decode_key(key[len(prefix) :]), document

    def to_dataframe(self) -> DataFrame:
        """Key and state as a Spark DataFrame `key string, state string`: the key as `str` shows it, the state as JSON."""
        if self._spark is None:
            raise MissingSettings("there is no Spark session here to make a DataFrame with; use items()")
        rows = [(str(key), msgspec.json.encode(_shown(document)).decode()) for key, document in self.items()]
        return self._spark().createDataFrame(rows, "key string, state string")

    def _head(self) -> Manifest | None:
        head = self._chain.head()
        if head is not None:
            self._codec_of(head)
        self.version = None if head is None else head.version
        return head

    def _codec_of(self, head: Manifest) -> Codec:
        """The codec that the store was written with: the application's, or that of steps which keep one value per key."""
        written = head.codecs.get(self._name, self._codec.name)
        for codec in (self._codec, PythonCodec()):
            if codec.name == written:
                return codec
        raise CodecMismatch(
            f"store {self._name!r} was written with codec {written}, this application uses {self._codec.name}"
        )

    def _settled(self, wanted: Callable[[Manifest], Iterable[int]]) -> Iterator[tuple[Manifest, Store]]:
        """Stores of our own for some partitions, all brought to the last commit, each for this call alone.

        They are free again when the call is over, also if whoever called has left it before its end.

        Retention may remove what is being read: then all of them begin again, at the commit that is the last one by then,
        and with a pin on it.
        """
        with ExitStack() as used:
            head, stores = self._brought(wanted, used)
            for store in stores:
                assert head is not None
                yield head, store

    def _brought(
        self, wanted: Callable[[Manifest], Iterable[int]], used: ExitStack
    ) -> tuple[Manifest | None, list[Store]]:
        lease: Lease | None = None
        try:
            for tries in count(1):
                head = self._head()
                if head is None:
                    return None, []
                try:
                    return head, [used.enter_context(self._store(head, part, lease)) for part in wanted(head)]
                except (Damaged, ZombieTask):
                    used.close()
                    newest = self._head()
                    if newest is None or newest.version == head.version or tries == TRIES:
                        raise
                    lease = lease or Lease(self._chain.storage, newest.version)
            raise AssertionError("count() does not end")
        finally:
            if lease is not None:
                lease.end()

    @contextmanager
    def _store(self, head: Manifest, partition: int, lease: Lease | None) -> Iterator[Store]:
        """A store at the version of `head`; free again afterwards."""
        free = self._free.setdefault((head.instance, partition), [])
        store = self._taken(free, head.version) or self._new_store()
        try:
            for _ in steps(store, self._chain.storage, recipe_for(self._chain, head, partition)):
                if lease is not None:
                    lease.renew()
            yield store
        except DamagedStore:
            store.wipe()
            raise
        finally:
            free.append(store)

    def _taken(self, free: list[Store], version: int) -> Store | None:
        """The best of the free stores. Some may be at a later version than this call, and of no use to it."""
        with self._taking:
            fits = [store for store in free if store.mark().version <= version]
            store = max(fits, key=lambda store: store.mark().version, default=None)
            if store is not None:
                free.remove(store)
            return store

    def _new_private_store(self) -> Store:
        """In a temporary directory that goes when this view does."""
        directory = Path(tempfile.mkdtemp(prefix="holdfast-view-"))
        store = RocksDBStore(directory / "store")
        weakref.finalize(self, _discard, store, directory)
        return store


def _only(partition: int, head: Manifest) -> Iterable[int]:
    return (partition,)


def _homes(head: Manifest, store: str, route: bytes) -> Iterable[int]:
    """The partitions in which a key may be: of a topic, whoever wrote to it has chosen."""
    partitions = _partitions(head, store)
    if head.source == "kafka" and partitions.start == 0:
        return partitions
    return (partitions[partition_of(route, len(partitions))],) if partitions else ()


def _partitions(head: Manifest, store: str) -> range:
    """The partitions of a store: those of its stage. A store that no stage has is one of an earlier program, in the first."""
    first = 0
    for stage in head.stages:
        if store in stage.stores:
            return range(first, first + stage.partitions)
        first += stage.partitions
    return range(head.stages[0].partitions)


def _discard(store: Store, directory: Path) -> None:
    store.close()
    shutil.rmtree(directory)


def _shown(document: dict[Any, Any]) -> dict[str, Any]:
    return {str(name): value if _is_json(value) else repr(value) for name, value in document.items()}


def _is_json(value: Any) -> bool:
    return isinstance(value, str | int | float | bool | list | dict | None)
