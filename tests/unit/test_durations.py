"""Durations as people write them, read as Spark reads them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from holdfast.errors import UnknownOption
from holdfast.state.durations import duration_ms


@pytest.mark.parametrize(
    ("given", "ms"),
    [
        ("1 hour", 3_600_000),
        ("INTERVAL 1 Day", 86_400_000),
        ("  2 minutes 30 seconds ", 150_000),
        ("1 week", 604_800_000),
        (".5 seconds", 500),
        ("5. seconds", 5000),
        ("1.0005 second", 1000),
        ("-1.0005 second", -1000),
        ("+ 3 seconds", 3000),
        ("- 3 seconds", -3000),
        ("1500 microseconds", 1),
        (timedelta(microseconds=-1500), -1),
        (7, 7),
    ],
)
def test_durations_are_read_as_spark_reads_them(given: Any, ms: int) -> None:
    assert duration_ms(given) == ms


@pytest.mark.parametrize(
    "given", ["", "interval", "1hour", "1.5 hours", "one hour", "1 h", "1", "hour", "1 hour,", "1 hour 2"]
)
def test_what_spark_does_not_read_as_a_duration_is_refused(given: str) -> None:
    with pytest.raises(UnknownOption, match="is no duration"):
        duration_ms(given)
