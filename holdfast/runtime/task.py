"""A task: one batch of one state partition. The letters are those of the protocol in batch.py.

    a  bring the local store to exactly the version that the batch continues
    b  read the input, run the steps, keep changes in memory
    c  put delta and outboxes under names of their own
    d  return the receipt

Everything that a task writes is either garbage or named by a commit. An exception becomes part of the receipt, so that
Spark does not try a deterministic failure again and the caller gets the exception itself.
"""

from __future__ import annotations

import gc
import logging
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NoReturn, Protocol

from holdfast.errors import FixTheRecord, MissingKey, UnsupportedValue, UserFunctionFailed
from holdfast.failpoints import reach
from holdfast.log import paths
from holdfast.log.files import FileRef, write_delta, write_table
from holdfast.log.manifest import AttemptId, InstanceId, Position, new_id
from holdfast.log.recipe import bring
from holdfast.log.storage import Storage
from holdfast.pickling import dumps, loads
from holdfast.plan.messages import MessagesEncoder
from holdfast.plan.program import Program
from holdfast.plan.record import Chunk, Headers, Place, Raw, Record, shown_key
from holdfast.plan.schema import to_ddl
from holdfast.plan.sinks import Encoder, Sink
from holdfast.plan.steps import compiled
from holdfast.runtime.job import Failure, Job, Receipt
from holdfast.sources.base import Reading
from holdfast.state.documents import Documents, State, rollback
from holdfast.state.keys import encode_key, encode_keys
from holdfast.stores.base import DamagedStore, Store

SPILL_AFTER = 500_000
"""Documents that a task keeps in memory: some hundred MB."""

logger = logging.getLogger("holdfast")


class Stores(Protocol):
    """Where this host keeps its local stores."""

    def open(self, instance: InstanceId, partition: int) -> AbstractContextManager[Store]:
        """The store of a partition, for this task alone."""

    def scratch(self) -> AbstractContextManager[Store]:
        """An empty store for what a task cannot keep in memory; gone afterwards."""


def run_task(
    program: Program, job: Job, partition: int, chunks: Reading | Iterable[Chunk], storage: Storage, stores: Stores
) -> Receipt:
    """One attempt of one task.

    A local store that turns out to be damaged is wiped and the exception let through: the job is lost, not wrong, and
    the driver runs it again.
    """
    batch: _Batch | None = None
    attempt = AttemptId(new_id())
    try:
        reach("task.begin", job.version)
        with without_gc(), ExitStack() as scratch, stores.open(job.instance, partition) as store:
            try:
                bring(store, storage, job.recipes[partition])  # a
                reach("task.restored", job.version)
                batch = _Batch(program, job, partition, store, lambda: scratch.enter_context(stores.scratch()))
                batch.is_quiet = getattr(chunks, "is_quiet", False)
                for chunk in chunks:  # b
                    batch.process(chunk)
                reach("task.processed", job.version)
                return batch.receipt(storage, attempt, getattr(chunks, "end", None))  # c, d
            except DamagedStore:
                store.wipe()
                raise
    except DamagedStore as damage:
        logger.warning("partition %d: %s; it will be built again", partition, damage)
        raise
    except Exception as error:
        place = batch.place if batch is not None else None
        return Receipt(
            version=job.version, partition=partition, attempt=attempt, span=job.span, failure=failure_of(error, place)
        )


