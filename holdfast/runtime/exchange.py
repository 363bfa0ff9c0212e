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
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol
from zlib import crc32

import msgspec

from holdfast.log.manifest import AttemptId
from holdfast.pickling import dumps
from holdfast.plan.program import Program
from holdfast.plan.record import IMMUTABLE, Chunk, Headers
from holdfast.runtime.job import Receipt
from holdfast.sources.base import CHUNK
from holdfast.state.keys import decode_keys, encode_key

_WITHOUT_REFERENCES = 2
"""The version of marshal that does not look for objects that it has met before: that takes half of the time."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode
_NO_POSITION = -1
"""Of what no record of the source has sent; less than any position."""


class LostMailError(Exception):
    """What a task received is not what one attempt of each sender sent; or tasks saw different attempts of one."""


class Sending(Protocol):
    """The record that sends."""

    timestamp: int
    index: int
    """Its place in the chunk that it comes from; among timers and the like, another for each call."""


def sender(posts: Sequence[Post], current: Sending) -> Callable[[Any, Any], None]:
    """What sends a key and a value to that one of `posts` that owns the key. This is the hot path.

    A value becomes bytes at once, while the cache has it, and what a function does to it later changes nothing of what was sent.
    """
    partitions = len(posts)

    def send(key: Any, value: Any) -> None:
        route = b"s" + key.encode() if type(key) is str and key.isascii() else encode_key(key)
        kind = type(value)
        is_plain = kind in IMMUTABLE or (
            kind is dict and IMMUTABLE.issuperset(map(type, value.values())) and IMMUTABLE.issuperset(map(type, value))
        )
        try:
            value = _encode(value) if is_plain else _Pickled(value)
        except (OverflowError, UnicodeEncodeError):  # an int of more than 64 bits, a lone surrogate
            value = _Pickled(value)
        post = posts[crc32(route) % partitions]  # as `partition_of`
        post.extend((route, value, current.timestamp, current.index))

    return send


class Post:
    """What some records have sent to one partition.

    Of every record the encoded key, the value in bytes, the timestamp and the index of the one that sent it, all in one list:
    columns are slices of it, which costs half of what a list of tuples does.
    """

    __slots__ = ("extend", "flat")

    def __init__(self) -> None:
        self.flat: list[Any] = []
        self.extend = self.flat.extend

    def take_back(self, index: int) -> None:
        """What the last record has sent, if it is the one of this index."""
        while self.flat and self.flat[-1] == index:
            del self.flat[-4:]

    def sealed(self, chunk: Chunk | None, partition: int, *, keeps_raw: bool) -> bytes:
        """All of it, for `Letters.opened`; the post is empty then. `chunk` is where the records come from; None: from timers and
        the like, of this partition."""
        routes, values, timestamps, indices = (self.flat[start::4] for start in range(4))
        self.flat.clear()
        pickled = [place for place, value in enumerate(values) if type(value) is _Pickled]
        for place in pickled:
            values[place] = values[place].data

        def of_senders(column: Sequence[Any]) -> list[Any]:
            return list(map(column.__getitem__, indices))

        partitions: int | bytes = partition
        headers = raw = None
        if chunk is None:
            positions = [_NO_POSITION] * len(routes)
        else:
            positions = of_senders(chunk.positions)
            if chunk.partitions is not None:
                partitions = _numbers(of_senders(chunk.partitions))
            if chunk.headers is not None:
                headers = of_senders(chunk.headers)
            if chunk.raw is not None and keeps_raw:
                raw = [(one.key(), one.value()) for one in of_senders(chunk.raw)]
        everything = (routes, values, pickled, _numbers(timestamps), partitions, _numbers(positions), headers, raw)
        return marshal.dumps(everything, _WITHOUT_REFERENCES)


class Letters(msgspec.Struct):
    """Records that have arrived, column by column, in their order."""

    routes: list[bytes]
    """Their encoded keys."""
    values: list[Any]
    timestamps: list[int]
    headers: list[Headers | None] | None
    partitions: list[int]
    """Of the source."""
    positions: list[int]
    raw: list[tuple[bytes | None, bytes | None]] | None
    """As the records came, where failed ones are kept."""

    @classmethod
    def opened(cls, data: bytes) -> Letters:
        routes, packed, pickled, timestamps, partitions, positions, headers, raw = marshal.loads(data)
        if pickled:
            decoders = dict.fromkeys(pickled, pickle.loads)
            values = [decoders.get(place, _decode)(value) for place, value in enumerate(packed)]
        else:
            values = list(map(_decode, packed))
        senders = [partitions] * len(routes) if type(partitions) is int else array("q", partitions).tolist()
        times, places = array("q", timestamps).tolist(), array("q", positions).tolist()
        return cls(routes, values, times, headers, senders, places, raw)

    def chunks(self, *, is_quiet: bool, origin: int) -> Iterator[Chunk]:
        for start in range(0, len(self.routes), CHUNK):
            end = start + CHUNK
            routes: list[Any] = self.routes[start:end]
            yield Chunk(
                keys=decode_keys(routes),
                values=self.values[start:end],
                timestamps=self.timestamps[start:end],  # type: ignore[arg-type]
                positions=self.positions[start:end],
                routes=routes,
                headers=None if self.headers is None else self.headers[start:end],
                partitions=self.partitions[start:end],
                raw=None if self.raw is None else [_Raw(*one) for one in self.raw[start:end]],
                is_quiet=is_quiet,
                origin=origin,
            )


def _numbers(column: list[int]) -> bytes:
    return array("q", column).tobytes()


def in_order(several: Iterable[Letters]) -> Letters:
    """All of them as one, in the order of their positions; what timers and the like have sent comes after it."""
    parts = list(several)
    positions = [position for letters in parts for position in letters.positions]
    order = sorted(range(len(positions)), key=positions.__getitem__)
    without = positions.count(_NO_POSITION)
    order = order[without:] + order[:without]

    def column(name: str) -> list[Any]:
        values = [value for letters in parts for value in getattr(letters, name) or [None] * len(letters.routes)]
        return [values[index] for index in order]

    raw = column("raw")
    return Letters(
        routes=column("routes"),
        values=column("values"),
        timestamps=column("timestamps"),
        headers=column("headers"),
        partitions=column("partitions"),
        positions=column("positions"),
        raw=raw if any(raw) else None,
    )


class _Pickled:
    """A value that is more than a dict of plain ones."""

    __slots__ = ("data",)

    def __init__(self, value: Any) -> None:
        try:
            self.data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        except (pickle.PicklingError, AttributeError, TypeError):
            self.data = dumps(value)  # knows instances of classes that pickle cannot name


class Parcel(msgspec.Struct, frozen=True):
    """Records of one chunk for one partition."""

    sender: int
    attempt: AttemptId
    number: int
    is_quiet: bool
    origin: int
    """The source that the records come from."""
    letters: bytes
    """What `Post.sealed` made; see `opened`."""

    def opened(self) -> Letters:
        return Letters.opened(self.letters)


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
        if self._in_order:
            yield from in_order(parcel.opened() for parcel in self._parcels()).chunks(is_quiet=False, origin=0)
            return
        for parcel in self._parcels():
            yield from parcel.opened().chunks(is_quiet=parcel.is_quiet, origin=parcel.origin)

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

    def __init__(self, key: bytes | None, value: bytes | None) -> None:
        self._key, self._value = key, value

    def key(self) -> bytes | None:
        return self._key

    def value(self) -> bytes | None:
        return self._value


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
