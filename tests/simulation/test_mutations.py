"""The simulation must notice a broken rule. Each test breaks one on purpose and wants a schedule to fail.

If a mutation survives, the simulation has a blind spot, and the rule is protected by nothing. One rule is shown by a unit
test alone, since three uploads would have to meet in one schedule: an upload refers to files of the newest snapshot only
(`test_an_upload_refers_to_nothing_that_a_lost_one_has_left`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import machines
import msgspec
import pytest
from faulty_storage import FaultyStorage
from schedule import simulate
from surroundings import SimulatedPublisher, TableTarget
from world import ANY, Kind, World

from holdfast.errors import Damaged, Fenced, HoldfastError, JobFailed
from holdfast.kafka import publishing
from holdfast.log import files, recipe, retention, snapshot
from holdfast.log.manifest import Chain
from holdfast.plan.sinks import decode_values
from holdfast.runtime import batch, exchange, processing, task
from holdfast.runtime.batch import Driver
from holdfast.runtime.delivery import Delivery, Outbox
from holdfast.runtime.exchange import LostMailError
from holdfast.sources.base import Span
from holdfast.state import documents, timers
from holdfast.stores.base import EMPTY, Mark
from holdfast.stores.memory import MemoryStore
from holdfast.testing import Crash, MemoryStorage

TRIES = 400

Patch = Callable[[pytest.MonkeyPatch], None]


def commit_before_the_delta_is_durable(patch: pytest.MonkeyPatch) -> None:
    pending: list[tuple[Any, str, bytes]] = []
    put = FaultyStorage.put

    def late(self: Any, name: str, data: bytes) -> None:
        if name.startswith("deltas/"):
            pending.append((self, name, data))
            return
        put(self, name, data)
        if name.startswith("commits/"):
            while pending:
                put(*pending.pop())

    patch.setattr(FaultyStorage, "put", late)


def trust_a_foreign_local_store(patch: pytest.MonkeyPatch) -> None:
    bring = recipe.bring

    def trusting(store: Any, storage: Any, way: Any) -> None:
        for stride in way.tail:
            if stride.version == store.mark().version:
                getattr(store, "_disk", store)._mark = stride.mark
        bring(store, storage, way)

    patch.setattr(task, "bring", trusting)


def take_sparks_start_offset(patch: pytest.MonkeyPatch) -> None:
    plan = Driver._plan

    def trusting(self: Any, proposal: Any, *rest: Any) -> Any:
        job = plan(self, proposal, *rest)
        if job.span is None or proposal.spark is None:
            return job
        start = int(proposal.spark.offsets.split("-")[0])
        return type(job)(
            **{f: getattr(job, f) for f in job.__struct_fields__} | {"span": Span({"taken": start}, job.span.end)}
        )

    patch.setattr(Driver, "_plan", trusting)


def skip_the_receipt_count(patch: pytest.MonkeyPatch) -> None:
    """Whatever has come is enough: who has sent nothing has changed nothing."""
    check = Driver._check_complete

    def unchecked(self: Any, job: Any, receipts: list[Any]) -> None:
        if not receipts:
            check(self, job, receipts)
        nothing = {"delta": None, "outboxes": {}, "rows_in": 0, "rows_out": 0, "keys_grown": 0, "bytes_grown": 0}
        for partition in set(range(self._program.all_partitions)) - {receipt.partition for receipt in receipts}:
            receipts.append(msgspec.structs.replace(receipts[0], partition=partition, **nothing))

    patch.setattr(Driver, "_check_complete", unchecked)


def compute_a_replay_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Driver, "_is_committed", lambda self, batch: False)


def let_a_commit_overwrite_another(patch: pytest.MonkeyPatch) -> None:
    def put(self: MemoryStorage, name: str, data: bytes) -> None:
        self.objects[name] = data

    patch.setattr(MemoryStorage, "put", put)


def take_any_manifest_for_ours(patch: pytest.MonkeyPatch) -> None:
    commit = Chain.commit

    def credulous(self: Chain, manifest: Any, **options: Any) -> Any:
        try:
            return commit(self, manifest, **options)
        except Fenced:
            return manifest

    patch.setattr(Chain, "commit", credulous)


def write_to_the_local_store_before_the_commit(patch: pytest.MonkeyPatch) -> None:
    changes = processing.Documents.changes

    def eager(self: Any) -> Any:
        result = changes(self)
        store = getattr(self._store, "_disk", self._store)
        store = getattr(store, "store", store)
        for key, value in zip(result.keys, result.values, strict=True):
            if value is None:
                store._values.pop(key, None)
            else:
                store._values[key] = value
        return result

    patch.setattr(processing.Documents, "changes", eager)


def skip_a_missing_delta(patch: pytest.MonkeyPatch) -> None:
    read = files.read_delta

    def lenient(storage: Any, ref: Any) -> Any:
        try:
            return list(read(storage, ref))
        except Damaged:
            return []

    patch.setattr(recipe, "read_delta", lenient)


def do_not_deliver_at_the_start(patch: pytest.MonkeyPatch) -> None:
    start, deliver = Driver.start, Delivery.deliver

    def hasty(self: Any) -> Any:
        patch.setattr(Delivery, "deliver", lambda self, manifest, **options: None)
        try:
            return start(self)
        finally:
            patch.setattr(Delivery, "deliver", deliver)

    patch.setattr(Driver, "start", hasty)


def deliver_before_the_commit(patch: pytest.MonkeyPatch) -> None:
    commit = Chain.commit

    def hasty(self: Chain, manifest: Any, **options: Any) -> Any:
        for sink in {sink for part in manifest.partitions for sink in part.outboxes}:
            target = TableTarget(self.storage._world, sink)
            target.deliver(manifest, Outbox(self, manifest, sink))
        return commit(self, manifest, **options)

    patch.setattr(Chain, "commit", hasty)


def forget_what_a_target_has(patch: pytest.MonkeyPatch) -> None:
    def deliver(self: Any, manifest: Any, outbox: Any) -> None:
        rows = [value for table in outbox.tables() for value, _, _ in decode_values(table)]
        known = self._world.tables[self._name].versions.setdefault(manifest.version, (manifest.id, []))
        known[1].extend(rows)
        if self._world.chance("crash after a storage call"):
            raise Crash("after delivery")

    patch.setattr(TableTarget, "deliver", deliver)


def keep_the_state_of_a_cleared_store(patch: pytest.MonkeyPatch) -> None:
    def lazy(store: Any, storage: Any, way: Any) -> None:
        held = store.mark()
        if held != EMPTY and held.version < way.base:
            store._mark = way.base_mark
        recipe_bring(store, storage, way)

    recipe_bring = recipe.bring
    patch.setattr(task, "bring", lazy)


def publish_whatever_the_note_says(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(publishing, "_is_out", lambda note, wanted: False)


def believe_the_note_from_before_an_error(patch: pytest.MonkeyPatch) -> None:
    opened = publishing.Publisher._open

    def forgetful(self: Any) -> None:
        known = self._note
        opened(self)
        self._note = known or self._note

    patch.setattr(publishing.Publisher, "_open", forgetful)


def let_every_driver_choose_who_publishes(patch: pytest.MonkeyPatch) -> None:
    publish = SimulatedPublisher.publish

    def whimsical(self: Any, manifest: Any) -> None:
        publish(self, msgspec.structs.replace(manifest, published_by=self.way(0, manifest)))

    patch.setattr(SimulatedPublisher, "publish", whimsical)


def take_whatever_attempt_comes(patch: pytest.MonkeyPatch) -> None:
    def unchecked(self: Any, bills: list[Any], taken: Any) -> None:
        for bill in bills:
            self.receipts += bill.receipts

    def any_of(outcomes: Any) -> list[Any]:
        return list({receipt.partition: receipt for outcome in outcomes for receipt in outcome.receipts}.values())

    patch.setattr(exchange.Inbox, "_check", unchecked)
    patch.setattr(batch, "gathered", any_of)


def take_parcels_as_they_come(patch: pytest.MonkeyPatch) -> None:
    def as_they_come(self: Any) -> Any:
        mail = list(self._mail)
        for parcel in (item for item in mail if isinstance(item, exchange.Parcel)):
            yield from parcel.opened().chunks(is_quiet=parcel.is_quiet, origin=parcel.origin)
        self._check(
            [item for item in mail if isinstance(item, exchange.Waybill)],
            Counter((item.sender, item.attempt) for item in mail if isinstance(item, exchange.Parcel)),
        )

    patch.setattr(exchange.Inbox, "__iter__", as_they_come)


def leave_the_index_as_it_is(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(timers.TimerIndex, "changes", lambda self: [])


def forget_that_a_timer_has_fired(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(documents.State, "_take", lambda self, timer: True)


def let_the_watermark_go_back(patch: pytest.MonkeyPatch) -> None:
    """It follows the last batch alone."""

    def forgetful_times(head: Any, seen: Any, sources: int) -> Any:
        return event_times(msgspec.structs.replace(head, event_ms=()), seen, sources)

    def forgetful(rule: Any, head: Any, now_ms: int, silences: Any) -> Any:
        return next_watermark(rule, msgspec.structs.replace(head, watermark_ms=None), now_ms, silences)

    event_times, next_watermark = batch.event_times, batch.next_watermark
    patch.setattr(batch, "event_times", forgetful_times)
    patch.setattr(batch, "next_watermark", forgetful)


def fire_timers_of_event_time_by_the_wall_clock(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(processing.Processing, "_threshold", lambda self, clock: self.time_ms)


def keep_what_has_ended_by_event_time(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(documents.Documents, "_event_now", lambda self: 0)


def show_a_snapshot_before_its_files_are_there(patch: pytest.MonkeyPatch) -> None:
    pending: list[tuple[Any, str, bytes]] = []
    put = FaultyStorage.put

    def late(self: Any, name: str, data: bytes) -> None:
        if name.startswith("snapshot-files/"):
            pending.append((self, name, data))
            return
        put(self, name, data)
        if name.startswith("snapshots/"):
            while pending:
                put(*pending.pop())

    patch.setattr(FaultyStorage, "put", late)


def remove_one_version_too_many(patch: pytest.MonkeyPatch) -> None:
    remove = retention._remove

    def greedy(storage: Any, sizes: Any, *, before: int, **options: Any) -> Any:
        return remove(storage, sizes, before=before + 1, **options)

    patch.setattr(retention, "_remove", greedy)


def remove_files_of_uploads_under_way(patch: pytest.MonkeyPatch) -> None:
    remove = retention._remove

    def greedy(storage: Any, sizes: Any, *, before: int, **options: Any) -> Any:
        files = any(name.startswith("snapshot-files/") for name in sizes)
        return remove(storage, sizes, before=1 << 60 if files else before, **options)

    patch.setattr(retention, "_remove", greedy)


def take_a_snapshot_of_any_time_line(patch: pytest.MonkeyPatch) -> None:
    """The attempt that a partition's snapshot is of does not matter; local stores are still asked for theirs."""

    def ways(storage: Any, wanted: Any, held: Any, known: Any, damages: Any) -> Any:
        def credulous(storage: Any, version: int) -> Any:
            found = read(storage, version)
            part = found.partitions[wanted.partition]
            attempts = {stride.version: stride.attempt for stride in wanted.tail}
            part = msgspec.structs.replace(part, attempt=attempts.get(part.version, part.attempt))
            return msgspec.structs.replace(found, partitions=_with(found.partitions, wanted.partition, part))

        read = snapshot.read_snapshot
        patch.setattr(recipe, "read_snapshot", credulous)
        return true_ways(storage, wanted, held, known, damages)

    def replace(self: Any, mark: Any) -> None:
        self._values = MemoryStore.open(self.staging())._values
        self._mark = mark

    true_ways = recipe._ways
    patch.setattr(recipe, "_ways", ways)
    patch.setattr(MemoryStore, "replace", replace)


