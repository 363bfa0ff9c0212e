"""Small disks that fill up, and directories that refuse writers. Both take root."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PAGE = 4096
NOBODY = 65534


class NoMount(Exception):
    """The machine does not permit it."""


@contextmanager
def small_disk(place: Path, megabytes: int = 16) -> Iterator[Path]:
    place.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(place)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        raise NoMount(mounted.stderr.strip())
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


@contextmanager
def full(disk: Path, spare_pages: int = 0) -> Iterator[None]:
    """The disk with no space left but a few pages."""
    ballast = disk / ".ballast"  # a name that no listing shows
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"\0" * PAGE)
        except OSError:
            file.truncate(max(0, file.tell() - spare_pages * PAGE))
    try:
        yield
    finally:
        ballast.unlink()


@contextmanager
def as_nobody() -> Iterator[None]:
    """This process without the rights of root."""
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


def give_to_nobody(place: Path) -> None:
    for path in (place, *place.rglob("*")):
        os.chown(path, NOBODY, NOBODY)


@contextmanager
def closed_to_writers(directory: Path) -> Iterator[None]:
    before = directory.stat().st_mode
    directory.chmod(0o555)
    try:
        yield
    finally:
        directory.chmod(before)
