"""Object stores: the `Storage` port on S3, Google Cloud Storage and Azure, through obstore.

`put` is one request with a condition (create, never overwrite), which the store must honour: `probe` finds out. A
request may be answered by an error, late, or not at all although it was carried out, and is then sent again: so a
put that meets its name taken reads it back. Its very own bytes mean that an earlier request of the same put has
succeeded, other bytes that the name is another's, and none that the store is still deciding.

A transfer may take long as long as it moves. What is received goes on where it broke off, so every request only has to bring
something. What is sent cannot go on: large bodies go in parts, and have the time that a slow line needs. Parts have no
condition, so they are for names that have one writer; a manifest is always one conditional put.

What the user gave, or the environment of the process that opened the storage, is in the vault; a pickle has the URL and
a token. The store's own words stay out of errors, but for status and code: they may hold signatures and tokens.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar
from urllib.parse import urlsplit

from holdfast import vault
from holdfast.errors import (
    HoldfastError,
    MissingSettings,
    StorageFailed,
    StorageReadOnly,
    StorageRefused,
    UnknownOption,
    UnsafeStorage,
)
from holdfast.log import paths
from holdfast.log.storage import Exists, Missing, raise_as_storage_error

if TYPE_CHECKING:
    from obstore.store import ObjectStore

PATIENCE_S = 30.0
"""How long a request that may yet succeed is sent again."""
REQUEST_S = 60.0
"""How long one request may take, with its body; one that sends a large body may take longer, see `SLOWEST`."""
PART = 8 << 20
"""What is up to this size is one conditional put; larger files and deltas go in parts of it."""
PARTS_AT_ONCE = 4
LARGE = 1 << 20
"""Bodies from this size on are sent with the patience for slow lines."""
SLOWEST = 128 << 10
"""Bytes in a second: a line over which large bodies still get through."""
AT_ONCE = 1000
"""How many objects are deleted by one request, where the store can do that."""
PIECE = 64 << 10
"""What a request has to bring of a large object before it may break off."""

SCHEMES = ("s3", "gs", "az")
_ENVIRONMENT = {
    "s3": (
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "AWS_REGION",
        "AWS_DEFAULT_REGION",
        "AWS_ENDPOINT",
        "AWS_ENDPOINT_URL",
    ),
    "gs": ("GOOGLE_SERVICE_ACCOUNT_KEY",),
    "az": (
        "AZURE_STORAGE_ACCOUNT_NAME",
        "AZURE_STORAGE_ACCOUNT_KEY",
        "AZURE_STORAGE_SAS_KEY",
        "AZURE_STORAGE_SAS_TOKEN",
        "AZURE_CLIENT_ID",
        "AZURE_CLIENT_SECRET",
        "AZURE_TENANT_ID",
    ),
}
"""What tasks get from the driver's environment. What names a thing of the machine (a role, a token file) is each machine's own."""

_KEYS = ("access_key_id", "secret_access_key", "session_token")

_NO_OBJECT = ("NoSuchKey", "BlobNotFound", None)
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")
_AGAIN = (408, 409, 429)
_AGAIN_CODES = ("RequestTimeout",)
"""S3's 400 for a body that did not arrive in time."""
_METADATA = re.compile(r"/latest/(api/token|meta-data)|/computeMetadata/|/metadata/identity")

Result = TypeVar("Result")
logger = logging.getLogger("holdfast")


