"""A real process ends at every named moment of publishing, and the next one makes good.

Whoever reaches the moment, the driver or a worker, is stopped there for good, and the driver is killed. What was
committed is published by the next life in the way that its commit says, whichever way that life has for its own.
"""

from __future__ import annotations

import random
import signal

import pytest
from stage import BATCH, Stage
from truth import check_all_taken, put_orders

from holdfast.failpoints import PUBLISH_POINTS

BEGIN, OPENED, *LATER = PUBLISH_POINTS
DEATHS = [*(("driver", point) for point in LATER), *(("tasks", point) for point in PUBLISH_POINTS)]
"""Who publishes, and where that ends."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("first", "later"), [(BEGIN, DEATHS[0::2]), (OPENED, DEATHS[1::2])], ids=["begin", "opened"])
def test_a_death_while_publishing_loses_nothing_and_doubles_nothing(
    first: str, later: list[tuple[str, str]], stage: Stage, choice: random.Random
) -> None:
    """One life after the other; each commits one version, and what it has left is found by one that is like it or is not.

    The driver keeps its producer from its start on. Only in its first life, which finds no note, it opens one to publish.
    """
    deaths = [("driver", first), *choice.sample(later, len(later))]
    print(*(" ".join(death) for death in deaths), sep=", ")
    put_orders(stage, (len(deaths) + 3) * BATCH)
    for version, (publish, point) in enumerate(deaths, start=1):
        failpoint = stage.armed(point, version, signal.SIGSTOP)
        with stage.life(publish, failpoint=failpoint) as life:
            life.wait_for(failpoint.was_met)
            life.kill()
        assert stage.head().version == version
        assert stage.head().published_by == publish
    stage.run_to_end("driver")
    check_all_taken(stage)


def test_a_lost_answer_or_a_lost_worker_changes_nothing(stage: Stage, choice: random.Random) -> None:
    put_orders(stage, 20 * BATCH)
    version = 3
    for publish in ("driver", "tasks"):
        with stage.life(publish, "--lose-answer", version) as life:
            life.wait_for((stage.directory / "state" / f"answer-lost@{version}").exists)
            life.wait_for_commits_from_now(2)  # it goes on by itself
            life.kill()
        version = stage.head().version + 2
    point = choice.choice(PUBLISH_POINTS)
    failpoint = stage.armed(point, version)
    with stage.life("tasks", failpoint=failpoint) as life:
        assert life.end() == 0, life.said()
        assert failpoint.was_met(), f"nothing was killed at {point}:\n{life.said()}"
        assert f"the job to publish version {version} was lost; running it again" in life.said()
    check_all_taken(stage)
