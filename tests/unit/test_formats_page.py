"""docs/formats.md must be true: its reader, which knows nothing of Holdfast, reads what Holdfast wrote."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import types
import zlib
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rig import Rig

from holdfast import State
from holdfast.dataframe import frame_of
from holdfast.kafka.changelog import MILESTONE, Milestone, decode_milestone, records
from holdfast.kafka.publishing import Note
from holdfast.log import manifest as manifests
from holdfast.log import paths
from holdfast.log.files import FileRef
from holdfast.log.manifest import Chain, Manifest, PartitionCommit, SparkBatch, cleared
from holdfast.log.pins import Pin
from holdfast.log.snapshot import PartitionSnapshot, Snapshot, SnapshotFile
from holdfast.log.storage import LocalStorage
from holdfast.plan.messages import MessageForm, MessagesEncoder
from holdfast.plan.pipeline import Pipeline
from holdfast.plan.program import Program, program_of
from holdfast.runtime.batch import Driver, Proposal
from holdfast.runtime.view import StateView
from holdfast.sources.iterable import IterableSource
from holdfast.state.codecs import JsonCodec
from holdfast.state.documents import document_prefix, read_document
from holdfast.state.keys import decode_key, encode_key, partition_of
from holdfast.stores.memory import MemoryStore
from holdfast.stores.slots import LocalStores
from holdfast.testing import LocalRunner, MemoryStores

PAGE = (Path(__file__).parents[2] / "docs" / "formats.md").read_text()
EVENTS = [
    {"key": key, "n": n}
    for n, key in enumerate(["ann", "bob", 1, "1", True, 1.0, -5, b"\x00\xff", ("ann", (2, b"")), "", "ann", "bob"] * 3)
]


def remember(event: dict[str, Any], state: State) -> None:
    """One of everything that a document can hold."""
    n = event["n"]
    state.set("n", n)
    state.set("list", [n, {"nested": None}, 2**70])
    state.set("text", "grüße")
    state.set("huge", 2**64 + n)
    state.set_bytes("raw", bytes([n]))
    state.set(("a", n % 3), n / 2)
    state.set("over", n, ttl=timedelta(milliseconds=1))
    state.set("lasting", [n], ttl=timedelta(days=1))
    state.set_bytes("lasting bytes", b"\xff", ttl=timedelta(days=1))
    state.delete(("a", (n + 1) % 3))


def forget_some(event: dict[str, Any], state: State) -> None:
    """A store whose documents come and go."""
    state.set("n", event["n"])
    if event["n"] % 2:
        state.delete("n")


class World:
    """A checkpoint on disk and a driver for it, without Spark."""

    def __init__(self, checkpoint: Path) -> None:
        self.chain = Chain(LocalStorage(checkpoint))
        self._stores = MemoryStores()
        self._now = 0

    def run(self, batches: int = 1) -> None:
        program = _program()
        runner = LocalRunner(program, self.chain.storage, self._stores)
        driver = Driver(self.chain, program, runner, {}, clock=self._clock, holder="a test")
        driver.start()
        for _ in range(batches):
            assert driver.head.position is not None
            driver.run_batch(Proposal(end={"taken": driver.head.position["taken"] + 5}))

    def clear(self) -> None:
        head = self.chain.head()
        assert head is not None
        self.chain.commit(cleared(head))

    def state(self, store: str) -> dict[bytes, Any]:
        return _comparable(StateView(self.chain, store, JsonCodec(), new_store=MemoryStore).items())

    def _clock(self) -> int:
        self._now += 1_000
        return self._now


def _program() -> Program:
    pipeline = Pipeline(IterableSource(EVENTS, "key", None))
    frame = frame_of(pipeline)
    frame.update(remember, stateful=True).update(forget_some, stateful=True, store="some")
    return program_of("pages", pipeline, JsonCodec(), 3)


def _comparable(items: Iterable[tuple[Any, Any]]) -> dict[bytes, Any]:
    """By encoded key: 1, 1.0 and True are three keys, which a dict would take for one."""
    return {encode_key(key): document for key, document in items}


def _block(language: str) -> str:
    (block,) = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    return str(block)


@pytest.fixture(scope="module")
def reader() -> types.ModuleType:
    module = types.ModuleType("read_state")
    exec(compile(_block("python"), "docs/formats.md", "exec"), module.__dict__)
    return module


def test_the_reader_of_the_page_knows_nothing_of_holdfast() -> None:
    assert "holdfast" not in re.findall(r"^(?:import|from) (\w+)", _block("python"), re.MULTILINE)


def test_the_reader_of_the_page_sees_what_the_view_sees(reader: types.ModuleType, tmp_path: Path) -> None:
    world = World(tmp_path)
    world.run(4)
    for store in ("default", "some"):
        shown = world.state(store)
        assert shown
        assert _comparable(reader.read_state(tmp_path, store)) == shown
    assert not list(reader.read_state(tmp_path, "nothing"))


def test_the_reader_of_the_page_reads_any_version_also_around_a_clear(reader: types.ModuleType, tmp_path: Path) -> None:
    world = World(tmp_path)
    history: list[dict[bytes, Any]] = []
    for step in [world.run] * 3 + [world.clear] + [world.run] * 2:
        step()
        history.append(world.state("default"))
    assert history[3] == {}
    assert [_comparable(reader.read_state(tmp_path, version=version)) for version in range(1, 7)] == history


def test_the_reader_of_the_page_begins_at_a_snapshot(reader: types.ModuleType, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    rig = Rig(LocalStorage(checkpoint, durable=False), LocalStores(tmp_path / "local"), every=3)
    rig.run(11)
    assert not (checkpoint / paths.manifest(0)).exists()
    assert {key: document["n"] for key, document in reader.read_state(checkpoint)} == rig.counts()


def test_the_reader_of_the_page_runs_as_a_program(tmp_path: Path) -> None:
    world = World(tmp_path / "checkpoint")
    world.run(1)
    program = tmp_path / "read_state.py"
    program.write_text(_block("python"))
    said = subprocess.run(
        [sys.executable, program, tmp_path / "checkpoint", "some", "1"], capture_output=True, text=True, check=True
    )
    assert sorted(said.stdout.splitlines()) == sorted(f"{decode_key(k)!r} {v}" for k, v in world.state("some").items())


@pytest.mark.parametrize("directory", ["commits", "deltas"])
def test_the_reader_of_the_page_takes_nothing_that_is_damaged(
    reader: types.ModuleType, tmp_path: Path, directory: str
) -> None:
    World(tmp_path).run(2)
    for path in (tmp_path / directory).iterdir():
        whole = path.read_bytes()
        path.write_bytes(whole[:200] + bytes([whole[200] ^ 1]) + whole[201:])
        with pytest.raises(AssertionError):
            list(reader.read_state(tmp_path))
        path.write_bytes(whole)


def test_the_manifest_of_the_page_is_one() -> None:
    shown = manifests.decode("the page", _block("json").rstrip("\n").encode())
    assert shown.version == 2


@pytest.mark.parametrize("struct", [Snapshot, PartitionSnapshot, SnapshotFile])
def test_every_field_of_a_snapshot_is_in_its_section(struct: Any) -> None:
    assert _fields(_section("## Snapshot")) >= set(struct.__struct_fields__)


def test_the_pin_of_the_page_has_its_fields() -> None:
    assert set(re.findall(r'"(\w+)":<', _section("## Retention"))) == set(Pin.__struct_fields__)


@pytest.mark.parametrize("struct", [Manifest, SparkBatch, PartitionCommit, FileRef])
def test_every_field_is_on_the_page(struct: Any) -> None:
    assert _fields(PAGE) >= set(struct.__struct_fields__)


@pytest.mark.parametrize(("struct", "section"), [(Note, "### Note"), (Milestone, "### Changelog")])
def test_every_field_in_kafka_is_in_its_section(struct: Any, section: str) -> None:
    assert _fields(_section(section)) == set(struct.__struct_fields__)


def test_the_note_of_the_page_is_one() -> None:
    (shown,) = re.findall(r"^    (\{.*\})$", _section("### Note"), re.MULTILINE)
    assert msgspec.json.encode(msgspec.json.decode(shown, type=Note)).decode() == shown


def test_the_changelog_of_the_page_is_one() -> None:
    document, name, *milestone = re.findall(r"^    (.*)$", _section("### Changelog"), re.MULTILINE)
    key, version, value = re.split(r" {2,}", document)
    change = document_prefix("default") + bytes.fromhex(key)[1:], bytes.fromhex(value)
    assert list(records("default", 1, [change])) == [(bytes.fromhex(key), bytes.fromhex(version + value))]
    assert decode_key(bytes.fromhex(key)[1:]) == b"k3"
    assert read_document(bytes.fromhex(value), JsonCodec(), now_ms=0) == {"total": 1}
    assert bytes.fromhex(name) == MILESTONE
    assert decode_milestone("orders", 0, "".join(milestone).encode()).offsets == (2,)


def test_the_messages_of_the_page_are_what_an_outbox_holds() -> None:
    encoder = MessagesEncoder("topic:t", MessageForm("t", bytes, bytes), None, 0)
    encoder.put(b"k", None, 1, [("h", b"x")])
    (table,) = re.findall(r"^Messages, for topics.*?^## ", PAGE, re.DOTALL | re.MULTILINE)
    assert re.findall(r"^\| `(\w+)` \| (\w+) ", table, re.MULTILINE) == [
        (field.name, str(field.type)) for field in encoder.table().schema
    ]


def _section(heading: str) -> str:
    return PAGE.split(f"\n{heading}\n")[1].split("\n##")[0]


def _fields(text: str) -> set[str]:
    return set(re.findall(r"^\| `(\w+)` \| ", text, re.MULTILINE))


def test_the_keys_of_the_page_are_encoded_so() -> None:
    rows = re.findall(r"^\| `(.+)` \| `([0-9a-f]+)` \| (\d+) \| (\d) \|$", PAGE, re.MULTILINE)
    assert len(rows) >= 9
    for key, encoded, crc, partition in rows:
        data = encode_key(ast.literal_eval(key))
        assert (data.hex(), zlib.crc32(data), partition_of(data, 4)) == (encoded, int(crc), int(partition))


def test_the_document_of_the_page_is_one() -> None:
    (shown,) = re.findall(r"^    85 .*?\n\n", PAGE, re.DOTALL | re.MULTILINE)
    data = bytes.fromhex("".join(re.split(r" {3,}(?=map|\"|  1\.5|7,)", line)[0] for line in shown.splitlines()))
    assert read_document(data, JsonCodec(), now_ms=999) == {"total": 2, "tags": ["a"], "raw": b"\1", "x": 1.5, 7: None}
    assert "x" not in read_document(data, JsonCodec(), now_ms=1000)
