"""What tests ask of a harness that a user has no use for."""

from __future__ import annotations

from holdfast.log.manifest import Chain, Manifest
from holdfast.testing import Harness


def head_of(harness: Harness) -> Manifest:
    head = Chain(harness.storage).head()
    assert head is not None
    return head


def is_due(harness: Harness) -> bool:
    """Whether a run would make a batch without input now."""
    assert harness._driver is not None
    return harness._driver.is_due()
