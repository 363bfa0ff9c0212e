"""Jobs that bear being run again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from holdfast.errors import HoldfastError, JobFailed

TRIES = 4
T = TypeVar("T")

logger = logging.getLogger("holdfast")


def surely(what: str, job: Callable[[], T], lost: type[Exception] = Exception) -> T:
    """What `job` returns; it is run again if it was lost with a worker or an executor, which `lost` says."""
    tries = 0
    while True:
        tries += 1
        try:
            return job()
        except HoldfastError:
            raise
        except lost as error:
            if tries == TRIES:
                raise JobFailed(f"the job to {what} was lost {TRIES} times; the last time: {error}") from error
            logger.warning("the job to %s was lost; running it again", what)
            logger.debug("lost with", exc_info=error)
