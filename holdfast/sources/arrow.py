"""`DataFrame.mapInArrow` without pandas.

PySpark's own method goes through `pandas_udf`, which insists on pandas although nothing of it is used. The function
underneath does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

ArrowMap = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]


def map_in_arrow(frame: DataFrame, function: ArrowMap, schema: Any) -> DataFrame:
    """`frame.mapInArrow(function, schema)`."""
    from pyspark.sql.classic.dataframe import DataFrame as ClassicDataFrame
    from pyspark.sql.udf import UserDefinedFunction
    from pyspark.util import PythonEvalType

    mapped = UserDefinedFunction(function, schema, name="holdfast", evalType=PythonEvalType.SQL_MAP_ARROW_ITER_UDF)
    column: Any = mapped(*[frame[name] for name in frame.columns])
    java: Any = frame._jdf
    return ClassicDataFrame(java.mapInArrow(column._jc, False, None), frame.sparkSession)
