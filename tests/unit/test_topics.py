"""Topics: what a declaration takes, and what a message looks like on both sides."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.errors import InvalidName, InvalidPipeline, Undecodable, UnknownOption, UnsupportedValue
from holdfast.kafka.topics import KafkaMessage, Topic, TopicConfig, headers_list
from holdfast.pickling import dumps, loads

CANARY = "canary-4711"


# -- the declaration ---------------------------------------------------------------------------------------------


def test_values_are_json_and_keys_are_bytes_unless_said_otherwise() -> None:
    topic = Topic("orders")
    codecs = (topic.value_deserializer, topic.value_serializer, topic.key_deserializer, topic.key_serializer)
    assert [codec.name for codec in codecs] == ["json", "json", "bytes", "bytes"]
    assert (topic.config, topic.timestamp_extractor) == (None, None)


@pytest.mark.parametrize("name", ["a", "orders", "a.b_c-D9", "_", "...", "x" * 249])
def test_a_name_that_kafka_takes_is_taken(name: str) -> None:
    assert Topic(name).name == name


@pytest.mark.parametrize("name", ["", ".", "..", "a b", "a/b", "ü", "a\n", "a,b", "x" * 250, None, 5])
def test_a_name_that_kafka_would_refuse_is_refused(name: Any) -> None:
    with pytest.raises(InvalidName, match="topic name"):
        Topic(name)


@pytest.mark.parametrize("option", ["value_serializer", "value_deserializer", "key_serializer", "key_deserializer"])
def test_an_unknown_codec_is_refused_under_its_own_option(option: str) -> None:
    for wrong in ("avro", None):
        with pytest.raises(UnknownOption, match=option):
            Topic("orders", **{option: wrong})  # type: ignore[arg-type]


def test_a_timestamp_extractor_takes_four_arguments() -> None:
    def extract(value: Any, headers: Any, timestamp: int, timestamp_type: int) -> int:
        return timestamp

    assert Topic("orders", timestamp_extractor=extract).timestamp_extractor is extract
    with pytest.raises(InvalidPipeline, match=r"called with \(value, headers, timestamp, timestamp_type\)"):
        Topic("orders", timestamp_extractor=lambda value: 0)  # type: ignore[arg-type, misc]


def test_a_topic_shows_its_name_and_codecs() -> None:
    assert repr(Topic("orders")) == "Topic('orders', key=bytes, value=json)"
    assert repr(Topic("orders", key_deserializer="str", value_serializer=len)) == (  # type: ignore[arg-type]
        "Topic('orders', key=string/bytes, value=json/len)"
    )


def test_a_topic_survives_pickling_with_its_functions() -> None:
    topic = Topic("orders", value_serializer=lambda v: v.encode(), config=TopicConfig(2, 1))
    copy: Topic = loads(dumps(topic))
    assert copy.serialize(value="x").value == b"x"
    assert (copy.name, copy.config) == ("orders", TopicConfig(2, 1))


# -- its config --------------------------------------------------------------------------------------------------


def test_a_config_leaves_to_the_broker_what_it_does_not_say() -> None:
    config = TopicConfig()
    assert (config.num_partitions, config.replication_factor, config.extra_config) == (None, None, {})


def test_extra_settings_are_text_as_kafka_takes_them() -> None:
    given = {"retention.ms": 1000, "preallocate": True, "cleanup.policy": "compact"}
    config = TopicConfig(num_partitions=1, replication_factor=1, extra_config=given)
    assert config.extra_config == {"retention.ms": "1000", "preallocate": "true", "cleanup.policy": "compact"}
    assert given["retention.ms"] == 1000


@pytest.mark.parametrize("number", [0, -1, 1.0, "1", True])
@pytest.mark.parametrize("option", ["num_partitions", "replication_factor"])
def test_a_number_of_a_config_is_positive_and_whole(option: str, number: Any) -> None:
    with pytest.raises(UnknownOption, match=rf"TopicConfig\({option}=\) is a positive whole number"):
        TopicConfig(**{option: number})


@pytest.mark.parametrize("extra", [["a"], {1: "a"}, {"a": None}, {"a": ["b"]}])
def test_extra_settings_are_names_and_plain_values(extra: Any) -> None:
    with pytest.raises(UnknownOption, match="extra_config"):
        TopicConfig(extra_config=extra)


def test_a_topic_takes_its_config_as_such() -> None:
    with pytest.raises(UnknownOption, match="config= is a TopicConfig, not dict"):
        Topic("orders", config={"num_partitions": 1})  # type: ignore[arg-type]


# -- messages ----------------------------------------------------------------------------------------------------


def test_a_message_is_serialized_as_it_would_be_sent() -> None:
    message = Topic("orders", key_serializer="str").serialize("ann", {"a": 1}, {"h": "x"}, 5)
    assert message == KafkaMessage(b"ann", b'{"a":1}', [("h", b"x")], 5)
    assert Topic("orders").serialize() == KafkaMessage(None, None, None, None)


def test_a_message_is_deserialized_as_a_program_sees_it() -> None:
    topic = Topic("orders", key_deserializer="str")
    assert topic.deserialize(key=b"ann", value=b'{"a":1}') == KafkaMessage("ann", {"a": 1})
    assert topic.deserialize(key=b"ann") == KafkaMessage("ann", None)
    with pytest.raises(Undecodable, match="the value is not JSON"):
        topic.deserialize(value=b"{")


def test_a_message_is_not_changed() -> None:
    with pytest.raises(AttributeError):
        KafkaMessage(None, None).key = b"x"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, None),
        ({}, []),
        ({"a": "ü", "b": b"y"}, [("a", "ü".encode()), ("b", b"y")]),
        ([("a", b"1"), ("a", "2"), ("n", None)], [("a", b"1"), ("a", b"2"), ("n", None)]),
        ((["a", "1"],), [("a", b"1")]),
    ],
)
def test_headers_become_a_list_of_names_and_bytes(given: Any, expected: Any) -> None:
    assert headers_list(given) == expected


@pytest.mark.parametrize(
    "given",
    [CANARY, CANARY.encode(), 4711, [CANARY], [(CANARY,)], {4711: CANARY}, {"a": [CANARY]}, {"a": CANARY + "\ud800"}],
)
def test_headers_of_another_form_are_refused_and_not_shown(given: Any) -> None:
    with pytest.raises(UnsupportedValue, match="header") as caught:
        headers_list(given)
    assert "4711" not in str(caught.value)


@pytest.mark.parametrize("timestamp", [-1, 1.5, "5", True])
def test_a_timestamp_is_a_whole_number_of_ms(timestamp: Any) -> None:
    with pytest.raises(UnsupportedValue, match="a timestamp is a whole number"):
        Topic("orders").serialize(timestamp_ms=timestamp)
