"""An application that has been on an object store for long: it has snapshots, has cleared up, and has lost its disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gateway import Gateway
from rig import KEYS, Rig

from holdfast import cli
from holdfast.log import paths
from holdfast.log.location import storage_at
from holdfast.log.recipe import recipes_for
from holdfast.log.snapshot import newest_snapshot, versions
from holdfast.log.storage import Storage
from holdfast.runtime.ladder import climb, held_marks
from holdfast.stores.base import EMPTY
from holdfast.stores.slots import LocalStores

BATCHES = 11


@pytest.fixture
def url(bucket: str) -> str:
    return f"s3://{bucket}/apps/counting"


@pytest.fixture
def storage(gateway: Gateway, url: str, monkeypatch: pytest.MonkeyPatch) -> Storage:
    """With credentials of the environment, which is what the command line has."""
    for name, value in gateway.options().items():
        monkeypatch.setenv(f"AWS_{name.upper()}", value)
    return storage_at(url)


@pytest.fixture
def rig(storage: Storage, tmp_path: Path) -> Rig:
    rig = Rig(storage, LocalStores(tmp_path / "disk"), every=2, keep=1)
    rig.run(BATCHES)
    return rig


def numbers(rig: Rig, prefix: str) -> list[int]:
    return sorted({paths.version_of(name) for name in rig.storage.names(prefix)})


def test_only_what_a_restore_from_the_last_snapshot_needs_is_left(rig: Rig, gateway: Gateway, bucket: str) -> None:
    assert versions(rig.storage) == [10]
    assert numbers(rig, paths.COMMITS) == [10, 11]
    assert numbers(rig, paths.DELTAS) == [11]
    newest = newest_snapshot(rig.storage)
    assert newest is not None
    named = sorted(file.name for part in newest.partitions for file in part.files)
    assert rig.storage.names(paths.SNAPSHOT_FILES) == named
    left = [file for file in (gateway.directory / bucket).rglob("*") if file.is_file()]
    assert len(left) == 2 + 2 + 1 + len(named), "something is left that no listing has"
    rig.assert_exact()


def test_a_lost_disk_is_restored_from_the_snapshot(rig: Rig, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rig.stores = LocalStores(tmp_path / "another disk")
    rig.start()
    recipes = recipes_for(rig.chain, rig.head)
    with caplog.at_level("INFO", logger="holdfast"):
        climb("counting", rig.runner, rig.storage, rig.head.instance, recipes, [EMPTY, EMPTY])
    for partition in range(2):
        assert f"partition {partition}: the snapshot of version 10 and 1 deltas" in caplog.text
    assert rig.runner.each(held_marks(rig.head.instance)) == [recipe.target for recipe in recipes]
    rig.run(4)
    rig.assert_exact()
    assert versions(rig.storage) == [14]


def test_the_command_line_reads_it(rig: Rig, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def call(*arguments: str) -> Any:
        assert cli.main([*arguments, "--json"]) == 0
        out = capsys.readouterr().out
        return [json.loads(line) for line in out.splitlines()]

    (stores,) = call("state", "ls", url)
    assert [(store["name"], store["keys"]) for store in stores["stores"]] == [("default", KEYS)]
    (found,) = call("state", "get", url, "k3")
    assert (found["version"], found["state"]["n"]) == (BATCHES, BATCHES)
    assert {item["key"]: item["state"]["n"] for item in call("state", "items", url)} == dict.fromkeys(
        [f"k{number}" for number in range(KEYS)], BATCHES
    )
    file = tmp_path / "export.jsonl"
    (exported,) = call("state", "export", url, "--to", str(file), "--format", "jsonl")
    assert exported["keys"] == len(file.read_text().splitlines()) == KEYS
    (described,) = call("checkpoint", "describe", url)
    assert {kind["name"]: kind["files"] for kind in described["files"]}["snapshots"] == 1
    (verified,) = call("checkpoint", "verify", url)
    assert verified["is_whole"] and verified["findings"] == []
    assert (verified["read"]["first"], verified["read"]["last"]) == (BATCHES - 1, BATCHES)


def test_the_command_line_names_what_is_damaged(
    rig: Rig, gateway: Gateway, bucket: str, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    harmed = rig.storage.names(paths.SNAPSHOT_FILES)[0]
    (gateway.directory / bucket / "apps" / "counting" / harmed).write_bytes(b"no longer")
    assert cli.main(["checkpoint", "verify", url]) == 1
    assert harmed in capsys.readouterr().out
