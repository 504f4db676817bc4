"""Selects a round's cohort: finds the eligible clients, calls the selector, and checks its
choice."""

from __future__ import annotations

from collections.abc import Sequence

from potluck.common.errors import RunError
from potluck.common.interruptible import in_thread
from potluck.server.clock import utc
from potluck.server.eligibility.eligibility import ScarceError
from potluck.server.hosts.attendance import Attendance
from potluck.server.live.live_status import set_state
from potluck.server.live.run import CohortMember, Run
from potluck.server.machine import events as rounds
from potluck.server.machine.troubles import counted
from potluck.server.plan.plan import RunPlan
from potluck.server.select.cohort_hosts import check_hosts
from potluck.server.select.interview import ReplayError, choose
from potluck.server.select.selection_checks import check_declared
from potluck.server.select.selection_record import SelectionRecord
from potluck.server.selection import Rows, Selection, SelectionContext
from potluck.server.store.records import AttemptKey, AttemptRow, MemberWork, Provenance, RunState
from potluck.server.updates.update_path import UpdatePath


async def admit(run: Run, clients: tuple[str, ...]) -> None:
    """Add clients to the roster, in this order, and record it in the store."""
    await run.selecting.admit(clients)
    if len(clients) == len(run.roster):  # these are the run's first clients
        await set_state(run, RunState.RUNNING)
        run.models.start_selector(run.selecting.population())


async def select(
    run: Run, path: UpdatePath, record: SelectionRecord, action: rounds.Select
) -> None:
    """Choose a cohort, and store it before it is used."""
    key = AttemptKey(run.id, action.round, action.attempt)
    try:
        unable = await path.unable(action.available)
        if unable:
            await run.selecting.left_out.add_and_store(unable)
        await _select(run, record, action, key)
    except ReplayError as error:
        run.post(rounds.StoredAnswersInvalid(error.message))
    except ScarceError as error:
        begun = run.stored_attempt == key
        run.post((rounds.StoredAnswersInvalid if begun else rounds.TooFewEligible)(error.message))


async def _select(
    run: Run, record: SelectionRecord, action: rounds.Select, key: AttemptKey
) -> None:
    if run.row.state is not RunState.RUNNING:
        await set_state(run, RunState.RUNNING)
    context = await record.begin(await _context(run, action, key), key)
    selection, answers = await choose(run, context, key)
    unable = [c for c in run.roster.clients(context.available) if c in run.selecting.left_out]
    if unable:
        raise ReplayError(
            f"{key}: {counted(len(unable))} can't take part; selecting again without them"
        )
    cohort = run.roster.clients(selection.rows)
    _check_unmasked_work(run.plan, selection)
    check_declared(run.plan.selector, selection, run.plan.run_file.selector.name)
    await record.chosen(context, key, selection)
    host_of = run.machine.pool.presence.host_of
    members = {
        client: CohortMember(host=host_of(client), reason=reason, work=work)
        for client, reason, work in zip(cohort, selection.reasons, _works(selection), strict=True)
    }
    run.choose_cohort(members, answers)
    stored = [(client, member.host, member.reason) for client, member in members.items()]
    works = {client: member.work for client, member in members.items()}
    provenance = {client: _provenance(run.services.attendance, client) for client in members}
    await run.services.in_store(lambda store: store.set_cohort(key, stored, works, provenance))
    run.log.info("selected", round=action.round, attempt=action.attempt, cohort=cohort)
    run.post(rounds.Selected(cohort))


def _provenance(attendance: Attendance, client: str) -> Provenance:
    """Return the facts that a client's host last reported about itself; empty if the host is
    disconnected."""
    session = attendance.session_of(client)
    if session is None:
        return Provenance()
    return Provenance(data_epoch=session.data_epoch, software=session.software_version or None)


def _works(selection: Selection) -> Sequence[MemberWork]:
    """Return what the selector set for each chosen client: quotas, weight, passes, omitted
    tensors."""
    unset = [None] * len(selection.rows)
    quotas = unset if selection.quotas is None else selection.quotas.tolist()
    weights = unset if selection.weights is None else selection.weights.tolist()
    epochs = unset if selection.epochs is None else selection.epochs.tolist()
    dropped = unset if selection.dropped is None else selection.dropped
    return [
        MemberWork(
            quotas=tuple(most or ()),
            weight=weight,
            epochs=passes,
            dropped=tuple(sorted(names or ())),
        )
        for most, weight, passes, names in zip(quotas, weights, epochs, dropped, strict=True)
    ]


def _check_unmasked_work(plan: RunPlan, selection: Selection) -> None:
    """Raise RunError if the selector sets quotas, passes or omitted tensors in a masked round."""
    if selection.quotas is not None:
        _check_unmasked(plan, "limits the samples that each client trains on")
    if selection.epochs is not None:
        _check_unmasked(plan, "sets the number of passes of each client")
    if selection.dropped is not None:
        _check_unmasked(plan, "has clients omit tensors from their updates")


def _check_unmasked(plan: RunPlan, does: str) -> None:
    """Raise RunError if the round is masked, because all clients of a masked round must do equal
    work. does: the selector's unequal setting, as a phrase for the error message."""
    run_file = plan.run_file
    if run_file.secure_aggregation:
        raise RunError(
            f"selector {run_file.selector.name} {does}, which masked rounds don't allow: all "
            "clients of a masked round must train alike, and the run file sets their number; "
            "choose another selector or option, or remove secure_aggregation",
            selector=run_file.selector.name,
        )


async def _context(run: Run, action: rounds.Select, key: AttemptKey) -> SelectionContext:
    """Store the available clients; return the selector's context."""
    run.begin_attempt()
    with run.services.observer.asking():
        rows = await run.selecting.eligibility.eligible(action, run.is_present)
    rows = await run.selecting.eligibility.in_label_sums(rows, run.is_present)
    if run.trace_clock is not None:
        failed = run.machine.attempts.failed
        clients = run.roster.clients(rows)
        rows = run.roster.rows(run.trace_clock.begin(clients, run.plan.rules.needed, failed=failed))
    check_hosts(run.selecting, run.plan, action.round, rows)
    run.begin_attempt()  # discard all earlier data
    if run.stored_attempt != key:
        spent, begun = run.machine.attempts.spent, utc()
        await run.services.in_store(
            lambda store: store.begin_attempt(key, rows.tolist(), begun, spent=spent)
        )
        run.stored_attempt = key
    else:
        await _check_resumable(run, rows)
    everybody = run.plan.selector.everybody(action.round)
    if everybody:
        _check_unmasked(run.plan, "has all clients train in a round")
    return SelectionContext(
        round=action.round,
        seed=run.plan.run_file.seed,
        count=max(len(rows), action.count) if everybody else action.count,
        population=run.selecting.population(),
        available=rows,
        rounds=run.plan.run_file.rounds,
        spares=run.plan.run_file.round.over_selection,
        epochs=run.plan.training.epochs,
        tensors=await in_thread(run.models.work.droppable)
        if run.plan.selector.drops_tensors
        else (),
        late=run.roster.rows(sorted(row.client_id for row in run.updates.late.awaited)),
    )


async def _check_resumable(run: Run, rows: Rows) -> None:
    """Raise ReplayError if the available clients differ from those before a restart."""
    run_id = run.id
    attempt: AttemptRow | None = await run.services.in_store(
        lambda store: store.current_attempt(run_id)
    )
    if attempt is not None and attempt.exchanges and list(attempt.available) != rows.tolist():
        raise ReplayError(
            f"{attempt.key}: the available clients have changed since the restart; asking again"
        )
