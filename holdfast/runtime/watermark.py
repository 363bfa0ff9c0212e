"""The watermark: how far event time has come, for all partitions alike.

It moves between batches and never back: to the latest event time that was committed, less the delay that the user
allows. With an idle timeout, once nothing has come for that long, event time is taken to go on with the wall clock.
Everything that it follows from is in the manifest, so it survives restarts.
"""

from __future__ import annotations

from holdfast.log.manifest import Manifest
from holdfast.plan.program import Watermark


def next_watermark(rule: Watermark | None, head: Manifest, now_ms: int) -> int | None:
    """The watermark of a batch that continues `head` at `now_ms`; None: the program has none."""
    if rule is None:
        return None
    before = head.watermark_ms or 0
    if head.event_ms is None:
        return before
    latest = head.event_ms
    if rule.idle_ms is not None and head.active_ms is not None and now_ms - head.active_ms > rule.idle_ms:
        latest += now_ms - head.active_ms
    return max(before, latest - rule.delay_ms)
