"""The parts of the Kafka code that need no broker: shares of a batch, ranges with gaps, formats, and the rules of notes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import (
    ForeignTarget,
    FutureFormat,
    IncompleteChangelog,
    InvalidName,
    MarkerLost,
    OffsetsLost,
    TopicMismatch,
    UnsupportedValue,
)
from holdfast.kafka import names
from holdfast.kafka.changelog import MILESTONE, Milestone, decode_milestone, documents, encode_milestone, records
from holdfast.kafka.cluster import TopicNeed
from holdfast.kafka.connection import Connection
from holdfast.kafka.cursors import Cursor
from holdfast.kafka.link import limits_of
from holdfast.kafka.publishing import Note, _is_out
from holdfast.log.files import changes_of, read_table
from holdfast.log.manifest import InstanceId, ManifestId
from holdfast.log.recipe import Recipe
from holdfast.plan.messages import OVERHEAD, MessageForm, MessagesEncoder, TopicLimits, unpacked
from holdfast.plan.pipeline import Pipeline
from holdfast.plan.program import Program, program_of
from holdfast.plan.record import Chunk
from holdfast.runtime.exchange import Outcome
from holdfast.runtime.job import Job
from holdfast.runtime.restoring import RestoreLine
from holdfast.runtime.task import run_task
from holdfast.sources.base import Span, fair_shares
from holdfast.sources.kafka import KafkaSource, check_same_topic
from holdfast.state.codecs import codec_for
from holdfast.state.documents import document_prefix
from holdfast.state.options import RocksDBOptions
from holdfast.testing import MemoryStorage, MemoryStores

# -- how much each partition may take -----------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 30), max_size=6), st.integers(1, 40))
def test_a_batch_is_shared_fairly_and_fully(available: list[int], rows: int) -> None:
    shares = fair_shares(available, rows)
    assert all(0 <= share <= there for share, there in zip(shares, available, strict=True))
    assert sum(shares) == min(rows, sum(available))
    cut = [share for share, there in zip(shares, available, strict=True) if share < there]
    assert max(shares, default=0) - min(cut, default=max(shares, default=0)) <= 1  # none has more than one that was cut


def test_what_a_short_partition_leaves_goes_to_the_others() -> None:
    assert fair_shares([100, 1, 0, 100], 10) == [5, 1, 0, 4]


# -- ranges with gaps ------------------------------------------------------------------------------------------------------


class Fetched:
    """A message, or the end of the partition, or an error."""

    def __init__(self, offset: int, error: Any = None) -> None:
        self._offset = offset
        self._error = error

    def offset(self) -> int:
        return self._offset

    def error(self) -> Any:
        return self._error


def end_at(offset: int) -> Fetched:
    from confluent_kafka import KafkaError

    return Fetched(offset, KafkaError(KafkaError._PARTITION_EOF))


class FakeConsumer:
    """Gives what a test has put into it, fetch by fetch."""

    def __init__(self, *fetches: list[Fetched]) -> None:
        self.fetches = list(fetches)
        self.assigned: list[int] = []

    def client(self, kind: Any, more: Any) -> FakeConsumer:
        return self

    def assign(self, places: list[Any]) -> None:
        self.assigned += [place.offset for place in places]

    def consume(self, count: int, timeout: float) -> list[Fetched]:
        return self.fetches.pop(0) if self.fetches else []


def offsets(taken: list[Any]) -> list[int]:
    return [message.offset() for message in taken]


def read(cursor: Cursor, end: int) -> list[int]:
    found: list[int] = []
    while cursor.at < end:
        found += offsets(cursor.take(end))
    return found


def test_a_record_beyond_the_range_is_kept_for_the_next_one() -> None:
    consumer = FakeConsumer([Fetched(0), Fetched(1), Fetched(5), Fetched(6)])
    cursor = Cursor(consumer, "app", "orders", 0)  # type: ignore[arg-type]
    cursor.move(0)
    assert read(cursor, 4) == [0, 1]
    cursor.move(4)
    assert read(cursor, 7) == [5, 6]
    assert consumer.assigned == [0]


def test_a_range_in_a_gap_ends_with_the_partition() -> None:
    consumer = FakeConsumer([Fetched(0)], [], [end_at(9)])
    cursor = Cursor(consumer, "app", "orders", 0)  # type: ignore[arg-type]
    cursor.move(0)
    assert read(cursor, 5) == [0]
    assert cursor.at == 9
    cursor.move(5)  # nothing was handed out from there
    assert consumer.assigned == [0, 5]


def test_a_cursor_that_is_moved_forgets_what_it_kept() -> None:
    consumer = FakeConsumer([Fetched(0), Fetched(3)], [Fetched(0), Fetched(3)])
    cursor = Cursor(consumer, "app", "orders", 0)  # type: ignore[arg-type]
    for _ in range(2):  # a batch that is run again
        cursor.move(0)
        assert read(cursor, 2) == [0]
        assert cursor.at == 2
    assert consumer.assigned == [0, 0]


def test_a_record_that_is_gone_is_an_error_with_its_place() -> None:
    from confluent_kafka import KafkaError

    gone = Fetched(-1001, KafkaError(KafkaError._AUTO_OFFSET_RESET))
    cursor = Cursor(FakeConsumer([Fetched(3)], [gone]), "app", "orders", 7)  # type: ignore[arg-type]
    cursor.move(3)
    with pytest.raises(OffsetsLost) as caught:
        read(cursor, 9)
    assert (caught.value.topic, caught.value.partition, caught.value.since) == ("orders", 7, 4)


def test_a_topic_is_the_same_if_its_id_and_its_partitions_are() -> None:
    check_same_topic("orders", "id", 3, "id", 3)
    for found, partitions in ((None, 0), ("other", 3), ("id", 4)):
        with pytest.raises(TopicMismatch):
            check_same_topic("orders", "id", 3, found, partitions)


# -- the changelog ---------------------------------------------------------------------------------------------------------

STONE = Milestone(
    app="app",
    instance="i",
    version=7,
    manifest="m",
    cleared=2,
    time_ms=5,
    topics={"orders": "t"},
    offsets=(9,),
    outs=(9,),
    codec="json",
    stores=("default",),
)


@given(st.integers(1, 2**63 - 1), st.dictionaries(st.binary(), st.none() | st.binary(min_size=1)))
def test_a_change_comes_back_from_its_changelog_record(version: int, changes: dict[bytes, bytes | None]) -> None:
    prefix, other = document_prefix("mine"), document_prefix("other")
    stored = [(prefix + key, value) for key, value in changes.items()]
    written = list(records("mine", version, [*stored, (other + b"x", b"not of this store")]))
    assert len(written) == len(changes)
    assert all(key != MILESTONE for key, _ in written)
    milestone = (MILESTONE, encode_milestone(STONE))
    read = dict([*written, milestone])
    assert dict(changes_of(documents("mine", version - 1, read))) == dict(stored)
    deleted = {name: None for name, value in stored if value is None}
    assert dict(changes_of(documents("mine", version, read))) == deleted, "what was cleared came back"


def test_a_milestone_comes_back() -> None:
    assert decode_milestone("topic", 0, encode_milestone(STONE)) == STONE


@pytest.mark.parametrize("data", [b"", b"\xff", b"[]", b"{}", b'{"format": "x"}', b'{"format": 1}'])
def test_a_milestone_that_is_none_is_named_with_its_place(data: bytes) -> None:
    with pytest.raises(IncompleteChangelog) as caught:
        decode_milestone("changelog", 3, data)
    assert (caught.value.topic, caught.value.partition) == ("changelog", 3)


def test_a_milestone_of_a_later_format_is_refused() -> None:
    with pytest.raises(FutureFormat, match="upgrade"):
        decode_milestone("changelog", 3, encode_milestone(msgspec.structs.replace(STONE, format=2)))


def test_a_name_that_kafka_would_not_take_is_refused() -> None:
    assert names.changelog("g", ("t",), "s") == "changelog__g--t--s"
    with pytest.raises(InvalidName, match="249"):
        names.changelog("g" * 100, ("t" * 100,), "s" * 50)


def test_a_need_is_said_as_an_operator_types_it() -> None:
    need = TopicNeed("x", 3, 2, {"cleanup.policy": "compact"})
    assert str(need) == "x: partitions=3, replication-factor=2, cleanup.policy=compact"
    assert str(TopicNeed("x", None, None)) == "x: partitions=1, replication-factor=the default"


# -- notes -----------------------------------------------------------------------------------------------------------------

NOTE = Note("instance", 5, "manifest")


def note(**changed: Any) -> Note:
    return msgspec.structs.replace(NOTE, **changed)


def test_a_version_is_out_if_the_note_names_its_very_commit() -> None:
    assert _is_out(NOTE, NOTE)
    assert not _is_out(note(version=4, manifest="before"), NOTE)
    assert not _is_out(note(version=0, manifest="long before"), NOTE)


@pytest.mark.parametrize(
    ("found", "error"),
    [
        (None, MarkerLost),
        (note(instance="another"), ForeignTarget),
        (note(instance="another", version=4), ForeignTarget),
        (note(version=6), ForeignTarget),
        (note(manifest="another"), ForeignTarget),
    ],
    ids=["none", "another instance", "another instance, earlier", "a later version", "another commit"],
)
def test_a_note_that_is_not_ours_to_follow_is_an_error(found: Note | None, error: type[Exception]) -> None:
    with pytest.raises(error):
        _is_out(found, NOTE)


# -- messages --------------------------------------------------------------------------------------------------------------


def as_it_is(data: Any) -> Any:
    return data


def encoder(limits: TopicLimits | None = None, new_key: Callable[[Any], Any] | None = None) -> MessagesEncoder:
    return MessagesEncoder("topic:out", MessageForm("out", as_it_is, as_it_is, new_key), limits, NOW_MS)


NOW_MS = 1_700_000_000_000
HOUR_MS = 3_600_000


def test_messages_come_back_from_their_table() -> None:
    messages = encoder()
    headers: Any = [("a", b"1"), ("a", None), ("b", b"")]
    messages.add(b"value", b"key", 5, headers)
    messages.add(None, None, 6, None)
    messages.add(b"", b"", 7, [])
    keys, values, times, packed = (column.to_pylist() for column in messages.table().columns)
    assert (keys, values, times) == ([b"key", None, b""], [b"value", None, b""], [5, 6, 7])
    assert [None if one is None else unpacked(one) for one in packed] == [headers, None, None]


def test_a_record_that_failed_leaves_no_message() -> None:
    messages = encoder()
    for n in range(3):
        messages.add(b"%d" % n, None, 0, None)
    messages.truncate(1)
    assert len(messages) == 1
    assert messages.table().column("value").to_pylist() == [b"0"]


def test_a_message_that_the_topic_would_refuse_is_refused_here() -> None:
    messages = encoder(TopicLimits(OVERHEAD + 10))
    messages.add(b"12345", b"12345", 0, None)
    for value, key, headers in ((b"123456", b"12345", None), (b"", None, [("name", b"x")])):
        with pytest.raises(UnsupportedValue, match=r"max\.message\.bytes") as caught:
            messages.add(value, key, 0, headers)
        assert "12345" not in str(caught.value)
    assert len(messages) == 1


@pytest.mark.parametrize(
    ("away_ms", "setting"),
    [
        (
            HOUR_MS + 1,
            r"3,600 s ahead of the clock, the topic takes up to 3,600 s; .*message\.timestamp\.after\.max\.ms",
        ),
        (
            -24 * HOUR_MS,
            r"86,400 s behind the clock, the topic takes up to 85,800 s; .*message\.timestamp\.before\.max\.ms",
        ),
    ],
)
def test_a_time_that_the_topic_would_refuse_is_refused_here(away_ms: int, setting: str) -> None:
    messages = encoder(TopicLimits(1_000_000, behind_ms=24 * HOUR_MS, ahead_ms=HOUR_MS))
    messages.add(b"value", None, NOW_MS + HOUR_MS, None)
    messages.add(b"value", None, NOW_MS - 23 * HOUR_MS, None)
    with pytest.raises(UnsupportedValue, match=setting):
        messages.add(b"value", None, NOW_MS + away_ms, None)
    assert len(messages) == 2
    messages.put(b"key", b"value", NOW_MS + away_ms, None)  # a dead letter goes out in any case
    *_, late = messages.table().column("timestamp").to_pylist()
    assert -24 * HOUR_MS < late - NOW_MS <= HOUR_MS
    messages.is_quiet = True  # it is out since long ago
    messages.add(b"value", None, NOW_MS + away_ms, None)


def test_without_limits_any_time_goes() -> None:
    messages = encoder(TopicLimits(1_000_000))
    for time_ms in (-1, 0, 1 << 50):
        messages.add(b"value", None, time_ms, None)
    assert messages.table().column("timestamp").to_pylist() == [-1, 0, 1 << 50]


@pytest.mark.parametrize(
    ("settings", "limits"),
    [
        ({}, TopicLimits(1_048_588)),
        ({"max.message.bytes": "5"}, TopicLimits(5)),
        ({"message.timestamp.after.max.ms": "7"}, TopicLimits(1_048_588, None, 7)),
        ({"message.timestamp.before.max.ms": "7"}, TopicLimits(1_048_588, 7, None)),
        ({"message.timestamp.before.max.ms": str(2**63 - 1)}, TopicLimits(1_048_588)),
        ({"message.timestamp.difference.max.ms": "9"}, TopicLimits(1_048_588, 9, 9)),
        (
            {"message.timestamp.difference.max.ms": "9", "message.timestamp.after.max.ms": "7"},
            TopicLimits(1_048_588, 9, 7),
        ),
        (
            {"message.timestamp.type": "LogAppendTime", "message.timestamp.after.max.ms": "7"},
            TopicLimits(1_048_588),
        ),
    ],
)
def test_the_settings_of_a_topic_say_what_it_takes(settings: dict[str, str], limits: TopicLimits) -> None:
    assert limits_of(settings) == limits


def test_a_new_key_is_made_of_the_value() -> None:
    messages = encoder(new_key=lambda value: value[:1])
    messages.add(b"value", b"key", 0, None)
    assert messages.table().column("key").to_pylist() == [b"v"]


# -- a rebuild -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quiet", "ends", "partitions", "everywhere"),
    [
        (None, [9, 9, 9, 9], [False, False], False),
        ([9, 9, 9, 9], [9, 8, 0, 9], [True, True], True),
        ([9, 9, 9, 9], [9, 8, 10, 9], [False, True], False),
        ([0, 9, 9, 9], [1, 10, 9, 9], [False, False], False),
    ],
)
def test_a_range_is_quiet_if_all_its_output_is_out(
    quiet: list[int] | None, ends: list[int], partitions: list[bool], everywhere: bool
) -> None:
    source = KafkaSource([], Connection("none"), "group", "earliest", "fail")
    start = {"offsets": [0] * 4} if quiet is None else {"offsets": [0] * 4, "quiet": quiet}
    span = Span(start, {"offsets": ends})
    assert [source.is_quiet(span, slice(partition, None, 2)) for partition in range(2)] == partitions
    assert source.is_quiet(span, slice(None)) is everywhere


# -- a task ----------------------------------------------------------------------------------------------------------------


def forwarding() -> tuple[Program, Job]:
    """A program that sends everything on, and its first job."""

    class Source:
        kind = name = "test"
        names: tuple[str, ...] = ("test",)

    pipeline = Pipeline(Source())
    pipeline.add_sink(pipeline.stages[0].entry, "topic:out", MessageForm("out", as_it_is, as_it_is), None)
    program = program_of("app", pipeline, codec_for(RocksDBOptions()), 1)
    start = ManifestId("start")
    return program, Job(1, InstanceId("i"), 1_000, None, None, (Recipe(0, 0, start, 0, start, ()),), {})


def test_headers_stay_with_their_record() -> None:
    """A chunk without any follows one whose last record has some."""
    program, job = forwarding()
    storage = MemoryStorage()
    chunks = [
        Chunk([b"a"], [b"1"], [1], [0], headers=[[("trace", b"1")]]),
        Chunk([b"b"], [b"2"], [2], [1]),
    ]
    (outcome,) = run_task(program, job, 0, chunks, storage, MemoryStores())
    assert isinstance(outcome, Outcome)
    (receipt,) = outcome.receipts
    assert receipt.failure is None
    table = read_table(storage, receipt.outboxes["topic:out"], kind="outbox")
    packed = table.column("headers").to_pylist()
    assert [None if one is None else unpacked(one) for one in packed] == [[("trace", b"1")], None]


# -- progress --------------------------------------------------------------------------------------------------------------


def test_a_restore_says_how_far_it_is(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="holdfast"):
        progress = RestoreLine("app", "the changelog topics", 4_000, "records")
        progress.show(1_000)
        progress.end()
    first, second, third = caplog.messages
    assert first == "app: restoring from the changelog topics: 4,000 records to read"
    assert second.startswith("app: restoring, 1,000 records done, 3,000 to go, ")
    assert " records/s, " in second and second.endswith(" s left")
    assert third.startswith("app: the state is whole again after ")


def test_a_restore_is_shown_live_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    import sys

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    progress = RestoreLine("app", "the changelog topics", 4_000, "records")
    progress.show(1_000)
    progress.show(4_000)
    progress.end()
    shown = capsys.readouterr().err
    assert shown.count("\r") == 2 and shown.endswith("\n")
    assert "3,000 to go" in shown and "0 to go" in shown
