"""Topics: what a program says about a Kafka topic. Nothing here talks to a broker."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from holdfast.errors import InvalidName, UnknownOption, UnsupportedValue
from holdfast.kafka.serialization import deserializer, serializer
from holdfast.plan.functions import check_function

HeadersLike = Mapping[str, str | bytes | None] | Iterable[tuple[str, str | bytes | None]]
MessageHeaders = list[tuple[str, bytes | None]]
TimestampExtractor = Callable[[Any, Any, int, int], int]

_NAME = re.compile(r"[a-zA-Z0-9._-]{1,249}")


class TopicConfig(msgspec.Struct, frozen=True):
    """How a topic is created where it does not exist. An existing topic is never changed.

    Parameters
    ----------
    num_partitions, replication_factor
        Positive numbers; None leaves the choice to the broker.
    extra_config
        Settings of the topic as Kafka names them. Kafka checks them, when it creates the topic.

    >>> TopicConfig(num_partitions=4, replication_factor=3, extra_config={"retention.ms": 60_000}).extra_config
    {'retention.ms': '60000'}
    """

    num_partitions: int | None = None
    replication_factor: int | None = None
    extra_config: Mapping[str, Any] = {}
    """Values as Kafka takes them: text."""

    def __post_init__(self) -> None:
        for name in ("num_partitions", "replication_factor"):
            number = getattr(self, name)
            if number is not None and (type(number) is not int or number < 1):
                raise UnknownOption(
                    f"TopicConfig({name}=) is a positive whole number, or None for the broker's default"
                )
        if not isinstance(self.extra_config, Mapping):
            raise UnknownOption(f"TopicConfig(extra_config=) is a dict, not {type(self.extra_config).__qualname__}")
        texts = {_text_name(name): _text(name, value) for name, value in self.extra_config.items()}
        msgspec.structs.force_setattr(self, "extra_config", texts)


def _text_name(name: Any) -> str:
    if not isinstance(name, str):
        raise UnknownOption(f"a name in TopicConfig(extra_config=) is a str, not {type(name).__qualname__}")
    return name


def _text(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return str(value)
    raise UnknownOption(
        f"TopicConfig(extra_config=): {name} is a str, a number or a bool, not {type(value).__qualname__}"
    )


class KafkaMessage(msgspec.Struct, frozen=True):
    """A message to or from a topic, as `Topic.serialize` and `Topic.deserialize` give it."""

    key: Any
    value: Any
    headers: MessageHeaders | None = None
    timestamp: int | None = None
    """In ms; None: Kafka takes the time of sending."""


class Topic:
    """A Kafka topic, and how its keys and values are read and written.

    Parameters
    ----------
    name
        1 to 249 letters, digits, `.`, `_` and `-`.
    value_deserializer, key_deserializer, value_serializer, key_serializer
        "json", "bytes", "string" (or "str"), "integer" (or "int"), "double", or a function of one argument. None (a
        tombstone, a message without a key) stays None and never reaches them.
    config
        How to create the topic where it does not exist.
    timestamp_extractor
        A function of `(value, headers, timestamp, timestamp_type)` that returns the event time in ms. The type is
        Kafka's: 0 none, 1 the producer's time, 2 the broker's.

    Guaranteed: a topic that could not be used (a name that Kafka refuses, a function that cannot be called) is refused
    here. Not guaranteed: that the topic exists, or that its messages are what the deserializers expect.

    >>> topic = Topic("orders", key_serializer="string")
    >>> topic.serialize(key="ann", value={"amount": 3}, headers={"trace": "1"})
    KafkaMessage(key=b'ann', value=b'{"amount":3}', headers=[('trace', b'1')], timestamp=None)
    """

    def __init__(
        self,
        name: str,
        *,
        value_deserializer: str | Callable[[bytes], Any] = "json",
        key_deserializer: str | Callable[[bytes], Any] = "bytes",
        value_serializer: str | Callable[[Any], bytes | None] = "json",
        key_serializer: str | Callable[[Any], bytes | None] = "bytes",
        config: TopicConfig | None = None,
        timestamp_extractor: TimestampExtractor | None = None,
    ) -> None:
        if config is not None and not isinstance(config, TopicConfig):
            raise UnknownOption(f"config= is a TopicConfig, not {type(config).__qualname__}")
        if timestamp_extractor is not None:
            check_function(
                "timestamp_extractor=", timestamp_extractor, ("value", "headers", "timestamp", "timestamp_type")
            )
        self.name = checked_topic_name(name)
        self.value_deserializer = deserializer("value", value_deserializer)
        self.key_deserializer = deserializer("key", key_deserializer)
        self.value_serializer = serializer("value", value_serializer)
        self.key_serializer = serializer("key", key_serializer)
        self.config = config
        self.timestamp_extractor = timestamp_extractor

    def serialize(
        self,
        key: Any = None,
        value: Any = None,
        headers: HeadersLike | None = None,
        timestamp_ms: int | None = None,
    ) -> KafkaMessage:
        """The message as it would be sent: key and value in bytes, headers as a list of `(str, bytes)`.

        >>> Topic("orders").serialize(key=b"ann", value=[1], timestamp_ms=5)
        KafkaMessage(key=b'ann', value=b'[1]', headers=None, timestamp=5)
        """
        return KafkaMessage(
            self.key_serializer(key), self.value_serializer(value), headers_list(headers), _checked(timestamp_ms)
        )

    def deserialize(
        self,
        key: bytes | None = None,
        value: bytes | None = None,
        headers: HeadersLike | None = None,
        timestamp_ms: int | None = None,
    ) -> KafkaMessage:
        """The message as a program sees it. The timestamp extractor is not asked.

        >>> Topic("orders").deserialize(key=b"ann", value=b"[1]").value
        [1]
        """
        return KafkaMessage(
            self.key_deserializer(key), self.value_deserializer(value), headers_list(headers), _checked(timestamp_ms)
        )

    def __repr__(self) -> str:
        return (
            f"Topic({self.name!r}, key={_both(self.key_deserializer.name, self.key_serializer.name)}, "
            f"value={_both(self.value_deserializer.name, self.value_serializer.name)})"
        )


def checked_topic_name(name: str) -> str:
    """`name`, if Kafka would take it for a topic."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in (".", ".."):
        raise InvalidName(
            f"topic name {name!r} is not usable: Kafka takes 1 to 249 letters, digits, '.', '_' and '-', and not "
            "'.' or '..' alone",
            name=name,
        )
    return name


