"""Between stages: what the tasks of one level send to those of the next, within one job.

Records travel in parcels, numbered by sender, so that those of one sender are taken in the order in which they were
sent, whatever the shuffle does. Every task also gets a waybill from every sender: who sent, by which attempt, and how
many parcels. A task that does not find exactly that has received a mixture of attempts: the job is lost and run again.

Receipts ride along, in full to the first partition of the next level only; all others carry the attempts that they have
seen. The driver commits only if everybody saw the same ones (`gathered`).
"""

from __future__ import annotations

import marshal
import pickle
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from holdfast.log.manifest import AttemptId
from holdfast.pickling import dumps
from holdfast.plan.program import Program
from holdfast.plan.record import Chunk, Headers, is_flat
from holdfast.runtime.job import Receipt
from holdfast.sources.base import CHUNK


class LostMailError(Exception):
    """What a task received is not what one attempt of each sender sent; or tasks saw different attempts of one."""


class Letters(msgspec.Struct):
    """Records on their way to one partition, column by column, in their order.

    What a function does to a value after it has sent it changes nothing: a value is copied at once or, if it is more than a
    dict of plain values, packed. All of them travel as one piece, which costs a third of what they cost one by one.
    """

    keys: list[Any] = []
    routes: list[bytes] = []
    values: list[Any] = []
    packed: list[int] = []
    """The indices of values that are packed, in their order; on arrival they are unpacked."""
    timestamps: list[int] = []
    headers: list[Headers | None] = []
    partitions: list[int] = []
    """Of the source."""
    positions: list[int] = []
    raw: list[tuple[bytes | None, bytes | None] | None] = []
    """As the records came, where failed ones are kept."""

    def take(self, key: Any, route: bytes, value: Any) -> None:
        """The first columns of one more record."""
        if not is_flat(value):
            self.packed.append(len(self.values))
            value = _packed(value)
        elif type(value) is dict:
            value = value.copy()
        self.keys.append(key)
        self.routes.append(route)
        self.values.append(value)

    def drop_last(self) -> None:
        for column in self._columns():
            column.pop()
        if self.packed and self.packed[-1] == len(self.values):
            self.packed.pop()

    def chunks(self, order: range | list[int], *, is_quiet: bool = False, origin: int = 0) -> Iterator[Chunk]:
        """The records with these indices. They must have arrived: nothing is packed."""
        for start in range(0, len(order), CHUNK):
            some = order[start : start + CHUNK]
            keys, routes, values, timestamps, headers, partitions, positions, raw = (
                column[some.start : some.stop] if isinstance(some, range) else [column[index] for index in some]
                for column in self._columns()
            )
            yield Chunk(
                keys=keys,
                values=values,
                timestamps=timestamps,
                positions=positions,
                routes=routes,
                headers=headers,
                partitions=partitions,
                raw=[_Raw(one) for one in raw if one is not None] if raw[0] is not None else None,
                is_quiet=is_quiet,
                origin=origin,
            )

    def add(self, others: Letters) -> None:
        for column, more in zip(self._columns(), others._columns(), strict=True):
            column += more

    def _columns(self) -> tuple[list[Any], ...]:
        return (
            self.keys,
            self.routes,
            self.values,
            self.timestamps,
            self.headers,
            self.partitions,
            self.positions,
            self.raw,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened, (marshal.dumps((self._columns(), self.packed)),)


def _opened(data: bytes) -> Letters:
    (keys, routes, values, timestamps, headers, partitions, positions, raw), packed = marshal.loads(data)
    for index in packed:
        values[index] = pickle.loads(values[index])
    return Letters(keys, routes, values, [], timestamps, headers, partitions, positions, raw)


class Parcel(msgspec.Struct, frozen=True):
    """Records of one chunk for one partition."""

    sender: int
    attempt: AttemptId
    number: int
    is_quiet: bool
    origin: int
    """The source that the records come from."""
    letters: Letters


class Waybill(msgspec.Struct, frozen=True):
    """What a task has sent to one partition, and that this is all."""

    sender: int
    attempt: AttemptId
    parcels: int
    failed: bool
    receipts: tuple[Receipt, ...]
    seen: dict[int, AttemptId]
    """By partition: the sender's attempt and those of the senders before it."""


class Outcome(msgspec.Struct, frozen=True):
    """What a task of the last level returns."""

    receipts: tuple[Receipt, ...]
    seen: dict[int, AttemptId]


Mail = Parcel | Waybill


class Inbox:
    """What one task receives: an iterator of chunks, and then who sent them.

    With `in_order` the records of all senders are taken in the order that they had in the source.
    """

    def __init__(self, senders: Iterable[int], mail: Iterable[Mail], *, in_order: bool = False) -> None:
        self._senders = set(senders)
        self._mail = mail
        self._in_order = in_order
        self.receipts: list[Receipt] = []
        self.seen: dict[int, AttemptId] = {}
        self.failed = False
        """A sender has failed, so what came is not worth processing."""

    def __iter__(self) -> Iterator[Chunk]:
        if not self._in_order:
            for parcel in self._parcels():
                letters = parcel.letters
                everything = range(len(letters.routes))
                yield from letters.chunks(everything, is_quiet=parcel.is_quiet, origin=parcel.origin)
            return
        gathered = Letters()
        for parcel in self._parcels():
            gathered.add(parcel.letters)
        positions = gathered.positions
        order = sorted(range(len(positions)), key=positions.__getitem__)
        yield from gathered.chunks(order)

    def _parcels(self) -> Iterator[Parcel]:
        """Those of one sender in the order in which they were sent."""
        taken: dict[tuple[int, AttemptId], int] = {}
        early: dict[tuple[int, AttemptId, int], Parcel] = {}
        bills: list[Waybill] = []
        for item in self._mail:
            if isinstance(item, Waybill):
                bills.append(item)
                continue
            early[item.sender, item.attempt, item.number] = item
            sender = (item.sender, item.attempt)
            while (parcel := early.pop((*sender, taken.get(sender, 0)), None)) is not None:
                taken[sender] = parcel.number + 1
                yield parcel
        self._check(bills, taken)

    def _check(self, bills: list[Waybill], taken: dict[tuple[int, AttemptId], int]) -> None:
        promised = {(bill.sender, bill.attempt): bill.parcels for bill in bills}
        complete = {bill.sender for bill in bills} == self._senders and len(bills) == len(self._senders)
        if not complete or {sender: count for sender, count in promised.items() if count} != taken:
            raise LostMailError("a task received the work of several attempts, or a part of it")
        for bill in bills:
            self.receipts += bill.receipts
            self.failed = self.failed or bill.failed
            for partition, attempt in bill.seen.items():
                if self.seen.setdefault(partition, attempt) != attempt:
                    raise LostMailError(f"partition {partition} was computed twice")


class _Raw:
    """A record as it came, from the stage that read it."""

    def __init__(self, raw: tuple[bytes | None, bytes | None]) -> None:
        self._key, self._value = raw

    def key(self) -> bytes | None:
        return self._key

    def value(self) -> bytes | None:
        return self._value


def _packed(value: Any) -> bytes:
    """A value as it travels."""
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError):
        return dumps(value)  # knows instances of classes that pickle cannot name


