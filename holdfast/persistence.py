"""Persistence: where a checkpoint lives."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from holdfast.errors import UnknownOption


class Persistence:
    """A place for the checkpoint: a local path or a file:// URL.

    Guaranteed: everything that a restart needs is there; local stores can be lost at any time.

    >>> Persistence("/data/orders").directory.name
    'orders'
    """

    def __init__(self, url: str | Path) -> None:
        text = str(url)
        parts = urlsplit(text)
        if parts.scheme not in ("", "file") or not text.strip():
            raise UnknownOption(f"Persistence({text!r}): a local path or a file:// URL is needed")
        self.directory = Path(unquote(parts.path) if parts.scheme else text).absolute()
