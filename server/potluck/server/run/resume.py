"""Prepares a run: creates its first model, or restores the state that it had when the coordinator
ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

from potluck.common.errors import NotFoundError, StorageError
from potluck.common.interruptible import in_thread
from potluck.common.monitoring.metric_labels import SUM
from potluck.common.run_file.claims import privacy_claim
from potluck.server.clock import utc
from potluck.server.eligibility.alarms import SelectionAlarms
from potluck.server.eligibility.collected_sums import NO_SUMS, LabelSums
from potluck.server.eligibility.eligibility import Eligibility
from potluck.server.eligibility.host_checks import HostChecks
from potluck.server.eligibility.left_out import LeftOutRegister
from potluck.server.eligibility.picks import PickRecord
from potluck.server.hosts.gather import announce_closed
from potluck.server.hosts.instructions import train_instruction_id
from potluck.server.live.feed import RunRecord
from potluck.server.live.models import Models, States, read_states
from potluck.server.live.run import Attempt, CohortMember, Run
from potluck.server.live.run_privacy import RunPrivacy
from potluck.server.live.run_updates import Updates
from potluck.server.live.selecting import Selecting
from potluck.server.live.services import RunServices
from potluck.server.live.spool import Spool, still_spooled
from potluck.server.machine import events as rounds
from potluck.server.machine.machine import Resumption, RoundMachine
from potluck.server.machine.roster import RunRoster
from potluck.server.plan.plan import RunPlan
from potluck.server.plan.pretraining import is_pretraining
from potluck.server.plan.trace_clock import TraceClock, trace_clock
from potluck.server.profiles.collect import Profiling
from potluck.server.reduce.model_work import ModelWork
from potluck.server.select.interview import answers_of
from potluck.server.select.upload_decision import is_offer
from potluck.server.store.model_files import ModelFiles, ModelVersion
from potluck.server.store.records import AttemptRow, FailedAttempt, MemberRow, MemberState, RoundRow

T = TypeVar("T")


async def resume(
    record: RunRecord,
    plan: RunPlan,
    work: ModelWork,
    spool: Spool,
    services: RunServices,
    events: asyncio.Queue[rounds.Event],
) -> Run | None:
    """Return the prepared run; None if an operator stopped its pre-training.

    Loads or creates the model, and reads the stored states of selector and strategy.
    """
    run_id, in_store = record.row.run_id, services.in_store
    plan = plan.with_base(await in_thread(work.base_blake3))
    roster = RunRoster(await in_store(lambda store: store.roster(run_id)))
    last: RoundRow | None = await in_store(lambda store: store.last_round(run_id))
    profiling = Profiling(run_id, plan, roster, services.attendance, in_store, services.trust)
    profiling.observe = services.observer.profile
    if record.row.model_blake3 is not None:
        model = await _from_files(record, services.files, work.load, record.row.model_blake3)
    else:
        initial = await _first_model(record, plan, work, services, profiling)
        if initial is None:
            return None
        model = initial
    if profiling.needs_model:
        profiling.use_model(await _profile_model(run_id, services))
    await profiling.admit(roster.ids)
    states = await _states(record, plan, services, model, profiling, last)
    eligibility = _eligibility(record, plan, work, services, profiling, events.put_nowait)
    clock = await _trace_clock(run_id, plan, services)
    run = Run(
        record=record,
        plan=plan,
        services=services,
        events=events,
        machine=_machine(plan, clock, Resumption(roster=roster)),
        selecting=Selecting(
            run_id,
            plan,
            profiling,
            eligibility,
            SelectionAlarms(roster, plan.run_file.sample_limits, record.warn),
            attendance=services.attendance,
            in_store=in_store,
        ),
        models=Models(plan, work, services.files, model, states),
        updates=Updates(
            run_id,
            plan,
            spool,
            attendance=services.attendance,
            in_store=in_store,
            offended=services.offended,
            post=events.put_nowait,
            warn=record.warn,
        ),
        privacy=RunPrivacy(run_id, plan, in_store, record.warn),
        trace_clock=clock,
    )
    eligibility.host_of = lambda client: run.machine.pool.presence.host_of(client)
    if roster:
        await _go_on(run, last)
    return run


def _machine(plan: RunPlan, clock: TraceClock | None, resumption: Resumption) -> RoundMachine:
    machine = RoundMachine(plan.rules, resumption)
    if clock is not None:
        machine.pool.together = clock.ever
    return machine


async def _trace_clock(run_id: str, plan: RunPlan, services: RunServices) -> TraceClock | None:
    """Return the run's simulated time after its committed rounds; None without a trace."""
    data = services.training.workplace.data_directory
    clock = await in_thread(trace_clock, plan.run_file.virtual_clock, data)
    if clock is not None:
        committed: list[RoundRow] = await services.in_store(lambda store: store.rounds(run_id))
        for row in committed:
            clock.commit(row.seconds)
    return clock


