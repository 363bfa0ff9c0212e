"""The benchmark: Holdfast beside Spark's own state and, on Kafka, beside Quix Streams, in one run on one machine. `make bench`.

    bench/run.py                    everything
    bench/run.py kafka              the three sections of kafka.py
    bench/run.py kafka-latency      one section
    bench/run.py kafka --smoke      whether the Kafka sections work, in small

Ratios within a run are what counts; absolute figures only say what kind of machine it was. Contenders of one
comparison take turns, each in a process of its own on the same input. Writes bench/out/results.json and results.png,
and prints one table. Fails if a ratio is below what is promised.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import group_state
import kafka
import pyarrow as pa
import pyarrow.parquet as pq

HERE = Path(__file__).parent
ROOT = HERE.parent
OUT = HERE / "out"
ROWS = 200_000
KEYS = 100_000
WARM_UP = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", help=f"some of: {', '.join(SECTIONS)}; kafka: all of these")
    parser.add_argument(
        "--smoke", action="store_true", help="small Kafka sections, whose figures mean nothing and are not kept"
    )
    options = parser.parse_args()
    chosen = [found for name in options.only or SECTIONS for found in sections(parser, name)]
    if options.smoke:
        chosen = [name for name in chosen if name in kafka.SECTIONS]
    OUT.mkdir(exist_ok=True)
    results: dict[str, Any] = {}
    rows: list[tuple[str, str, str, bool]] = []
    for name in chosen:
        began = time.monotonic()
        rows += kafka.SECTIONS[name](results, kafka.SMALL) if options.smoke else SECTIONS[name](results)
        print(f"[{name}: {time.monotonic() - began:.0f} s]", file=sys.stderr, flush=True)
    if not options.smoke:
        (OUT / "results.json").write_text(json.dumps(results, indent=1))
        draw(results)
    width = max(len(row[0]) for row in rows)
    for what, figure, promised, kept in rows:
        print(f"{what:<{width}}  {figure:>14}  {promised:>14}  {'' if kept else 'NOT KEPT'}")
    for command in results.get("how", []):
        print(f"ran: {command}")
    sys.exit(0 if all(row[3] for row in rows) else 1)


# -- the sections -------------------------------------------------------------------------------------------------------


def against_spark(results: dict[str, Any]) -> list[tuple[str, str, str, bool]]:
    """Running total, 100,000 keys, batches of 200,000 rows from parquet; state and delta on disk, no sink."""
    long, short = parquet(12), parquet(2)
    rates: dict[str, list[float]] = {}
    for _ in range(2):  # in turns, so that a slow minute hits all
        for name, data in (
            ("holdfast-files", long),
            ("spark-jvm-sum", long),
            ("holdfast-iterable", long),
            ("spark-transformWithState", short),
        ):
            warm_up = 0 if data is short else WARM_UP
            seconds = contend(name, data, "--batches", "12")[warm_up:]
            rates.setdefault(name, []).extend(ROWS / second for second in seconds)
    rate = {name: statistics.median(found) for name, found in rates.items()}
    results["rows_per_second"] = rate
    ours = rate["holdfast-files"]
    lines = [(f"{name}, rows/s", f"{found:,.0f}", "", True) for name, found in rate.items()]
    lines += [
        ratio("files / Spark transformWithState in Python", ours / rate["spark-transformWithState"], 15),
        ratio("files / Spark groupBy().sum() in the JVM", ours / rate["spark-jvm-sum"], 1),
        ratio(
            "iterable / Spark transformWithState in Python",
            rate["holdfast-iterable"] / rate["spark-transformWithState"],
            15,
        ),
        ratio("iterable / Spark groupBy().sum() in the JVM", rate["holdfast-iterable"] / rate["spark-jvm-sum"], 1),
    ]
    return lines


def many_keys(results: dict[str, Any]) -> list[tuple[str, str, str, bool]]:
    """The same with 5 million keys in the store."""
    few = contend("holdfast-iterable", OUT, "--fill", "100000", "--batches", "24")[-16:]
    many = contend("holdfast-iterable", OUT, "--fill", "5000000", "--keys", "5000000", "--batches", "24")[-16:]
    slowdown = (sum(few) / len(few)) / (sum(many) / len(many))
    results["many_keys"] = {"100,000": ROWS / statistics.mean(few), "5,000,000": ROWS / statistics.mean(many)}
    return [ratio("rate with 5,000,000 keys / with 100,000", slowdown, 0.6)]


def endurance(results: dict[str, Any]) -> list[tuple[str, str, str, bool]]:
    """Whether the hundredth open of RocksDB is as quick as the tenth."""
    seconds = contend("holdfast-iterable", OUT, "--batches", "312")
    early, late = seconds[10:30], seconds[290:310]
    results["endurance"] = [ROWS / second for second in seconds]
    return [ratio("rate at batch 300 / at batch 20", sum(early) / sum(late), 0.85)]


def batch_floor(results: dict[str, Any]) -> list[tuple[str, str, str, bool]]:
    """What a small batch costs."""
    seconds = contend("holdfast-iterable", OUT, "--rows", "2000", "--batches", "120")[20:]
    median = statistics.median(seconds) * 1000
    results["batch_floor_ms"] = median
    return [("batch of 2,000 rows, median ms", f"{median:.0f}", "<= 250", median <= 250)]


def second_stage(results: dict[str, Any]) -> list[tuple[str, str, str, bool]]:
    """What a total by a second key costs, which every record is shuffled for; once the JVM has compiled what that takes.

    kafka-second-stage has the same from topic to topic, where both programs also publish.
    """
    seconds: dict[str, list[float]] = {"1": [], "2": []}
    for _ in range(2):
        for stages, found in seconds.items():
            found += contend("holdfast-files", parquet(30), "--stages", stages)[10:]
    one, two = (statistics.median(found) for found in seconds.values())
    results["stages"] = {stages: ROWS / statistics.median(found) for stages, found in seconds.items()}
    added = (two - one) / one
    return [
        ("from files to nowhere: time of two keyed stages / of one", f"{two / one:.2f}", "", True),
        ("from files to nowhere: time that the second adds / of one", f"{added:.2f}", "<= 1.8", added <= 1.8),
    ]


def pending_timers(results: dict[str, Any]) -> list[tuple[str, str, str, bool]]:
    """What a million timers cost that are not due, beside a million keys without them."""
    seconds: dict[str, list[float]] = {"": [], "--timers": []}
    for _ in range(2):
        for option, found in seconds.items():
            options = ("--waiting", "1000000", "--batches", "20", "--rows", "100000", *([option] if option else []))
            found += contend("holdfast-iterable", OUT, *options)[-14:]
    without, with_timers = (statistics.median(found) for found in seconds.values())
    slower = with_timers / without
    results["pending_timers"] = {"without": without, "with a million": with_timers}
    return [("time of a batch with 1,000,000 pending timers / without", f"{slower:.2f}", "<= 1.1", slower <= 1.1)]


def uploads(results: dict[str, Any]) -> list[tuple[str, str, str, bool]]:
    """What it costs to take and upload a snapshot of a million keys after every batch, one after the other."""
    seconds: dict[str, list[float]] = {"never": [], "always": []}
    for _ in range(2):
        for when, found in seconds.items():
            options = ("--fill", "1000000", "--keys", "1000000", "--batches", "20")
            more = ("--snapshot-every", "1") if when == "always" else ()
            found += contend("holdfast-iterable", OUT, *options, *more)[-14:]
    without, with_uploads = (statistics.median(found) for found in seconds.values())
    results["uploads"] = {"rate without": ROWS / without, "rate with": ROWS / with_uploads}
    return [ratio("rate while snapshots are uploaded / without", without / with_uploads, 0.85)]


def growth(results: dict[str, Any]) -> list[tuple[str, str, str, bool]]:
    """The size of a checkpoint over 2,000 small batches, as tests/contract/test_growth.py measures it."""
    test = ROOT / "tests" / "contract" / "test_growth.py"
    subprocess.run([sys.executable, "-m", "pytest", "-q", str(test)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    _, *lines = (ROOT / "build" / "checkpoint-size.csv").read_text().splitlines()
    results["growth"] = rows = [tuple(map(int, line.split(","))) for line in lines]
    most = max(checkpoint / state for version, state, checkpoint, _ in rows if version > 200)
    return [("checkpoint / state over 2,000 batches, at most", f"{most:.2f}", "<= 8", most <= 8)]


SECTIONS = {
    "against-spark": against_spark,
    "batch-floor": batch_floor,
    "many-keys": many_keys,
    "endurance": endurance,
    "second-stage": second_stage,
    "pending-timers": pending_timers,
    "uploads": uploads,
    "growth": growth,
    **group_state.SECTIONS,
    **kafka.SECTIONS,
}


def sections(parser: argparse.ArgumentParser, name: str) -> list[str]:
    """The sections that a word on the command line means."""
    if name == "kafka":
        return list(kafka.SECTIONS)
    if name not in SECTIONS:
        parser.error(f"there is no section {name}; there are {', '.join(SECTIONS)}")
    return [name]


# -- how it is done -----------------------------------------------------------------------------------------------------


def contend(name: str, data: Path, *options: str) -> list[float]:
    """The seconds between the commits of a contender."""
    work = OUT / "work"
    if work.exists():
        shutil.rmtree(work)
    work.mkdir()
    command = [sys.executable, str(HERE / "contender.py"), name, "--input", str(data), "--work", str(work), *options]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        sys.exit(f"{name} failed:\n{run.stderr[-4000:]}")
    seconds: list[float] = json.loads(run.stdout.strip().splitlines()[-1])
    print(
        f"  {name:<26} {' '.join(options)}: {statistics.median(seconds) * 1000:,.0f} ms a batch",
        file=sys.stderr,
        flush=True,
    )
    shutil.rmtree(work)
    return seconds


def parquet(files: int) -> Path:
    directory = OUT / f"input-{files}"
    if not directory.exists():
        temporary = OUT / f"input-{files}.tmp"
        temporary.mkdir()
        chance = random.Random(1)
        for number in range(files):
            users = [f"user{chance.randrange(KEYS)}" for _ in range(ROWS)]
            table = pa.table({"user": users, "amount": [chance.randrange(1000) for _ in range(ROWS)]})
            pq.write_table(table, temporary / f"{number:05d}.parquet")
        temporary.rename(directory)
    return directory


def ratio(what: str, found: float, promised: float) -> tuple[str, str, str, bool]:
    return what, f"{found:.2f}", f">= {promised}", found >= promised


def draw(results: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4))
    rates = results.get("rows_per_second", {})
    left.barh(list(rates), list(rates.values()), color="#3b7a57")
    left.set_title("running total, 100,000 keys, thousand rows/s")
    left.set_xlim(right=1.2 * max(rates.values(), default=1))
    left.xaxis.set_major_formatter(lambda value, position: f"{value / 1000:,.0f}")
    for index, value in enumerate(rates.values()):
        left.text(value, index, f" {value:,.0f}", va="center")
    right.plot(results.get("endurance", []), linewidth=0.8, color="#3b7a57")
    right.set_title("thousand rows/s over 300 batches of 200,000 rows")
    right.yaxis.set_major_formatter(lambda value, position: f"{value / 1000:,.0f}")
    right.set_ylim(bottom=0)
    right.set_xlabel("batch")
    figure.tight_layout()
    figure.savefig(OUT / "results.png", dpi=120)
    if "growth" in results:
        figure, axes = plt.subplots(figsize=(8, 4))
        batches, state, checkpoint, _ = zip(*results["growth"], strict=True)
        axes.plot(batches, [size / 1000 for size in checkpoint], color="#3b7a57", label="checkpoint")
        axes.plot(batches, [size / 1000 for size in state], color="#999999", label="state")
        axes.set_title("size in kB over 2,000 batches, a snapshot every 50")
        axes.set_xlabel("batch")
        axes.set_ylim(bottom=0)
        axes.legend()
        figure.tight_layout()
        figure.savefig(OUT / "checkpoint-size.png", dpi=120)


if __name__ == "__main__":
    main()
