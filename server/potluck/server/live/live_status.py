"""The current state of a run, for display: its wait for clients, or the progress of its round."""

from __future__ import annotations

from datetime import timedelta

from potluck.common.real_time import YEAR_SECONDS
from potluck.rpc.v1 import operator_pb2
from potluck.server.clock import now
from potluck.server.live.feed import member_message, run_status, waiting_message
from potluck.server.live.run import CohortMember, Run
from potluck.server.machine.machine import Phase
from potluck.server.store.records import MemberState, RunState


async def set_state(run: Run, state: RunState, reason: str = "") -> None:
    """Store the run's new state and publish it."""
    await run.record.set_state(state, reason)
    publish_status(run)


def publish_status(run: Run) -> None:
    """Publish the state of the run."""
    run.record.feed.publish(operator_pb2.WatchRunResponse(status=status(run)))


def status(run: Run) -> operator_pb2.RunStatus:
    """Return the state of the run."""
    return run_status(run.row, waiting(run), run.selecting.left_out.summary())


def waiting(run: Run) -> operator_pb2.Waiting | None:
    """Return the current wait of the run for clients; None while a round is under way."""
    found = run.machine.waiting
    if found is None:
        return None
    until = None
    if found.until is not None:
        # A date that overflows would break the list of all runs.
        shown = min(found.until, now() + YEAR_SECONDS)
        until = run.epoch + timedelta(seconds=shown)
    return waiting_message(found, until, run.machine.pool.away())


def progress(run: Run) -> operator_pb2.RoundProgress | None:
    """Return the progress of the current round; None between rounds."""
    machine, cohort = run.machine, run.attempt.cohort
    if machine.phase in (Phase.WAITING, Phase.ENDED):
        return None
    return operator_pb2.RoundProgress(
        round=machine.round,
        attempt=machine.attempt,
        phase=machine.phase.value,
        members=[_member(run, client, chosen) for client, chosen in cohort.items()],
        seconds=now() - run.attempt.begun,
        trained=run.models.trained,
        bytes_down=run.updates.bytes_down,
        bytes_up=run.updates.bytes_up,
    )


def _member(run: Run, client: str, chosen: CohortMember) -> operator_pb2.Member:
    member = run.machine.cohort.members.get(client)
    pending = run.services.attendance.pending(run.instruction_id(client))
    return member_message(
        client,
        chosen.host,
        chosen.reason,
        member.state if member else MemberState.SELECTED,
        member.trouble if member else "",
        run.updates.received.get(client),
        pending.progress if pending else None,
    )