class ObjectStorage:
    """A prefix in a bucket. Picklable: tasks use the same one, with the settings of the process that opened it."""

    def __init__(self, url: str, token: str) -> None:
        self.url = url
        self._token = token

    @classmethod
    def open(cls, url: str, options: Mapping[str, str] | None = None) -> ObjectStorage:
        """The storage at `url`, with settings of obstore's for that kind of store. Nothing is asked of it yet."""
        scheme = _checked(url).scheme
        given = {}
        for name, value in (options or {}).items():
            if not isinstance(name, str) or not isinstance(value, str):
                raise UnknownOption("storage_options: names and values are str")
            given[_plain(scheme, name)] = value
        found = {_plain(scheme, name): os.environ[name] for name in _ENVIRONMENT[scheme] if os.environ.get(name)}
        if not given.keys().isdisjoint(_KEYS):  # a key and the session token of another do not go together
            found = {name: value for name, value in found.items() if name not in _KEYS}
        storage = cls(url.rstrip("/"), vault.lock_away(found | given))
        storage._store()
        return storage

    def __repr__(self) -> str:
        return f"ObjectStorage({self.url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return ObjectStorage, (self.url, self._token)

    def secrets(self) -> dict[str, dict[str, Any]]:
        """What another process has to unlock. It travels in memory only; it is never written, logged or shown."""
        return {self._token: vault.settings_of(self._token)}

    # -- the port --------------------------------------------------------------------------------------------------

    def put(self, name: str, data: bytes) -> None:
        """As the port says; but of data in several parts, which only names with one writer have, see `put_file`."""
        if len(data) > PART and paths.has_one_writer(name):
            self._put_parts(name, data)
        else:
            self._put_whole(name, data)

    def get(self, name: str) -> bytes:
        return b"".join(self._pieces(name))

    def put_file(self, name: str, path: Path) -> None:
        """As `put`; but that the name is free is only looked up before a file of several parts, not a condition of it."""
        try:
            if path.stat().st_size <= PART:
                self._put_whole(name, path.read_bytes())
            else:
                self._put_parts(name, path)
        except OSError as error:
            raise_as_storage_error(error, path)

    def get_file(self, name: str, path: Path) -> None:
        pieces = self._pieces(name)
        first = next(pieces, b"")
        try:
            with path.open("wb") as file:
                file.write(first)
                for piece in pieces:
                    file.write(piece)
        except OSError as error:
            raise_as_storage_error(error, path)

    def names(self, prefix: str) -> list[str]:
        return sorted(self.sizes(prefix))

    def sizes(self, prefix: str) -> dict[str, int]:
        found = self._ask("list", prefix, lambda store: store.list_with_delimiter(prefix)["objects"])
        return {str(item["path"]): int(item["size"]) for item in found}

    def delete(self, name: str) -> None:
        try:
            self._ask("delete", name, lambda store: store.delete(name))
        except Missing:
            return

    def delete_all(self, names: Sequence[str]) -> None:
        for first in range(0, len(names), AT_ONCE):
            some = list(names[first : first + AT_ONCE])
            try:
                self._ask("delete", f"{some[0]} and {len(some) - 1} others", partial(_delete, names=some))
            except Missing:  # some stores stop at a name that is not there, as after an answer that was lost
                for name in some:
                    self.delete(name)

    def sweep(self, prefix: str) -> list[int]:
        """Nothing: an object appears whole, and the parts of one that never did are the bucket's to end."""
        return []

    # -- transfers --------------------------------------------------------------------------------------------------

    def _put_whole(self, name: str, data: bytes) -> None:
        self._ask("put", name, lambda store: self._create(store, name, data), sends=len(data))

    def _put_parts(self, name: str, data: bytes | Path) -> None:
        if self._has(name):
            raise Exists(name)
        self._ask(
            "put",
            name,
            lambda store: store.put(name, data, use_multipart=True, chunk_size=PART, max_concurrency=PARTS_AT_ONCE),
            sends=PART,
        )

    def _pieces(self, name: str) -> Iterator[bytes]:
        """The bytes of `name`. A transfer that breaks off goes on where it was, as often as it has brought something."""
        from obstore.exceptions import BaseError

        offset = 0
        while True:
            size, piece, rest = self._ask("get", name, partial(_begin, name=name, offset=offset))
            try:
                while piece:
                    offset += len(piece)
                    yield piece
                    piece = next(rest, b"")
                return
            except BaseError as error:
                if offset >= size:
                    return
                logger.debug(
                    "%s: get of %s broke off after %d of %d bytes", self.url, name, offset, size, exc_info=error
                )

    # -- the condition ---------------------------------------------------------------------------------------------

    def probe(self) -> None:
        """Refuse a store that would overwrite where it is told to create: two runs could then commit the same version."""
        name = paths.probe(secrets.token_hex(16))
        self.put(name, b"first")
        try:
            self.put(name, b"second")
        except Exists:
            return
        else:
            raise UnsafeStorage(
                f"{self.url} overwrites an object where it was told to create one only (If-None-Match), so two runs could commit "
                "the same version. Use a store that has conditional writes, or turn them on in this one",
                url=self.url,
            )
        finally:
            self.delete(name)

    def _create(self, store: ObjectStore, name: str, data: bytes) -> None:
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        try:
            store.put(name, data, mode="create")
        except (AlreadyExistsError, PreconditionError):
            try:
                if self.get(name) == data:
                    return
            except Missing:
                raise _UndecidedError from None
            raise Exists(name) from None

    def _has(self, name: str) -> bool:
        try:
            self._ask("get", name, lambda store: store.head(name))
        except Missing:
            return False
        return True

    # -- requests --------------------------------------------------------------------------------------------------

    def _ask(self, verb: str, name: str, request: Callable[[ObjectStore], Result], *, sends: int = 0) -> Result:
        """What `request` returns. While its failure may pass, it is sent again: at least once, however long it took.

        `sends` is the size of its body, if it has one.
        """
        from obstore.exceptions import BaseError

        limit = time.monotonic() + PATIENCE_S
        pause = 0.1
        for attempt in count(1):
            try:
                return request(self._store(is_large=sends >= LARGE))
            except (BaseError, FileNotFoundError, _UndecidedError) as error:
                answer = _Answer(error)
                if not answer.may_pass or (attempt > 1 and time.monotonic() + pause > limit):
                    self._raise(verb, name, answer)
            logger.warning("%s: %s of %s failed (%s); trying again", self.url, verb, name, answer)
            time.sleep(pause)
            pause = min(pause * 2, 3.0)
        raise AssertionError("unreachable")

    def _raise(self, verb: str, name: str, answer: _Answer) -> NoReturn:
        if answer.is_missing and verb != "put":
            raise Missing(name) from None
        kind: type[HoldfastError] = StorageFailed
        advice = "look at the store, then start again: the last commit is untouched"
        if answer.code in _NO_BUCKET or answer.is_missing:
            kind, advice = StorageRefused, "there is no such bucket: look at the URL and the region, or create it"
        elif answer.no_credentials:
            kind, advice = (
                StorageRefused,
                "no credentials were found: set them in the environment of the driver, or give storage_options=",
            )
        elif answer.code == "AccessDenied" and verb in ("put", "delete"):
            kind, advice = (
                StorageReadOnly,
                "allow these credentials to write and delete objects there, then start again",
            )
        elif answer.is_refusal:
            kind, advice = StorageRefused, "look at the credentials, what they are allowed, and the region"
        elif answer.is_unsupported:
            kind, advice = (
                UnsafeStorage,
                "the store does not know conditional writes (If-None-Match), on which every commit stands: use one that does",
            )
        raise kind(f"{self.url}: {verb} of {name} failed ({answer}); {advice}", url=self.url, name=name) from None

    def _store(self, *, is_large: bool = False) -> ObjectStore:
        """The client of this process: one that a fork inherited has no threads. What is large has one of its own."""
        place = (os.getpid(), self.url, self._token, is_large)
        if place not in _stores:
            limit_s = REQUEST_S + (PARTS_AT_ONCE * PART / SLOWEST if is_large else 0)
            _stores[place] = _opened(self.url, vault.settings_of(self._token), limit_s)
        return _stores[place]


