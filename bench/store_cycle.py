"""What one micro-batch costs a local store: open, apply a delta, fetch the keys of the batch, close.

    python bench/store_cycle.py --keys 100000 --cycles 300
    python bench/store_cycle.py --keys 2500000 --cycles 100 --processes 2

Each process has a store of its own, as the tasks of two partitions do, and all start together. Keys are picked at
random, sorted as the engine sorts them. Making them up is not timed. A row is the mean of ten cycles of one process.
`cpu` is the processor time of all its threads, compaction included: the figure to trust on a machine that is shared.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import tempfile
import time
from itertools import pairwise
from multiprocessing.synchronize import Barrier
from pathlib import Path
from statistics import fmean, median

from holdfast.stores.base import EMPTY, Mark
from holdfast.stores.rocksdb import RocksDBStore

COLUMNS = ("open", "apply", "get", "close", "cycle", "cpu")


def value(n: int) -> bytes:
    return b"\x81\xa5total\xce" + n.to_bytes(4, "big") + b"\xc0\xc0\xc0"


def fill(path: Path, keys: list[bytes]) -> Mark:
    """A store of `keys`, written as a restore would: a few large versions."""
    ordered = sorted(keys)
    mark = EMPTY
    store = RocksDBStore(path)
    for start in range(0, len(ordered), 200_000):
        to = Mark(mark.version + 1, "fill")
        store.apply(((key, value(0)) for key in ordered[start : start + 200_000]), mark, to)
        mark = to
    store.close()
    return mark


def run(path: Path, count: int, cycles: int, changes: int, seed: int, start: Barrier) -> None:
    chance = random.Random(seed)
    keys = [b"ddefault\x00suser%d" % n for n in range(count)]
    mark = fill(path, keys)
    start.wait()
    rows: list[tuple[float, ...]] = []
    for cycle in range(cycles):
        delta = [(key, value(cycle)) for key in sorted(chance.sample(keys, changes))]
        wanted = sorted(chance.sample(keys, changes))
        to = Mark(mark.version + 1, "bench")
        cpu = time.process_time()
        times = [time.perf_counter()]
        store = RocksDBStore(path)
        times.append(time.perf_counter())
        store.apply(delta, mark, to)
        times.append(time.perf_counter())
        found = store.get_many(wanted)
        times.append(time.perf_counter())
        store.close()
        times.append(time.perf_counter())
        cpu = time.process_time() - cpu
        if None in found:
            raise AssertionError("a key is lost")
        mark = to
        rows.append((*(b - a for a, b in pairwise(times)), times[-1] - times[0], cpu))
        if len(rows) % 10 == 0 or len(rows) == cycles:
            report(path.name, len(rows), rows[-10:])
    for column, name in ((-2, "cycle"), (-1, "cpu")):
        values = [row[column] * 1000 for row in rows]
        steady = ""
        if cycles >= 300:
            steady = f", rate of cycles 280-300 over 15-25: {fmean(values[15:25]) / fmean(values[280:300]):.2f}"
        print(
            f"{path.name:>5}  {name}: mean {fmean(values):.0f} ms, median {median(values):.0f} ms, "
            f"worst {max(values):.0f} ms{steady}",
            flush=True,
        )


def report(name: str, cycle: int, rows: list[tuple[float, ...]]) -> None:
    means = "".join(f"{sum(column) / len(rows) * 1000:9.1f}" for column in zip(*rows, strict=True))
    print(f"{name:>5}{cycle:7}{means}{max(row[-2] for row in rows) * 1000:9.0f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=100_000, help="keys in each store")
    parser.add_argument("--cycles", type=int, default=300)
    parser.add_argument("--changes", type=int, default=43_000, help="changes, and keys fetched, per cycle")
    parser.add_argument("--processes", type=int, default=1, help="stores used at the same time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dir", type=Path, help="where the stores lie; a temporary directory unless given")
    options = parser.parse_args()
    print(f"{'store':>5}{'cycle':>7}" + "".join(f"{name:>9}" for name in COLUMNS) + f"{'worst':>9}   (ms)")
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        start = multiprocessing.Barrier(options.processes)
        workers = [
            multiprocessing.Process(
                target=run,
                args=(Path(directory) / str(n), options.keys, options.cycles, options.changes, options.seed + n, start),
            )
            for n in range(options.processes)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if any(worker.exitcode for worker in workers):
            raise SystemExit("a worker failed")


if __name__ == "__main__":
    main()
