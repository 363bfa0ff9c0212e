"""docs/operating.md must be true: its commands are run as one session and must say what the page says."""

from __future__ import annotations

import random
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from holdfast import State, cli
from holdfast.dataframe import frame_of
from holdfast.log import manifest as manifests
from holdfast.log.manifest import Chain, Manifest
from holdfast.log.storage import LocalStorage
from holdfast.plan.pipeline import Pipeline
from holdfast.plan.program import program_of
from holdfast.runtime.batch import Driver, Proposal
from holdfast.runtime.delivery import Outbox
from holdfast.sources.iterable import IterableSource
from holdfast.state.codecs import JsonCodec
from holdfast.testing import LocalRunner, MemoryStores

PAGE = Path(__file__).parents[2] / "docs" / "operating.md"
BATCH = 400
BEGAN_MS = 1_794_780_000_000
ORDERS = [{"user": f"user-{n * 7 % 500}", "amount": n % 10} for n in range(3 * BATCH)]


def running_total(order: dict[str, Any], state: State) -> dict[str, Any]:
    total = state.get("total", 0) + order["amount"]
    state.set("total", total)
    state.set("last", [order["amount"]])
    return {"user": order["user"], "total": total}


class Nowhere:
    """A sink's target that takes everything."""

    def prepare(self, head: Manifest) -> None: ...

    def deliver(self, manifest: Manifest, outbox: Outbox) -> None: ...


def make_checkpoint(directory: Path) -> None:
    """The checkpoint that the page is about."""
    pipeline = Pipeline(IterableSource(ORDERS, "user", None))
    frame_of(pipeline).apply(running_total, stateful=True).to_table("totals")
    program = program_of("orders", pipeline, JsonCodec(), 2)
    storage = LocalStorage(directory, durable=False)
    clock = iter(range(BEGAN_MS, BEGAN_MS + 1_000_000, 60_000))
    driver = Driver(
        Chain(storage),
        program,
        LocalRunner(program, storage, MemoryStores()),
        {sink.id: Nowhere() for sink in program.sinks},
        clock=lambda: next(clock),
        holder="worker-1:4711",
    )
    driver.start()
    for end in range(BATCH, len(ORDERS) + 1, BATCH):
        driver.run_batch(Proposal(end={"taken": end}))


def session_of(page: str) -> list[tuple[str, str]]:
    """Every command of the page, and what it says there."""
    blocks = re.findall(r"^```console\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    return [
        (command.removeprefix("$ "), said)
        for block in blocks
        for command, said in re.findall(r"^(\$ .*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE)
    ]


def answer(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What a command says."""
    if command.startswith("holdfast "):
        cli.main(shlex.split(command)[1:])
        out, err = capsys.readouterr()
        return out + err
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    return done.stdout


def stable(text: str) -> str:
    """Without the sizes of files, which are Arrow's, and the columns that follow from them."""
    text = re.sub(r"[0-9.,]+ (bytes|kB)\b", "SIZE", text)
    text = re.sub(r'("bytes":|says )[0-9]+', r"\1SIZE", text)
    return re.sub(r" +", " ", text)


def test_the_commands_of_the_page_say_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(manifests, "entropy", random.Random(1).randbytes)
    monkeypatch.setattr(cli, "now_ms", lambda: BEGAN_MS + 4 * 60_000)
    make_checkpoint(tmp_path / "state" / "orders" / "checkpoint")
    session = session_of(PAGE.read_text())
    assert len(session) > 10
    for command, said in session:
        assert stable(answer(command, capsys)) == stable(said), command


def test_every_command_and_option_is_on_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    page = PAGE.read_text()
    for room, commands in {"state": ("ls", "get", "items", "export"), "checkpoint": ("describe", "verify")}.items():
        for command in commands:
            assert f"holdfast {room} {command} " in page
            cli.main([room, command, "--help"])
            for option in re.findall(r"--[a-z-]+", capsys.readouterr().out):
                assert option == "--help" or f"`{option}" in page or f"{option} " in page, option
