"""What can happen to a file."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

Damage = Callable[[Path, random.Random], None]


def truncated(path: Path, choice: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: choice.randrange(len(data))])


def bit_flipped(path: Path, choice: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[choice.randrange(len(data))] ^= 1 << choice.randrange(8)
    path.write_bytes(data)


def rotted(path: Path, place: int) -> None:
    """A bit flips on the disk: in place, and nothing tells that the file has changed."""
    found = path.stat()
    with path.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


def deleted(path: Path, choice: random.Random) -> None:
    path.unlink()


KINDS: list[Damage] = [truncated, bit_flipped, deleted]
