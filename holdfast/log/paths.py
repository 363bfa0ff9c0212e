"""Every name in a checkpoint. No other module builds one.

    commits/<version, 20 digits>.json               manifest: the commit record of a version
    deltas/<version>-<partition>-<attempt>.arrow    what one attempt of one task changed
    outbox/<version>-<partition>-<sink>-<attempt>.arrow   what it emitted for one sink
    delivered/<version>.json                        every target has the output of this version
    snapshots/<version>.json                        which files hold the state at a version
    snapshot-files/<version>-<partition>-<upload>-<n>   one of them
    pins/<id>.json                                  what a reader still needs
    probe/<id>                                      whether an object store honours conditions; gone at once
    spark/                                          Spark's own checkpoint of the streaming query; in an object store
    spark/<version>-<id>                            a file of it, put before the commit of a version
    initial/                                        the state that groups began with, as rows

Names sort by version. Attempt ids are random, so two attempts never write the same name.
"""

from __future__ import annotations

import re

from holdfast.errors import Damaged, InvalidName

COMMITS = "commits/"
DELTAS = "deltas/"
OUTBOX = "outbox/"
DELIVERED = "delivered/"
SNAPSHOTS = "snapshots/"
SNAPSHOT_FILES = "snapshot-files/"
PINS = "pins/"
PROBE = "probe/"
SPARK = "spark"
SPARK_FILES = f"{SPARK}/"
CLASSES = {
    "manifests": COMMITS,
    "deltas": DELTAS,
    "outboxes": OUTBOX,
    "marks of delivery": DELIVERED,
    "snapshots": SNAPSHOTS,
    "snapshot files": SNAPSHOT_FILES,
    "files of Spark": SPARK_FILES,
}
"""What the protocol writes, class by class, by the name that people call it. Spark's own directory is the place of the last
class, too, and has names of its own there."""
INITIAL = "initial"

_VERSIONED = re.compile(r"[0-9]{20}[.\-]")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,199}")


def manifest(version: int) -> str:
    return f"{COMMITS}{version:020d}.json"


def delta(version: int, partition: int, attempt: str) -> str:
    return f"{DELTAS}{version:020d}-{partition:05d}-{attempt}.arrow"


def outbox(version: int, partition: int, sink: int, attempt: str) -> str:
    return f"{OUTBOX}{version:020d}-{partition:05d}-{sink:03d}-{attempt}.arrow"


def delivered(version: int) -> str:
    return f"{DELIVERED}{version:020d}.json"


def spark_file(version: int, identity: str) -> str:
    return f"{SPARK_FILES}{version:020d}-{identity}"


def probe(identity: str) -> str:
    return f"{PROBE}{identity}"


def snapshot(version: int) -> str:
    return f"{SNAPSHOTS}{version:020d}.json"


def snapshot_file(version: int, partition: int, upload: str, number: int) -> str:
    return f"{SNAPSHOT_FILES}{version:020d}-{partition:05d}-{upload}-{number:05d}"


def pin(identity: str) -> str:
    return f"{PINS}{identity}.json"


def version_of(name: str) -> int:
    """The version in a name; `Damaged` if this module has not built it."""
    if not is_named_well(name):
        raise Damaged(f"{name} is not a file of Holdfast and is in its way; move it elsewhere", name=name)
    return int(name.rsplit("/", 1)[-1][:20])


def has_one_writer(name: str) -> bool:
    """Whether nobody but its writer can ever ask for a name: there is a random id in it."""
    return name.startswith((DELTAS, OUTBOX, SNAPSHOT_FILES, f"{SPARK}/"))


def is_named_well(name: str) -> bool:
    """Whether a name could be one that this module built: it begins with a version."""
    return _VERSIONED.match(name.rsplit("/", 1)[-1]) is not None


def checked_name(what: str, name: str) -> str:
    """`name`, if it can be part of a file name; it becomes one."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidName(
            f"{what} name {name!r} is not usable: take 1 to 200 letters, digits, '_', '-' or '.', "
            "not starting with '-' or '.'; a name is not a path",
            name=name,
        )
    return name
