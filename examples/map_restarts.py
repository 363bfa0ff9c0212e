"""A program that fails every 15 seconds and is started again in a loop: every integer is added exactly once.

It fails in the middle of a batch, so what it has added in that batch is lost, and added again by the next start. What
`inspect` prints may come twice, where a program ends between a commit and the end of its delivery. The sum does not care.

Run it: python examples/map_restarts.py, and end it with Ctrl-C; or, to see its end soon, with the seconds until it fails
and the integers that it adds: python examples/map_restarts.py 0.5 12000
"""

import sys
import tempfile
import time
from datetime import timedelta

from holdfast import Application, Persistence

FAIL_AFTER_S = float(sys.argv[1]) if len(sys.argv) > 1 else 15.0
COUNT = int(sys.argv[2]) if len(sys.argv) > 2 else 2**31 - 1

place = tempfile.mkdtemp()


class Sum:
    """The running sum, until it has been at work for so long."""

    def __init__(self) -> None:
        self.started: float | None = None

    def __call__(self, key: int, n: int, total: int) -> tuple[int, int]:
        self.started = self.started or time.monotonic()
        if n % 500 == 250 and time.monotonic() - self.started > FAIL_AFTER_S:
            raise RuntimeError("oh no!", total)
        return total + n, total + n


def build() -> Application:
    persistence = Persistence(place, snapshot_every=timedelta(seconds=10))
    app = Application("sum", persistence=persistence, state_dir=place, max_batch_rows=500, loglevel=None)
    (
        app.dataframe(app.from_iterable(range(COUNT)))
        .key_by(lambda n: 0)
        .stateful_map("sum", Sum(), default=0)
        .inspect("print", print)
    )
    return app


def committed(app: Application) -> int:
    state = app.state("sum").get(0)
    return 0 if state is None else state["value"]


if __name__ == "__main__":
    while True:
        app = build()
        try:
            app.run()
            break
        except RuntimeError as error:
            text, total = error.args
            print(f"{text} The sum was {total}, of which {committed(app)} is committed; starting again")
    print(f"the sum is {committed(app)}, that of all integers is {COUNT * (COUNT - 1) // 2}")
