"""The watermark: how far event time has come, for all partitions alike.

It moves between batches and never back: to the latest event time that was committed, less the delay that the user
allows. Of several sources the one that is furthest behind counts.

With an idle timeout, once a source has been silent for that long, it lets the watermark go on with the wall clock, and it
is not waited for if it never had a record. Silent is a source that was looked at and had nothing: while no run is alive, a
batch with its records runs, or it cannot be looked at, records may be waiting. So a silence belongs to a run. All else
that the watermark follows from is in the manifest and survives restarts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from holdfast.log.manifest import Manifest
from holdfast.plan.program import Watermark


class Silence(NamedTuple):
    """Nothing has come from a source since then."""

    since_ms: int
    watermark_ms: int
    """Where the watermark stood."""


class Silences:
    """The silences of a run, as far as one has looked."""

    def __init__(self, sources: int) -> None:
        self._sources = sources
        self._known: dict[int, Silence] = {}

    def note(self, silent: Collection[int], since_ms: int, watermark_ms: int | None) -> None:
        """After a look that has found these sources silent: for all others, silence cannot have begun earlier than now."""
        for source in range(self._sources):
            if source not in silent or source not in self._known:
                self._known[source] = Silence(since_ms, watermark_ms or 0)

    def of(self, silent: Collection[int]) -> dict[int, Silence]:
        """By source: the silences of those that are still silent."""
        return {source: self._known[source] for source in silent if source in self._known}


def next_watermark(rule: Watermark | None, head: Manifest, now_ms: int, silences: Mapping[int, Silence]) -> int | None:
    """The watermark of a batch that continues `head` at `now_ms`; None: the program has none.

    `silences`: by source that gives the batch nothing.
    """
    if rule is None:
        return None
    before = head.watermark_ms or 0
    limits = list(_limits(rule, head, now_ms, silences))
    if not limits or None in limits:
        return before
    return max(before, min(limit for limit in limits if limit is not None))


def _limits(rule: Watermark, head: Manifest, now_ms: int, silences: Mapping[int, Silence]) -> Iterator[int | None]:
    """How far each source that has to be waited for lets the watermark come; None: it has had no record yet."""
    for source, latest in enumerate(head.event_ms):
        limit = None if latest is None else latest - rule.delay_ms
        silence = silences.get(source)
        if silence is None or rule.idle_ms is None or now_ms - silence.since_ms <= rule.idle_ms:
            yield limit
        elif limit is not None:
            yield max(limit, silence.watermark_ms) + now_ms - silence.since_ms


def event_times(head: Manifest, seen: Iterable[dict[int, int]], sources: int) -> tuple[int | None, ...]:
    """The latest event time of each source after a batch in which tasks saw these."""
    latest = list(head.event_ms) or [None] * sources
    for times in seen:
        for source, time in times.items():
            known = latest[source]
            if known is None or time > known:
                latest[source] = time
    return tuple(latest)
