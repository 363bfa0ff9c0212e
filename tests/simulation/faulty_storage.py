"""The world's storage as one process sees it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from holdfast.errors import StorageFailed
from holdfast.log import paths
from holdfast.log.storage import Exists
from holdfast.testing import Crash, MemoryStorage

if TYPE_CHECKING:
    from world import World


class FaultyStorage(MemoryStorage):
    """The world's storage as one process sees it. Whatever a call does, the process may not live to hear of it."""

    def __init__(self, world: World) -> None:
        self._world = world  # the objects are there

    def put(self, name: str, data: bytes) -> None:
        world = self._world
        self._before(pause=4 if name.startswith(paths.COMMITS) else 1)
        if world.chance("put refused", 0.5):
            raise StorageFailed("no answer")
        if not name.startswith(paths.COMMITS) and world.chance("torn write", 0.5):
            world.storage.objects[name] = data[: len(data) // 2]
            raise Crash("torn write")
        if world.chance("delayed write", 0.5):
            world.delayed.append((name, data))
            raise Crash("delayed write")
        world.storage.put(name, data)
        if name.startswith(paths.SNAPSHOTS) and not world.calm:
            world.faults["snapshot taken"] += 1
        if world.chance("answer lost"):
            raise StorageFailed("the answer was lost")
        self._after()

    def get(self, name: str) -> bytes:
        self._before()
        return self._world.storage.get(name)

    def sizes(self, prefix: str) -> dict[str, int]:
        self._before()
        return self._world.storage.sizes(prefix)

    def delete(self, name: str) -> None:
        world = self._world
        self._before()
        if name.startswith(paths.COMMITS) and name in world.storage.objects:
            if not world.calm:
                world.faults["cleared up"] += 1
            world.removed.setdefault(paths.version_of(name), world.storage.objects[name])
        world.storage.delete(name)
        self._after()

    def delete_all(self, names: Sequence[str]) -> None:
        for name in self._world.random.sample(names, len(names)):
            self.delete(name)

    def _before(self, *, pause: int = 1) -> None:
        world = self._world
        land_delayed(world)
        if world.zombies and world.random.random() < 0.1:
            world.zombies.pop(world.random.randrange(len(world.zombies)))()
        world.maybe_pause(pause)
        if world.chance("crash before a storage call"):
            raise Crash("before")

    def _after(self) -> None:
        if self._world.chance("crash after a storage call"):
            raise Crash("after")


def land_delayed(world: World) -> None:
    """A write that was on its way when its process died arrives now, or never."""
    if world.delayed and world.random.random() < 0.2:
        name, data = world.delayed.pop()
        if world.random.random() < 0.7:
            with suppress(Exists):
                world.storage.put(name, data)
