"""For tests of pipelines: run them with no JVM, through the same protocol code, and crash them where it hurts.

>>> from holdfast.testing import Harness
>>> def count(value, state):
...     state.set("n", state.get("n", 0) + 1)
>>> harness = Harness(lambda sdf: sdf.update(count, stateful=True))
>>> harness.feed(("ann", "click"), ("bob", "click"), ("ann", "click"))
>>> harness.crash_at("commit.done")
>>> harness.run()
Traceback (most recent call last):
holdfast.testing.memory.Crash: at commit.done, version 1
>>> harness.restart()
>>> harness.run()
>>> dict(harness.state().items())
{'ann': {'n': 2}, 'bob': {'n': 1}}
>>> harness.values
['click', 'click', 'click']
"""

from holdfast.failpoints import DRIVER_POINTS, TASK_POINTS
from holdfast.testing.harness import Harness, run
from holdfast.testing.memory import Crash, LocalRunner, MemoryStorage, MemoryStores

__all__ = [
    "DRIVER_POINTS",
    "TASK_POINTS",
    "Crash",
    "Harness",
    "LocalRunner",
    "MemoryStorage",
    "MemoryStores",
    "run",
]
