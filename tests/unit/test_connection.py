"""Connections: every way to give one, what is refused, and where a secret never shows."""

from __future__ import annotations

import copy
import logging
import pickle
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast import vault
from holdfast.errors import InvalidPipeline, UnknownOption
from holdfast.kafka import connection as module
from holdfast.kafka.connection import Connection, ConnectionConfig, connection
from holdfast.pickling import dumps, loads
from holdfast.vault import unlock

CANARY = "canary-4711"


@pytest.fixture(autouse=True)
def _nothing_is_known_before_or_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vault, "_known", {})


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    logger = logging.getLogger("holdfast.kafka")
    level = logger.level
    logger.setLevel(logging.NOTSET)
    yield logger
    logger.setLevel(level)


def secured() -> ConnectionConfig:
    return ConnectionConfig(
        "broker:9092",
        security_protocol="SASL_SSL",
        sasl_mechanism="plain",
        sasl_username="ann",
        sasl_password=CANARY,
        ssl_ca_location=Path("/etc/ca.pem"),
    )


# -- the config --------------------------------------------------------------------------------------------------


def test_a_config_becomes_librdkafka_s_settings() -> None:
    assert secured().as_librdkafka_dict() == {
        "bootstrap.servers": "broker:9092",
        "security.protocol": "sasl_ssl",
        "sasl.mechanism": "PLAIN",
        "sasl.username": "ann",
        "sasl.password": CANARY,
        "ssl.ca.location": "/etc/ca.pem",
    }


def test_a_config_survives_the_way_through_librdkafka_s_names() -> None:
    given = {
        **secured().as_librdkafka_dict(),
        "oauth_cb": len,
        "enable.ssl.certificate.verification": False,
        "sasl.kerberos.min.time.before.relogin": 5,
    }
    assert ConnectionConfig.from_librdkafka_dict(given).as_librdkafka_dict() == given


def test_librdkafka_s_other_names_are_understood() -> None:
    given = {"metadata.broker.list": "broker:9092", "sasl.mechanisms": "PLAIN"}
    expected = {"bootstrap.servers": "broker:9092", "sasl.mechanism": "PLAIN"}
    assert ConnectionConfig.from_librdkafka_dict(given).as_librdkafka_dict() == expected
    assert ConnectionConfig("broker:9092", sasl_mechanisms="PLAIN").as_librdkafka_dict() == expected


def test_every_option_is_taken_under_both_names_and_shown_only_if_harmless() -> None:
    for option in module._OPTIONS - {"bootstrap_servers"} - set(module._CHOICES) - module._BOOL - module._INT:
        value: Any = (lambda _: (CANARY, 0)) if option == "oauth_cb" else CANARY
        config = ConnectionConfig("broker:9092", **{option: value})
        assert (CANARY in repr(config)) == option.endswith("_location"), option
        assert option in repr(config)
        again = ConnectionConfig.from_librdkafka_dict(config.as_librdkafka_dict())
        assert again.as_librdkafka_dict() == config.as_librdkafka_dict()


def test_a_config_shows_no_secret() -> None:
    assert repr(secured()) == (
        "ConnectionConfig('broker:9092', security_protocol='sasl_ssl', sasl_mechanism='PLAIN', sasl_username=***, "
        "sasl_password=***, ssl_ca_location='/etc/ca.pem')"
    )
    masked = secured().as_librdkafka_dict(plaintext_secrets=False)
    assert (masked["sasl.password"], masked["ssl.ca.location"]) == ("***", "/etc/ca.pem")


@pytest.mark.parametrize("copier", [pickle.dumps, dumps])
def test_a_config_is_not_pickled(copier: Any) -> None:
    with pytest.raises(InvalidPipeline, match="it holds secrets"):
        copier(secured())


def test_an_unknown_option_is_refused_with_the_nearest_names() -> None:
    with pytest.raises(UnknownOption, match=r"no option 'sasl_passwrod'; did you mean sasl_password\?") as caught:
        ConnectionConfig("broker:9092", sasl_passwrod=CANARY)
    assert CANARY not in str(caught.value)
    with pytest.raises(UnknownOption, match=r"no option 'sasl.passwrod'; did you mean sasl\.password\?") as caught:
        ConnectionConfig.from_librdkafka_dict({"bootstrap.servers": "broker:9092", "sasl.passwrod": CANARY})
    assert CANARY not in str(caught.value)
    with pytest.raises(UnknownOption, match=r"no option 'zzz'$"):
        ConnectionConfig("broker:9092", zzz=CANARY)


