"""Holdfast: stateful stream processing in plain Python, on Spark."""

from holdfast.application import Application
from holdfast.dataframe import StreamingDataFrame
from holdfast.persistence import Persistence
from holdfast.plan.record import Place, Record
from holdfast.runtime.view import StateView
from holdfast.state.documents import State
from holdfast.state.options import RocksDBOptions

__version__ = "0.1.0"

__all__ = [
    "Application",
    "Persistence",
    "Place",
    "Record",
    "RocksDBOptions",
    "State",
    "StateView",
    "StreamingDataFrame",
]