@contextmanager
def without_gc() -> Iterator[None]:
    """A batch makes many objects and drops them together: looking for cycles among them meanwhile is wasted work."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class _Batch:
    """The records of one task and what they change. Also the `Current` record of the compiled steps."""

    def __init__(
        self, program: Program, job: Job, partition: int, store: Store, open_scratch: Callable[[], Store]
    ) -> None:
        self.key: Any = None
        self.timestamp = job.time_ms
        self.headers: Headers | None = None
        self.step = "source"
        self.place: Place | None = None
        self.is_quiet = False
        """The output of these records is out already: they only rebuild the state."""
        self._route: bytes | None = None
        self._program = program
        self._job = job
        self._partition = partition
        self._undo: list[Any] = []
        self._documents = {
            name: Documents(store, name, program.codec, job.time_ms, self._undo) for name in program.stores
        }
        self._encoders = {
            sink.id: sink.encoder(job.schemas.get(sink.id), program.message_limits.get(sink.id))
            for sink in program.sinks
        }
        self._open_scratch = open_scratch
        self._scratch: Store | None = None
        self._flow = compiled(program.root, self)
        self._rows = self._skipped = 0

    def opener(self, store: str) -> Callable[[], State]:
        documents = self._documents[store]
        known = documents.states.get

        def state() -> State:
            route = self._route
            found = known(route)  # type: ignore[arg-type]
            if found is not None:
                return found
            if route is None:
                encode_key(self.key)  # says what is wrong with it
                raise MissingKey("the record has no key")
            return documents.state(route)

        return state

    def encoder(self, sink: Sink) -> Encoder:
        return self._encoders[sink.id]

    def process(self, chunk: Chunk) -> None:
        routes = chunk.routes if chunk.routes is not None else _routes(chunk)
        for documents in self._documents.values():
            documents.prefetch(routes)
        flow, undo, faults, timestamps = self._flow, self._undo, chunk.faults, chunk.timestamps
        headers = chunk.headers
        encoders = tuple(self._encoders.values())
        emitted: list[int] = []
        self.timestamp, self.headers = self._job.time_ms, None
        for index, (self.key, self._route, value) in enumerate(zip(chunk.keys, routes, chunk.values, strict=True)):
            if timestamps is not None:
                time = timestamps[index]
                self.timestamp = self._job.time_ms if time is None else time
            if headers is not None:
                self.headers = headers[index]
            if encoders:
                emitted = [len(encoder) for encoder in encoders]
            try:
                if faults and index in faults:
                    self.step = "source"
                    raise faults[index]
                flow(value)
            except DamagedStore:
                raise
            except Exception as error:
                rollback(undo)
                for encoder, length in zip(encoders, emitted, strict=True):
                    encoder.truncate(length)
                self._failed(error, chunk, index)
            else:
                undo.clear()
        self._rows += len(chunk.values)
        if sum(len(documents.states) for documents in self._documents.values()) > SPILL_AFTER:
            self._spill()

    def _spill(self) -> None:
        """Make room: a batch that touches more keys than memory holds must not die of it, again and again."""
        if self._scratch is None:
            self._scratch = self._open_scratch()
            logger.info(
                "partition %d: the batch touches more than %d keys; using the disk", self._partition, SPILL_AFTER
            )
        for documents in self._documents.values():
            documents.spill(self._scratch)

    def _failed(self, error: Exception, chunk: Chunk, index: int) -> None:
        """Skip the record if the user's callback says so, or put it aside; otherwise the error ends the batch."""
        program = self._program
        source = program.source.name
        position = chunk.positions[index]
        self.place = Place(source, self._partition, position, self.key, self.step)
        callback = program.on_error
        if index in chunk.faults and program.on_consumer_error is not None:
            callback = program.on_consumer_error
        record = Record(chunk.values[index], self.key, self.timestamp, self.headers, source, self._partition, position)
        if callback is None or not callback(error, record, logger):
            if program.dead_letters is None or chunk.raw is None:
                raise error
            self._put_aside(program.dead_letters, chunk.raw[index], error, self.place)
        self.place = None
        self._skipped += 1

    def _put_aside(self, sink: Sink, raw: Raw, error: Exception, place: Place) -> None:
        """A dead letter: the record as it came, with where it came from and why it is here."""
        encoder = self._encoders[sink.id]
        assert isinstance(encoder, MessagesEncoder)
        encoder.put(raw.key(), raw.value(), self.timestamp, [*(self.headers or ()), *_reasons(error, place)])

    def _check_sizes(self, documents: Documents, keys: list[bytes], values: list[bytes | None]) -> None:
        """Nothing may be committed that the changelog topic would refuse."""
        limit = self._program.document_limit
        if limit is None:
            return
        for key, value in zip(keys, values, strict=True):
            if value is not None and len(key) + len(value) > limit:
                raise UnsupportedValue(
                    f"store {documents.name!r}, key {shown_key(documents.key_of(key))}: its state has {len(value):,} bytes, its "
                    f"changelog topic takes {limit:,}; keep less, or raise the topic's max.message.bytes"
                )

    def receipt(self, storage: Storage, attempt: AttemptId, end: Position | None) -> Receipt:
        job, partition = self._job, self._partition
        keys: list[bytes] = []
        values: list[bytes | None] = []
        keys_grown = bytes_grown = 0
        for _, documents in sorted(self._documents.items()):
            changed, to, more_keys, more_bytes = documents.changes()
            self._check_sizes(documents, changed, to)
            keys += changed
            values += to
            keys_grown += more_keys
            bytes_grown += more_bytes
        delta = write_delta(storage, paths.delta(job.version, partition, attempt), keys, values) if keys else None
        reach("task.delta.durable", job.version)
        outboxes: dict[str, FileRef] = {}
        schemas: dict[str, str] = {}
        for sink in self._program.sinks:
            encoder = self._encoders[sink.id]
            if len(encoder) and not self.is_quiet:
                table = encoder.table()
                name = paths.outbox(job.version, partition, sink.index, attempt)
                outboxes[sink.id] = write_table(storage, name, table, kind="outbox")
                if sink.form == "rows" and sink.id not in job.schemas:
                    schemas[sink.id] = to_ddl(table.schema)
        reach("task.outbox.durable", job.version)
        return Receipt(
            version=job.version,
            partition=partition,
            attempt=attempt,
            span=job.span,
            end=end,
            delta=delta,
            outboxes=outboxes,
            schemas=schemas,
            rows_in=self._rows,
            rows_out=0 if self.is_quiet else sum(len(encoder) for encoder in self._encoders.values()),
            skipped=self._skipped,
            keys_grown=keys_grown,
            bytes_grown=bytes_grown,
        )


