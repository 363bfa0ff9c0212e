"""A running total over generated orders, killed in the middle.

    make demo

The parent starts the job as a process of its own, waits until half of the orders are committed, kills it with SIGKILL, starts it
again, and then checks every total against the input.
"""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from holdfast import Application, State

ORDERS = 60_000
CUSTOMERS = 500
STATE_DIR = Path("state")


def orders() -> Iterator[dict[str, Any]]:
    """The same orders each time: a source must be able to start over."""
    chance = random.Random(7)
    for number in range(ORDERS):
        yield {
            "number": number,
            "customer": f"customer-{chance.randrange(CUSTOMERS)}",
            "cents": chance.randrange(100, 9_000),
        }


def add_up(order: dict[str, Any], state: State) -> dict[str, Any]:
    total = state.get("total", default=0) + order["cents"]
    state.set("total", total)
    return {**order, "total": total}


def job() -> Application:
    app = Application("demo", state_dir=STATE_DIR, max_batch_rows=3_000)
    totals = app.dataframe(app.from_iterable(orders, key="customer")).apply(add_up, stateful=True)
    totals.filter(lambda order: order["number"] % 5_000 == 0).apply(
        lambda order: f"order {order['number']:>6}: {order['customer']} has spent {order['total'] / 100:,.2f}"
    ).print()
    return app


def main() -> None:
    if (STATE_DIR / "demo").exists():
        shutil.rmtree(STATE_DIR / "demo")
    began = time.monotonic()
    first = start()
    await_version(first, 1)
    print(f"-- first batch committed {time.monotonic() - began:.1f} s after the start")
    await_version(first, ORDERS // 3_000 // 2)
    first.send_signal(signal.SIGKILL)
    first.wait()
    killed_at = last_version()
    print(f"-- killed process {first.pid} with SIGKILL at version {killed_at}; starting again")
    second = start()
    if second.wait() != 0:
        sys.exit(f"the second process ended with {second.returncode}")
    finished_at = last_version()

    expected: dict[str, int] = {}
    for order in orders():
        expected[order["customer"]] = expected.get(order["customer"], 0) + order["cents"]
    view = job().state()
    found = {customer: state["total"] for customer, state in view.items()}
    print(f"-- app.state().get('customer-7') -> {view.get('customer-7')}")
    if found != expected:
        sys.exit("the totals are WRONG")
    print(
        f"""
1. {ORDERS:,} orders of {CUSTOMERS} customers went through a plain function with keyed state, on Spark, with no service.
2. Every batch became visible by one atomic commit: state, output and position in the source together.
3. The process was killed at version {killed_at} in the middle of its work; its successor went on from there to {finished_at}.
4. All {len(found)} totals equal a recomputation from the input: nothing was lost, nothing counted twice.
5. The state you saw was read from the checkpoint under {STATE_DIR}/demo; the whole took {time.monotonic() - began:.0f} s."""
    )


def start() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, __file__, "--job"])


def await_version(process: subprocess.Popen[bytes], version: int) -> None:
    while last_version() < version:
        if process.poll() is not None:
            sys.exit(f"the job ended early, with {process.returncode}")
        time.sleep(0.01)


def last_version() -> int:
    commits = STATE_DIR / "demo" / "checkpoint" / "commits"
    return len(list(commits.glob("*.json"))) - 1


if __name__ == "__main__":
    job().run() if "--job" in sys.argv else main()
