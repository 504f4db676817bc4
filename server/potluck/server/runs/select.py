"""Choosing a round's cohort: who may be selected, what the selector says, whether that is sound."""

from __future__ import annotations

from dataclasses import replace

from potluck.common.errors import RunError
from potluck.common.runfile import MissingProfiles
from potluck.server.aggregation.model_work import States
from potluck.server.rounds import events as rounds
from potluck.server.rounds.troubles import counted
from potluck.server.runs.eligibility import ScarceError
from potluck.server.runs.host_checks import HostChecks
from potluck.server.runs.interview import Questioning, ReplayError
from potluck.server.runs.label_cells import Cells
from potluck.server.runs.label_totals import LabelTotals
from potluck.server.runs.run import CohortMember, Run
from potluck.server.runs.services import utc
from potluck.server.selection import Rows, SelectionContext
from potluck.server.store.records import AttemptKey, AttemptRow, RunState


class Selecting:
    """The part of a run that chooses cohorts."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._in_store = run.services.in_store
        self._questioning = Questioning(run)
        self._checks = HostChecks(run)
        self._totals = LabelTotals(run)
        self._cells = Cells(run)

    async def admit(self, clients: tuple[str, ...]) -> None:
        """Store that clients joined the roster, in this order."""
        run, run_id = self._run, self._run.id
        await self._in_store(lambda store: store.append_to_roster(run_id, clients))
        await run.profiling.admit(clients)
        if len(clients) == len(run.roster):  # the first ones
            await run.set_state(RunState.RUNNING, "")
            run.states = States(
                selector=run.plan.selector.init(run.population()),
                strategy=run.states.strategy,
            )

    async def select(self, action: rounds.Select) -> None:
        """Choose a cohort; it is in the store before anybody acts on it."""
        try:
            await self._select(action)
        except ReplayError as error:
            self._run.post(rounds.Outdated(error.message))
        except ScarceError as error:
            run = self._run
            run.post(rounds.Excluded(run.eligibility.excluded))
            begun = run.stored_attempt == run.key
            run.post((rounds.Outdated if begun else rounds.Scarce)(error.message))

    async def _select(self, action: rounds.Select) -> None:
        run = self._run
        if run.row.state is not RunState.RUNNING:
            await run.set_state(RunState.RUNNING, "")
        key = AttemptKey(run.id, action.round, action.attempt)
        context = await self._context(action, key)
        selection, answers = await self._questioning.choose(context, key)
        unable = [c for c in run.roster.clients(context.available) if c in run.left_out]
        if unable:
            raise ReplayError(
                f"{key}: {counted(len(unable))} turned out to be unable to take part; selecting "
                "without them"
            )
        cohort = run.roster.clients(selection.rows)
        if selection.quotas is not None:
            self._check_quotas()
        quotas = [()] * len(cohort) if selection.quotas is None else selection.quotas.tolist()
        members = {
            client: CohortMember(host=run.machine.host_of(client), reason=reason, quotas=most)
            for client, reason, most in zip(cohort, selection.reasons, quotas, strict=True)
        }
        run.attempt = replace(run.attempt, cohort=members, answers=answers)
        stored = [(client, member.host, member.reason) for client, member in members.items()]
        limited = {} if selection.quotas is None else dict(zip(cohort, quotas, strict=True))
        await self._in_store(lambda store: store.set_cohort(key, stored, limited))
        run.log.info("selected", round=action.round, attempt=action.attempt, cohort=cohort)
        run.post(rounds.Selected(cohort))

    def _check_quotas(self) -> None:
        """Raise RunError where clients may not be told different things."""
        run_file = self._run.plan.run_file
        if run_file.secure_aggregation:
            raise RunError(
                f"selector {run_file.selector.name} limits the samples that each client trains on, "
                "and all clients of a masked round train alike; choose another selector or "
                "option, or unmasked updates",
                selector=run_file.selector.name,
            )

    async def _context(self, action: rounds.Select, key: AttemptKey) -> SelectionContext:
        """What the selector may look at; the available set is in the store before it does."""
        run = self._run
        run.begin_attempt()
        with run.services.observer.asking():
            tag = f"{action.round}.{action.attempt}"
            rows = await run.eligibility.eligible(
                await self._checks.able(action.available, tag=tag),
                round_number=action.round,
                attempt=action.attempt,
                count=action.count,
                present=run.is_present,
            )
        run.post(rounds.Excluded(run.eligibility.excluded))
        eligible = run.roster.clients(rows)
        await self._totals.find(eligible)
        await self._cells.find(eligible)
        rows = self._in_cells(rows)
        run.begin_attempt()  # once more: what came before it does not count
        if run.stored_attempt != key:
            spent, begun = run.machine.spent, utc()
            await self._in_store(
                lambda store: store.begin_attempt(key, rows.tolist(), begun, spent=spent)
            )
            run.stored_attempt = key
        else:
            await self._check_resumable(rows)
        return SelectionContext(
            round=action.round,
            seed=run.plan.run_file.seed,
            count=action.count,
            population=run.population(),
            available=rows,
        )

    def _in_cells(self, rows: Rows) -> Rows:
        """Without those who are in no cell, where the selector works by cell and needs it."""
        run = self._run
        missing = run.plan.run_file.profiles.missing
        if not self._cells.wanted or missing is MissingProfiles.INCLUDE:
            return rows
        return rows[[client in run.cell_counts for client in run.roster.clients(rows)]]

    async def _check_resumable(self, rows: Rows) -> None:
        """Raises ReplayError where others are available than when the first question was asked."""
        run_id = self._run.id
        attempt: AttemptRow | None = await self._in_store(
            lambda store: store.current_attempt(run_id)
        )
        if attempt is not None and attempt.exchanges and list(attempt.available) != rows.tolist():
            raise ReplayError(
                f"{attempt.key}: others are available than before the restart; asking anew"
            )
