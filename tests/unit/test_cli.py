"""The command line: what it shows, what it finds, and how it ends."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import threading
import time
from base64 import b64decode
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from damage import KINDS, Damage, deleted
from msgspec.structs import replace

from holdfast import RocksDBOptions, State, cli
from holdfast.log import manifest as manifests
from holdfast.log import paths
from holdfast.log.files import write_delta
from holdfast.log.manifest import Chain, Manifest
from holdfast.log.storage import LocalStorage
from holdfast.testing import Harness

ROOT = Path(__file__).parents[2]
KEYS = ["ann", "bob", 7, 2.5, True, b"\x00\xff", ("ann", (1, b"x"))]
VERSIONS = 4


def add(order: dict[str, Any], state: State) -> dict[str, Any]:
    total = state.get("total", 0) + order["amount"]
    state.set("total", total)
    state.set("secret", ["hunter2"])
    return {"total": total}


def pipeline(sdf: Any) -> Any:
    return sdf.apply(add, stateful=True).to_table("totals")


def harness_at(checkpoint: Path, build: Callable[[Any], Any] = pipeline, **options: Any) -> Harness:
    harness = Harness(build, **options)
    harness.storage = LocalStorage(checkpoint, durable=False)
    return harness


def run(harness: Harness, batches: int = VERSIONS) -> None:
    for _ in range(batches):
        harness.now_ms += 1_000
        harness.feed(*((key, {"amount": 1}) for key in KEYS))
        harness.run()


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a few versions and two partitions; never to be touched."""
    checkpoint = tmp_path_factory.mktemp("ready") / "checkpoint"
    run(harness_at(checkpoint, partitions=2))
    return checkpoint


@pytest.fixture
def checkpoint(ready: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(ready, tmp_path / "checkpoint"))


