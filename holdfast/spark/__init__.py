"""The GroupState front door: Spark's `mapGroupsWithState` and `flatMapGroupsWithState`, in Python, on any streaming DataFrame.

    result = (stateful(df).groupByKey(lambda row: row.user_id)
        .mapGroupsWithState(running_total, schema="user_id string, total double"))
    query = result.writeStream.format("memory").queryName("totals").start()

It owns names and argument checks, never execution: a query is an `Application` on the session of the DataFrame, with the
checkpoint location as its place. Every name is also there in snake_case. docs/from-spark.md says what differs from Spark.
"""

from holdfast.runtime.background import StreamingQuery
from holdfast.spark.frames import GroupedFrame, StatefulFrame, StatefulResult, stateful
from holdfast.spark.writing import DataStreamWriter
from holdfast.state.group import GroupState, GroupStateTimeout
from holdfast.state.row import Row

__all__ = [
    "DataStreamWriter",
    "GroupState",
    "GroupStateTimeout",
    "GroupedFrame",
    "Row",
    "StatefulFrame",
    "StatefulResult",
    "StreamingQuery",
    "stateful",
]
