"""Every name in Kafka that is ours. No other module builds one.

<group>                                      consumer group: notes of what is out, and the source's offsets for lag tools
changelog__<group>--<topic>--<store>         follows a store: as many partitions as its stage, compacted; of several source
                                             topics it has the names of all
holdfast__<group>--notes                     holds no records: its offsets in the group are the notes; slot 0 is the driver's,
                                             slot 1 + p that of the task of partition p
holdfast-<group>-<slot>                      transactional id: whoever writes a note writes it under the id of its slot
"""

from __future__ import annotations

from holdfast.errors import InvalidName

DRIVER_SLOT = 0
COMPACTED = {"cleanup.policy": "compact"}


def task_slot(partition: int) -> int:
    return 1 + partition


def changelog(group: str, topics: tuple[str, ...], store: str) -> str:
    return _checked("--".join([f"changelog__{group}", *topics, store]))


def notes(group: str) -> str:
    return _checked(f"holdfast__{group}--notes")


def transactional_id(group: str, slot: int) -> str:
    return f"holdfast-{group}-{slot}"


def _checked(name: str) -> str:
    if len(name) > 249:
        raise InvalidName(
            f"topic name {name!r} has {len(name)} characters, Kafka takes 249: shorten the names in it", name=name
        )
    return name
