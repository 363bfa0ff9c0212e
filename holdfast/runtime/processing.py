"""What one task does to its records: the steps of its stage, over the state of one partition.

Everything stays in memory until the task writes it down: changed documents, encoded output, and records on their way to
the next stage. A record that fails leaves no trace in any of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from holdfast.errors import FixTheRecord, MissingKey, UnsupportedValue
from holdfast.failpoints import reach
from holdfast.log import paths
from holdfast.log.files import FileRef, write_delta, write_table
from holdfast.log.manifest import AttemptId, Position
from holdfast.log.storage import Storage
from holdfast.plan.messages import MessagesEncoder
from holdfast.plan.program import Program, Stage
from holdfast.plan.record import Chunk, Headers, Place, Raw, Record, shown_key
from holdfast.plan.schema import to_ddl
from holdfast.plan.sinks import Encoder, Sink
from holdfast.plan.steps import Ending, Fire, compiled
from holdfast.runtime.exchange import Parcel, Post, sender
from holdfast.runtime.job import Job, Receipt
from holdfast.state.cell import Clock
from holdfast.state.documents import Documents, State, rollback
from holdfast.state.keys import decode_key, encode_key, encode_keys
from holdfast.state.timers import CLOCKS
from holdfast.stores.base import DamagedStore, Store

SPILL_AFTER = 500_000
"""Documents that a task keeps in memory: some hundred MB."""

logger = logging.getLogger("holdfast")


class Processing:
    """The records of one task and what they change. Also the `Current` record of the compiled steps."""

    def __init__(
        self,
        program: Program,
        job: Job,
        partition: int,
        attempt: AttemptId,
        store: Store,
        open_scratch: Callable[[], Store],
    ) -> None:
        self.key: Any = None
        self.time_ms = self.timestamp = job.time_ms
        self.watermark_ms = job.watermark_ms
        self.headers: Headers | None = None
        self.step = "source"
        self.place: Place | None = None
        self.index = 0
        """Which record of the chunk this is, or which call of those without a record."""
        self.sent: dict[int, list[Parcel]] = {}
        """By partition of the next level: what goes there."""
        self._route: bytes | None = None
        self._chunk: Chunk | None = None
        self._program = program
        self._stage: Stage = program.stage_of(partition)
        self._stages = {stage.index: stage for stage in program.stages}
        self._job = job
        self._partition = partition
        self._attempt = attempt
        self._undo: list[Any] = []
        self._posts: dict[int, Post] = {}
        """By target: what some records have sent."""
        self._fires: dict[str, Fire] = {}
        self._endings: list[Ending] = []
        timed = self._stage.timed_stores
        self._documents = {
            name: Documents(store, name, program.codec_of(name), self, self._undo, has_timers=name in timed)
            for name in self._stage.stores
        }
        self._read_ahead = [
            self._documents[name] for name in self._stage.stores if name not in self._stage.gathered_stores
        ]
        self._encoders = {
            sink.id: sink.encoder(job.schemas.get(sink.id), program.message_limits.get(sink.id), job.time_ms)
            for sink in self._stage.sinks
        }
        self._topics = [encoder for encoder in self._encoders.values() if isinstance(encoder, MessagesEncoder)]
        self._open_scratch = open_scratch
        self._scratch: Store | None = None
        self._flows = compiled(self._stage.root, self)
        self._rows = self._skipped = self._late = 0
        self._events: dict[int, int] = {}
        """By source: the latest event time."""
        self._given: dict[int, int] = {}
        """By record of the chunk: the latest event time that a step gave to it."""
        self._was_quiet: bool | None = None
        """Whether all records so far only rebuild the state; None: there were none."""

    # -- what the compiled steps use ---------------------------------------------------------------------------------

    def opener(self, store: str) -> Callable[[], State]:
        documents = self._documents[store]
        known = documents.states.get

        def state() -> State:
            found = known(self._route)  # type: ignore[arg-type]
            return found if found is not None else documents.state(self.route)

        return state

    def encoder(self, sink: Sink) -> Encoder:
        return self._encoders[sink.id]

    def forwarder(self, stage: int) -> Callable[[Any, Any], None]:
        return sender([self._posts.setdefault(target, Post()) for target in self._stages[stage].range], self)

    def saw(self, timestamp: int) -> None:
        """An event time of the current record that moves the watermark, unless the record fails."""
        if self._chunk is not None:
            known = self._given.get(self.index)
            if known is None or timestamp > known:
                self._given[self.index] = timestamp

    def fires(self, store: str, fire: Fire) -> None:
        """What is called with the name of each timer of `store` that is due."""
        self._fires[store] = fire

    def ends(self, ending: Ending) -> None:
        """What gathers records through the batch, and is called at its end."""
        self._endings.append(ending)

    def prefetch(self, store: str, routes: list[bytes]) -> None:
        self._make_room()
        self._documents[store].prefetch(routes)

    def enter(self, route: bytes, timestamp: int) -> None:
        """The current record is none of the input, but of this key."""
        self._route, self.key, self.timestamp, self.headers = route, decode_key(route), timestamp, None

    def late(self) -> None:
        self._late += 1

    @property
    def route(self) -> bytes:
        """The encoded key of the current record."""
        if self._route is None:
            encode_key(self.key)  # says what is wrong with it
            raise MissingKey("the record has no key")
        return self._route

    # -- the records -------------------------------------------------------------------------------------------------

    def process(self, chunk: Chunk) -> None:
        routes = chunk.routes if chunk.routes is not None else _routes(chunk)
        for documents in self._read_ahead:
            documents.prefetch(routes)
        undo, faults, timestamps = self._undo, chunk.faults, chunk.timestamps
        is_first = self._stage.level == 0
        flow = self._flows[chunk.origin if is_first else 0]
        headers = chunk.headers
        encoders = tuple(self._encoders.values())
        before = [len(encoder) for encoder in encoders]
        emitted: list[int] = []
        failed: set[int] = set()
        self._chunk = chunk
        self.timestamp, self.headers = self.time_ms, None
        for topic in self._topics:
            topic.is_quiet = chunk.is_quiet
        for index, (self.key, self._route, value) in enumerate(zip(chunk.keys, routes, chunk.values, strict=True)):
            self.index = index
            if timestamps is not None:
                time = timestamps[index]
                self.timestamp = self.time_ms if time is None else time
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
                self._take_back(encoders, emitted)
                self._failed(error, chunk, index)
                failed.add(index)
            else:
                undo.clear()
        if is_first:
            self._rows += len(chunk.values)
        self._see(chunk, failed)
        self._was_quiet = chunk.is_quiet and self._was_quiet is not False
        self._after_some(before, is_quiet=chunk.is_quiet)
        self._chunk = None

    def finish(self) -> None:
        """After the last record: what was gathered, and then what is due."""
        is_quiet = self._was_quiet
        if is_quiet is None:
            is_quiet = self._program.is_quiet(self._job.span, self._partition)
        for topic in self._topics:
            topic.is_quiet = is_quiet
        before = [len(encoder) for encoder in self._encoders.values()]
        for ending in self._endings:
            for route in ending.routes():
                with self._alone():
                    ending.call(route)
            self._after_some(before, is_quiet=is_quiet)
        for store, documents in self._documents.items():
            for clock in CLOCKS:
                limit = self._threshold(clock)
                if limit is not None:
                    self._fire(store, documents, clock, limit, is_quiet=is_quiet)

    def _fire(self, store: str, documents: Documents, clock: Clock, limit: int, *, is_quiet: bool) -> None:
        before = [len(encoder) for encoder in self._encoders.values()]
        fire = self._fires.get(store)
        for page in documents.due(clock, limit):
            for state, timer in page:
                if not state._take(timer):
                    continue
                self._undo.clear()  # it is gone, whatever comes of the call
                name, _, due = timer
                self.enter(state._route, due if clock == "event" else self.time_ms)
                if fire is not None:
                    with self._alone():
                        fire(name)
            self._after_some(before, is_quiet=is_quiet)

    def _threshold(self, clock: Clock) -> int | None:
        return self.time_ms if clock == "processing" else self.watermark_ms

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """A call that belongs to no record: it happens as a whole or leaves no trace."""
        self.index += 1
        encoders = tuple(self._encoders.values())
        emitted = [len(encoder) for encoder in encoders]
        try:
            yield
        except DamagedStore:
            raise
        except Exception as error:
            self._take_back(encoders, emitted)
            self._failed_call(error)
        else:
            self._undo.clear()

    def _take_back(self, encoders: tuple[Encoder, ...], emitted: list[int]) -> None:
        """Undo what a record did to state, output, later stages and the watermark."""
        rollback(self._undo)
        self._given.pop(self.index, None)
        for post in self._posts.values():
            post.take_back(self.index)
        for encoder, length in zip(encoders, emitted, strict=True):
            encoder.truncate(length)

    def _after_some(self, before: list[int], *, is_quiet: bool) -> None:
        """Put away what some records have left, and make room."""
        if is_quiet:
            for encoder, length in zip(self._encoders.values(), before, strict=True):
                encoder.truncate(length)
        chunk, keeps_raw = self._chunk, self._program.dead_letters is not None
        for target, post in self._posts.items():
            if not post.flat:
                continue
            parcels = self.sent.setdefault(target, [])
            letters = post.sealed(chunk, self._partition, keeps_raw=keeps_raw)
            origin = 0 if chunk is None else chunk.origin
            parcels.append(Parcel(self._partition, self._attempt, len(parcels), is_quiet, origin, letters))
        self._make_room()

    def _see(self, chunk: Chunk, failed: set[int]) -> None:
        """What moves the watermark: the event times that steps have given or, if none does, those of the source."""
        program, origin = self._program, chunk.origin
        times = list(self._given.values())
        self._given.clear()
        if self._stage.level == 0 and program.watermark is not None and origin not in program.sets_timestamps:
            times = self._source_times(chunk, failed)
        if times:
            latest = max(times)
            self._events[origin] = max(latest, self._events.get(origin, latest))

    def _source_times(self, chunk: Chunk, failed: set[int]) -> list[int]:
        """Of the records that have one and did not fail."""
        times = chunk.timestamps
        if times is None:
            return [self.time_ms] if len(failed) < len(chunk.values) else []
        if failed:
            times = [time for index, time in enumerate(times) if index not in failed]
        return [time for time in times if time is not None]

    def _make_room(self) -> None:
        """A batch that touches more keys than memory holds must not die of it, again and again."""
        if sum(len(documents.states) for documents in self._documents.values()) <= SPILL_AFTER:
            return
        if self._scratch is None:
            self._scratch = self._open_scratch()
            logger.info(
                "partition %d: the batch touches more than %d keys; using the disk", self._partition, SPILL_AFTER
            )
        for documents in self._documents.values():
            documents.spill(self._scratch)

    def release(self) -> None:
        """Let go of everything but what is `sent`. States and compiled steps refer to each other in circles: the garbage collector
        would have to go through all of them, after every task."""
        self._flows = []
        self._fires.clear()
        self._endings.clear()
        for documents in self._documents.values():
            documents.forget()

    # -- errors ------------------------------------------------------------------------------------------------------

    def _failed(self, error: Exception, chunk: Chunk, index: int) -> None:
        """Skip the record if the user's callback says so, or put it aside; otherwise the error ends the batch."""
        program = self._program
        source = program.source.names[chunk.origin]
        position = chunk.positions[index]
        partition = self._partition if chunk.partitions is None else chunk.partitions[index]
        self.place = Place(source, partition, position, self.key, self.step)
        callback = program.on_error
        if index in chunk.faults and program.on_consumer_error is not None:
            callback = program.on_consumer_error
        record = Record(chunk.values[index], self.key, self.timestamp, self.headers, source, partition, position)
        if callback is None or not callback(error, record, logger):
            if program.dead_letters is None or chunk.raw is None:
                raise error
            self._put_aside(program.dead_letters, chunk.raw[index], error, self.place)
        self.place = None
        self._skipped += 1

    def _failed_call(self, error: Exception) -> None:
        """The same for a call that belongs to no record: a timer, or all records of a key."""
        program = self._program
        source = program.source.name
        self.place = Place(source, self._partition, -1, self.key, self.step)
        record = Record(None, self.key, self.timestamp, None, source, self._partition, -1)
        if program.on_error is None or not program.on_error(error, record, logger):
            raise error
        self.place = None
        self._skipped += 1

    def _put_aside(self, sink: Sink, raw: Raw, error: Exception, place: Place) -> None:
        """A dead letter: the record as it came, with where it came from and why it is here."""
        encoder = self._encoders[sink.id]
        assert isinstance(encoder, MessagesEncoder)
        encoder.put(raw.key(), raw.value(), self.timestamp, [*(self.headers or ()), *_reasons(error, place)])

    # -- what is written down ----------------------------------------------------------------------------------------

    def receipt(self, storage: Storage, end: Position | None, *, copied: bool = False) -> Receipt:
        job, partition, attempt = self._job, self._partition, self._attempt
        keys: list[bytes] = []
        values: list[bytes | None] = []
        index: list[tuple[bytes, bytes | None]] = []
        keys_grown = bytes_grown = 0
        for _, documents in sorted(self._documents.items()):
            changes = documents.changes()
            self._check_sizes(documents, changes.keys, changes.values)
            keys += changes.keys
            values += changes.values
            index += changes.index
            keys_grown += changes.documents
            bytes_grown += changes.size
        removed = values.count(None)
        updated = len(values) - removed
        keys += [key for key, _ in index]
        values += [value for _, value in index]
        delta = write_delta(storage, paths.delta(job.version, partition, attempt), keys, values) if keys else None
        reach("task.delta.durable", job.version)
        outboxes: dict[str, FileRef] = {}
        schemas: dict[str, str] = {}
        for sink in self._stage.sinks:
            encoder = self._encoders[sink.id]
            if len(encoder):
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
            rows_out=sum(len(encoder) for encoder in self._encoders.values()),
            skipped=self._skipped,
            late=self._late,
            keys_grown=keys_grown,
            bytes_grown=bytes_grown,
            keys_updated=updated,
            keys_removed=removed,
            events=self._events,
            due_ms=self._next_due("processing"),
            event_due_ms=self._next_due("event"),
            copied=copied,
        )

    def _next_due(self, clock: Clock) -> int | None:
        found = [documents.next_due(clock, self._threshold(clock)) for documents in self._documents.values()]
        return min((due for due in found if due is not None), default=None)

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


def _reasons(error: Exception, place: Place) -> Headers:
    """The headers of a dead letter."""
    return [
        ("holdfast.topic", place.source.encode()),
        ("holdfast.partition", str(place.partition).encode()),
        ("holdfast.offset", str(place.position).encode()),
        ("holdfast.step", place.step.encode()),
        ("holdfast.error", type(error).__qualname__.encode()),
        ("holdfast.message", message_of(error).encode(errors="replace")),
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


def message_of(error: Exception) -> str:
    try:
        return str(error)
    except Exception:  # whatever an exception's own __str__ may raise
        return "(it cannot be shown)"
