"""Holdfast: stateful stream processing in plain Python, on Spark."""

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