_stores: dict[tuple[int, str, str, bool], ObjectStore] = {}
"""By process, URL, token, and whether it sends large bodies."""


class _UndecidedError(Exception):
    """The name is taken and holds nothing: the store has not decided between two puts."""


class _Answer:
    """What an error of obstore's says, without the words of the store."""

    def __init__(self, error: Exception) -> None:
        text = str(error)
        status = re.search(r"status code: (\d{3})", text)
        code = re.search(r"<Code>(\w+)</Code>", text)
        self._kind = type(error).__name__
        self.status = int(status.group(1)) if status else None
        self.code = code.group(1) if code else None
        self.no_credentials = _METADATA.search(text) is not None
        self.is_missing = isinstance(error, FileNotFoundError) and self.code in _NO_OBJECT
        self.is_refusal = (
            self.status is not None
            and 300 <= self.status < 500
            and self.status not in _AGAIN
            and self.code not in _AGAIN_CODES
        )
        self.is_unsupported = self.status == 501 or self._kind in ("NotSupportedError", "NotImplementedError")
        self.may_pass = not (self.no_credentials or self.is_missing or self.is_refusal or self.is_unsupported)

    def __str__(self) -> str:
        said = " ".join(str(word) for word in (self.status, self.code) if word is not None)
        return said or ("undecided" if self._kind == "_UndecidedError" else "no answer")


