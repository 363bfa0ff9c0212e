"""GroupState: the state of a group and its timeout, with the names and semantics of Spark's Scala API.

A function is called once for every group with rows in a batch, and afterwards once for every group whose timeout is due.
What holds, as in Spark:
- every call begins without a timeout: the one that was set before is void, whatever the call then does;
- a timeout is due when the clock is past it, not when it is reached; the clock is the batch's processing time or its
  watermark, the same for all calls of a batch;
- state and timeout are two things: a group may have either without the other, and `remove` takes only the state.
"""

# ruff: noqa: N802  (the names are Spark's)

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any

from holdfast.errors import InvalidTimeout, NoState, NoWatermark, UnknownOption, UnsupportedValue
from holdfast.state.cell import Cell
from holdfast.state.durations import duration_ms
from holdfast.state.row import Convert, Row, as_dicts, field_names, row_of

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)


class GroupStateTimeout(StrEnum):
    """Which clock the timeouts of a query go by."""

    NoTimeout = "NoTimeout"
    """None: groups never time out."""
    ProcessingTimeTimeout = "ProcessingTimeTimeout"
    """The wall clock; set with `setTimeoutDuration`."""
    EventTimeTimeout = "EventTimeTimeout"
    """The watermark; set with `setTimeoutTimestamp`. Rows that are not later than the watermark are dropped."""


class GroupState:
    """The state of the group that the function was called for.

    Guaranteed: what `get` returns equals what was last given to `update`, in this call or a later one, through crashes and
    restarts; other groups are invisible; if the call fails, none of its changes remain.

    Not guaranteed: a value that is changed in place is not saved until it is given to `update` again, and a handle kept
    beyond its call is worth nothing. Every name is also there in snake_case.
    """

    __slots__ = ("_cell", "_timed_out", "_timeout")

    def __init__(self, cell: Cell, timeout: GroupStateTimeout, timed_out: bool) -> None:
        self._cell = cell
        self._timeout = timeout
        self._timed_out = timed_out

    @property
    def exists(self) -> bool:
        """Whether the group has a state."""
        return self._cell.exists

    @property
    def get(self) -> Any:
        """The state; `NoState` if there is none."""
        if not self._cell.exists:
            raise NoState("the group has no state: ask `state.exists` first, or use `state.getOption`")
        return self._cell.value

    @property
    def getOption(self) -> Any:
        """The state; None if there is none, which no state can be."""
        return self._cell.value

    def update(self, newState: Any) -> None:  # noqa: N803
        """Set the state. `UnsupportedValue` for None and for a type that cannot be kept; the state is then as it was."""
        if newState is None:
            raise UnsupportedValue("None cannot be a state: call state.remove() to have none")
        self._cell.update(newState)

    def remove(self) -> None:
        """Drop the state, if there is any. A timeout that this call has set stays."""
        self._cell.remove()

    @property
    def hasTimedOut(self) -> bool:
        """Whether this call is for a timeout. There are no values then, and the timeout is gone."""
        return self._timed_out

    def setTimeoutDuration(self, duration: int | str | timedelta) -> None:
        """Let the group time out when the processing time is more than `duration` after this batch's.

        It is a number of ms, a text such as "1 hour", or a timedelta; a month is 31 days. `InvalidTimeout` unless the query has
        `ProcessingTimeTimeout` and the duration is positive.
        """
        self._needs(GroupStateTimeout.ProcessingTimeTimeout, "setTimeoutDuration")
        length = _checked_ms(duration)
        if length <= 0:
            raise InvalidTimeout(f"setTimeoutDuration({duration!r}): a timeout must be at least a millisecond away")
        self._cell.set_timer("processing", self._cell.time_ms + length)

    def setTimeoutTimestamp(
        self,
        timestamp: int | datetime,
        additionalDuration: int | str | timedelta = 0,  # noqa: N803
    ) -> None:
        """Let the group time out when the watermark is past `timestamp` and an additional duration.

        The timestamp is in ms since 1970 or a datetime; a naive one is in local time. `InvalidTimeout` unless the query has
        `EventTimeTimeout`, the duration is not negative, and their sum is positive and not before the watermark.
        """
        self._needs(GroupStateTimeout.EventTimeTimeout, "setTimeoutTimestamp")
        more = _checked_ms(additionalDuration)
        if more < 0:
            raise InvalidTimeout(f"setTimeoutTimestamp(): the additional duration {additionalDuration!r} is negative")
        due = _since_1970(timestamp) + more
        if due <= 0:
            raise InvalidTimeout(f"setTimeoutTimestamp(): {due} ms is not after 1970")
        watermark = self._cell.watermark_ms
        if watermark is not None and due < watermark:
            raise InvalidTimeout(f"setTimeoutTimestamp(): {due} ms is before the watermark, which is at {watermark} ms")
        self._cell.set_timer("event", due)

    def set_timeout_timestamp(self, timestamp: int | datetime, additional_duration: int | str | timedelta = 0) -> None:
        """`setTimeoutTimestamp`."""
        self.setTimeoutTimestamp(timestamp, additional_duration)

    def getCurrentWatermarkMs(self) -> int:
        """The watermark of this batch, in ms since 1970; `NoWatermark` if the query has none."""
        watermark = self._cell.watermark_ms
        if watermark is None:
            raise NoWatermark("the query has no watermark: declare one with withWatermark(column, delay)")
        return watermark

    def getCurrentProcessingTimeMs(self) -> int:
        """The processing time of this batch, in ms since 1970; the same if the batch is computed again."""
        return self._cell.time_ms

    def __repr__(self) -> str:
        return f"GroupState({self.get!r})" if self.exists else "GroupState(<undefined>)"

    get_option = getOption
    has_timed_out = hasTimedOut
    set_timeout_duration = setTimeoutDuration
    get_current_watermark_ms = getCurrentWatermarkMs
    get_current_processing_time_ms = getCurrentProcessingTimeMs

    def _needs(self, timeout: GroupStateTimeout, what: str) -> None:
        if self._timeout is not timeout:
            raise InvalidTimeout(f"{what}() needs timeoutConf={timeout}; the query has {self._timeout}")