def _eligibility(
    record: RunRecord,
    plan: RunPlan,
    work: ModelWork,
    services: RunServices,
    profiling: Profiling,
    post: Callable[[rounds.Event], None],
) -> Eligibility:
    """Return the run's rules on which clients may be selected; no client is excluded yet."""
    run_id, attendance = record.row.run_id, services.attendance
    left_out = LeftOutRegister(run_id, plan, attendance, services.in_store, post)
    label_sums, wants_sums = LabelSums(), profiling.by_cell or plan.wants_label_totals
    if wants_sums and services.sums is None:
        record.warn(f"the target is the sum of noisy label counts, without a secure sum: {NO_SUMS}")
    elif wants_sums and services.sums is not None:
        label_sums = services.sums.of_run(run_id, plan, record.say)
    return Eligibility(
        plan=plan,
        roster=profiling.roster,
        profiling=profiling,
        picks=PickRecord(profiling.roster),
        checks=HostChecks(
            run_id, plan, work.layout.header, attendance, left_out, work.clients_evaluate
        ),
        left_out=left_out,
        label_sums=label_sums,
        warn=record.warn,
        post=post,
        is_member=services.trust.is_member if plan.path.members_only else _anybody,
    )


def _anybody(_: str) -> bool:
    return True


async def _from_files(
    record: RunRecord, files: ModelFiles, read: Callable[..., T], *arguments: object
) -> T:
    """Call `read` in a thread, to load files whose digests are in the store. Raises
    StorageError."""
    try:
        return await in_thread(read, *arguments)
    except NotFoundError as error:
        path = files.path(error.metadata["blake3"])
        raise StorageError(
            f"{path} is missing, so that the run can't continue after round "
            f"{record.row.committed_rounds}; restore the file from a backup",
            path=path,
        ) from error


async def _states(
    record: RunRecord,
    plan: RunPlan,
    services: RunServices,
    model: ModelVersion,
    profiling: Profiling,
    last: RoundRow | None,
) -> States:
    """Return the states of selector and strategy after the last committed round, or before round
    1."""
    if last is not None:
        remembered = (last.state_blake3, last.selector_scalars, last.strategy_scalars)
        return await _from_files(record, services.files, read_states, services.files, *remembered)

    def initial() -> States:
        with services.files.large_arrays(), services.files.opened(model.blake3) as file:
            strategy = plan.strategy.init(file.arrays)
        population = profiling.population(limits=plan.run_file.sample_limits)
        return States(selector=plan.selector.init(population), strategy=strategy)

    return await in_thread(initial)


# Models -----------------------------------------------------------------------------------------


async def _first_model(
    record: RunRecord, plan: RunPlan, work: ModelWork, services: RunServices, profiling: Profiling
) -> ModelVersion | None:
    """Create the model before round 1; return None if an operator stopped its pre-training."""
    run_id = record.row.run_id
    for remark in plan.remarks:
        record.warn(remark)
    if plan.run_file.privacy is not None:
        record.say(privacy_claim(plan.run_file.model_dump(exclude_none=True)))
    model = await in_thread(work.initial_model)
    if _pretrains(run_id, plan, needs_model=profiling.needs_model):
        record.say("pre-training a model" + (" for triplets" if profiling.needs_model else ""))
        pretrained = await services.pretrain(model.blake3)
        # this run does not use the first model; the pre-training run keeps its file
        if pretrained != model.blake3:
            services.files.let_go(model.digests)
        if pretrained is None:
            return None
        if pretrained != model.blake3:
            model = await in_thread(work.load, pretrained)
    blake3 = model.blake3
    await services.in_store(lambda store: store.set_initial_model(run_id, blake3, utc()))
    return model


def _pretrains(run_id: str, plan: RunPlan, *, needs_model: bool) -> bool:
    """Return True if a run needs a pre-training run. A pre-training run itself never needs one."""
    settings = plan.run_file.profiles.triplet
    wanted = needs_model or settings.pretraining_always
    return wanted and settings.pretraining_rounds > 0 and not is_pretraining(run_id)


async def _profile_model(run_id: str, services: RunServices) -> ModelVersion:
    """Return the model before round 1. Triplets of clients that join later are estimated with this
    model, too."""
    blake3 = (await services.in_store(lambda store: store.run(run_id))).initial_model_blake3
    try:
        return await asyncio.to_thread(services.files.published, blake3)
    except NotFoundError:  # stored triplets stay valid, but no new ones can be estimated
        return ModelVersion(blake3=blake3, size=0, renditions=())


# The round under way ----------------------------------------------------------------------------