def _checked(url: str) -> Any:
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES or not parts.netloc:
        raise UnknownOption(
            f"{url!r}: a URL of an object store is s3://bucket/prefix, gs://... or az://container/prefix"
        )
    if "@" in parts.netloc or parts.query or parts.fragment:  # it is shown, so it must not be a place for a password
        raise UnknownOption(
            "the URL of an object store is bucket and prefix only; give anything else as storage_options="
        )
    return parts


def _plain(scheme: str, name: str) -> str:
    """One spelling of a setting that has several."""
    name = name.lower()
    if scheme == "s3":
        name = name.removeprefix("aws_")
        return {"endpoint_url": "endpoint", "default_region": "region"}.get(name, name)
    return name


def _opened(url: str, settings: Mapping[str, str], limit_s: float) -> ObjectStore:
    try:
        from obstore.exceptions import BaseError, UnknownConfigurationKeyError
        from obstore.store import AzureStore, GCSStore, S3Store
    except ModuleNotFoundError:
        raise MissingSettings("object stores need the package obstore: pip install obstore") from None
    parts = _checked(url)
    kind: Any = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}[parts.scheme]
    config = dict(settings)
    keys = _Keys(*(config.pop(name, None) for name in _KEYS)) if _KEYS[0] in config else None
    plain_http = any(value.startswith("http://") for value in config.values())
    try:
        store: ObjectStore = kind(
            parts.netloc,
            prefix=parts.path.strip("/") or None,
            config=config,
            credential_provider=keys,
            client_options={"timeout": timedelta(seconds=limit_s), "allow_http": plain_http},
            retry_config={"max_retries": 3, "retry_timeout": timedelta(seconds=PATIENCE_S)},
        )
    except UnknownConfigurationKeyError as error:
        named = re.search(r"key: '(\w+)'", str(error))
        raise UnknownOption(
            f"storage_options: {url} has no setting {named.group(1) if named else 'of that name'}; the names are obstore's"
        ) from None
    except (BaseError, ValueError):
        raise UnknownOption(
            f"{url}: a setting is missing or has a value that it cannot take; look at storage_options= and the environment"
        ) from None
    return store


class _Keys:
    """Gives obstore the keys of S3 as they are: it would complete what it is configured with from the environment."""

    def __init__(self, access_key_id: str | None, secret_access_key: str | None, session_token: str | None) -> None:
        self._keys = {
            "access_key_id": access_key_id,
            "secret_access_key": secret_access_key or "",
            "token": session_token,
            "expires_at": None,
        }

    def __call__(self) -> dict[str, str | None]:
        return self._keys


def _delete(store: ObjectStore, names: list[str]) -> None:
    store.delete(names)


def _begin(store: ObjectStore, name: str, offset: int) -> tuple[int, bytes, Iterator[bytes]]:
    """The size of an object, its first bytes from `offset` on, and the rest of them."""
    answer = store.get(name, options={"range": {"offset": offset}} if offset else None)
    stream = iter(answer.stream(min_chunk_size=PIECE))
    return answer.meta["size"], next(stream, b""), stream
