"""What is wrong with a store, its URL or its credentials is said by name, before anything runs; and no secret with it."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gateway import HOST, USER, Gateway
from proxy import Proxy

from holdfast import Application, Persistence, vault
from holdfast.errors import (
    HoldfastError,
    StorageReadOnly,
    StorageRefused,
    UnknownOption,
    UnsafeStorage,
)
from holdfast.log import object_storage
from holdfast.log.location import storage_at
from holdfast.log.object_storage import ObjectStorage
from holdfast.log.storage import Missing, Storage
from holdfast.pickling import dumps

CANARY = "canary-4711"

CALLS: dict[str, Callable[[Storage], Any]] = {
    "put": lambda storage: storage.put("a/x", b"1"),
    "get": lambda storage: storage.get("a/x"),
    "names": lambda storage: storage.names("a/"),
    "delete": lambda storage: storage.delete("a/x"),
    "put_file": lambda storage: storage.put_file("a/x", Path(__file__)),
    "get_file": lambda storage: storage.get_file("a/x", Path("/nowhere")),
}
each_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())


@pytest.fixture(autouse=True)
def _nothing_comes_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in object_storage._ENVIRONMENT["s3"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(object_storage, "PATIENCE_S", 1.0)


def shown(error: BaseException) -> str:
    """Everything that a user might see of it."""
    return "".join(traceback.format_exception(error)) + repr(vars(error))


# -- conditions --------------------------------------------------------------------------------------------------


def opened(proxy: Proxy, bucket: str) -> ObjectStorage:
    return ObjectStorage.open(f"s3://{bucket}/orders", proxy.options())


def test_a_store_that_honours_conditions_is_taken_and_nothing_is_left_of_the_probe(proxy: Proxy, bucket: str) -> None:
    storage = opened(proxy, bucket)
    storage.probe()
    assert storage.names("probe/") == []


@pytest.mark.parametrize("kind", ["unavailable", "lost", "conflict"])
def test_a_probe_survives_what_may_happen_to_a_put(proxy: Proxy, bucket: str, kind: str) -> None:
    proxy.inject(kind, "PUT", "/probe/")
    opened(proxy, bucket).probe()
    assert proxy.happened == {kind: 1}


def test_a_store_that_overwrites_is_refused_before_anything_is_changed(
    proxy: Proxy, bucket: str, tmp_path: Path
) -> None:
    proxy.inject("overwrites", "PUT", "", 1000)
    place = Persistence(f"s3://{bucket}/orders", storage_options=proxy.options())
    app = Application("orders", persistence=place, state_dir=tmp_path)
    app.dataframe(app.from_iterable([1]))
    with pytest.raises(UnsafeStorage, match="overwrites an object where it was told to create one only"):
        app.run()
    assert proxy.happened["overwrites"] == 2
    assert [file for file in (proxy.gateway.directory / bucket).rglob("*") if file.is_file()] == []


def test_a_store_that_does_not_know_the_condition_is_refused(proxy: Proxy, bucket: str) -> None:
    proxy.inject("unknown", "PUT", "", 1000)
    with pytest.raises(UnsafeStorage, match=r"501 NotImplemented\); the store does not know conditional writes"):
        opened(proxy, bucket).probe()


# -- credentials ---------------------------------------------------------------------------------------------------


@each_call
def test_a_wrong_secret_is_refused(gateway: Gateway, bucket: str, call: Any) -> None:
    storage = storage_at(f"s3://{bucket}/x", gateway.options() | {"secret_access_key": CANARY})
    with pytest.raises(StorageRefused, match=r"403 SignatureDoesNotMatch\); look at the credentials") as caught:
        call(storage)
    assert CANARY not in shown(caught.value) and USER not in shown(caught.value)


@each_call
def test_an_unknown_user_is_refused_and_not_taken_for_a_missing_object(
    gateway: Gateway, bucket: str, call: Any
) -> None:
    storage = storage_at(f"s3://{bucket}/x", gateway.options() | {"access_key_id": CANARY})
    with pytest.raises(StorageRefused, match="look at the credentials") as caught:
        call(storage)
    assert CANARY not in shown(caught.value)


@each_call
def test_a_bucket_that_does_not_exist_is_said_so_and_not_taken_for_a_missing_object(
    gateway: Gateway, call: Any
) -> None:
    storage = storage_at("s3://nowhere/x", gateway.options())
    with pytest.raises(StorageRefused, match="there is no such bucket: look at the URL and the region, or create it"):
        call(storage)


def test_without_credentials_it_says_where_they_are_looked_for(gateway: Gateway, bucket: str) -> None:
    machine = f"http://{HOST}:9"  # nobody there, as on a machine without a role
    options = {"endpoint": f"http://{gateway.address}", "metadata_endpoint": machine}
    with pytest.raises(StorageRefused, match=r"no credentials were found: set them in the environment of the driver"):
        storage_at(f"s3://{bucket}/x", options).put("a/x", b"1")


@pytest.mark.parametrize(("method", "call"), [("PUT", "put"), ("POST", "delete"), ("PUT", "put_file")])
def test_credentials_that_may_only_read_make_it_read_only(proxy: Proxy, bucket: str, method: str, call: str) -> None:
    proxy.inject("denied", method, "", 1000)
    with pytest.raises(StorageReadOnly, match="allow these credentials to write"):
        CALLS[call](opened(proxy, bucket))


def test_the_environment_is_enough(gateway: Gateway, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in gateway.options().items():
        monkeypatch.setenv(f"AWS_{name.upper()}", value)
    storage = storage_at(f"s3://{bucket}/x")
    storage.put("a/x", b"1")
    assert storage.get("a/x") == b"1"


def test_keys_that_are_given_are_not_mixed_with_those_of_the_environment(
    gateway: Gateway, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", CANARY)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", CANARY)
    storage = storage_at(f"s3://{bucket}/x", gateway.options())
    storage.put("a/x", b"1")
    with pytest.raises(Missing):
        storage.get("a/y")


def test_a_storage_shows_no_secret_and_takes_none_into_a_pickle(gateway: Gateway, bucket: str) -> None:
    options = gateway.options() | {"secret_access_key": CANARY}
    place = Persistence(f"s3://{bucket}/x", storage_options=options)
    for data in (pickle.dumps(place.storage), dumps(place.storage), dumps(place)):
        for word in (CANARY, USER, "region"):
            assert word.encode() not in data
    assert repr(place.storage) == f"ObjectStorage('s3://{bucket}/x')"
    assert CANARY not in repr(place) + repr(vars(place)) + repr(vars(place.storage))


def test_it_is_usable_elsewhere_once_it_is_unlocked(
    gateway: Gateway, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = storage_at(f"s3://{bucket}/x", gateway.options())
    pickled, secrets = pickle.dumps(storage), vault.secrets_of(storage)
    monkeypatch.setattr(vault, "_known", {})
    monkeypatch.setattr(object_storage, "_stores", {})
    arrived: Storage = pickle.loads(pickled)
    with pytest.raises(AssertionError, match="not unlocked"):
        arrived.get("a/x")
    vault.unlock(secrets)
    arrived.put("a/x", b"1")
    assert arrived.get("a/x") == b"1"


# -- declarations --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["s3://", "s3:///x", "gs://", "az:///x"])
def test_a_url_needs_a_bucket(url: str) -> None:
    with pytest.raises(UnknownOption, match="a URL of an object store is s3://bucket/prefix"):
        Persistence(url)


@pytest.mark.parametrize("url", [f"s3://ann:{CANARY}@bucket/x", f"s3://bucket/x?secret={CANARY}", f"s3://b/x#{CANARY}"])
def test_a_url_is_no_place_for_a_secret(url: str) -> None:
    with pytest.raises(UnknownOption, match="is bucket and prefix only") as caught:
        Persistence(url)
    assert CANARY not in shown(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"acess_key": CANARY}, "no setting acess_key; the names are obstore's"),
        ({"access_key_id": 5}, "names and values are str"),
        ({"checksum_algorithm": CANARY}, "a value that it cannot take"),
    ],
)
def test_options_that_the_store_does_not_have_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UnknownOption, match=message) as caught:
        Persistence("s3://bucket/x", storage_options=options)
    assert CANARY not in shown(caught.value)


def test_a_local_path_has_no_options() -> None:
    with pytest.raises(UnknownOption, match="a local path has none"):
        Persistence("/data/orders", storage_options={"region": "us-east-1"})


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("gs://bucket/x", {}),
        ("az://container/x", {"account_name": "ann"}),
        ("s3://bucket", {}),
    ],
)
def test_every_kind_of_store_can_be_declared(url: str, options: dict[str, str]) -> None:
    assert repr(Persistence(url, storage_options=options).storage) == f"ObjectStorage({url!r})"


def test_errors_name_no_secret_wherever_it_is_given(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", CANARY)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", CANARY)
    with pytest.raises(HoldfastError) as caught:
        storage_at("s3://nowhere/x", {"endpoint": f"http://{gateway.address}"}).get("a/x")
    assert CANARY not in shown(caught.value)
