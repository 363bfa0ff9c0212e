"""GroupState beside Spark's `applyInPandasWithState`: a running total per user, on the same parquet files.

    bench/run.py group-state        the section
    bench/group_state.py NAME DIRECTORY WORK   one contender, in a process of its own; prints the seconds of its batches

The figures are read off the files that mark a batch as committed, as in contender.py.
"""

from __future__ import annotations

import json
import random
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

HERE = Path(__file__).parent
OUT = HERE / "out"
ROWS = 200_000
KEYS = 100_000
SCHEMA = "user string, amount bigint"
TOTALS = "user string, total bigint"


def group_state(results: dict[str, Any]) -> list[tuple[str, str, str, bool]]:
    """Batches of 200,000 rows, 100,000 keys; the function sees the rows of a user in a batch together, and gives one total."""
    OUT.mkdir(exist_ok=True)
    ours = ROWS / statistics.median(contend("holdfast", 10)[3:])
    sparks = ROWS / statistics.median(contend("spark", 2))
    results["group_state_rows_per_second"] = {"holdfast": ours, "spark applyInPandasWithState": sparks}
    found = ours / sparks
    return [
        ("GroupState, rows/s", f"{ours:,.0f}", "", True),
        ("Spark applyInPandasWithState, rows/s", f"{sparks:,.0f}", "", True),
        ("GroupState / Spark applyInPandasWithState", f"{found:.2f}", ">= 10", found >= 10),
    ]


SECTIONS = {"group-state": group_state}


def contend(name: str, batches: int) -> list[float]:
    """The seconds between the commits of a contender."""
    work = OUT / "group-state"
    if work.exists():
        shutil.rmtree(work)
    work.mkdir()
    command = [sys.executable, __file__, name, str(files(batches)), str(work)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        sys.exit(f"{name} failed:\n{run.stderr[-4000:]}")
    shutil.rmtree(work)
    seconds: list[float] = json.loads(run.stdout.strip().splitlines()[-1])
    return seconds


def files(batches: int) -> Path:
    """The input, a file per batch."""
    directory = OUT / f"group-state-{batches}"
    if not directory.exists():
        draft = OUT / f"group-state-{batches}.tmp"
        draft.mkdir()
        chance = random.Random(1)
        for number in range(batches):
            users = [f"user{chance.randrange(KEYS)}" for _ in range(ROWS)]
            table = pa.table({"user": users, "amount": [chance.randrange(1000) for _ in range(ROWS)]})
            pq.write_table(table, draft / f"{number:05d}.parquet")
        draft.rename(directory)
    return directory


# -- the contenders ----------------------------------------------------------------------------------------------


def holdfast(rows: Any, work: Path) -> Path:
    from holdfast.spark import stateful

    def running_total(user: str, values: Iterator[Any], state: Any) -> Any:
        total = state.get if state.exists else 0
        for value in values:
            total += value.amount
        state.update(total)
        return (user, total)

    result = stateful(rows).groupByKey(lambda row: row.user).mapGroupsWithState(running_total, schema=TOTALS)
    writer = result.writeStream.foreachBatch(lambda df, version: None).option("checkpointLocation", str(work / "c"))
    writer.trigger(availableNow=True).start().awaitTermination()
    return work / "c" / "commits"


def spark(rows: Any, work: Path) -> Path:
    import pandas as pd
    from pyspark.sql.streaming.state import GroupStateTimeout

    def running_total(key: Any, frames: Iterator[Any], state: Any) -> Iterator[Any]:
        (total,) = state.get if state.exists else (0,)
        for frame in frames:
            total += int(frame["amount"].sum())
        state.update((total,))
        yield pd.DataFrame({"user": [key[0]], "total": [total]})

    result = rows.groupBy("user").applyInPandasWithState(
        running_total, TOTALS, "total bigint", "update", GroupStateTimeout.NoTimeout
    )
    writer = result.writeStream.format("noop").outputMode("update").option("checkpointLocation", str(work / "c"))
    writer.trigger(availableNow=True).start().awaitTermination()
    return work / "c" / "commits"


def main() -> None:
    from contender import spark_session

    name, directory, work = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    session = spark_session(work)
    rows = session.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(directory)
    commits = {"holdfast": holdfast, "spark": spark}[name](rows, work)
    times = sorted((int(path.stem), path.stat().st_mtime_ns) for path in commits.iterdir() if path.stem.isdigit())
    session.stop()
    print(json.dumps([(after - before) / 1e9 for (_, before), (_, after) in pairwise(times)]))


if __name__ == "__main__":
    main()