def _with(parts: tuple[Any, ...], index: int, part: Any) -> tuple[Any, ...]:
    return (*parts[:index], part, *parts[index + 1 :])


def clear_up_by_a_snapshot_of_any_time_line(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(retention, "is_of", lambda chain, snapshot: True)


def clear_up_whatever_readers_hold(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(retention, "oldest_pin", lambda storage, now_ms: None)


def do_not_look_back_after_a_commit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Chain, "_check_not_overtaken", lambda self, manifest, tries: None)


def take_a_damaged_snapshot_as_it_is(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(snapshot, "_is_whole", lambda path, file, checksums: True)
    patch.setattr(MemoryStore, "replace", _whatever_is_there)


def _whatever_is_there(self: Any, mark: Any) -> None:
    try:
        staged = MemoryStore.open(self.staging())
        self._values = staged._values
    except Damaged:
        self._values = {}
    self._mark = mark


def snapshot_what_is_not_committed(patch: pytest.MonkeyPatch) -> None:
    """The copy is made after the batch has changed the store."""
    receipt = processing.Processing.receipt

    def late(self: Any, storage: Any, end: Any, *, copied: bool = False) -> Any:
        made = receipt(self, storage, end, copied=copied)
        if copied:
            store = next(iter(self._documents.values()))._store
            store = getattr(store, "_disk", store)
            store = machines.frozen(getattr(store, "store", store))
            delta = [] if made.delta is None else files.read_delta(storage, made.delta)
            store.apply(delta, store.mark(), Mark(store.mark().version + 1, "late"))
            store._mark = self._job.recipes[self._partition].target
            for host in CURRENT[-1].copies:
                if host.copied(self._job.instance, self._partition, self._attempt):
                    host.copy(self._job.instance, self._partition, store, self._attempt)
        return made

    make = World.__init__

    def noted(self: Any, *given: Any) -> None:
        make(self, *given)
        CURRENT[:] = [self]

    patch.setattr(World, "__init__", noted)
    patch.setattr(processing.Processing, "receipt", late)


CURRENT: list[Any] = []

MUTATIONS: list[Patch] = [
    show_a_snapshot_before_its_files_are_there,
    remove_one_version_too_many,
    remove_files_of_uploads_under_way,
    take_a_snapshot_of_any_time_line,
    clear_up_by_a_snapshot_of_any_time_line,
    clear_up_whatever_readers_hold,
    do_not_look_back_after_a_commit,
    take_a_damaged_snapshot_as_it_is,
    snapshot_what_is_not_committed,
    take_whatever_attempt_comes,
    take_parcels_as_they_come,
    leave_the_index_as_it_is,
    forget_that_a_timer_has_fired,
    let_the_watermark_go_back,
    fire_timers_of_event_time_by_the_wall_clock,
    keep_what_has_ended_by_event_time,
    publish_whatever_the_note_says,
    believe_the_note_from_before_an_error,
    let_every_driver_choose_who_publishes,
    commit_before_the_delta_is_durable,
    trust_a_foreign_local_store,
    take_sparks_start_offset,
    skip_the_receipt_count,
    compute_a_replay_again,
    let_a_commit_overwrite_another,
    take_any_manifest_for_ours,
    write_to_the_local_store_before_the_commit,
    skip_a_missing_delta,
    do_not_deliver_at_the_start,
    deliver_before_the_commit,
    forget_what_a_target_has,
    keep_the_state_of_a_cleared_store,
]


KINDS: dict[Patch, Kind] = {
    do_not_look_back_after_a_commit: Kind(snapshot_every=1, keep=1, delay=0, sleep=4, readers=0, rate=0.03),
    take_a_damaged_snapshot_as_it_is: Kind(snapshot_every=1, keep=1, delay=0, sleep=1, regret=1, readers=0, rate=0.02),
    clear_up_whatever_readers_hold: Kind(snapshot_every=1, keep=1, delay=0, readers=4, rate=0.01),
    remove_files_of_uploads_under_way: Kind(snapshot_every=1, keep=1, delay=30, rate=0.01),
    deliver_before_the_commit: Kind(kafka=False),
    forget_what_a_target_has: Kind(kafka=False),
    take_a_snapshot_of_any_time_line: Kind(snapshot_every=1, regret=10, rate=0.01),
    clear_up_by_a_snapshot_of_any_time_line: Kind(snapshot_every=2, keep=1, regret=20, rate=0.01),
    skip_the_receipt_count: Kind(staged=False, rate=0.08),
    take_whatever_attempt_comes: Kind(staged=True, rate=0.03),
    take_parcels_as_they_come: Kind(staged=True, ranged=False),
    trust_a_foreign_local_store: Kind(regret=10, rate=0.01),
}
"""The worlds in which a broken rule shows. Schedules without a mutation are of all kinds."""


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_the_simulation_catches(mutation: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a check or an error with a name: any other error is one of the mutation itself."""
    kind = KINDS.get(mutation, ANY)
    mutation(monkeypatch)
    for seed in range(TRIES):
        try:
            simulate(seed, kind)
        except (AssertionError, HoldfastError) as error:
            if isinstance(error, JobFailed) and not isinstance(error.__cause__, HoldfastError | LostMailError):
                raise
            print(f"\n{mutation.__name__}: caught by seed {seed}: {type(error).__name__}")
            break
    else:
        pytest.fail(f"{mutation.__name__} survived {TRIES} schedules")
    monkeypatch.undo()
    simulate(seed, kind)  # the same schedule ends exactly where no rule is broken
