"""What a run takes from hosts: the updates of the attempt under way."""

from __future__ import annotations

from pathlib import Path

from potluck.common.metrics.metric_labels import MASKED
from potluck.server.aggregation.model_files import ModelVersion
from potluck.server.aggregation.update_files import SpooledUpdate
from potluck.server.clock import now
from potluck.server.hosts.offences import OFFENCES
from potluck.server.rounds.events import Event
from potluck.server.runs.masked_rounds import MaskedRounds
from potluck.server.runs.run import Run
from potluck.server.runs.train import Collecting


class UpdateInbox:
    """Where a prepared run's updates arrive. Lives on the event loop."""

    def __init__(self, run: Run, collecting: Collecting, masking: MaskedRounds | None) -> None:
        self._run = run
        self._collecting = collecting
        self.masking = masking
        """The secure sums of the run's rounds, where updates are masked."""
        self.plan = run.plan
        self.spool = run.spool
        self.work = run.work

    @property
    def model(self) -> ModelVersion:
        """The model clients train from."""
        return self._run.model

    def expects(self, client: str, update_id: str) -> bool:
        """Whether an update with this id is waited for."""
        return self._collecting.expects(client, update_id)

    def has(self, client: str, update_id: str) -> bool:
        """Whether the update with this id is spooled in the attempt under way."""
        return self._collecting.has(client, update_id)

    async def accept(self, client: str, update_id: str, update: SpooledUpdate) -> None:
        """Take over a verified update that is in the spool."""
        await self._collecting.accept(client, update_id, update)

    def fail(self, client: str, message: str, reason: str) -> None:
        """The update of a client that is in the round under way can't be used."""
        if reason in OFFENCES:
            self._run.offenders.add(client)
        self._collecting.fail(client, message, reason)

    def spool_path(self, client: str, blake3: str) -> Path:
        """Path of the client's update of this attempt."""
        machine = self._run.machine
        return self.spool.path(machine.round, machine.attempt, client, blake3)

    def upload_begins(self) -> None:
        """An update begins to arrive."""
        self._run.services.observer.upload_begins()

    def count_up(self, received: int) -> None:
        """Count bytes of an update that came in."""
        self._run.intake.bytes_up += received
        encoding = self.plan.run_file.transport.up.encoding if self.masking is None else MASKED
        self._run.services.observer.received(encoding, received)

    def seconds_since_instructed(self, client: str) -> float:
        """Seconds since the client was sent its training."""
        return now() - self._run.intake.instructed.get(client, now())

    def post(self, event: Event) -> None:
        """Hand an event to the state machine."""
        self._run.post(event)
