"""Before a run's first event: its first model, or where a coordinator that went down left it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TypeVar

from potluck.common.errors import NotFoundError, StorageError
from potluck.common.interruptible import in_thread
from potluck.server.aggregation.model_files import ModelVersion
from potluck.server.aggregation.model_work import States
from potluck.server.aggregation.update_files import SpooledUpdate, spooled_intact
from potluck.server.rounds import events as rounds
from potluck.server.rounds.machine import Resumption, RoundMachine
from potluck.server.runs.announce import announce_closed
from potluck.server.runs.interview import stored_answers
from potluck.server.runs.run import Run
from potluck.server.runs.services import utc
from potluck.server.store.records import AttemptRow, LeftOutRow, MemberState, RoundRow

T = TypeVar("T")


class Preparing:
    """Brings a run to where it stands according to the store."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._in_store = run.services.in_store

    async def prepare(self) -> None:
        """Find or make the model, read what selector and strategy remember, resume the round."""
        run, run_id = self._run, self._run.row.run_id
        run.enrol(await self._in_store(lambda store: store.roster(run_id)))
        last: RoundRow | None = await self._in_store(lambda store: store.last_round(run_id))
        if run.row.model_blake3 is not None:
            run.model = await self._from_files(run.work.load, run.row.model_blake3)
        elif not await self._begin_with_a_model():
            run.post(rounds.StopRequested())
            return
        if run.profiling.needs_model:
            await self._find_profile_model()
        await run.eligibility.admit(run.roster)
        if last is None:
            run.states = await in_thread(self._initial_states)
        else:
            run.states = await self._from_files(
                run.work.read_states,
                last.state_blake3,
                last.selector_scalars,
                last.strategy_scalars,
            )
        if run.roster:
            await self._resume(last)

    async def _from_files(self, read: Callable[..., T], *arguments: object) -> T:
        """What a thread reads from files that the store names. Raises StorageError."""
        try:
            return await in_thread(read, *arguments)
        except NotFoundError as error:
            run = self._run
            path = run.services.files.path(error.metadata["blake3"])
            raise StorageError(
                f"{path} is gone, and without it nothing follows round {run.row.committed_rounds}; "
                "restore it from a backup",
                path=path,
            ) from error

    # Models -----------------------------------------------------------------------------------

    async def _begin_with_a_model(self) -> bool:
        """Make the model before round 1; False where the operator stops that."""
        run, run_id = self._run, self._run.row.run_id
        for remark in run.plan.remarks:
            run.say(remark, warning=True)
        initial = await in_thread(run.work.initial_model)
        blake3: str | None = initial.blake3
        triplet = run.plan.run_file.profiles.triplet
        if run.profiling.needs_model and triplet.pretraining_rounds:
            run.say("pre-training a model for triplets")
            blake3 = await run.services.pretrain(initial.blake3)
        if blake3 is None:
            return False
        pretrained = blake3 != initial.blake3
        run.model = await in_thread(run.work.load, blake3) if pretrained else initial
        await self._in_store(lambda store: store.set_initial_model(run_id, blake3, utc()))
        return True

    async def _find_profile_model(self) -> None:
        """Triplets of late joiners too are estimated with the model before round 1."""
        run, run_id = self._run, self._run.row.run_id
        blake3 = (await self._in_store(lambda store: store.run(run_id))).initial_model_blake3
        try:
            model = await asyncio.to_thread(run.services.files.published, blake3)
        except NotFoundError:  # who has disclosed is known by it, but nobody can any more
            model = ModelVersion(blake3=blake3, size=0, renditions=())
        run.profiling.use_model(model)

    def _initial_states(self) -> States:
        run = self._run
        assert run.model is not None  # noqa: S101  # prepare has just loaded it
        with run.services.files.opened(run.model.blake3) as file:
            strategy = run.plan.strategy.init(file.arrays).apart()
        return States(selector=run.plan.selector.init(run.population()), strategy=strategy)

    # Resuming ---------------------------------------------------------------------------------

    async def _resume(self, last: RoundRow | None) -> None:
        """Go on where a coordinator went down."""
        run, run_id = self._run, self._run.row.run_id
        committed = 0 if last is None else last.key.round
        run.recall(await self._in_store(lambda store: store.participation(run_id)))
        if last is not None:  # the coordinator may have gone down before it could tell
            announce_closed(run.services.attendance, last)
        left_out = await self._left_out()
        attempt: AttemptRow | None = await self._in_store(
            lambda store: store.current_attempt(run_id)
        )
        if attempt is not None and run.plan.run_file.secure_aggregation:
            await self._abandon_masked(attempt)
            attempt = None
        if attempt is None:
            spent = await self._in_store(lambda store: store.last_attempt(run_id, committed + 1))
            await asyncio.to_thread(run.spool.remove)
            resumption = Resumption(
                roster=tuple(run.roster),
                committed=committed,
                attempt=spent + 1,
                spent=spent,
                left_out=left_out,
            )
        else:
            resumption = await self._resume_attempt(attempt, committed, left_out)
        run.machine = RoundMachine(run.plan.rules, resumption)
        run.services.observer.resumed(run.row, last, resumption.cohort)
        run.say(f"resumed after round {committed}")

    async def _left_out(self) -> Mapping[str, str]:
        """The clients that could not take part, and why."""
        run, run_id = self._run, self._run.row.run_id
        rows: list[LeftOutRow] = await self._in_store(lambda store: store.left_out(run_id))
        run.left_out = {row.client_id: row for row in rows} | run.left_out
        return {row.client_id: row.trouble for row in rows}

    async def _abandon_masked(self, attempt: AttemptRow) -> None:
        """The keys of a masked round are gone with the coordinator that had them."""
        key, reason = attempt.key, "the coordinator went down, and with it the keys of the sum"
        await self._in_store(lambda store: store.abandon_attempt(key, reason))
        self._run.say(f"round {key.round}, attempt {key.attempt} is given up: {reason}")

    async def _resume_attempt(
        self, attempt: AttemptRow, committed: int, left_out: Mapping[str, str]
    ) -> Resumption:
        run, key = self._run, attempt.key
        run.begun_attempt = key
        facts = run.facts
        facts.available = tuple(run.roster[row] for row in attempt.available)
        facts.cohort = tuple(member.client_id for member in attempt.members)
        facts.answers = [
            stored_answers(exchange.answers, key)
            for exchange in attempt.exchanges
            if exchange.answers is not None
        ]
        cohort: list[tuple[str, MemberState]] = []
        for member in attempt.members:
            facts.hosts[member.client_id] = member.host_id
            facts.reasons[member.client_id] = member.reason
            if member.quotas is not None:
                facts.quotas[member.client_id] = member.quotas
            state = member.state
            if state is MemberState.RECEIVED and member.update is not None:
                path = run.spool.path(
                    key.round, key.attempt, member.client_id, member.update.blake3
                )
                update = SpooledUpdate(client=member.client_id, path=path, row=member.update)
                if await in_thread(spooled_intact, update):
                    facts.updates[member.client_id] = update
                else:
                    state = MemberState.SELECTED  # torn by the crash; have it sent again
            cohort.append((member.client_id, state))
        await asyncio.to_thread(run.spool.clear_except, key.round, key.attempt)
        return Resumption(
            roster=tuple(run.roster),
            committed=committed,
            attempt=key.attempt,
            spent=attempt.spent,
            left_out=left_out,
            available=facts.available,
            cohort=tuple(cohort),
            seconds={client: update.row.seconds for client, update in facts.updates.items()},
        )