class Said:
    """What a command has said, and how it has ended."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code = code
        self.out = out
        self.err = err

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Call = Callable[..., Said]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    def called(*arguments: Any) -> Said:
        code = cli.main([str(argument) for argument in arguments])
        return Said(code, *capsys.readouterr())

    return called


# -- state -----------------------------------------------------------------------------------------------------------


def test_ls_shows_the_stores(call: Call, ready: Path) -> None:
    said = call("state", "ls", ready)
    assert said.code == 0
    assert [line.split() for line in said.out.splitlines()[2:]] == [
        ["store", "stage", "partitions", "codec", "keys", "size", "changelog"],
        ["default", "source", "2", "json", "7", "309", "bytes", "-"],
    ]
    stores = call("state", "ls", ready, "--json").json["stores"]
    assert [(store["name"], store["keys"], store["codec"]) for store in stores] == [("default", 7, "json")]


def test_stores_that_share_a_stage_show_no_numbers_of_their_own(call: Call, tmp_path: Path) -> None:
    def two(sdf: Any) -> Any:
        return sdf.update(add, stateful=True).update(add, stateful=True, store="other")

    run(harness_at(tmp_path, two))
    stores = call("state", "ls", tmp_path, "--json").json["stores"]
    assert [(store["name"], store["keys"]) for store in stores] == [("default", None), ("other", None)]
    assert call("state", "get", tmp_path, "ann", "--store", "other", "--json").json["state"]["total"] == VERSIONS


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("ann", "str"), ("7", "int"), ("2.5", "float"), ("true", "bool"), ("00ff", "hex"), ('"bob"', "json"),
        ('["ann", [1, {"base64": "eA=="}]]', "json"),
    ],
)  # fmt: skip
def test_get_finds_keys_of_every_type(call: Call, ready: Path, text: str, kind: str) -> None:
    said = call("state", "get", ready, text, "--key-type", kind, "--json")
    assert said.code == 0, said.err
    assert said.json["version"] == VERSIONS
    assert said.json["state"] == {"total": VERSIONS, "secret": ["hunter2"]}


def test_the_keys_of_items_can_be_asked_for(call: Call, ready: Path) -> None:
    lines = call("state", "items", ready, "--json").out.splitlines()
    assert len(lines) == len(KEYS)
    for line in map(json.loads, lines):
        found = call("state", "get", ready, json.dumps(line["key"]), "--key-type", "json", "--json")
        assert found.json["state"] == line["state"]


def test_get_shows_values_as_python_writes_them(call: Call, ready: Path) -> None:
    assert call("state", "get", ready, "ann").out.splitlines() == [
        f"'ann' in store default, version {VERSIONS}",
        "",
        f"'total'   {VERSIONS}",
        "'secret'  ['hunter2']",
    ]


def test_items_can_be_limited(call: Call, ready: Path) -> None:
    assert len(call("state", "items", ready, "--limit", 3).out.splitlines()) == 3


@pytest.mark.parametrize("key", ["nobody", "7"])
def test_a_key_without_state_is_said_and_not_shown(call: Call, ready: Path, key: str) -> None:
    said = call("state", "get", ready, key)
    assert (said.code, said.out) == (1, "")
    assert "--key-type" in said.err


def test_an_export_of_lines_is_what_items_shows(call: Call, ready: Path, tmp_path: Path) -> None:
    said = call("state", "export", ready, "--to", tmp_path / "state.jsonl", "--json")
    assert (said.json["keys"], said.json["version"], said.json["format"]) == (len(KEYS), VERSIONS, "jsonl")
    assert (tmp_path / "state.jsonl").read_text() == call("state", "items", ready, "--json").out


def test_an_export_to_parquet_says_what_it_is(call: Call, ready: Path, tmp_path: Path) -> None:
    assert call("state", "export", ready, "--to", tmp_path / "state.parquet").code == 0
    table = pq.read_table(tmp_path / "state.parquet")
    assert table.schema.metadata[b"holdfast.version"] == str(VERSIONS).encode()
    assert table.schema.metadata[b"holdfast.store"] == b"default"
    keys = set(zip(table["key"].to_pylist(), table["key_type"].to_pylist(), strict=True))
    assert keys >= {("ann", "str"), ("7", "int"), ("true", "bool"), ('["ann",[1,{"base64":"eA=="}]]', "tuple")}
    assert {json.loads(state)["total"] for state in table["state"].to_pylist()} == {VERSIONS}


def test_an_export_that_fails_leaves_nothing(call: Call, checkpoint: Path, tmp_path: Path) -> None:
    next((checkpoint / "deltas").iterdir()).unlink()
    assert call("state", "export", checkpoint, "--to", tmp_path / "state.jsonl").code == 1
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_an_empty_store_exports_an_empty_file(call: Call, tmp_path: Path) -> None:
    harness_at(tmp_path / "checkpoint").run()
    for name in ("state.jsonl", "state.parquet"):
        assert call("state", "export", tmp_path / "checkpoint", "--to", tmp_path / name).code == 0
    assert (tmp_path / "state.jsonl").read_text() == ""
    assert pq.read_table(tmp_path / "state.parquet").num_rows == 0


def test_a_value_per_key_is_shown_with_its_own_types(call: Call, tmp_path: Path) -> None:
    def remember(key: Any, value: Any, seen: Any) -> Any:
        return value, {"on": date(2024, 2, 29), "seen": (1, {2}), 5: b"x"}

    harness = harness_at(tmp_path, lambda sdf: sdf.stateful_map("seen", remember, default=None))
    run(harness, 1)
    assert "datetime.date(2024, 2, 29)" in call("state", "get", tmp_path, "ann", "--store", "seen").out
    said = call("state", "get", tmp_path, "ann", "--store", "seen", "--json")
    assert said.json["state"]["value"] == [["on", "2024-02-29"], ["seen", [1, [2]]], [5, {"base64": "eA=="}]]


def test_a_store_with_a_codec_of_the_program_is_shown_raw_only(call: Call, tmp_path: Path) -> None:
    run(harness_at(tmp_path, rocksdb_options=RocksDBOptions(dumps=pickle.dumps, loads=pickle.loads)), 1)
    refused = call("state", "get", tmp_path, "ann")
    assert (refused.code, refused.out) == (1, "")
    assert "pickle.dumps/_pickle.loads" in refused.err and "--raw" in refused.err
    raw = call("state", "get", tmp_path, "ann", "--raw", "--json").json["state"]
    assert pickle.loads(b64decode(raw["secret"]["base64"])) == ["hunter2"]
    assert "base64:" in call("state", "items", tmp_path, "--raw").out


def test_state_that_is_not_whole_yet_is_shown_with_a_warning(call: Call, checkpoint: Path) -> None:
    changed(checkpoint, VERSIONS, kind="restoring")
    said = call("state", "get", checkpoint, "ann", "--json")
    assert (said.code, said.err) == (0, "holdfast: the state is being restored from Kafka and is not whole yet\n")
    assert said.json["version"] == VERSIONS


def test_a_url_of_a_file_is_a_path(call: Call, ready: Path) -> None:
    assert call("state", "ls", ready.as_uri()).out == call("state", "ls", ready).out


# -- describe --------------------------------------------------------------------------------------------------------


def test_describe_says_what_the_checkpoint_is(call: Call, ready: Path) -> None:
    found = call("checkpoint", "describe", ready, "--json").json
    assert (found["app"], found["first"]["version"], found["last"]["version"]) == ("harness", 0, VERSIONS)
    assert (found["first"]["kind"], found["last"]["kind"], found["last"]["holder"]) == ("start", "batch", "harness")
    assert found["position"] == {"taken": VERSIONS * len(KEYS)}
    assert (found["keys"], found["delivered"], found["is_waiting"]) == (len(KEYS), VERSIONS, False)
    assert sum(part["keys"] for part in found["partitions"]) == len(KEYS)
    assert {sink["id"]: sink["schema"] for sink in found["sinks"]}["table:totals"] == "total bigint"
    for one in found["files"]:
        files = [path.stat().st_size for path in (ready / paths.CLASSES[one["name"]]).glob("*")]
        assert (one["files"], one["bytes"]) == (len(files), sum(files))


def test_describe_for_people_has_all_of_it(call: Call, ready: Path) -> None:
    said = call("checkpoint", "describe", ready).out
    for part in (
        f"0 to {VERSIONS}",
        "7 keys",
        "taken 28",
        f"up to version {VERSIONS}",
        "table:totals",
        "total bigint",
        "marks",
    ):
        assert part in said


def test_output_that_waits_for_its_delivery_is_described(call: Call, checkpoint: Path) -> None:
    (checkpoint / paths.delivered(VERSIONS)).unlink()
    found = call("checkpoint", "describe", checkpoint, "--json").json
    assert (found["delivered"], found["is_waiting"]) == (VERSIONS - 1, True)
    assert "has output that is not" in call("checkpoint", "describe", checkpoint).out


# -- verify ----------------------------------------------------------------------------------------------------------


def test_nothing_is_wrong_with_a_whole_checkpoint(call: Call, ready: Path) -> None:
    said = call("checkpoint", "verify", ready)
    assert (said.code, said.err) == (0, "")
    assert said.out.splitlines()[-1] == "nothing is wrong"
    found = call("checkpoint", "verify", ready, "--json").json
    assert (found["is_whole"], found["findings"], found["read"]["counters"]) == (True, [], "recomputed")
    assert found["read"]["files"] == sum(len(list((ready / prefix).glob("*"))) for prefix in paths.CLASSES.values())


@pytest.mark.parametrize("damage", KINDS)
@pytest.mark.parametrize("prefix", [paths.COMMITS, paths.DELTAS, paths.OUTBOX, paths.DELIVERED])
def test_every_damaged_file_is_named(call: Call, checkpoint: Path, prefix: str, damage: Damage) -> None:
    seed = random.randrange(2**32)
    choice = random.Random(seed)
    for path in sorted((checkpoint / prefix).iterdir()):
        whole = path.read_bytes()
        damage(path, choice)
        said = call("checkpoint", "verify", checkpoint, "--json")
        names = {(finding["kind"], finding["name"]) for finding in said.json["findings"]}
        if damage is deleted and prefix == paths.DELIVERED:  # nothing needs a mark to be there
            assert (said.code, names) == (0, set())
        else:
            assert (said.code, names) == (1, {("damage", prefix + path.name)}), f"seed {seed}"
        path.write_bytes(whole)


def test_verify_goes_on_after_the_first_problem(call: Call, checkpoint: Path) -> None:
    victims = [sorted((checkpoint / prefix).iterdir())[0] for prefix in (paths.COMMITS, paths.DELTAS, paths.OUTBOX)]
    for path in victims:
        path.write_bytes(b"")
    said = call("checkpoint", "verify", checkpoint)
    assert said.code == 1
    assert all(f"damage: {path.relative_to(checkpoint)} is damaged" in said.out for path in victims)
    assert said.out.splitlines()[-1] == "3 problems"
    assert "the numbers of keys and bytes were not recomputed" in said.out


def changed(checkpoint: Path, version: int, **fields: Any) -> None:
    """A manifest with other fields and a right checksum."""
    path = checkpoint / paths.manifest(version)
    manifest = manifests.decode(path.name, path.read_bytes())
    path.write_bytes(manifests.encode(replace(manifest, **fields)))


def read(checkpoint: Path, version: int) -> Manifest:
    return Chain(LocalStorage(checkpoint)).read(version)


def partitions_with(manifest: Manifest, **fields: Any) -> tuple[Any, ...]:
    return (replace(manifest.partitions[0], **fields), *manifest.partitions[1:])


def says(call: Call, checkpoint: Path) -> list[str]:
    return [finding["message"] for finding in call("checkpoint", "verify", checkpoint, "--json").json["findings"]]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"parent": "0" * 32}, "is not a continuation of version 1"),
        ({"instance": "0" * 32}, "is of another application or instance than version 1"),
        ({"base": 1}, "has another base than version 1"),
        ({"time_ms": 1}, "has an earlier processing time than version 1"),
        ({"partitions": ()}, "has other partitions than its stages"),
    ],
)
def test_a_manifest_at_odds_with_its_parent_is_named(
    call: Call, checkpoint: Path, fields: dict[str, Any], problem: str
) -> None:
    changed(checkpoint, 2, **fields)
    assert f"{paths.manifest(2)} {problem}" in [message.split(":")[0] for message in says(call, checkpoint)]


@pytest.mark.parametrize("field", ["keys", "bytes", "keys_updated", "keys_removed"])
def test_counters_that_do_not_add_up_are_named(call: Call, checkpoint: Path, field: str) -> None:
    manifest = read(checkpoint, VERSIONS)
    wrong = getattr(manifest.partitions[0], field) + 1
    changed(checkpoint, VERSIONS, partitions=partitions_with(manifest, **{field: wrong}))
    (message,) = says(call, checkpoint)
    assert message.startswith(f"{paths.manifest(VERSIONS)} counts other") and message.endswith("partition 0 has")


@pytest.mark.parametrize("keys", [[b"dx\0b", b"dx\0a"], [b"dx\0a", b"dx\0a"]])
def test_a_delta_out_of_order_is_named(call: Call, checkpoint: Path, keys: list[bytes]) -> None:
    manifest = read(checkpoint, VERSIONS)
    name = paths.delta(VERSIONS, 0, "f" * 32)
    delta = write_delta(LocalStorage(checkpoint), name, keys, [b"\x80", b"\x80"])
    changed(checkpoint, VERSIONS, partitions=partitions_with(manifest, delta=delta))
    assert f"{name} is not in the order of its keys" in says(call, checkpoint)


def test_a_number_of_rows_that_is_not_so_is_named(call: Call, checkpoint: Path) -> None:
    manifest = read(checkpoint, VERSIONS)
    delta = manifest.partitions[0].delta
    assert delta is not None
    changed(checkpoint, VERSIONS, partitions=partitions_with(manifest, delta=replace(delta, rows=99)))
    assert says(call, checkpoint) == [f"{delta.name} has {delta.rows} rows where the commit says 99"]


def test_lost_versions_are_named_together(call: Call, checkpoint: Path) -> None:
    for version in (1, 2):
        (checkpoint / paths.manifest(version)).unlink()
    found = call("checkpoint", "verify", checkpoint, "--json").json
    (gap,) = [finding for finding in found["findings"] if finding["kind"] == "damage"]
    assert gap["message"].startswith(f"{paths.manifest(1)} and all up to version 2 are missing")


def test_a_mark_of_another_commit_is_named(call: Call, checkpoint: Path) -> None:
    name = paths.delivered(2)
    (checkpoint / name).write_text(json.dumps({"manifest": "0" * 32}))
    assert says(call, checkpoint) == [f"{name} marks the output of another commit than version 2"]


def test_orphans_are_listed_and_do_no_harm(call: Call, checkpoint: Path) -> None:
    storage = LocalStorage(checkpoint)
    lost, on_its_way = paths.delta(2, 0, "e" * 32), paths.outbox(VERSIONS + 1, 0, 0, "e" * 32)
    storage.put(lost, b"anything")
    storage.put(on_its_way, b"half")
    storage.put("deltas/notes.txt", b"?")
    said = call("checkpoint", "verify", checkpoint, "--json")
    assert said.code == 0
    assert {finding["name"]: finding["kind"] for finding in said.json["findings"]} == dict.fromkeys(
        (lost, on_its_way, "deltas/notes.txt"), "orphan"
    )
    assert said.json["read"]["orphan_bytes"] == 13
    assert "3 orphans, 13 bytes: they do no harm" in call("checkpoint", "verify", checkpoint).out


def test_a_stranger_among_the_commits_is_in_the_way(call: Call, checkpoint: Path) -> None:
    (checkpoint / "commits" / "notes.txt").write_text("?")
    assert says(call, checkpoint) == [
        "commits/notes.txt is not a file of Holdfast and is in its way; move it elsewhere"
    ]


def test_verify_reads_on_through_a_clear_and_timers(call: Call, tmp_path: Path) -> None:
    from holdfast.log.manifest import cleared

    def timed(value: Any, state: State) -> None:
        state.set("n", state.get("n", 0) + 1)
        state.set_timer("t", 5_000, clock="processing")
        if state.get("n") % 3 == 0:
            state.delete("n")

    harness = harness_at(
        tmp_path, lambda sdf: sdf.apply(timed, stateful=True, on_timer=lambda key, name, state: None), partitions=3
    )
    run(harness, 7)
    chain = Chain(LocalStorage(tmp_path))
    head = chain.head()
    assert head is not None
    chain.commit(cleared(head))
    harness.restart()
    run(harness, 2)
    found = call("checkpoint", "verify", tmp_path, "--json").json
    assert (found["findings"], found["read"]["counters"]) == ([], "recomputed")
    assert call("checkpoint", "describe", tmp_path, "--json").json["base"] == 8


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_progress_is_one_line_that_goes_away(
    call: Call, ready: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    said = call("checkpoint", "verify", ready)
    assert said.out.splitlines()[-1] == "nothing is wrong"
    assert terminal.getvalue().startswith(f"\r\x1b[K1 of {VERSIONS + 1} versions, ")
    assert terminal.getvalue().endswith("\r\x1b[K") and "\n" not in terminal.getvalue()


# -- while the application runs ----------------------------------------------------------------------------------------


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Path]:
    """A checkpoint on which another thread commits one version after the other."""
    checkpoint = tmp_path / "checkpoint"
    harness = harness_at(checkpoint, partitions=3)
    run(harness, 1)
    stopping = threading.Event()
    failed: list[BaseException] = []

    def work() -> None:
        try:
            while not stopping.is_set():
                run(harness, 1)
                time.sleep(0.01)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    yield checkpoint
    stopping.set()
    thread.join()
    assert not failed


def test_each_call_sees_one_version_of_a_running_application(call: Call, running: Path) -> None:
    seen = []
    while len(set(seen)) < 5:
        totals = {
            json.loads(line)["state"]["total"] for line in call("state", "items", running, "--json").out.splitlines()
        }
        assert len(totals) == 1
        got = call("state", "get", running, "ann", "--json").json
        assert got["state"]["total"] == got["version"] >= max(totals)
        seen += totals
    assert seen == sorted(seen)


def test_a_running_application_is_whole(call: Call, running: Path) -> None:
    seen = set()
    while len(seen) < 5:
        said = call("checkpoint", "verify", running, "--json")
        assert (said.code, [one for one in said.json["findings"] if one["kind"] == "damage"]) == (0, [])
        described = call("checkpoint", "describe", running, "--json").json
        assert described["last"]["version"] >= said.json["read"]["last"]
        seen.add(described["last"]["version"])


# -- how it ends -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        [], ["state"], ["state", "get", "somewhere"], ["state", "items", "somewhere", "--limit", "-1"],
        ["state", "get", "somewhere", "x", "--key-type", "int"], ["state", "ls", "ftp://somewhere"],
        ["state", "export", "somewhere", "--to", "state.txt"], ["state", "get", "somewhere", "null", "--key-type", "json"],
    ],
)  # fmt: skip
def test_a_wrong_call_ends_with_2(call: Call, arguments: list[str]) -> None:
    said = call(*arguments)
    assert (said.code, said.out) == (2, "")
    assert said.err


@pytest.mark.parametrize(
    "arguments", [["state", "ls"], ["state", "items"], ["checkpoint", "describe"], ["checkpoint", "verify"]]
)
def test_no_checkpoint_ends_with_1_and_says_where_one_would_be(
    call: Call, tmp_path: Path, arguments: list[str]
) -> None:
    said = call(*arguments, tmp_path)
    assert (said.code, said.out) == (1, "")
    assert f"no checkpoint at {tmp_path}" in said.err and "<state_dir>/<name>/checkpoint" in said.err


def test_an_unknown_store_is_answered_with_those_there_are(call: Call, ready: Path) -> None:
    said = call("state", "items", ready, "--store", "defualt")
    assert (said.code, said.err) == (1, "holdfast: no store 'defualt'; there is default\n")


@pytest.mark.parametrize("prefix", [paths.COMMITS, paths.DELTAS])
def test_an_error_is_one_line_without_state(call: Call, checkpoint: Path, prefix: str) -> None:
    for path in (checkpoint / prefix).iterdir():
        path.write_bytes(path.read_bytes()[:-9])
    for command in ("get", "items"):
        said = call("state", command, checkpoint, *(["ann"] if command == "get" else []))
        assert (said.code, said.out, said.err.count("\n")) == (1, "", 1)
        assert said.err.startswith(f"holdfast: {prefix}") and "hunter2" not in said.err


def test_a_surprise_is_one_line_without_state(call: Call, ready: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def surprise(*_: Any) -> None:
        raise RuntimeError("hunter2")

    monkeypatch.setattr("holdfast.log.describe.describe", surprise)
    said = call("checkpoint", "describe", ready)
    assert (said.code, said.out) == (1, "")
    assert said.err.startswith("holdfast: RuntimeError in test_cli.py, line ") and "hunter2" not in said.err


def python(*arguments: Any, **options: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def test_the_command_runs_as_a_module(ready: Path) -> None:
    done = python("-m", "holdfast", "state", "get", ready, "ann", "--json")
    out, err = done.communicate()
    assert (done.returncode, err) == (0, "")
    assert json.loads(out)["state"]["total"] == VERSIONS


def test_the_script_of_the_package_is_main() -> None:
    import tomllib

    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"holdfast": f"{cli.__name__}:{cli.main.__name__}"}


def test_no_command_imports_spark(ready: Path, tmp_path: Path) -> None:
    done = python(
        "-c",
        "import sys\n"
        "from holdfast.cli import main\n"
        f"url = {str(ready)!r}\n"
        "for command in (['state', 'ls', url], ['state', 'get', url, 'ann'], ['state', 'items', url],\n"
        f"                ['state', 'export', url, '--to', {str(tmp_path / 'x.parquet')!r}],\n"
        "                ['checkpoint', 'describe', url], ['checkpoint', 'verify', url]):\n"
        "    assert main(command) == 0, command\n"
        "print(sorted({'pyspark', 'py4j', 'confluent_kafka'} & sys.modules.keys()))\n",
    )
    out, err = done.communicate()
    assert (done.returncode, err) == (0, "")
    assert out.splitlines()[-1] == "[]"


def test_a_command_is_there_in_half_a_second(ready: Path) -> None:
    program = (
        "import time; from holdfast.cli import main\n"
        f"main(['state', 'ls', {str(ready)!r}])\n"
        "print(time.process_time())\n"  # what else the machine does says nothing
    )
    seconds = [float(python("-c", program).communicate()[0].splitlines()[-1]) for _ in range(3)]
    assert min(seconds) < 0.5


def test_a_closed_pipe_ends_it_quietly(tmp_path: Path) -> None:
    harness = harness_at(tmp_path)
    harness.feed(*((f"key {n}", {"amount": 1}) for n in range(20_000)))
    harness.run()
    with python("-m", "holdfast", "state", "items", tmp_path) as reader:
        assert reader.stdout is not None and reader.stderr is not None
        assert reader.stdout.readline()
        reader.stdout.close()
        assert reader.stderr.read() == ""
    assert reader.returncode == 0
