"""A reader of the state, in a process of its own: it sleeps between two reads while others commit and clear up.

It must end, with the state of one version: retention leaves what a reader holds with a pin.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from answer import totals
from lives import live

from holdfast.log import manifest, paths
from holdfast.log.manifest import Chain, Manifest
from holdfast.runtime.view import StateView
from holdfast.state.codecs import JsonCodec
from holdfast.stores.memory import MemoryStore

if TYPE_CHECKING:
    from world import World


def read_asleep(world: World) -> None:
    if not world.storage.names(paths.COMMITS):
        return
    view = StateView(Chain(SleepyStorage(world)), "default", JsonCodec(), new_store=MemoryStore)
    state = dict(view.items())
    assert view.version is not None
    assert totals(state) == _expected(world, view.version), "a reader saw the state of no version"


class SleepyStorage:
    """The world's storage as a reader sees it: it sleeps between reading the last manifest and a file that leads to it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._is_tired = False

    def put(self, name: str, data: bytes) -> None:
        self._world.faults["reader began again"] += 1
        self._world.storage.put(name, data)

    def get(self, name: str) -> bytes:
        if not name.startswith(paths.COMMITS):
            self._sleep()
        return self._world.storage.get(name)

    def put_file(self, name: str, path: Path) -> None:
        raise AssertionError("a reader puts nothing but pins")

    def get_file(self, name: str, path: Path) -> None:
        path.write_bytes(self.get(name))

    def names(self, prefix: str) -> list[str]:
        self._is_tired = self._is_tired or prefix == paths.COMMITS
        return self._world.storage.names(prefix)

    def sizes(self, prefix: str) -> dict[str, int]:
        return self._world.storage.sizes(prefix)

    def delete(self, name: str) -> None:
        self._world.storage.delete(name)

    def sweep(self, prefix: str) -> list[int]:
        raise AssertionError("a reader clears nothing up")

    def _sleep(self) -> None:
        world = self._world
        if not self._is_tired:
            return
        self._is_tired = False
        world.faults["reader slept"] += 1
        world.nesting += 1
        try:
            live(world, 1)
        finally:
            world.nesting -= 1


def _expected(world: World, version: int) -> dict[str, int]:
    """A fold over what was taken since the state was last empty."""
    head = _manifest(world, version)
    state: dict[str, int] = {}
    for record in world.input[_taken(_manifest(world, head.base)) : _taken(head)]:
        state[record["key"]] = state.get(record["key"], 0) + record["amount"]
    return state


def _manifest(world: World, version: int) -> Manifest:
    name = paths.manifest(version)
    return manifest.decode(name, world.removed.get(version) or world.storage.objects[name])


def _taken(found: Manifest) -> int:
    if found.position is not None:
        return int(found.position["taken"])
    return 0 if found.spark is None else int(found.spark.offsets.split("-")[1])