def mailed(
    program: Program, receipt: Receipt | None, sent: dict[int, list[Parcel]], inbox: Inbox | None, partition: int
) -> Iterator[tuple[int, Mail] | Outcome]:
    """What a task gives to the runner: mail by partition of the next level or, from the last level, its outcome.

    `receipt` is None if a task before this one has failed.
    """
    carried = () if inbox is None else tuple(inbox.receipts)
    seen = {} if inbox is None else dict(inbox.seen)
    receipts = carried if receipt is None else (*carried, receipt)
    if receipt is not None:
        seen[partition] = receipt.attempt
    level = program.stage_of(partition).level
    if level == len(program.levels) - 1:
        yield Outcome(receipts, seen)
        return
    attempt = AttemptId("") if receipt is None else receipt.attempt
    failed = receipt is None or receipt.failure is not None
    following = program.levels[level + 1]
    for target in following:
        parcels = [] if failed else sent.get(target, [])
        for parcel in parcels:
            yield target, parcel
        in_full = receipts if target == following.start else ()
        yield target, Waybill(partition, attempt, len(parcels), failed, in_full, seen)


def gathered(outcomes: Iterable[Outcome]) -> list[Receipt]:
    """The receipts of all tasks of a job, one per attempt that counts."""
    receipts: dict[int, Receipt] = {}
    seen: dict[int, AttemptId] = {}
    for outcome in outcomes:
        for receipt in outcome.receipts:
            known = receipts.setdefault(receipt.partition, receipt)
            if known.attempt != receipt.attempt:
                raise LostMailError(f"partition {receipt.partition} was computed twice")
        for partition, attempt in outcome.seen.items():
            if seen.setdefault(partition, attempt) != attempt:
                raise LostMailError(f"partition {partition} was computed twice")
    for partition, receipt in receipts.items():
        if seen.get(partition, receipt.attempt) != receipt.attempt:
            raise LostMailError(f"partition {partition} was computed twice")
    return list(receipts.values())
