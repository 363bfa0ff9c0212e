"""StreamingDataFrame: the fluent front door, with the names and semantics that Quix Streams users know.

It owns names and argument checks, never execution: every method adds a step to the plan and returns the frame after
it. Using one frame twice makes branches; they do not disturb each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Self

from holdfast.errors import InvalidPipeline
from holdfast.kafka.topics import Topic
from holdfast.plan.folding import Choosing, Folding, IsFor, is_there, value_of
from holdfast.plan.functions import check_function
from holdfast.plan.messages import MessageForm
from holdfast.plan.pipeline import FIRST, Pipeline, Stage, option
from holdfast.plan.schema import arrow_schema
from holdfast.plan.sinks import VERSION_COLUMN
from holdfast.plan.steps import Call, Node, SetTimestamp
from holdfast.sinks.foreach_batch import ForeachBatchTarget
from holdfast.sinks.table import FORMATS, TableTarget, same_table, table_id
from holdfast.sinks.values import InspectTarget, PrintTarget
from holdfast.sources.base import Source, extractor
from holdfast.state.documents import State
from holdfast.state.python_codec import PythonCodec

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType


class StreamingDataFrame:
    """A stream of records between two steps. Made by `Application.dataframe`.

    >>> from holdfast.testing import run
    >>> run(lambda sdf: sdf.filter(lambda n: n % 2 == 0).apply(lambda n: n * 10), [1, 2, 3, 4]).values
    [20, 40]
    """

    def __init__(self, pipeline: Pipeline, stage: Stage, node: Node) -> None:
        self._pipeline = pipeline
        self._stage = stage
        self._node = node

    def apply(
        self,
        func: Callable[..., Any],
        *,
        stateful: bool = False,
        expand: bool = False,
        metadata: bool = False,
        store: str | None = None,
        on_timer: Callable[[Any, str, State], Iterable[Any] | None] | None = None,
    ) -> Self:
        """Replace the value by what `func` returns, None included; with `expand`, by each item of it.

        Parameters
        ----------
        func
            Called with `(value)`; with `stateful` a `State` comes last; with `metadata` it is
            `(value, key, timestamp, headers)`, the timestamp in ms, and then the state.
        stateful
            Give `func` the state of the record's key. A record without a key is a `MissingKey` error.
        expand
            `func` returns an iterable: every item goes on as a value of its own.
        store
            The name of the store; steps that name the same store share it. If not given, `default` or, after a change of key,
            the name of that.
        on_timer
            Called with `(key, name, state)` when a timer is due that was set with `State.set_timer`; it returns or yields the
            values that go on, or returns None.

        Guaranteed: the effect of a record on state and output happens exactly once. Not guaranteed: that `func` runs only
        once; a batch that was not committed is computed again, so anything else that it does may happen again.
        """
        return self._call(
            "apply", func, stateful=stateful, expand=expand, metadata=metadata, store=store, on_timer=on_timer
        )

    def update(
        self, func: Callable[..., Any], *, stateful: bool = False, metadata: bool = False, store: str | None = None
    ) -> Self:
        """Call `func`, which may change the value in place, and pass the value on; what it returns is dropped.

        >>> from holdfast.testing import run
        >>> run(lambda sdf: sdf.update(lambda order: order.update(paid=True)), [{"id": 1}]).values
        [{'id': 1, 'paid': True}]
        """
        return self._call("update", func, stateful=stateful, metadata=metadata, store=store)

    def filter(
        self, func: Callable[..., Any], *, stateful: bool = False, metadata: bool = False, store: str | None = None
    ) -> Self:
        """Pass on the values for which `func` returns something true.

        >>> from holdfast.testing import run
        >>> def is_new(value, state):
        ...     seen = state.exists("seen")
        ...     state.set("seen", True)
        ...     return not seen
        >>> run(lambda sdf: sdf.filter(is_new, stateful=True), [("a", 1), ("a", 2), ("b", 3)]).values
        [1, 3]
        """
        return self._call("filter", func, stateful=stateful, metadata=metadata, store=store)

    def group_by(
        self, key: str | Callable[[Any], Any], *, name: str | None = None, partitions: int | None = None
    ) -> Self:
        """Give every record a new key, a field of the value or a function of it; what comes after sees state by that key.

        The records are shuffled by it within the same job: there is no topic in between, and one commit holds all stages.

        Parameters
        ----------
        name
            Of the stage that begins here, and of its default store. By default the field's name, or `group_by-source` if that
            is `source`, which is the first stage; for a function a number, so name it if the pipeline may change.
        partitions
            State partitions of that stage; by default as many as the first one has.

        Guaranteed: records of one key that come from one partition keep their order; of an iterable, all records of a key do.
        1, "1", True and 1.0 are different keys; None is an error of its record.

        >>> from holdfast.testing import run
        >>> def count(order, state):
        ...     state.set("orders", state.get("orders", 0) + 1)
        ...     return order["city"], state.get("orders")
        >>> orders = [("ann", {"city": "Rome"}), ("bob", {"city": "Oslo"}), ("cy", {"city": "Rome"})]
        >>> run(lambda sdf: sdf.group_by("city").apply(count, stateful=True), orders).values
        [['Rome', 1], ['Oslo', 1], ['Rome', 2]]
        """
        function = extractor("group_by()", key)
        if function is None:
            raise InvalidPipeline("group_by() takes a field name or a function of the value")
        if name is None and isinstance(key, str):
            name = f"group_by-{key}" if key == FIRST else key
        stage = self._pipeline.add_stage(self._stage, self._node, function, "group_by", name, partitions)
        return type(self)(self._pipeline, stage, stage.entry)

    def key_by(self, func: Callable[[Any], Any], *, name: str | None = None, partitions: int | None = None) -> Self:
        """As `group_by` with a function, under the name that Malstrom users know."""
        stage = self._pipeline.add_stage(self._stage, self._node, func, "key_by", name, partitions)
        return type(self)(self._pipeline, stage, stage.entry)

    def stateful_map(self, name: str, func: Callable[[Any, Any, Any], tuple[Any, Any]], default: Any = None) -> Self:
        """Replace the value by the first of what `func(key, value, state)` returns; the second is the key's new state.

        Parameters
        ----------
        name
            Of the step and of its store.
        func
            Gets the state that it returned last for this key or, at first and after it has returned None, the default.
        default
            A value, copied for each key, or a function without arguments that makes one.

        The state is any plain Python value: numbers, str, bytes, lists, tuples, dicts, sets, dates and times. Guaranteed: every
        record affects it exactly once.

        >>> from holdfast.testing import run
        >>> def pipeline(sdf):
        ...     return sdf.key_by(lambda n: n % 2).stateful_map("sum", lambda key, n, total: (total + n, total + n), default=0)
        >>> run(pipeline, range(6)).values
        [0, 1, 2, 4, 6, 9]
        """
        return self._fold("stateful_map", name, func, default)

    def stateful_flat_map(
        self, name: str, func: Callable[[Any, Any, Any], tuple[Iterable[Any], Any]], default: Any = None
    ) -> Self:
        """As `stateful_map`, but the output is an iterable, each item of which goes on."""
        return self._fold("stateful_flat_map", name, func, default, expand=True)

    def map(self, *func: Any) -> Self:
        """Replace the value by what a function of it returns: `apply`, under Malstrom's name. A name may come first.

        >>> from holdfast.testing import run
        >>> run(lambda sdf: sdf.map("double", lambda n: 2 * n), [1, 2]).values
        [2, 4]
        """
        return self._named_call("map", func)

    def flat_map(self, *func: Any) -> Self:
        """Replace the value by each item of what a function of it returns. A name may come first."""
        return self._named_call("flat_map", func, expand=True)

    def filter_map(self, *func: Any) -> Self:
        """Replace the value by what a function of it returns; None drops it. A name may come first.

        >>> from holdfast.testing import run
        >>> run(lambda sdf: sdf.filter_map(lambda n: n * 10 if n > 1 else None), [1, 2]).values
        [20]
        """
        mapped = self._named_call("filter_map", func)
        return mapped._added(Call("filter", is_there))

    def split(self, name: str, func: Callable[[Any], int | Iterable[int]], outputs: int = 2) -> tuple[Self, ...]:
        """Several frames; `func` says which of them get a value: a number from 0 on, True or False, or several numbers.

        >>> from holdfast.testing import run
        >>> def pipeline(sdf):
        ...     even, odd = sdf.split("parity", lambda n: n % 2)
        ...     return even.map(str).union(odd)
        >>> run(pipeline, [1, 2, 3]).values
        [1, '2', 3]
        """
        label = f"split({name})"
        check_function(label, func, ["value"])
        if type(outputs) is not int or outputs < 1:
            raise InvalidPipeline(f"{label}: outputs={outputs!r} is not a positive number")
        chosen = self._added(Call("apply", Choosing(label, func, outputs), title=label))
        return tuple(
            chosen._added(Call("filter", IsFor(number), title=label))._added(Call("apply", value_of, title=label))
            for number in range(outputs)
        )

    def union(self, *others: StreamingDataFrame) -> Self:
        """The records of this frame and the others: `concat`, for any number of frames."""
        joined = self
        for other in others:
            joined = joined.concat(other)
        return joined

    def concat(self, other: StreamingDataFrame) -> Self:
        """The records of both frames, of one source or of two: change the key after this, not before.

        State of the steps after it is by key, whichever frame a record comes from; topics must have the same number of
        partitions for that. A store belongs to these steps alone: those before have others.

        Guaranteed: each record passes once per frame that it is in; there is no order between the frames.

        >>> from holdfast.testing import run
        >>> def both(sdf):
        ...     return sdf.filter(lambda n: n > 1).concat(sdf.apply(lambda n: -n))
        >>> run(both, [1, 2]).values
        [-1, 2, -2]
        """
        if not isinstance(other, StreamingDataFrame) or other._pipeline is not self._pipeline:
            raise InvalidPipeline("concat() takes a frame of the same application")
        if other._stage is not self._stage:
            raise InvalidPipeline("concat(): the key was changed in one of the frames; join them first, then change it")
        return self._after(self._pipeline.join(self._node, other._node))

    def set_timestamp(self, func: Callable[[Any, Any, int, Any], Any]) -> Self:
        """Give every record another event time: what `func(value, key, timestamp, headers)` returns, in ms or as a datetime.

        It holds for the steps after this one, and it is what moves the watermark, instead of the times of the record's source.
        """
        return self._after(self._pipeline.add_timestamps(self._node, SetTimestamp(func)))

    def inspect(self, *func: Any) -> Self:
        """Call a function with every value, on the driver, after the batch that made it is committed; the value goes on.
        A name may come before the function.

        Guaranteed: nothing of an uncommitted batch is seen. Not guaranteed: that a value is seen only once, after a crash.
        Values travel as msgpack: a tuple arrives as a list.
        """
        label, function = _named("inspect", func)
        check_function(label, function, ["value"])
        self._pipeline.add_sink(self._node, "inspect", "values", lambda context: InspectTarget(function))
        return self

    def print(self, *, metadata: bool = False) -> Self:
        """Print every value on the driver's standard output, as `inspect` does; with `metadata` also key and timestamp."""
        self._pipeline.add_sink(self._node, "print", "values", lambda context: PrintTarget(metadata))
        return self

    def to_topic(self, topic: Topic, key: Callable[[Any], Any] | None = None) -> Self:
        """Send every value to a Kafka topic, with the record's key, timestamp and headers; the value goes on.

        `key` makes the message's key of the value. A value that the topic's serializer cannot write, or that is larger than
        the topic takes, is an error of its record; so is an event time that is further from the clock than the topic takes.

        Guaranteed: a consumer that reads committed messages only sees each output once, in the order of its key, through any
        crash; with `processing_guarantee="at-least-once"` it may see some again. Not guaranteed: an order between keys.
        """
        if not isinstance(topic, Topic):
            raise InvalidPipeline(f"to_topic() takes a topic of app.topic(), not {type(topic).__qualname__}")
        if key is not None:
            check_function("to_topic(key=)", key, ["value"])
        form = MessageForm(topic.name, topic.key_serializer, topic.value_serializer, key)
        self._pipeline.add_sink(self._node, f"topic:{topic.name}", form, None)
        return self

    def to_table(
        self,
        name_or_path: str,
        *,
        format: str = "parquet",
        schema: str | StructType | None = None,
        mode: str = "append",
    ) -> Self:
        """Write the values, which are dicts, as rows of a table, through Spark.

        Parameters
        ----------
        name_or_path
            A path if it contains a '/'; otherwise a table of that name, in the session's warehouse and catalog.
        format
            parquet, json, csv or orc.
        schema
            DDL or a StructType; without it the first rows decide. The checkpoint keeps it: a later row that does not fit is
            an error of that record, and another schema at a later start is `PlanMismatch`.
        mode
            `append` keeps the rows of all versions, `overwrite` those of the last version that had rows.

        Guaranteed: the rows of a version become visible together and once, whatever is repeated. They carry the version in
        the partition column `holdfast_version`.
        """
        option("to_table", "format", format, FORMATS)
        if schema is not None and VERSION_COLUMN in arrow_schema(schema).names:
            raise InvalidPipeline(
                f"to_table({name_or_path!r}): the column {VERSION_COLUMN} is added by Holdfast; rename yours"
            )
        option("to_table", "mode", mode, ("append", "overwrite"))
        identity = table_id(name_or_path)
        if any(same_table(identity, known) for known in self._pipeline.targets):
            raise InvalidPipeline(f"to_table({name_or_path!r}): the pipeline writes to this table already")
        self._pipeline.add_sink(
            self._node,
            identity,
            "rows",
            lambda context: TableTarget(context, name_or_path, format, overwrite=mode == "overwrite"),
            schema,
        )
        return self

    def foreach_batch(self, func: Callable[[DataFrame, int], Any], *, schema: str | StructType | None = None) -> Self:
        """Call `func(df, version)` on the driver for every committed version that has rows; values are dicts.

        Guaranteed: versions come in order and none is left out. Not guaranteed: that a version comes only once: after a
        crash it may come again, with the same rows and the same number, by which `func` can tell.
        """
        check_function("foreach_batch()", func, ["df", "version"])
        self._pipeline.add_sink(
            self._node, "foreach_batch", "rows", lambda context: ForeachBatchTarget(context, func), schema
        )
        return self

    def _call(
        self,
        verb: str,
        func: Callable[..., Any],
        *,
        stateful: bool,
        metadata: bool,
        store: str | None,
        expand: bool = False,
        on_timer: Callable[..., Any] | None = None,
    ) -> Self:
        if store is not None and not stateful:
            raise InvalidPipeline(f"{verb}(store={store!r}) needs stateful=True")
        if store is None:
            store = "default" if self._stage.index == 0 else self._stage.name
        call = Call(verb, func, stateful, expand, metadata, store, on_timer)
        return self._added(call)

    def _fold(
        self, verb: str, name: str, func: Callable[[Any, Any, Any], Any], default: Any, *, expand: bool = False
    ) -> Self:
        label = f"{verb}({name})"
        check_function(label, func, ["key", "value", "state"])
        folding = Folding(label, func, default)
        call = Call(
            "apply", folding, stateful=True, expand=expand, metadata=True, store=name, codec=PythonCodec(), title=label
        )
        return self._added(call)

    def _named_call(self, verb: str, given: tuple[Any, ...], *, expand: bool = False) -> Self:
        label, function = _named(verb, given)
        check_function(label, function, ["value"], yields=expand)
        return self._added(Call("apply", function, expand=expand, title=label))

    def _added(self, call: Call) -> Self:
        return self._after(self._pipeline.add_call(self._stage, self._node, call))

    def _after(self, node: Node) -> Self:
        return type(self)(self._pipeline, self._stage, node)


def frame_of(pipeline: Pipeline, source: Source | None = None) -> StreamingDataFrame:
    """The stream of one of a pipeline's sources; by default of the only one."""
    return StreamingDataFrame(pipeline, pipeline.stages[0], pipeline.entry(source or pipeline.source))


def _named(verb: str, given: tuple[Any, ...]) -> tuple[str, Any]:
    """The label and the function of a call that may have a name first."""
    match given:
        case (str(name), function):
            return f"{verb}({name})", function
        case (function,):
            name = getattr(function, "__name__", type(function).__name__) if callable(function) else ""
            return f"{verb}({name})", function
    raise InvalidPipeline(f"{verb}() takes a function, or a name and a function")