def _checked_ms(duration: int | str | timedelta) -> int:
    try:
        return duration_ms(duration)
    except UnknownOption as error:
        raise InvalidTimeout(str(error)) from None


def _since_1970(timestamp: int | datetime) -> int:
    if type(timestamp) is int:
        return timestamp
    if isinstance(timestamp, datetime):
        return (timestamp.astimezone(UTC) - _EPOCH) // _MILLISECOND
    raise InvalidTimeout(f"a timestamp is an int of ms or a datetime, not {type(timestamp).__qualname__}")


class GroupFunction:
    """The user's function as the engine calls it: rows and a `GroupState` in, dicts by column out.

    Parameters
    ----------
    function
        Called with `(key, values, state)`.
    flat
        Whether it returns any number of outputs, or exactly one.
    columns
        The names of the output's columns, for tuples; without them a tuple's are `_1`, `_2` and so on.
    to_row
        What makes a row of a value; by default the value's columns as they are.
    """

    def __init__(
        self,
        function: Callable[[Any, Iterator[Any], GroupState], Any],
        *,
        flat: bool,
        timeout: GroupStateTimeout,
        columns: tuple[str, ...] | None = None,
        to_row: Convert = row_of,
    ) -> None:
        self._function = function
        self._flat = flat
        self._timeout = timeout
        self._columns = columns
        self._to_row = to_row

    def __call__(self, key: Any, values: Iterator[dict[str, Any]], cell: Cell, timed_out: bool) -> list[dict[str, Any]]:
        """Call the function for one group; its outputs, all of them, because a generator may change the state to the last."""
        if self._timeout is GroupStateTimeout.NoTimeout:
            if timed_out:
                return []  # it was set by an earlier program, whose timeouts this one does not have
        elif not timed_out and cell.timer is not None:
            cell.clear_timer()
        result = self._function(key, map(self._to_row, values), GroupState(cell, self._timeout, timed_out))
        if not self._flat:
            return [self._output(result)]
        return [self._output(output) for output in self._outputs(result)]

    def _outputs(self, result: Any) -> Iterable[Any]:
        if isinstance(result, str | bytes | dict | Row) or not hasattr(result, "__iter__"):
            raise UnsupportedValue(
                "the function of flatMapGroupsWithState must return an iterator or a list of outputs, not "
                f"{type(result).__qualname__}; without any output: iter([])"
            )
        return result  # type: ignore[no-any-return]

    def _output(self, output: Any) -> dict[str, Any]:
        """An output as a dict: dicts and rows by name, tuples by position."""
        kind = type(output)
        fields: dict[str, Any]
        if kind is dict:
            fields = output
        elif kind is Row:
            fields = vars(output).copy()
        elif isinstance(output, tuple):
            fields = dict(zip(field_names(output) or self._names(output), output, strict=True))
        else:
            raise UnsupportedValue(
                f"an output must be a tuple, a dict or a row, not {kind.__qualname__}"
                + ("" if self._flat else "; the function of mapGroupsWithState returns exactly one")
            )
        if not _FLAT.issuperset(map(type, fields.values())):
            return {name: as_dicts(value) for name, value in fields.items()}
        return fields

    def _names(self, output: tuple[Any, ...]) -> tuple[str, ...]:
        if self._columns is None:
            return tuple(f"_{number}" for number in range(1, len(output) + 1))
        if len(output) != len(self._columns):
            raise UnsupportedValue(
                f"an output has {len(output)} values, the schema has {len(self._columns)} columns: {', '.join(self._columns)}"
            )
        return self._columns


_FLAT = frozenset((str, int, float, bool, type(None), bytes, datetime))
"""Types in which no row can hide."""
