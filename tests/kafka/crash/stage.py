"""A scene in which the program lives: every life has the same names in Kafka and the same checkpoint."""

from __future__ import annotations

import signal
from pathlib import Path

import life
from broker import Broker
from life import Armed, Life
from scene import Scene

BATCH = 200


class Stage(Scene):
    """A corner of the broker for one application, whose runs are processes of their own."""

    def __init__(self, broker: Broker, directory: Path) -> None:
        super().__init__(broker, None, directory)  # type: ignore[arg-type]
        self._home = directory / "state"

    def life(self, publish: str, *more: object, batch: int = BATCH, failpoint: Armed | None = None) -> Life:
        """A life that ends with its input; `publish` says who publishes what it commits: "driver" or "tasks"."""
        environment = failpoint.environment if failpoint is not None else None
        return Life(self._home, *self._arguments(publish, batch), *more, environment=environment)

    def run_to_end(self, publish: str, batch: int = BATCH) -> None:
        """A life that nobody disturbs."""
        life.run_to_end(self._home, *self._arguments(publish, batch))

    def commits(self) -> int:
        return life.commits(self._home)

    def armed(self, point: str, version: int, number: signal.Signals = signal.SIGKILL) -> Armed:
        return Armed(self._home, point, version, number)

    def _arguments(self, publish: str, batch: int) -> list[object]:
        named = {"broker": self.broker.address, "name": self.name, "source": self.source, "target": self.target}
        given = named | {"batch": batch, "publish": publish}
        return [word for name, value in given.items() for word in (f"--{name}", value)]
