"""Every error that Holdfast raises by name, sorted by what the user has to do next.

    HoldfastError
      FixTheProgram     the declaration is wrong; nothing has run
      FixTheRecord      one record cannot be processed as it is
      StopAndLook       going on could lose or double something; a person decides
      MendTheMachine    disk, permissions, settings: mend it and start again

An error carries its facts as attributes, survives pickling (it crosses from tasks to the driver) and never shows a
payload: a place is a source, a partition, a position and a key, not a value.
"""

from __future__ import annotations

from typing import Any


class HoldfastError(Exception):
    """The root. Keyword facts become attributes and survive pickling."""

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.__dict__.update(facts)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(kind: type[HoldfastError], args: tuple[Any, ...], facts: dict[str, Any]) -> HoldfastError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(facts)
    return error


# -- the declaration is wrong ------------------------------------------------------------------------------------


class FixTheProgram(HoldfastError):
    """The program is wrong in a way that can be seen before anything runs."""


class InvalidPipeline(FixTheProgram):
    """A step, source or sink was declared wrongly."""


class UnknownOption(FixTheProgram):
    """An option that does not exist, or a value that it cannot take."""


class InvalidName(FixTheProgram):
    """A name of an application or store that could not be a plain file name, or of a topic that Kafka would refuse."""


class CodecMismatch(FixTheProgram):
    """The store was written with another codec than the program now asks for."""


class PlanMismatch(FixTheProgram):
    """The checkpoint was written by a pipeline of another shape (partitions, kind of source, schema of a sink)."""


# -- one record cannot be processed --------------------------------------------------------------------------------


class FixTheRecord(HoldfastError):
    """A record cannot be processed as it is. `on_processing_error` may skip it."""


class MissingKey(FixTheRecord):
    """A stateful step met a record whose key is None."""


class UnsupportedKey(FixTheRecord):
    """A key of a type that has no stable encoding."""


class UnsupportedValue(FixTheRecord):
    """A value that its codec or its sink's schema would change or cannot hold."""


class NoState(FixTheRecord):
    """The state of a group was asked for, and the group has none."""


class NoWatermark(FixTheRecord):
    """The watermark was asked for, and the query has none."""


class InvalidTimeout(FixTheRecord):
    """A timeout that the query's kind of timeout does not allow, or that lies in the past."""


class Undecodable(FixTheRecord):
    """The bytes of a record are not what its deserializer expects."""


class UserFunctionFailed(FixTheRecord):
    """A user function raised an exception that could not be brought to the driver as itself."""


# -- a person decides --------------------------------------------------------------------------------------------


class StopAndLook(HoldfastError):
    """Going on could lose or double something."""


class Fenced(StopAndLook):
    """Another driver committed on this checkpoint. Stop one of them."""

    def __init__(self, version: int, holder: str) -> None:
        super().__init__(
            f"version {version} was committed by {holder}; this run stops. Only one run may own a checkpoint.",
            version=version,
            holder=holder,
        )


class RunIsAlive(StopAndLook):
    """The operation needs the application stopped, and a run of it is alive."""


class ForeignCheckpoint(StopAndLook):
    """The checkpoint belongs to another application."""


class ForeignTarget(StopAndLook):
    """A sink's target holds output of another instance, or of a version that is not in this checkpoint."""


class SourceMismatch(StopAndLook):
    """Spark's offset log and the manifest chain disagree about what was read."""


class TopicMismatch(StopAndLook):
    """A topic is not what the checkpoint or the settings say: another id, partition count or configuration."""


class OffsetsLost(StopAndLook):
    """Records that were not read yet are gone from the topic. `on_data_loss="skip"` goes on without them."""


class EarlierLife(StopAndLook):
    """There is no checkpoint, but Kafka holds traces of an application of this name."""


class MarkerLost(StopAndLook):
    """Kafka's note of what was published last is gone, and nothing else tells."""


class IncompleteChangelog(StopAndLook):
    """A changelog topic does not hold the whole state, so it cannot be restored from."""


class NotThere(StopAndLook):
    """The command line was asked for a checkpoint, a store or a key that does not exist, or for values of a foreign codec."""


class FutureFormat(StopAndLook):
    """A file was written by a later version of Holdfast."""


class Damaged(StopAndLook):
    """A durable file is missing, truncated or changed."""


class ZombieTask(StopAndLook):
    """A task was started with an older recipe than its local store has: a newer run owns the partition."""


class IncompleteJob(StopAndLook):
    """A job did not return exactly one receipt per partition for the planned ranges."""


# -- mend the machine ------------------------------------------------------------------------------------------


class MendTheMachine(HoldfastError):
    """Something under Holdfast failed; when it is mended, start again: nothing is lost."""


class StorageFull(MendTheMachine):
    """No space left where the checkpoint or the local stores live."""


class StorageReadOnly(MendTheMachine):
    """The checkpoint or the local stores cannot be written."""


class StorageRefused(MendTheMachine):
    """The object store refused a request: credentials, permissions, region, or there is no such bucket."""


class UnsafeStorage(MendTheMachine):
    """The object store has no conditional writes, or ignores the condition."""


class StorageFailed(MendTheMachine):
    """The storage failed in another way."""


class MissingSettings(MendTheMachine):
    """The Spark session lacks settings that can only be given when it starts."""


class SparkLost(MendTheMachine):
    """Spark, or a process of it, went away under the run."""


class BrokerAway(MendTheMachine):
    """The Kafka cluster could not be reached for longer than Holdfast waits."""


class NoTopic(MendTheMachine):
    """The Kafka cluster does not know a topic, or a consumer group."""


class KafkaRefused(MendTheMachine):
    """The Kafka cluster refused a request: permissions, credentials, settings."""


class JobFailed(MendTheMachine):
    """Spark could not run the job, again and again."""
