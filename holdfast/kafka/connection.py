"""Connections: the settings of a Kafka cluster, and where its secrets may be.

`ConnectionConfig` is the user's way to give them; `Connection` is what Holdfast passes around. Neither shows a secret
in a message or a repr, and neither takes one into a pickle: a `Connection` is pickled as a random token, a
`ConnectionConfig` not at all. What the token stands for is in the vault of the process that made it, and of any other
only after `unlock(connection.secrets())`.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, TypeVar

from holdfast import vault
from holdfast.errors import InvalidPipeline, UnknownOption

# -- what the user gives -----------------------------------------------------------------------------------------

_BOOL = frozenset(("enable_sasl_oauthbearer_unsecure_jwt", "enable_ssl_certificate_verification"))
_INT = frozenset(("sasl_kerberos_min_time_before_relogin",))
_CHOICES = {
    "security_protocol": ("plaintext", "ssl", "sasl_plaintext", "sasl_ssl"),
    "sasl_mechanism": ("GSSAPI", "PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"),
    "sasl_oauthbearer_method": ("default", "oidc"),
    "ssl_endpoint_identification_algorithm": ("none", "https"),
}
_OPTIONS = frozenset((
    "bootstrap_servers", "security_protocol", "client_id", "oauth_cb", "sasl_mechanism", "sasl_username",
    "sasl_password", "sasl_kerberos_kinit_cmd", "sasl_kerberos_keytab", "sasl_kerberos_min_time_before_relogin",
    "sasl_kerberos_service_name", "sasl_kerberos_principal", "sasl_oauthbearer_config",
    "enable_sasl_oauthbearer_unsecure_jwt", "sasl_oauthbearer_method", "sasl_oauthbearer_client_id",
    "sasl_oauthbearer_client_secret", "sasl_oauthbearer_scope", "sasl_oauthbearer_extensions",
    "sasl_oauthbearer_token_endpoint_url", "ssl_cipher_suites", "ssl_curves_list", "ssl_sigalgs_list",
    "ssl_key_location", "ssl_key_password", "ssl_key_pem", "ssl_certificate_location", "ssl_certificate_pem",
    "ssl_ca_location", "ssl_ca_pem", "ssl_ca_certificate_stores", "ssl_crl_location", "ssl_keystore_location",
    "ssl_keystore_password", "ssl_providers", "ssl_engine_location", "ssl_engine_id",
    "enable_ssl_certificate_verification", "ssl_endpoint_identification_algorithm",
))  # fmt: skip
_MASK = "***"


class ConnectionConfig:
    """How to reach a Kafka cluster.

    Parameters
    ----------
    bootstrap_servers
        `host:port`, several separated by commas.
    security_protocol
        "plaintext", "ssl", "sasl_plaintext" or "sasl_ssl".
    sasl_mechanism
        "GSSAPI", "PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512" or "OAUTHBEARER".
    oauth_cb
        For OAUTHBEARER: a function that takes the value of `sasl_oauthbearer_config` and returns `(token, expiry in
        seconds since 1970)`. It is called in the processes of Spark as well, and travels there with what it refers to.
    more
        The other `sasl_*` and `ssl_*` settings of librdkafka, with `_` for its dots.

    Guaranteed: no value but those of servers, protocol, mechanism and file locations is shown by `repr` or in an error;
    a config is not pickled. Not guaranteed: that the cluster can be reached; the first client finds out.

    >>> ConnectionConfig("broker:9092", security_protocol="SASL_SSL", sasl_mechanism="PLAIN", sasl_password="hunter2")
    ConnectionConfig('broker:9092', security_protocol='sasl_ssl', sasl_mechanism='PLAIN', sasl_password=***)
    >>> ConnectionConfig("broker:9092", sasl_passwrod="hunter2")
    Traceback (most recent call last):
        ...
    holdfast.errors.UnknownOption: ConnectionConfig has no option 'sasl_passwrod'; did you mean sasl_password?
    """

    def __init__(
        self,
        bootstrap_servers: str,
        *,
        security_protocol: str | None = None,
        sasl_mechanism: str | None = None,
        sasl_username: str | None = None,
        sasl_password: str | None = None,
        ssl_ca_location: str | os.PathLike[str] | None = None,
        ssl_certificate_location: str | os.PathLike[str] | None = None,
        ssl_key_location: str | os.PathLike[str] | None = None,
        ssl_key_password: str | None = None,
        client_id: str | None = None,
        oauth_cb: Callable[[str], tuple[Any, ...]] | None = None,
        **more: str | int | None,
    ) -> None:
        if "sasl_mechanisms" in more:  # librdkafka has both names
            if sasl_mechanism is not None:
                raise UnknownOption("sasl_mechanism and sasl_mechanisms are the same setting; give one")
            sasl_mechanism = more.pop("sasl_mechanisms")  # type: ignore[assignment]
        given: dict[str, Any] = {
            "bootstrap_servers": _checked_servers("bootstrap_servers", bootstrap_servers),
            "security_protocol": security_protocol,
            "sasl_mechanism": sasl_mechanism,
            "sasl_username": sasl_username,
            "sasl_password": sasl_password,
            "ssl_ca_location": ssl_ca_location,
            "ssl_certificate_location": ssl_certificate_location,
            "ssl_key_location": ssl_key_location,
            "ssl_key_password": ssl_key_password,
            "client_id": client_id,
            "oauth_cb": oauth_cb,
            **more,
        }
        for name in more:
            if name not in _OPTIONS:
                raise UnknownOption(f"ConnectionConfig has no option {name!r}{_near(name, _OPTIONS)}")
        self._given = {name: _checked(name, value) for name, value in given.items() if value is not None}

    @classmethod
    def from_librdkafka_dict(cls, config: Mapping[str, Any], ignore_extras: bool = False) -> ConnectionConfig:
        """A config from librdkafka's names. What is no setting of a connection is refused, or ignored if so asked.

        >>> ConnectionConfig.from_librdkafka_dict({"bootstrap.servers": "broker:9092", "ssl.ca.location": "/ca.pem"})
        ConnectionConfig('broker:9092', ssl_ca_location='/ca.pem')
        """
        options: dict[str, Any] = {}
        for name, value in _checked_names(config).items():
            option = _ALIASES.get(name, name).replace(".", "_")
            if option not in _OPTIONS:
                if ignore_extras:
                    continue
                raise UnknownOption(f"ConnectionConfig has no option {name!r}{_near(name, map(_dotted, _OPTIONS))}")
            if option in options:
                raise UnknownOption(f"{_dotted(option)} is given twice, once under its other name")
            options[option] = value
        if "bootstrap_servers" not in options:
            raise UnknownOption("bootstrap.servers is missing")
        return cls(**options)

    def as_librdkafka_dict(self, plaintext_secrets: bool = True) -> dict[str, Any]:
        """The settings under librdkafka's names; WITH the secrets, unless `plaintext_secrets=False` masks them.

        >>> ConnectionConfig("broker:9092", ssl_key_password="hunter2").as_librdkafka_dict(plaintext_secrets=False)
        {'bootstrap.servers': 'broker:9092', 'ssl.key.password': '***'}
        """
        return {
            _dotted(name): value if plaintext_secrets or _is_harmless(name) else _MASK
            for name, value in self._given.items()
        }

    def __repr__(self) -> str:
        servers, *others = self._given.items()
        shown = [repr(servers[1])]
        shown += [f"{name}={repr(value) if _is_harmless(name) else _MASK}" for name, value in others]
        return f"ConnectionConfig({', '.join(shown)})"

    def __reduce__(self) -> NoReturn:
        raise InvalidPipeline(
            "a ConnectionConfig is not pickled, because it holds secrets; a function that needs one makes it itself"
        )


def _dotted(option: str) -> str:
    return option if option.endswith("_cb") else option.replace("_", ".")


def _is_harmless(option: str) -> bool:
    return option in ("bootstrap_servers", "security_protocol", "sasl_mechanism") or option.endswith("_location")


def _near(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, sorted(names), n=2, cutoff=0.8)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _checked(name: str, value: Any) -> Any:
    """The value as librdkafka takes it. An error names its type only: it may be a password in the wrong place."""
    if name == "oauth_cb":
        if not callable(value):
            raise UnknownOption(f"oauth_cb is a function, not {type(value).__qualname__}")
        return value
    if name in _BOOL or name in _INT:
        kind = bool if name in _BOOL else int
        if type(value) is not kind:
            raise UnknownOption(f"{name} is of type {kind.__name__}, not {type(value).__qualname__}")
        return value
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str):
        raise UnknownOption(f"{name} is a str, not {type(value).__qualname__}")
    if name in _CHOICES:
        for choice in _CHOICES[name]:
            if choice.lower() == value.lower():
                return choice
        raise UnknownOption(f"{name} is one of {', '.join(_CHOICES[name])}")
    return value


def _checked_servers(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise UnknownOption(f"{name} is a str, host:port, several separated by commas; not {type(value).__qualname__}")
    if not value.strip(" ,"):
        raise UnknownOption(f"{name} is empty; give host:port, several separated by commas")
    if "@" in value:  # they are shown, so they must not be a place for a password
        raise UnknownOption(f"{name} is host:port without a user; give that as ConnectionConfig(sasl_username=, ...)")
    return value


# -- what Holdfast passes around ---------------------------------------------------------------------------------

_ALIASES = {"metadata.broker.list": "bootstrap.servers", "sasl.mechanisms": "sasl.mechanism"}
_CALLBACK_DATA = "ssl_engine_callback_data"

_OFFSETS = "Holdfast keeps the offsets itself, in its checkpoint"
_SENDS = "Holdfast chooses how it sends, so that a record is delivered exactly once"
_OWNED = {
    "enable.auto.commit": _OFFSETS,
    "auto.commit.enable": _OFFSETS,
    "enable.auto.offset.store": _OFFSETS,
    "isolation.level": "Holdfast reads only what was committed",
    "transactional.id": _SENDS,
    "enable.idempotence": _SENDS,
    "group.id": "use consumer_group= of the application, or its name",
    "auto.offset.reset": "use auto_offset_reset= of the application",
    "enable.partition.eof": "Holdfast knows the ends of partitions from the plan of a batch",
    "default.topic.config": "give its settings by themselves",
}

_REFUSED = re.compile(r'property:? "([\w.]+)"')
Client = TypeVar("Client")

_librdkafka = logging.getLogger("holdfast.kafka")


class Connection:
    """A Kafka cluster. Made by `connection`; pickled as a token."""

    def __init__(self, token: str) -> None:
        self._token = token

    @property
    def token(self) -> str:
        """Names the connection, in every process."""
        return self._token

    def settings(self, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The settings of a librdkafka client: the user's, then `more`. They hold secrets.

        librdkafka's own log lines go to the logger `holdfast.kafka`, which shows only what is critical unless the user
        gave it a level: an error that matters comes back from a call and is raised there. A `logger` or `error_cb` of
        the user is kept.
        """
        if _librdkafka.level == logging.NOTSET:
            _librdkafka.setLevel(logging.CRITICAL)
        return {"logger": _librdkafka, "error_cb": _log_error, **self._settings(), **(more or {})}

    def client(self, kind: Callable[[dict[str, Any]], Client], more: Mapping[str, Any] | None = None) -> Client:
        """A client of this cluster. A setting that it refuses is named without its value, which librdkafka would show."""
        from confluent_kafka import KafkaException

        try:
            return kind(self.settings(more))
        except KafkaException as error:
            setting = _REFUSED.search(str(error))
            raise UnknownOption(
                f"the Kafka client refuses the setting {setting.group(1)}: its name or its value"
                if setting
                else "the Kafka client refuses the settings it was given; look at their names and values"
            ) from None

    @property
    def bootstrap_servers(self) -> str:
        return str(self._settings()["bootstrap.servers"])

    def secrets(self) -> dict[str, dict[str, Any]]:
        """What `unlock` needs in another process. It travels in memory only; it is never written, logged or shown."""
        return {self._token: dict(self._settings())}

    def _settings(self) -> dict[str, Any]:
        return vault.settings_of(self._token)

    def __repr__(self) -> str:
        return f"Connection({self.bootstrap_servers!r})" if vault.is_known(self._token) else "Connection(not unlocked)"

    def __reduce__(self) -> tuple[Any, ...]:
        return Connection, (self._token,)