def test_settings_that_are_none_of_a_connection_are_ignored_if_so_asked() -> None:
    given = {"bootstrap.servers": "broker:9092", "linger.ms": 5}
    with pytest.raises(UnknownOption, match=r"linger\.ms"):
        ConnectionConfig.from_librdkafka_dict(given)
    config = ConnectionConfig.from_librdkafka_dict(given, ignore_extras=True)
    assert config.as_librdkafka_dict() == {"bootstrap.servers": "broker:9092"}


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("security_protocol", CANARY, "security_protocol is one of plaintext, ssl, sasl_plaintext, sasl_ssl"),
        ("sasl_mechanism", CANARY, "sasl_mechanism is one of GSSAPI, PLAIN"),
        ("sasl_password", [CANARY], "sasl_password is a str, not list"),
        ("sasl_password", CANARY.encode(), "sasl_password is a str, not bytes"),
        ("oauth_cb", CANARY, "oauth_cb is a function, not str"),
        ("enable_ssl_certificate_verification", CANARY, "is of type bool, not str"),
        ("sasl_kerberos_min_time_before_relogin", True, "is of type int, not bool"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_and_not_shown(option: str, value: Any, message: str) -> None:
    with pytest.raises(UnknownOption, match=message) as caught:
        ConnectionConfig("broker:9092", **{option: value})
    assert CANARY not in "".join(traceback.format_exception(caught.value))


def test_a_setting_is_not_given_under_two_names() -> None:
    with pytest.raises(UnknownOption, match="the same setting"):
        ConnectionConfig("broker:9092", sasl_mechanism="PLAIN", sasl_mechanisms="PLAIN")
    both = {"bootstrap.servers": "a:1", "metadata.broker.list": "b:1"}
    for make in (ConnectionConfig.from_librdkafka_dict, connection):
        with pytest.raises(UnknownOption, match=r"bootstrap\.servers is given twice"):
            make(both)


# -- the connection ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    ["broker:9092", ConnectionConfig("broker:9092"), {"bootstrap.servers": "broker:9092"},
     {"metadata.broker.list": "broker:9092"}],
)  # fmt: skip
def test_a_connection_is_made_from_servers_a_config_or_a_dict(given: Any) -> None:
    made = connection(given)
    assert made.bootstrap_servers == made.settings()["bootstrap.servers"] == "broker:9092"
    assert repr(made) == "Connection('broker:9092')"


def test_a_dict_may_hold_other_settings_of_librdkafka() -> None:
    given = {"bootstrap.servers": "broker:9092", "linger.ms": 5, "oauth_cb": len}
    assert connection(given).settings().items() >= given.items()


def test_the_settings_of_a_client_are_the_user_s_and_then_holdfast_s() -> None:
    made = connection({"bootstrap.servers": "broker:9092", "linger.ms": 5, "acks": 1})
    settings = made.settings({"group.id": "g", "acks": "all"})
    assert (settings["linger.ms"], settings["acks"], settings["group.id"]) == (5, "all", "g")
    settings["bootstrap.servers"] = "changed"
    assert made.bootstrap_servers == "broker:9092"
    assert "group.id" not in made.settings()


@pytest.mark.parametrize("given", [None, 5, ["broker:9092"], "", " , ", {}, {"bootstrap.servers": None}, {1: 2}])
def test_a_connection_without_servers_is_refused(given: Any) -> None:
    with pytest.raises(UnknownOption):
        connection(given)


def test_a_password_among_the_servers_is_refused_because_they_are_shown() -> None:
    for given in (f"ann:{CANARY}@broker:9092", {"bootstrap.servers": f"ann:{CANARY}@broker:9092"}):
        with pytest.raises(UnknownOption, match="without a user") as caught:
            connection(given)
        assert CANARY not in str(caught.value)


