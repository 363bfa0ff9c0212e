"""Spark's own checkpoint of a Spark source, where ours is in an object store.

Spark needs a directory that it can write itself, and alone knows the position of its source. So a run has a directory on
its own disk, and every commit names what a later run needs of it: the files are put into the checkpoint before the
commit, and written to an empty directory when a run starts. They are those of the last committed batch, which Spark then
begins again and finds committed. What it had planned beyond is planned anew.

Layout: spark/<version>-<id>, the bytes of one file. Spark never changes a file that it has written, so one that an
earlier commit names is named again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from holdfast.errors import InvalidPipeline
from holdfast.log import paths
from holdfast.log.files import FileRef, checksum, read_bytes
from holdfast.log.manifest import new_id
from holdfast.log.storage import Storage

_ENTRY = re.compile(r"(\d+)(\.compact)?")


class SparkFiles:
    """Carries the files of Spark's checkpoint to a storage and back."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def bring(self, files: Mapping[str, FileRef], directory: Path) -> None:
        """Make `directory`, which does not exist, what it was when `files` were kept."""
        for name, ref in files.items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(read_bytes(self._storage, ref))

    def keep(self, directory: Path, batch: int, version: int, known: Mapping[str, FileRef]) -> dict[str, FileRef]:
        """Put what is needed to begin `batch` again, and is not `known` yet."""
        if (directory / "state").exists():
            raise InvalidPipeline(
                "the streaming DataFrame has an operation with state of Spark's own, such as an aggregation or dropDuplicates; "
                "that state cannot be in an object store: give a persistence on a disk that all machines share"
            )
        kept: dict[str, FileRef] = {}
        for path in _needed(directory, batch):
            name = path.relative_to(directory).as_posix()
            data = path.read_bytes()
            ref = known.get(name)
            if ref is None or (ref.length, ref.checksum) != (len(data), checksum(data)):
                ref = FileRef(paths.spark_file(version, new_id()), len(data), checksum(data), 0)
                self._storage.put(ref.name, data)
            kept[name] = ref
        return kept


def _needed(directory: Path, batch: int) -> Iterator[Path]:
    yield directory / "metadata"
    for log in ("offsets", "commits"):
        for number in (batch - 1, batch):
            if (directory / log / str(number)).exists():
                yield directory / log / str(number)
    for source in sorted((directory / "sources").glob("**/")):
        yield from _entries(source)


def _entries(log: Path) -> Iterator[Path]:
    """The files of a source's log, without those that a later one has in it."""
    files = [file for file in sorted(log.iterdir()) if file.is_file() and not file.name.startswith(".")]
    numbers = {file: _ENTRY.fullmatch(file.name) for file in files}
    compacted = [int(entry.group(1)) for entry in numbers.values() if entry and entry.group(2)]
    first = max(compacted, default=-1)
    for file, entry in numbers.items():
        number = int(entry.group(1)) if entry else first
        if number > first or not entry or (entry.group(2) and number == first):
            yield file
