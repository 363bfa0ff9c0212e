"""What must be there in the end, and on the way, computed as plainly as it can be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from staged import check_stages, taken

from holdfast.errors import Damaged
from holdfast.log import manifest, paths
from holdfast.log.files import checksum
from holdfast.log.manifest import Chain, Manifest
from holdfast.log.recipe import bring, recipe_for
from holdfast.log.snapshot import newest_snapshot
from holdfast.log.verify import Verification
from holdfast.runtime.view import StateView
from holdfast.state.codecs import JsonCodec
from holdfast.stores.memory import MemoryStore

if TYPE_CHECKING:
    from world import World


def check_newest_snapshot(world: World) -> None:
    """What a restore would begin with is whole."""
    if not world.storage.names(paths.COMMITS):
        return
    newest = newest_snapshot(world.storage)
    for file in (file for part in newest.partitions for file in part.files) if newest is not None else ():
        assert file.name in world.storage.objects, "the newest snapshot names a file that is not there"
        assert checksum(world.storage.objects[file.name]) == file.checksum, "the newest snapshot names another file"


def check_view_is_right_or_refuses(world: World) -> None:
    try:
        state = dict(StateView(Chain(world.storage), "default", JsonCodec(), new_store=MemoryStore).items())
    except Damaged:
        return
    expected, _ = fold(world, committed_records(world))
    assert totals(state) == expected, "a damaged delta gave a wrong value"


def committed_records(world: World) -> list[dict[str, Any]]:
    head = Chain(world.storage).head()
    assert head is not None
    return world.input[: taken(head)]


def fold(world: World, records: list[dict[str, Any]]) -> tuple[dict[str, int], list[tuple[str, int, int]]]:
    """State and output as they must be: the plainest program that could compute them."""
    state: dict[str, int] = {}
    output = []
    for n, record in enumerate(records):
        if n in world.cleared_at:
            state.clear()
        state[record["key"]] = state.get(record["key"], 0) + record["amount"]
        output.append((record["key"], record["n"], state[record["key"]]))
    if len(records) in world.cleared_at:
        state.clear()
    return state, output


def totals(state: dict[str, Any]) -> dict[str, int]:
    return {key: document["total"] for key, document in state.items()}


def check_changelog(world: World, chain: Chain) -> None:
    """The changelogs add up to the state at the last version, partition by partition."""
    if world.kafka is None:
        return
    head = chain.head()
    assert head is not None
    for stage in world.program.stages:
        for local, partition in enumerate(stage.range):
            store = MemoryStore()
            bring(store, world.storage, recipe_for(chain, head, partition))
            found: dict[bytes, bytes] = {}
            for name in stage.stores:
                milestone, documents = world.kafka.changelog(name, local)
                assert milestone is not None and milestone.version == head.version
                found |= documents
            assert found == dict(store.scan(b"d", b"e")), "the changelog holds another state"


def check_verification(world: World) -> None:
    """Nothing is wrong with a checkpoint that has come through everything, but for what harms nobody: a mark may be torn, and
    a snapshot damaged or of a time line that was abandoned."""
    damage = [finding.name for finding in Verification(world.storage).findings() if finding.kind == "damage"]
    harmless = (paths.DELIVERED, paths.SNAPSHOTS, paths.SNAPSHOT_FILES)
    assert not [name for name in damage if not name.startswith(harmless)], f"said to be damaged: {damage}"


def check(world: World) -> None:
    chain = Chain(world.storage)
    state = dict(StateView(chain, "default", JsonCodec(), new_store=MemoryStore).items())
    expected_state, expected_output = fold(world, world.input)
    assert len(committed_records(world)) == len(world.input)
    check_newest_snapshot(world)
    assert totals(state) == expected_state
    rows = world.rows()
    assert sorted((row["key"], row["n"], row["total"]) for row in rows) == sorted(expected_output)
    for key in expected_state:
        mine = [row for row in rows if row["key"] == key]
        assert [row["n"] for row in mine] == sorted(row["n"] for row in mine), "out of order"
        assert state[key]["nonce"] == mine[-1]["nonce"], "state and output are of different attempts"
    check_changelog(world, chain)
    manifests = all_manifests(world)
    if world.staged:
        check_stages(world, manifests)
    check_verification(world)
    assert not world.wrong, world.wrong
    assert sum(commit.rows_in for one in manifests for commit in one.partitions) == len(world.input)
    identities = {one.version: one.id for one in manifests}
    assert all(identities[version] == identity for version, identity in world.promised), "a commit has come to nothing"


def all_manifests(world: World) -> list[Manifest]:
    """The whole chain, from what is there and what retention has removed; each checked to continue the one before it."""
    chain = Chain(world.storage)
    head = chain.head()
    assert head is not None
    found = [head]
    while found[-1].version > 0:
        version = found[-1].version - 1
        name = paths.manifest(version)
        data = world.removed.get(version) or world.storage.objects[name]
        found.append(manifest.decode(name, data))
        assert found[-1].id == found[-2].parent, "the chain is broken"
    return found