def test_missing_servers_are_looked_for_under_a_name_that_is_near() -> None:
    with pytest.raises(UnknownOption, match=r"bootstrap\.servers is missing; did you mean it by bootstrap\.server\?"):
        connection({"bootstrap.server": CANARY})
    with pytest.raises(UnknownOption, match=r"no Kafka setting 'bootstrap_servers'.*with dots: bootstrap\.servers"):
        connection({"bootstrap_servers": CANARY})


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("enable.auto.commit", "keeps the offsets itself"),
        ("enable.auto.offset.store", "keeps the offsets itself"),
        ("isolation.level", "only what was committed"),
        ("transactional.id", "exactly once"),
        ("enable.idempotence", "exactly once"),
        ("group.id", "consumer_group="),
        ("auto.offset.reset", "auto_offset_reset="),
        ("enable.partition.eof", "ends of partitions"),
    ],
)
def test_a_setting_that_holdfast_owns_is_refused_with_the_reason(name: str, why: str) -> None:
    with pytest.raises(UnknownOption, match=f"{name} cannot be given: .*{why}") as caught:
        connection({"bootstrap.servers": "broker:9092", name: CANARY})
    assert CANARY not in str(caught.value)


# -- librdkafka's log --------------------------------------------------------------------------------------------


def test_librdkafka_s_log_lines_go_to_a_logger_that_is_quiet_by_default(log: logging.Logger) -> None:
    assert connection("broker:9092").settings()["logger"] is log
    assert log.level == logging.CRITICAL


def test_a_level_that_the_user_set_is_kept(log: logging.Logger, caplog: pytest.LogCaptureFixture) -> None:
    log.setLevel(logging.DEBUG)
    settings = connection("broker:9092").settings()
    settings["error_cb"]("all brokers are down")
    assert log.level == logging.DEBUG
    assert caplog.messages == ["all brokers are down"]


# -- secrets -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copier", [pickle.dumps, dumps])
def test_a_pickled_connection_holds_no_setting_at_all(copier: Any) -> None:
    data = copier(connection(secured()))
    for setting in (CANARY, "broker", "9092", "ann", "sasl", "ca.pem"):
        assert setting.encode() not in data


def test_a_connection_shows_its_servers_only() -> None:
    assert repr(connection(secured())) == "Connection('broker:9092')"
    assert CANARY not in str(vars(connection(secured())))


def test_two_connections_have_tokens_that_say_nothing() -> None:
    first, second = connection(secured()), connection(secured())
    assert set(first.secrets()).isdisjoint(second.secrets())


@pytest.mark.parametrize("copier", [lambda made: pickle.loads(pickle.dumps(made)), copy.copy, copy.deepcopy])
def test_a_copy_in_the_same_process_is_usable(copier: Any) -> None:
    made = connection(secured())
    assert copier(made).settings() == made.settings()


def test_a_connection_that_was_not_unlocked_is_not_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    made = connection(secured())
    monkeypatch.setattr(vault, "_known", {})
    for use in (made.settings, made.secrets):
        with pytest.raises(AssertionError, match="not unlocked"):
            use()
    assert repr(made) == "Connection(not unlocked)"


def test_unlocking_makes_a_connection_usable_functions_included(monkeypatch: pytest.MonkeyPatch) -> None:
    made = connection(ConnectionConfig("broker:9092", oauth_cb=lambda _: (CANARY, 5.0)))
    pickled, carried = pickle.dumps(made), dumps(made.secrets())
    monkeypatch.setattr(vault, "_known", {})
    arrived: Connection = pickle.loads(pickled)
    unlock(loads(carried))
    settings = arrived.settings()
    assert (settings["bootstrap.servers"], settings["oauth_cb"]("")) == ("broker:9092", (CANARY, 5.0))


def test_another_process_knows_nothing_until_it_is_unlocked() -> None:
    made = connection(secured())
    program = (
        "import sys, pickle\n"
        "from holdfast.vault import unlock\n"
        "made, secrets = pickle.load(sys.stdin.buffer), pickle.load(sys.stdin.buffer)\n"
        "print(made)\n"
        "unlock(secrets)\n"
        "print(made, made.settings()['sasl.password'])\n"
        "print('confluent_kafka' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=pickle.dumps(made) + pickle.dumps(made.secrets()),
        capture_output=True,
        check=True,
    )
    assert done.stdout.decode().splitlines() == [
        "Connection(not unlocked)",
        f"Connection('broker:9092') {CANARY}",
        "False",
    ]


def test_what_is_carried_is_usable_where_it_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    carried = dumps(vault.Carried(connection(secured())))
    monkeypatch.setattr(vault, "_known", {})
    assert loads(carried).thing.settings()["sasl.password"] == CANARY


def test_what_has_no_secrets_is_carried_as_it_is() -> None:
    assert loads(dumps(vault.Carried([1, 2]))).thing == [1, 2]
