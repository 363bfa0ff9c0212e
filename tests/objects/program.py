"""The program that is killed: running totals over numbers, in state on an object store and in a table.

python program.py <home>      URL and options of the store come by stdin, so that no file or process list has them
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from holdfast import Application, Persistence, State
from holdfast.runtime.session import build_session

COUNT, USERS, BATCH = 600, 7, 100
SCHEMA = "n bigint, user string, amount bigint"


def order(n: int) -> dict[str, Any]:
    return {"n": n, "user": f"user-{n % USERS}", "amount": n * n % 101}


def running_total(order: dict[str, Any], state: State) -> dict[str, Any]:
    total = state.get("total", 0) + order["amount"]
    state.set("total", total)
    return {"n": order["n"], "user": order["user"], "total": total}


def application(home: Path, url: str, options: dict[str, str], spark: Any = None) -> Application:
    return Application(
        "orders",
        spark=spark,
        persistence=Persistence(url, storage_options=options),
        state_dir=home / "state",
        partitions=2,
        max_batch_rows=BATCH,
        loglevel="WARNING",
    )


def main() -> None:
    home = Path(sys.argv[1])
    given = json.loads(sys.stdin.readline())
    files = len(sys.argv) > 2
    # What reads files runs in a JVM that does not compile for later: it lives for a few batches.
    spark = build_session("orders", warehouse=home / "warehouse", only_plans=True) if files else None
    app = application(home, given["url"], given["options"], spark)
    source: Any = app.from_iterable([order(n) for n in range(COUNT)], key="user")
    if files:
        source = app.from_files(sys.argv[2], format="json", schema=SCHEMA, key="user", files_per_batch=1)
    app.dataframe(source).apply(running_total, stateful=True).to_table(str(home / "totals"))
    app.run(available_now=files)


if __name__ == "__main__":
    main()
