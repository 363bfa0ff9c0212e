"""A run's work in Kafka that needs its tasks: recovering, backfilling, publishing."""

from __future__ import annotations

import logging

from holdfast.kafka.backfill import backfill, backfilled
from holdfast.kafka.link import Attachment
from holdfast.kafka.recovery import Recover, Restore
from holdfast.log.manifest import Chain
from holdfast.plan.program import Program
from holdfast.runtime.batch import Driver
from holdfast.sinks.kafka import KafkaPublisher, Tasks

logger = logging.getLogger("holdfast")


class Station:
    """Everything of Kafka that a run uses, from its start to its end."""

    def __init__(self, attachment: Attachment, program: Program, chain: Chain, tasks: Tasks, holder: str) -> None:
        self._attachment = attachment
        self._program = program
        self._chain = chain
        self._tasks = tasks
        self._holder = holder
        self._route = attachment.route(program)
        self.publisher = KafkaPublisher(
            self._route, chain, tasks, program.all_partitions, several=len(program.stages) > 1
        )

    def recover(self, how: Recover) -> None:
        """Make a checkpoint of what Kafka holds, if there is none."""
        head = self._chain.head()
        if head is None or head.kind == "restoring":
            self.publisher.fence()
            Restore(self._attachment, self._program, self._chain, self._tasks, self._holder).run(how)
        else:
            logger.info("recover=%r: there is a checkpoint at version %d; going on from it", how, head.version)

    def backfill(self, driver: Driver) -> None:
        """Bring changelogs up to a state that they have not followed; note the ones that are turned off."""
        head = driver.head
        stores = self._attachment.to_backfill()
        off = [store for store in head.changelogs if store not in self._program.changelogs]
        if not stores and not off:
            return
        to = backfilled(head, self._program.changelogs, self._holder)
        if stores:
            logger.info("%s: filling the changelogs of %s from the checkpoint", self._program.app, ", ".join(stores))
            count = backfill(self._route, self._chain, head, to, self._tasks)
            logger.info("%s: %d documents written to the changelogs", self._program.app, count)
        driver.adopt(to)

    def close(self) -> None:
        self.publisher.close()
