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

# The driver keeps its producer from its start on. Only in its first life, which finds no note, it opens one to publish.
BEGIN, OPENED, *LATER = PUBLISH_POINTS
BY_DRIVER = [("driver", point) for point in (OPENED, *LATER)]
BY_TASKS = [("tasks", point) for point in PUBLISH_POINTS]
OTHER_WAY = [
    death
    for by_driver, by_tasks in zip((BEGIN, LATER[0], LATER[2]), (OPENED, LATER[1], LATER[3]), strict=True)
    for death in (("driver", by_driver), ("tasks", by_tasks))
]
"""Each life finds what the other kind has left."""


def die(stage: Stage, deaths: list[tuple[str, str]]) -> None:
    """A life for each of (who publishes, where it ends), one after the other; each commits one version. Then to the end."""
    put_orders(stage, (len(deaths) + 3) * BATCH)
    for version, (publish, point) in enumerate(deaths, start=1):
        failpoint = stage.armed(point, version, signal.SIGSTOP)
        with stage.life(publish, failpoint=failpoint) as life:
            life.wait_for(failpoint.was_met)
            life.kill()
        assert stage.head().version == version
        assert stage.head().published_by == publish
    stage.run_to_end("driver")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("deaths", [BY_DRIVER, BY_TASKS, OTHER_WAY], ids=["driver", "tasks", "other"])
def test_a_death_while_publishing_loses_nothing_and_doubles_nothing(
    stage: Stage, deaths: list[tuple[str, str]]
) -> None:
    die(stage, deaths)
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
