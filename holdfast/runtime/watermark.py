"""The watermark: how far event time has come, for all partitions alike.

It moves between batches and never back: to the latest event time that was committed, less the delay that the user
allows. Of several sources the one that is furthest behind counts. With an idle timeout, once nothing has come from a
source for that long, its event time is taken to go on with the wall clock, and it is not waited for if it never had any.
Everything that it follows from is in the manifest, so it survives restarts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from holdfast.log.manifest import Manifest
from holdfast.plan.program import Watermark


def next_watermark(rule: Watermark | None, head: Manifest, now_ms: int) -> int | None:
    """The watermark of a batch that continues `head` at `now_ms`; None: the program has none."""
    if rule is None:
        return None
    before = head.watermark_ms or 0
    times = list(_times(rule, head, now_ms))
    if not times or None in times:
        return before
    return max(before, min(time for time in times if time is not None) - rule.delay_ms)


def _times(rule: Watermark, head: Manifest, now_ms: int) -> Iterator[int | None]:
    """Where event time stands in each source that has to be waited for; None: it has had no record yet."""
    for latest, active in zip(head.event_ms, head.active_ms, strict=True):
        silence = now_ms - active
        is_idle = rule.idle_ms is not None and silence > rule.idle_ms
        if latest is not None:
            yield latest + silence if is_idle else latest
        elif not is_idle:
            yield None


def event_times(head: Manifest, seen: Iterable[dict[int, int | None]], sources: int) -> tuple[int | None, ...]:
    """The latest event time of each source after a batch in which tasks saw these."""
    latest = list(head.event_ms) or [None] * sources
    for times in seen:
        for source, time in times.items():
            known = latest[source]
            if time is not None and (known is None or time > known):
                latest[source] = time
    return tuple(latest)


def activity(head: Manifest, seen: Iterable[dict[int, int | None]], sources: int, time_ms: int) -> tuple[int, ...]:
    """When each source last had records, after a batch at `time_ms` in which tasks saw these."""
    active = list(head.active_ms) or [time_ms] * sources
    for times in seen:
        for source in times:
            active[source] = time_ms
    return tuple(active)
