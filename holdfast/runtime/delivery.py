"""Step 5 of the protocol in batch.py: what a committed version emitted goes to the sinks.

A version may be delivered any number of times, by whoever finds no mark that all sinks have it; only the sinks see to it that
nothing is there twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, Protocol

import msgspec

from holdfast.errors import ForeignTarget, StopAndLook
from holdfast.failpoints import reach
from holdfast.log import paths
from holdfast.log.files import read_table
from holdfast.log.manifest import Chain, Manifest
from holdfast.log.storage import Exists, Missing

logger = logging.getLogger("holdfast")


class Target(Protocol):
    """Delivers the outbox of one sink. Must bear being given the same version again."""

    def prepare(self, head: Manifest) -> None:
        """Refuse a target that holds someone else's output, before anything runs."""

    def deliver(self, manifest: Manifest, outbox: Outbox) -> None:
        """Make the output of a committed version visible."""


class Publisher(Protocol):
    """Publishes what goes to Kafka: the outboxes of its sinks, the deltas, the positions. Everything of a version together.

    It is given every version, also one without output, and must bear being given the same version again.
    """

    sinks: frozenset[str]

    def prepare(self, head: Manifest) -> None:
        """Refuse what someone else has published, before anything runs."""

    def way(self, rows: int, head: Manifest) -> Literal["driver", "tasks"]:
        """Who will publish the version of so many rows that comes after `head`."""

    def publish(self, manifest: Manifest) -> None: ...


class Outbox:
    """What a committed version emitted for one sink."""

    def __init__(self, chain: Chain, manifest: Manifest, sink: str) -> None:
        self.storage = chain.storage
        self.files = [commit.outboxes[sink] for commit in manifest.partitions if sink in commit.outboxes]
        self.schema = manifest.schemas.get(sink)

    def tables(self) -> list[Any]:
        """One Arrow table per partition that emitted something."""
        return [read_table(self.storage, file, kind="outbox") for file in self.files]

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """Whoever reads the outbox in tasks fails with Spark's words: if a file is damaged, say that instead."""
        try:
            yield
        except Exception:
            self.tables()
            raise


class Delivery:
    """All sinks of a run."""

    def __init__(
        self,
        chain: Chain,
        targets: Mapping[str, Target],
        publisher: Publisher | None,
        check_not_fenced: Callable[[], None],
    ) -> None:
        self._chain = chain
        self._targets = targets
        self._publisher = publisher
        self._check_not_fenced = check_not_fenced

    def prepare(self, head: Manifest) -> None:
        """Refuse sinks that hold someone else's output, before anything runs."""
        for target in self._targets.values():
            target.prepare(head)
        if self._publisher is not None:
            self._publisher.prepare(head)

    def way(self, rows: int, head: Manifest) -> Literal["driver", "tasks"] | None:
        """Who will publish the version of so many rows that comes after `head`; None: nothing is published."""
        return None if self._publisher is None else self._publisher.way(rows, head)

    def deliver_to(self, head: Manifest) -> None:
        """Deliver what a crash may have left: the last batch, and what emptied the state after it."""
        undelivered = [head]
        while undelivered[-1].kind in ("clear", "backfilled"):
            undelivered.append(self._chain.parent_of(undelivered[-1]))
        for manifest in reversed(undelivered):
            self.deliver(manifest)

    def deliver(self, manifest: Manifest, *, is_new: bool = False) -> None:
        """Every sink gets the outbox of this version, unless a mark says that all have it. One that is new has no mark."""
        emitted = {sink for commit in manifest.partitions for sink in commit.outboxes}
        published = self._publisher is not None and manifest.kind in ("batch", "clear")
        if not (emitted or published) or (not is_new and self._is_delivered(manifest)):
            return
        known = self._targets.keys() | (self._publisher.sinks if self._publisher is not None else set())
        unknown = emitted - known
        if unknown:
            raise StopAndLook(
                f"version {manifest.version} has undelivered output for {sorted(unknown)}, which the pipeline no longer has: "
                "run it once more with these sinks, then remove them",
                version=manifest.version,
            )
        reach("deliver.begin", manifest.version)
        for sink, target in self._targets.items():
            if sink in emitted:
                try:
                    target.deliver(manifest, Outbox(self._chain, manifest, sink))
                except Exception:
                    self._check_not_fenced()  # another run may have delivered it and cleared up after us
                    raise
        if self._publisher is not None and published:
            try:
                self._publisher.publish(manifest)
            except Exception:
                self._check_not_fenced()
                raise
        reach("deliver.done", manifest.version)
        try:
            self._chain.storage.put(paths.delivered(manifest.version), msgspec.json.encode({"manifest": manifest.id}))
        except Exists:
            logger.debug("version %d is marked as delivered already", manifest.version)

    def _is_delivered(self, manifest: Manifest) -> bool:
        try:
            mark = msgspec.json.decode(self._chain.storage.get(paths.delivered(manifest.version)), type=dict[str, str])
        except Missing:
            return False
        except (msgspec.DecodeError, UnicodeDecodeError):
            return False  # a mark that cannot be read marks nothing; to deliver again is always safe
        if mark.get("manifest") != manifest.id:
            raise ForeignTarget(
                f"{paths.delivered(manifest.version)} marks the output of another commit than version {manifest.version} of this "
                "chain: the checkpoint was put back in part. Put all of it back, or begin a new one",
                version=manifest.version,
            )
        return True