def connection(broker_address: str | ConnectionConfig | Mapping[str, Any]) -> Connection:
    """The connection that the user means: servers, a config, or a dict of any settings under librdkafka's names.

    A setting that Holdfast owns, because another value would break what it guarantees, is refused. That a name in a dict
    exists is checked by librdkafka, when the first client is made.

    >>> connection("broker:9092")
    Connection('broker:9092')
    >>> connection({"bootstrap.servers": "broker:9092", "enable.auto.commit": True})
    Traceback (most recent call last):
        ...
    holdfast.errors.UnknownOption: the Kafka setting enable.auto.commit cannot be given: Holdfast keeps the offsets \
itself, in its checkpoint
    """
    if isinstance(broker_address, str):
        settings: dict[str, Any] = {"bootstrap.servers": _checked_servers("broker_address", broker_address)}
    elif isinstance(broker_address, ConnectionConfig):
        settings = broker_address.as_librdkafka_dict()
    elif isinstance(broker_address, Mapping):
        settings = _checked_settings(broker_address)
    else:
        raise UnknownOption(
            f"broker_address= is host:port, a ConnectionConfig or a dict, not {type(broker_address).__qualname__}"
        )
    return Connection(vault.lock_away(settings))


def _checked_names(given: Any) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise UnknownOption(f"Kafka settings are a dict, not {type(given).__qualname__}")
    for name in given:
        if not isinstance(name, str):
            raise UnknownOption(f"the name of a Kafka setting is a str, not {type(name).__qualname__}")
    return dict(given)


def _checked_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for name, value in _checked_names(given).items():
        if name in _OWNED:
            raise UnknownOption(f"the Kafka setting {name} cannot be given: {_OWNED[name]}", option=name)
        if "_" in name and not name.endswith("_cb") and name != _CALLBACK_DATA:
            raise UnknownOption(
                f"there is no Kafka setting {name!r}; in a dict the names are librdkafka's, with dots: "
                f"{name.replace('_', '.')}"
            )
        name = _ALIASES.get(name, name)
        if name in settings:
            raise UnknownOption(f"the Kafka setting {name} is given twice, once under its other name")
        settings[name] = value
    if "bootstrap.servers" not in settings:
        raise UnknownOption(f"bootstrap.servers is missing{_near_servers(settings)}")
    _checked_servers("bootstrap.servers", settings["bootstrap.servers"])
    return settings


def _near_servers(settings: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches("bootstrap.servers", settings, n=1)
    return f"; did you mean it by {near[0]}?" if near else ""


def _log_error(error: Any) -> None:
    _librdkafka.debug("%s", error)
