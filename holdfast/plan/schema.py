"""Schemas of rows: Spark's DDL form, read and written without a JVM, to and from Arrow.

`user string, total bigint, tags array<string>`: the types are Spark's names. Manifests keep schemas in this form.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from holdfast.errors import InvalidPipeline

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

_SIMPLE: dict[str, pa.DataType] = {
    "string": pa.string(),
    "bigint": pa.int64(),
    "int": pa.int32(),
    "smallint": pa.int16(),
    "tinyint": pa.int8(),
    "double": pa.float64(),
    "float": pa.float32(),
    "boolean": pa.bool_(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "timestamp_ntz": pa.timestamp("us"),
    "void": pa.null(),
}
_NAMES = {kind: name for name, kind in _SIMPLE.items()}
_ALIASES = {"long": "bigint", "integer": "int", "short": "smallint", "byte": "tinyint", "real": "float"}
_TOKEN = re.compile(r"\s*(`(?:[^`]|``)+`|[A-Za-z_][A-Za-z0-9_]*|\d+|[<>(),:])")


def arrow_schema(schema: str | StructType | pa.Schema) -> pa.Schema:
    """The Arrow schema of a DDL string, a Spark StructType or an Arrow schema."""
    if isinstance(schema, pa.Schema):
        return schema
    if isinstance(schema, str):
        return _Reader(schema).schema()
    if not hasattr(schema, "fields"):
        raise InvalidPipeline(f"schema must be a DDL string or a StructType, not {type(schema).__qualname__}")
    return _Reader(
        ", ".join(f"{_quoted(field.name)} {_spark_name(field.dataType)}" for field in schema.fields)
    ).schema()


def to_ddl(schema: pa.Schema) -> str:
    return ", ".join(f"{_quoted(field.name)} {_type_name(field.type)}" for field in schema)


def inferred(rows: list[dict[str, Any]]) -> pa.Schema:
    """The narrowest schema that Arrow finds for these rows; the fields in the order in which they appear."""
    names = dict.fromkeys(name for row in rows for name in row)
    fields = []
    for name in names:
        kind = pa.array([row.get(name) for row in rows]).type
        fields.append(pa.field(name, _as_spark_has_it(kind)))
    return pa.schema(fields)


def decided_schema(schema: pa.Schema) -> pa.Schema:
    """`schema` without void: where only None was seen, string, as Spark decides too. No table can hold a void column."""
    return pa.schema([pa.field(field.name, _decided(field.type)) for field in schema])


def _decided(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_null(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(_decided(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, _decided(field.type)) for field in kind])
    return kind


def _as_spark_has_it(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", tz="UTC" if kind.tz else None)
    if pa.types.is_list(kind):
        return pa.list_(_as_spark_has_it(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, _as_spark_has_it(field.type)) for field in kind])
    return kind


def _type_name(kind: pa.DataType) -> str:
    if kind in _NAMES:
        return _NAMES[kind]
    if pa.types.is_decimal(kind):
        return f"decimal({kind.precision},{kind.scale})"
    if pa.types.is_list(kind):
        return f"array<{_type_name(kind.value_type)}>"
    if pa.types.is_map(kind):
        return f"map<{_type_name(kind.key_type)},{_type_name(kind.item_type)}>"
    if pa.types.is_struct(kind):
        return "struct<" + ",".join(f"{_quoted(field.name)}:{_type_name(field.type)}" for field in kind) + ">"
    raise InvalidPipeline(f"rows with a field of type {kind} cannot be written; give schema=")


def _spark_name(kind: Any) -> str:
    """The DDL of a Spark type, with quoted names: `simpleString` leaves them bare."""
    if hasattr(kind, "fields"):
        fields = (f"{_quoted(field.name)}:{_spark_name(field.dataType)}" for field in kind.fields)
        return f"struct<{','.join(fields)}>"
    if hasattr(kind, "elementType"):
        return f"array<{_spark_name(kind.elementType)}>"
    if hasattr(kind, "keyType"):
        return f"map<{_spark_name(kind.keyType)},{_spark_name(kind.valueType)}>"
    return str(kind.simpleString())


def _quoted(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) else "`" + name.replace("`", "``") + "`"


class _Reader:
    """A recursive-descent reader of DDL."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens: list[str] = []
        at = 0
        while at < len(text.rstrip()):
            match = _TOKEN.match(text, at)
            if match is None:
                raise self._wrong(f"unexpected {text[at:].strip()[:1]!r}")
            self.tokens.append(match[1])
            at = match.end()
        self.tokens.reverse()

    def schema(self) -> pa.Schema:
        fields = [self._field(colon=False)]
        while self._take_if(","):
            fields.append(self._field(colon=False))
        if self.tokens:
            raise self._wrong(f"unexpected {self.tokens[-1]!r}")
        self._check_names(fields)
        return pa.schema(fields)

    def _field(self, *, colon: bool) -> pa.Field:
        name = self._take()
        if name[0] == "`":
            name = name[1:-1].replace("``", "`")
        if not self._take_if(":") and colon:
            raise self._wrong(f"a ':' is missing after {name!r}")
        return pa.field(name, self._type())

    def _check_names(self, fields: list[pa.Field]) -> None:
        """Spark does not tell upper and lower case apart in a column's name."""
        for index, field in enumerate(fields):
            if any(field.name.lower() == other.name.lower() for other in fields[:index]):
                raise self._wrong(f"the column {field.name!r} is there twice")

    def _type(self) -> pa.DataType:
        name = self._take().lower()
        name = _ALIASES.get(name, name)
        if name in _SIMPLE:
            return _SIMPLE[name]
        if name in ("decimal", "numeric", "dec"):
            precision, scale = 10, 0
            if self._take_if("("):
                precision = self._number()
                scale = self._number() if self._take_if(",") else 0
                self._expect(")")
            if not 1 <= precision <= 38 or scale > precision:
                raise self._wrong(f"a decimal has at most 38 digits, not ({precision},{scale})")
            return pa.decimal128(precision, scale)
        if name not in ("array", "map", "struct"):
            raise self._wrong(f"no type {name!r}")
        self._expect("<")
        result: pa.DataType
        if name == "array":
            result = pa.list_(self._type())
        elif name == "map":
            key = self._type()
            if pa.types.is_null(key):
                raise self._wrong("a map cannot have keys of type 'void'")
            self._expect(",")
            result = pa.map_(key, self._type())
        else:
            fields = [self._field(colon=True)]
            while self._take_if(","):
                fields.append(self._field(colon=True))
            self._check_names(fields)
            result = pa.struct(fields)
        self._expect(">")
        return result

    def _number(self) -> int:
        token = self._take()
        if not token.isdecimal():
            raise self._wrong(f"a number expected, not {token!r}")
        return int(token)

    def _take(self) -> str:
        if not self.tokens:
            raise self._wrong("it ends too early")
        return self.tokens.pop()

    def _take_if(self, token: str) -> bool:
        if self.tokens and self.tokens[-1] == token:
            self.tokens.pop()
            return True
        return False

    def _expect(self, token: str) -> None:
        if not self._take_if(token):
            raise self._wrong(f"{token!r} expected")

    def _wrong(self, what: str) -> InvalidPipeline:
        return InvalidPipeline(f"schema {self.text!r}: {what}; write it as in 'user string, total bigint'")
