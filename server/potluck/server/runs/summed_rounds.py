"""Rounds in which hosts add up their clients' updates: every upload is a sum of one or more
updates."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import numpy as np

from potluck.common.errors import LayoutError
from potluck.common.interruptible import in_thread
from potluck.common.monitoring.metric_labels import SUM as SUM_LABEL
from potluck.common.updates.lane_files import opened_lanes, vectors_of
from potluck.common.updates.lanes import members_digest
from potluck.common.updates.update_report import UpdateReport
from potluck.rpc.v1 import transfer_pb2
from potluck.server.aggregation.lane_reduction import opened_lane_sum
from potluck.server.aggregation.update_files import SpooledUpdate
from potluck.server.cohorts.sample_limits import counted
from potluck.server.hosts.instructions import SUM
from potluck.server.rounds import events as rounds
from potluck.server.rounds.summable import lane_terms
from potluck.server.runs.models import RoundModel
from potluck.server.runs.report_checks import check_said, report_said
from potluck.server.runs.run import Run
from potluck.server.runs.update_path import ReceivedUpdate, UpdatePath
from potluck.server.strategy import Summation


class SummedRounds(UpdatePath):
    """Handles rounds with sums. The coordinator sees each client's report, but not its update."""

    encoding = SUM_LABEL

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._terms = lane_terms(run.plan.run_file, run.plan.strategy)

    def check_header(self, header: transfer_pb2.UpdateHeader) -> None:
        """Check an announced sum: its form, its members and each member's report. Raises
        LayoutError."""
        if (
            header.encoding != SUM
            or not header.delta
            or header.compressed
            or header.HasField("report")
        ):
            raise LayoutError(
                "this run needs sums of updates; the announced update has another form"
            )
        members = header.members
        first = (header.client_id, header.update_id)
        if not members or (members[0].client_id, members[0].update_id) != first:
            raise LayoutError("a sum must name its members, and have the id of the first member")
        if len({each.client_id for each in members}) != len(members):
            raise LayoutError("a sum names a client twice; name each client at most once")
        for each in members:
            check_said(self._run.plan, self._run.attempt, each.client_id, each.report)

    async def check_file(self, update: ReceivedUpdate) -> None:
        """Check that the file is a sum, and that its values are possible for its members."""
        ids = [each.update_id for each in update.header.members]

        def check() -> None:
            with opened_lanes(update.path, self._vectors) as file:
                file.check(members_digest(ids), len(ids))

        await asyncio.to_thread(check)

    def report(self, member: transfer_pb2.SumMember) -> UpdateReport:
        """Return the report of one member, with those of the selector's numbers that are finite."""
        return report_said(self._run.plan, member.report)

    async def reduce(self, updates: Sequence[SpooledUpdate]) -> RoundModel | None:
        """Compute the round's model from the sums that contain these updates."""
        run = self._run
        excess = self._too_heavy(updates)
        if excess:
            why = "clients count with more samples than they may, and are in sums with others"
            run.post(rounds.SumFailed(*run.key[1:], why, tuple(excess.items())))
            return None
        total = opened_lane_sum(
            updates,
            [run.instruction_id(update.client) for update in updates],
            self._vectors,
            self._terms,
            normalized=run.plan.strategy.summation is Summation.NORMALIZED,
        )
        model, strategy_state, _ = await in_thread(
            run.models.work.next_model_by_sum,
            run.machine.round,
            [update.client for update in updates],
            total,
            run.models.current,
            run.models.states.strategy,
            clients=len(run.roster),
        )
        return RoundModel(model=model, strategy_state=strategy_state)

    @property
    def _vectors(self) -> Mapping[str, int]:
        return vectors_of(
            self._run.models.work.layout.parameters, self._run.plan.strategy.auxiliary
        )

    def _too_heavy(self, updates: Sequence[SpooledUpdate]) -> Mapping[str, str]:
        """Return the clients with more samples than the run's limits allow, with error messages.

        The weight of a single update could be lowered, but not the weight of a part of a sum.
        """
        weights = np.array([self._terms.weight(each.row.samples) for each in updates], np.int64)
        limits = self._run.plan.run_file.sample_limits
        allowed = counted(weights, limits)
        return {
            update.client: f"its weight is {weight} samples, and sample_limits allows {most}; set "
            "sample_limits.maximum, which hosts apply, or raise maximum_multiple"
            for update, weight, most in zip(updates, weights, allowed, strict=True)
            if weight > most
        }
