"""A program that fails again and again and is started again in a loop: every integer is added exactly once.

What `inspect` prints may come twice, where the program failed between a commit and the end of its delivery. The sum does not care.
"""

import sys
import tempfile
import time

from holdfast import Application, Persistence

COUNT = 12_000
FAIL_AFTER_S = float(sys.argv[1]) if len(sys.argv) > 1 else 15.0

place = tempfile.mkdtemp()
starts = 0


def build() -> Application:
    global starts
    starts += 1
    started = time.monotonic()

    def fail_sometimes(total: int) -> None:
        if time.monotonic() - started > FAIL_AFTER_S:
            raise RuntimeError("oh no!")

    app = Application("sum", persistence=Persistence(place), state_dir=place, max_batch_rows=500, loglevel=None)
    (
        app.dataframe(app.from_iterable(range(COUNT)))
        .key_by(lambda n: 0)
        .stateful_map("sum", lambda key, n, total: (total + n, total + n), default=0)
        .inspect("fail-sometimes", fail_sometimes)
    )
    return app


if __name__ == "__main__":
    while True:
        app = build()
        try:
            app.run()
            break
        except RuntimeError:
            print("failed; starting again")
    print(f"started {starts} times, the sum is {app.state('sum').get(0)['value']}, it should be {sum(range(COUNT))}")