async def _go_on(run: Run, last: RoundRow | None) -> None:
    """Continue a run after a restart of the coordinator."""
    run_id, in_store = run.id, run.services.in_store
    committed = 0 if last is None else last.key.round
    run.recall(await in_store(lambda store: store.participation(run_id)))
    attempt: AttemptRow | None = await in_store(lambda store: store.current_attempt(run_id))
    cohort = [] if attempt is None else [member.client_id for member in attempt.members]
    await run.updates.restore(cohort)
    if last is not None:  # the coordinator may have ended before it announced the round
        awaited = [each.client_id for each in run.updates.late.awaited if each.key == last.key]
        announce_closed(run.services.attendance, last, awaited)
    run.selecting.left_out.restore(await in_store(lambda store: store.left_out(run_id)))
    if attempt is not None and not run.plan.path.resumes:
        await _abandon(run, attempt)
        attempt = None
    earlier: list[FailedAttempt] = await in_store(
        lambda store: store.failed_attempts(run_id, committed + 1)
    )
    counted = [each for each in earlier if each.counts]
    failed = len(counted)
    if run.trace_clock is not None:  # repeat the clock's steps
        for number, each in enumerate(counted):
            clients = [run.roster.ids[row] for row in each.available]
            run.trace_clock.begin(clients, len(clients), failed=number)
    if attempt is None:
        spent = await in_store(lambda store: store.last_attempt(run_id, committed + 1))
        await asyncio.to_thread(run.updates.spool.clear_except, run.updates.kept_clients())
        resumption = Resumption(
            roster=run.roster,
            committed=committed,
            attempt=spent + 1,
            spent=spent,
            left_out=run.selecting.left_out.troubles,
            why_over="" if last is None else run.why_over(last.best),
        )
    else:
        resumption = await _resume_attempt(run, attempt, committed, failed)
    spared = set[str]().union(*(each.to_avoid for each in earlier))
    resumption = replace(resumption, failed=failed, spared=spared)
    run.machine = _machine(run.plan, run.trace_clock, resumption)
    run.services.observer.resumed(run.row, last, resumption.cohort)
    run.say(f"resumed after round {committed}")


async def _abandon(run: Run, attempt: AttemptRow) -> None:
    """Give up an attempt with masked updates, because its keys were lost when the coordinator
    ended."""
    key, reason = attempt.key, "the coordinator stopped, and the keys of the secure sum were lost"
    await run.services.in_store(lambda store: store.abandon_attempt(key, reason))
    run.say(f"round {key.round}, attempt {key.attempt} is abandoned: {reason}")


async def _resume_attempt(run: Run, attempt: AttemptRow, committed: int, failed: int) -> Resumption:
    """Restore the cohort of an attempt, with the updates whose files are complete. failed: number
    of failed attempts at the round before it."""
    key = run.stored_attempt = attempt.key
    run.attempt = Attempt()
    available = tuple(run.roster.ids[row] for row in attempt.available)
    if run.trace_clock is not None:
        run.trace_clock.begin(available, len(available), failed=failed)
    run.choose_cohort(
        {
            member.client_id: CohortMember(
                host=member.host_id, reason=member.reason, work=member.work
            )
            for member in attempt.members
        },
        answers_of(attempt.exchanges, key),
    )
    run.updates.received.update(
        await in_thread(
            still_spooled,
            run.updates.spool,
            key,
            attempt.members,
            lambda client: train_instruction_id(*key, client),
            missed=run.updates.late.most_rounds > 0,
        )
    )
    run.updates.bytes_up = _bytes_arrived(attempt.members)
    cohort = [
        (member.client_id, _state_now(member, whole=member.client_id in run.updates.received))
        for member in attempt.members
    ]
    kept: dict[tuple[int, int], set[str]] = {
        **run.updates.kept_clients(),
        (key.round, key.attempt): set(),
    }
    await asyncio.to_thread(run.updates.spool.clear_except, kept)
    return Resumption(
        roster=run.roster,
        committed=committed,
        attempt=key.attempt,
        spent=attempt.spent,
        left_out=run.selecting.left_out.troubles,
        available=available,
        cohort=tuple(cohort),
        seconds={
            client: run.arrival(client, each.row.seconds)
            for client, each in run.updates.received.items()
        },
        uploads_decided=any(is_offer(each.question) for each in attempt.exchanges),
    )


def _state_now(member: MemberRow, *, whole: bool) -> MemberState:
    """Return a member's stored state. If a crash damaged its update, the update is awaited again.
    whole: True if the update's file is intact."""
    received = member.state is MemberState.RECEIVED
    return MemberState.SELECTED if received and not whole else member.state


def _bytes_arrived(members: Iterable[MemberRow]) -> int:
    """Return the size of the updates that had arrived, damaged ones included. The file of a sum
    counts once."""
    sizes = {
        row.blake3 if row.encoding == SUM else member.client_id: row.size
        for member in members
        if (row := member.update) is not None
    }
    return sum(sizes.values())
