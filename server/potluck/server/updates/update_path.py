"""Handling of a round's updates, from their announcement to the round's model.

This module has the base class, and the class for updates that the coordinator may read one by one.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from potluck.common.errors import LayoutError
from potluck.common.interruptible import in_thread
from potluck.common.updates.update_report import UpdateReport
from potluck.rpc.v1 import coordinator_pb2, transfer_pb2
from potluck.server.hosts.instructions import ENCODINGS
from potluck.server.live.models import RoundModel
from potluck.server.live.run import Run
from potluck.server.plan.path_rules import PathRules
from potluck.server.reduce.judging import UpdatesSeen
from potluck.server.reduce.server_training import train_on_coordinator
from potluck.server.reduce.update_files import SpooledUpdate
from potluck.server.store.model_files import ModelVersion
from potluck.server.updates.report_checks import check_said, report_said


@dataclass(frozen=True, kw_only=True)
class ReceivedUpdate:
    """An update whose file has the announced digest.

    model: the model from which the client started. finite: True if a `FiniteScreen` found only
    finite numbers in the file.
    """

    header: transfer_pb2.UpdateHeader
    path: Path
    model: ModelVersion
    finite: bool


class UpdatePath(PathRules):
    """Base class for handling updates: has the steps that differ between open, masked and summed
    updates. Used on the event loop."""

    encoding: str
    """Name of the updates' file format in stored rows and metrics, e.g. "float32"."""

    def __init__(self, run: Run) -> None:
        self._run = run

    async def begin(self, work: coordinator_pb2.Train) -> None:
        """Prepare for a client of the current attempt that will receive this instruction. Called
        once per client."""

    @abstractmethod
    def check_header(self, header: transfer_pb2.UpdateHeader) -> None:
        """Check the announcement of an update. Raises LayoutError."""

    @abstractmethod
    async def check_file(self, update: ReceivedUpdate) -> None:
        """Check the file's content. Raises UpdateError, TooLargeError, ProtocolError."""

    def check_sender(self, update: ReceivedUpdate) -> None:
        """Check the client's signature, after the file was checked. Raises ProtocolError.

        By default no signature is needed: the connection's certificate suffices.
        """

    @abstractmethod
    def report(self, member: transfer_pb2.SumMember, /) -> UpdateReport:
        """Return a member's report about its training, with only the numbers that the run uses."""

    async def unable(self, clients: Sequence[str]) -> Mapping[str, str]:  # noqa: ARG002  for subclasses
        """Return the clients that must not be selected any more, with the reasons.

        Called before each selection, with the clients that are available.
        """
        return {}

    def lose(self, client: str) -> None:
        """Stop waiting for this client's update. With masks, other updates may depend on it."""

    @abstractmethod
    async def reduce(self, updates: Sequence[SpooledUpdate]) -> RoundModel | None:
        """Compute the round's model. Return None if this is impossible; the state machine has then
        been informed."""

    async def give_up(self) -> None:
        """End the attempt without a model."""

    def stop(self) -> None:
        """Stop all work for the run."""


class OpenRounds(UpdatePath):
    """Handles updates that the coordinator may read one by one."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._up = run.plan.run_file.transport.up
        self.encoding = self._up.encoding.value

    def check_header(self, header: transfer_pb2.UpdateHeader) -> None:
        """Check the announced report, encoding and compression. Raises LayoutError."""
        check_said(self._run.plan, self._run.attempt, header.client_id, header.report)
        up = self._up
        if (
            header.encoding != ENCODINGS[up.encoding]
            or header.delta != up.delta
            or (header.compressed and not up.compress)
            or header.members
        ):
            raise LayoutError(
                f"this run needs updates as {up.encoding}{(' delta' if up.delta else '')}, "
                f"{('compressed or not' if up.compress else 'not compressed')}; but the "
                "announced update has another format"
            )

    async def check_file(self, update: ReceivedUpdate) -> None:
        """Check the file's layout and numbers."""
        member = self._run.attempt.cohort.get(update.header.client_id)
        await asyncio.to_thread(
            self._run.models.work.check_update,
            update.path,
            update.model,
            compressed=update.header.compressed,
            finite=update.finite,
            dropped=() if member is None else member.work.dropped,
        )

    def report(self, member: transfer_pb2.SumMember) -> UpdateReport:
        """Return the member's report. Numbers for the selector are kept only if they are finite."""
        return report_said(self._run.plan, member.report)

    async def reduce(self, updates: Sequence[SpooledUpdate]) -> RoundModel | None:
        """Combine the updates as the strategy requests."""
        run = self._run
        cohort = run.attempt.cohort
        rows = run.roster.rows([update.client for update in updates]).tolist()
        weights = {update.client: cohort[update.client].work.weight for update in updates}
        moved = await in_thread(
            run.models.work.next_model,
            run.machine.round,
            updates,
            run.models.current,
            await run.models.enrolled(len(run.roster), run.selecting.population),
            clients=len(run.roster),
            seen=UpdatesSeen(
                state=run.models.states.selector,
                places={update.client: row for update, row in zip(updates, rows, strict=True)},
                weights={client: each for client, each in weights.items() if each is not None},
            ),
            late=run.updates.late_updates(run.machine.round),
        )
        model = moved.model
        if run.plan.strategy.trains:
            aside = moved.judgement.set_aside
            kept = [each for each, row in zip(updates, rows, strict=True) if row not in aside]
            with run.models.training() as note:
                model = await train_on_coordinator(
                    run.models.work,
                    run.services.files,
                    model,
                    kept,
                    base=run.models.current,
                    process=run.services.training,
                    run_file=run.row.run_file,
                    round_number=run.machine.round,
                    progress=note,
                )
        return RoundModel(
            model=model,
            strategy_state=moved.strategy_state,
            facts=moved.facts,
            judgement=moved.judgement,
            late_weights=moved.late_weights,
        )
