"""Locations: which storage a URL means."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

from holdfast.errors import UnknownOption
from holdfast.log.object_storage import SCHEMES, ObjectStorage
from holdfast.log.storage import LocalStorage, Storage


def storage_at(url: str | Path, options: Mapping[str, str] | None = None, *, durable: bool = True) -> Storage:
    """The storage at a local path, a file:// URL, or s3://, gs:// or az://; `options` are settings of an object store.

    Without options an object store is opened with what the environment says. Nothing is asked of it before it is used.

    >>> storage_at("file:///data/orders")
    LocalStorage('/data/orders')
    """
    directory = directory_at(url)
    if directory is not None:
        if options:
            raise UnknownOption("storage_options= are settings of an object store; a local path has none")
        return LocalStorage(directory, durable=durable)
    return ObjectStorage.open(str(url), options)


def directory_at(url: str | Path) -> Path | None:
    """The local directory that a URL means; None: it is in an object store."""
    text = str(url)
    parts = urlsplit(text)
    if parts.scheme in SCHEMES:
        return None
    if parts.scheme not in ("", "file") or not text.strip():
        raise UnknownOption(
            f"{text!r} is no place for a checkpoint: a local path is needed, or a URL with file://, s3://, gs:// or az://"
        )
    return Path(unquote(parts.path) if parts.scheme else text).absolute()