def headers_list(headers: HeadersLike | None) -> MessageHeaders | None:
    """Headers as Kafka takes them: in order, a name may come twice, text as UTF-8, a null header as None.

    >>> headers_list({"a": "x", "b": b"y"})
    [('a', b'x'), ('b', b'y')]
    """
    if headers is None:
        return None
    if isinstance(headers, str | bytes) or not isinstance(headers, Iterable):
        raise UnsupportedValue(f"headers are a dict or a list of (name, value), not {type(headers).__qualname__}")
    return [_header(item) for item in (headers.items() if isinstance(headers, Mapping) else headers)]


def _header(item: Any) -> tuple[str, bytes | None]:
    if not isinstance(item, tuple | list) or len(item) != 2 or not isinstance(item[0], str):
        raise UnsupportedValue("a header is a pair of a name (str) and a value (bytes or str)")
    name, value = item
    try:
        name.encode()
        value = value.encode() if isinstance(value, str) else value
    except UnicodeEncodeError:
        raise UnsupportedValue("a header has a str with lone surrogates, which is not UTF-8") from None
    if value is not None and not isinstance(value, bytes):
        raise UnsupportedValue(f"the header {name!r} is bytes or str, not {type(value).__qualname__}")
    return name, value


def _checked(timestamp_ms: int | None) -> int | None:
    if timestamp_ms is not None and (type(timestamp_ms) is not int or timestamp_ms < 0):
        raise UnsupportedValue("a timestamp is a whole number (int) of ms since 1970, not below 0")
    return timestamp_ms


def _both(first: str, second: str) -> str:
    return first if first == second else f"{first}/{second}"