def _reasons(error: Exception, place: Place) -> Headers:
    """The headers of a dead letter."""
    return [
        ("holdfast.topic", place.source.encode()),
        ("holdfast.partition", str(place.partition).encode()),
        ("holdfast.offset", str(place.position).encode()),
        ("holdfast.step", place.step.encode()),
        ("holdfast.error", type(error).__qualname__.encode()),
        ("holdfast.message", _message(error).encode(errors="replace")),
    ]


def _routes(chunk: Chunk) -> list[bytes | None]:
    """The encoded keys of a chunk; a key without an encoding is a fault of its record, if that needs state."""
    try:
        return encode_keys(chunk.keys)
    except FixTheRecord:
        return [_route(key) for key in chunk.keys]


def _route(key: Any) -> bytes | None:
    try:
        return encode_key(key)
    except FixTheRecord:
        return None


def failure_of(error: Exception, place: Place | None) -> Failure:
    try:
        pickled = dumps(error)
        loads(pickled)
    except Exception:  # whatever an exception's own pickling may raise
        pickled = None
    return Failure(
        kind=type(error).__qualname__,
        message=_message(error),
        traceback="".join(traceback.format_exception(error)),
        pickled=pickled,
        place=place,
    )


def _message(error: Exception) -> str:
    try:
        return str(error)
    except Exception:  # whatever an exception's own __str__ may raise
        return "(it cannot be shown)"


def raise_failure(failure: Failure) -> NoReturn:
    """Raise a task's exception as itself, with its place attached."""
    error: Exception
    if failure.pickled is not None:
        error = loads(failure.pickled)
    else:
        error = UserFunctionFailed(f"{failure.kind}: {failure.message}", kind=failure.kind)
    if failure.place is not None:
        error.holdfast_place = failure.place  # type: ignore[attr-defined]
        error.add_note(f"at {failure.place}")
    error.add_note("in a task:\n" + failure.traceback.rstrip())
    raise error
