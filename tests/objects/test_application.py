"""A whole application on an object store: killed, moved to another machine, exact; and its secret nowhere but in memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import program
import pyarrow.parquet as pq
import pytest
from gateway import Gateway
from proxy import Proxy

from holdfast.log.location import storage_at
from holdfast.log.manifest import Chain

CANARY = "canary-3f8b2c-secret-of-the-store"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with Gateway(tmp_path_factory.mktemp("guarded") / "data", secret=CANARY) as gateway:
        yield gateway


def live(
    home: Path, url: str, options: dict[str, str], *arguments: object, kill_at: str | None = None
) -> subprocess.CompletedProcess[str]:
    """One life of the program, which ends at a failpoint if so asked; everything that it and Spark write is below `home`."""
    claim = home.with_name(str(kill_at))
    for name in ("tmp", "spark"):
        (home / name).mkdir(parents=True, exist_ok=True)
    life = subprocess.run(
        [sys.executable, program.__file__, str(home), *map(str, arguments)],
        cwd=home,
        input=json.dumps({"url": url, "options": options}) + "\n",
        env=os.environ
        | {
            "PYTHONPATH": str(ROOT),
            "HOLDFAST_CLASS_ARCHIVE": "use",
            "TMPDIR": str(home / "tmp"),
            "SPARK_LOCAL_DIRS": str(home / "spark"),
        }
        | ({"HOLDFAST_FAILPOINT": kill_at, "HOLDFAST_FAILPOINT_CLAIM": str(claim.parent)} if kill_at else {}),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert life.returncode == (-signal.SIGKILL if kill_at else 0), life.stderr
    assert claim.exists() == (kill_at is not None), "nobody was killed"
    return life


def truth() -> tuple[dict[str, dict[str, int]], list[dict[str, Any]]]:
    """State and rows, recomputed from the input."""
    totals: dict[str, int] = {}
    rows = []
    for order in map(program.order, range(program.COUNT)):
        totals[order["user"]] = totals.get(order["user"], 0) + order["amount"]
        rows.append({"n": order["n"], "user": order["user"], "total": totals[order["user"]]})
    return {user: {"total": total} for user, total in totals.items()}, rows


def rows_of(table: Path) -> list[dict[str, Any]]:
    files = [file for file in table.rglob("*.parquet") if ".staging" not in str(file)]
    rows = [row for file in files for row in pq.ParquetFile(file).read().to_pylist()]
    return sorted(rows, key=lambda row: int(row["n"]))


def holding(directory: Path, word: str) -> list[Path]:
    forms = (word.encode(), word.encode("utf-16-le"))
    return [
        file for file in directory.rglob("*") if file.is_file() and any(form in file.read_bytes() for form in forms)
    ]


def test_a_run_that_was_killed_goes_on_exactly_on_a_machine_with_an_empty_disk(
    guarded: Gateway, tmp_path: Path
) -> None:
    url = f"s3://{guarded.bucket()}/apps/orders"
    with Proxy(guarded) as proxy:
        for part in ("/commits/", "/deltas/", "/outbox/"):
            proxy.inject("lost", "PUT", f"{part}{2:020d}")
            proxy.inject("unavailable", "PUT", f"{part}{4:020d}", 5)
        home = tmp_path / "home"
        killed = live(home, url, proxy.options(), kill_at="commit.done@3")
        assert holding(tmp_path, CANARY) == []
        assert holding(tmp_path, url), "the search finds nothing: not even what is in the broadcast"
        (home / "state").rename(tmp_path / "lost")
        done = live(home, url, proxy.options())
        assert proxy.happened["lost"] >= 3 and proxy.happened["unavailable"] >= 10
    state, rows = truth()
    app = program.application(Path(tempfile.mkdtemp(dir=tmp_path)), url, guarded.options())
    assert dict(app.state().items()) == state
    assert rows_of(home / "totals") == rows
    head = Chain(storage_at(url, guarded.options())).head()
    assert head is not None and head.version == program.COUNT // program.BATCH
    assert holding(tmp_path, CANARY) == []
    assert CANARY not in killed.stderr + killed.stdout + done.stderr + done.stdout
    assert sorted(path.name for path in (home / "state" / "orders").iterdir()) == ["local", "run"]


def test_a_spark_source_goes_on_exactly_on_a_machine_with_an_empty_disk(gateway: Gateway, tmp_path: Path) -> None:
    url = f"s3://{gateway.bucket()}/apps/orders"
    home, given = tmp_path / "home", tmp_path / "given"
    given.mkdir()
    orders = [program.order(n) for n in range(program.COUNT)]
    per_file = program.COUNT // 15  # more files than Spark's log of them has entries before it is compacted
    for number in range(15):
        lines = [json.dumps(order) + "\n" for order in orders[number * per_file : (number + 1) * per_file]]
        file = given / f"{number:02d}.json"
        file.write_text("".join(lines))
        os.utime(file, (1_700_000_000 + number, 1_700_000_000 + number))  # the order in which Spark takes them
    later = [given / f"{number}.json" for number in (13, 14)]
    for file in later:
        file.rename(tmp_path / file.name)
    live(
        home, url, gateway.options(), given, kill_at="job.done@12"
    )  # Spark has planned the batch, and nobody committed it
    (home / "state").rename(tmp_path / "lost")
    for file in later:
        (tmp_path / file.name).rename(file)
    live(home, url, gateway.options(), given)
    state, rows = truth()
    app = program.application(Path(tempfile.mkdtemp(dir=tmp_path)), url, gateway.options())
    assert dict(app.state().items()) == state
    assert rows_of(home / "totals") == rows
    head = Chain(storage_at(url, gateway.options())).head()
    assert head is not None and head.version == 15
    assert len(head.spark_files) < 15, "what Spark has compacted is still carried"
