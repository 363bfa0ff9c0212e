"""Holdfast: stateful stream processing in plain Python, on Spark.

A public name is loaded when it is first asked for: the command line shares this package and does without Spark.
"""

from typing import TYPE_CHECKING, Any

from holdfast import errors as errors

if TYPE_CHECKING:
    from holdfast.application import Application
    from holdfast.dataframe import StreamingDataFrame
    from holdfast.kafka.connection import ConnectionConfig
    from holdfast.kafka.topics import KafkaMessage, Topic, TopicConfig
    from holdfast.persistence import Persistence
    from holdfast.plan.record import Place, Record
    from holdfast.runtime.view import StateView
    from holdfast.state.documents import State
    from holdfast.state.options import RocksDBOptions

__version__ = "0.1.0"

__all__ = [
    "Application",
    "ConnectionConfig",
    "KafkaMessage",
    "Persistence",
    "Place",
    "Record",
    "RocksDBOptions",
    "State",
    "StateView",
    "StreamingDataFrame",
    "Topic",
    "TopicConfig",
]

_HOMES = {
    "Application": "application",
    "ConnectionConfig": "kafka.connection",
    "KafkaMessage": "kafka.topics",
    "Persistence": "persistence",
    "Place": "plan.record",
    "Record": "plan.record",
    "RocksDBOptions": "state.options",
    "State": "state.documents",
    "StateView": "runtime.view",
    "StreamingDataFrame": "dataframe",
    "Topic": "kafka.topics",
    "TopicConfig": "kafka.topics",
}

if not TYPE_CHECKING:  # a checker would take every name for a public one

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        found = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
