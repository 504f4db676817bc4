"""Answers operators' queries about stored runs, clients and disclosures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, ValidationError

from potluck.common.disclosure import LABEL_COUNTS
from potluck.common.errors import NotFoundError, StorageError
from potluck.server.config import CoordinatorConfig
from potluck.server.hosts.attendance import Attendance
from potluck.server.machine.troubles import LeftOutClients
from potluck.server.plan.plan import RunPlan, draw_up
from potluck.server.profiles.collect import Profiling, stored_profiles
from potluck.server.profiles.trust import Trust
from potluck.server.reduce.audit.audit_records import BiasRecords, audit_run, check_auditable
from potluck.server.reduce.audit.label_audit import ClientAudit
from potluck.server.selection import Population
from potluck.server.store import Profile, SecureSum, Store
from potluck.server.store.model_files import ModelFiles
from potluck.server.store.records import ClientRow, RoundRow, RunRow
from potluck.server.store.store_thread import InStore

_ROUNDS_AT_ONCE = 100
"""Number of rounds read from the store at once. Between two reads, other callers can use the
store."""


class SumRecord(BaseModel):
    """The outcome of one secure sum, with only those of its stored fields that operators read.

    clients: clients in the sum, or the invited clients if the sum was aborted; each with its host.
    refusals: each client that refused, with the rule that it named. rule, have, need: if the sum
    was aborted, the rule that was not met, the number that it counted, and the number that it
    needs. convicted: client that provably sent a share that can't be decrypted, and the client that
    proved it. verdict: the proof in base64. epsilon: ε of the sum; None if the sum is exact.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    session_id: str
    run: str
    round: int
    attempt: int
    subject: str
    disclosure: str
    outcome: Literal["released", "aborted"]
    clients: dict[str, str]
    least_hosts: int
    colluding_hosts: int
    quorum: int
    epsilon: float | None
    refusals: dict[str, str] = {}
    convicted: dict[str, str] = {}
    verdict: str = ""
    stage: str = ""
    rule: str = ""
    have: int = 0
    need: int = 0
    at: AwareDatetime


@dataclass(frozen=True, kw_only=True)
class Disclosures:
    """All data that left the clients of a run and that the coordinator received.

    sums: secure sums that include clients of the run, from any run, oldest first. profiles:
    profiles of the run's clients. independent: True if the coordinator's operator does not hold the
    federation root's key.
    """

    sums: tuple[SumRecord, ...]
    profiles: tuple[Profile, ...]
    independent: bool


class Archive:
    """Answers queries about runs, clients, rounds, models and disclosures. Used on the event
    loop."""

    def __init__(
        self,
        config: CoordinatorConfig,
        in_store: InStore,
        files: ModelFiles,
        attendance: Attendance,
        trust: Trust,
    ) -> None:
        self._config = config
        self._in_store = in_store
        self._files = files
        self._attendance = attendance
        self._trust = trust
        self.lost: dict[str, str] = {}
        """Runs that are missing in the database, by id, each with an explanation."""

    async def run(self, run_id: str) -> RunRow:
        """Return a run by its id, a prefix of the id, or its name; see `Store.run`. Raises
        NotFoundError."""
        try:
            row: RunRow = await self._in_store(lambda store: store.run(run_id))
        except NotFoundError:
            for lost, reason in self.lost.items():
                if run_id and lost.startswith(run_id):
                    raise NotFoundError(reason, run=lost) from None
            raise
        return row

    async def runs(self, *, before: int | None = None, limit: int | None = None) -> list[RunRow]:
        """Return all runs or one page of them, newest first, including pre-training runs."""
        rows: list[RunRow] = await self._in_store(partial(Store.runs, before=before, limit=limit))
        return rows

    async def left_out(self, run_ids: Sequence[str]) -> Mapping[str, str]:
        """Return a text about the clients that are excluded from these runs, with the reasons, by
        run; nothing for runs without any."""
        found: dict[str, dict[str, str]] = await self._in_store(
            lambda store: store.troubles(run_ids)
        )
        return {run_id: LeftOutClients(troubles=of).summary() for run_id, of in found.items()}

    async def clients(self, *, after: str = "", limit: int | None = None) -> list[ClientRow]:
        """Return all known clients, or one page of them."""
        rows: list[ClientRow] = await self._in_store(
            partial(Store.clients, after=after, limit=limit)
        )
        return rows

    async def committed_rounds(self, run_id: str, *, after: int = 0) -> AsyncIterator[RoundRow]:
        """Yield a run's rounds with numbers above `after`, in order, including rounds that are
        committed while it yields."""
        while True:
            page: list[RoundRow] = await self._in_store(
                partial(Store.rounds, run_id=run_id, after=after, limit=_ROUNDS_AT_ONCE)
            )
            for row in page:
                yield row
            if len(page) < _ROUNDS_AT_ONCE:
                return
            after = page[-1].key.round

    async def model_of(
        self, run_id: str, round_number: int, *, best: bool = False
    ) -> tuple[RunRow, int, str, RoundRow | None]:
        """Return a run, the number of the requested round, the digest of that round's model, and
        the round.

        Round 0 means the last committed round. Before the first commit, the result is round 0 with
        the initial model and without a round. best: True to request the round of the run's best
        model. Raises NotFoundError.
        """
        row = await self.run(run_id)
        number = self._best_round(row) if best else round_number or row.committed_rounds
        committed: RoundRow | None = None
        if number:
            committed = await self._in_store(lambda store: store.round(row.run_id, number))
            blake3 = None if committed is None else committed.model_blake3
        else:
            blake3 = row.model_blake3
        if blake3 is None:
            which = f"round {number}" if number else "any round"
            last = row.committed_rounds
            remedy = (
                f"request a round from 1 to {last}" if last else "wait until a round is committed"
            )
            raise NotFoundError(
                f"run {row.run_id} has no model of {which}; {remedy}", run=row.run_id
            )
        try:
            self._files.existing(blake3)
        except NotFoundError:
            raise NotFoundError(
                f"the model of round {number} of run {row.run_id} was deleted; [retention] in a "
                "run file sets which models are kept",
                run=row.run_id,
            ) from None
        return row, number, blake3, committed

    def _best_round(self, row: RunRow) -> int:
        """Return the round of a run's best model. Raises NotFoundError."""
        if row.best is not None and row.best.round is not None:
            return row.best.round
        rule = self._plan(row).stop_rule
        if rule is None:
            raise NotFoundError(
                f"run {row.run_id} has no best model: its run file sets no metric in "
                "stop.measure or retention.keep_best; request the last model, or the model of a "
                "round",
                run=row.run_id,
            )
        waits = f" after round {rule.opening}" if rule.opening else ""
        raise NotFoundError(
            f"run {row.run_id} has no best model yet: no evaluation{waits} included {rule.measure}",
            run=row.run_id,
        )

    async def profiles(self, run_id: str) -> Population:
        """Return the disclosed profiles of a run's clients. Raises NotFoundError."""
        row = await self.run(run_id)
        return (await self._stored_profiles(row, self._plan(row))).population()

    async def audit_labels(self, run_id: str) -> tuple[Population, list[ClientAudit]]:
        """Compare the label counts that a run's clients claim with the changes of the output bias
        by their updates.

        Raises NotFoundError; RunError if the run can't be audited.
        """
        row = await self.run(run_id)
        plan = self._plan(row)
        check_auditable(plan)
        profiling = await self._stored_profiles(row, plan)
        population, rates = profiling.population(), profiling.noise_rates(LABEL_COUNTS)
        rounds = [each async for each in self.committed_rounds(row.run_id)]
        records = bias_records(self._config, row.run_id)
        audits = await asyncio.to_thread(audit_run, plan, population, rates, rounds, records)
        return population, audits

    async def audit_disclosures(self, run_id: str) -> Disclosures:
        """Return all data that left a run's clients. Raises NotFoundError."""
        row = await self.run(run_id)
        found: Disclosures = await self._in_store(
            partial(_read_disclosures, run_id=row.run_id, independent=self._trust.independent)
        )
        return found

    async def _stored_profiles(self, row: RunRow, plan: RunPlan) -> Profiling:
        return await stored_profiles(
            row.run_id, plan, self._attendance, self._in_store, self._trust
        )

    def _plan(self, row: RunRow) -> RunPlan:
        source = f"run file of {row.run_id}"
        return draw_up(row.run_file, source=source, model_modules=self._config.model_modules)


def bias_records(config: CoordinatorConfig, run_id: str) -> BiasRecords:
    """Return access to the files that record how a run's updates change the output bias."""
    return BiasRecords(config.state_directory / "bias-updates" / run_id)


def _read_disclosures(store: Store, *, run_id: str, independent: bool) -> Disclosures:
    """Read a run's disclosures. Raises StorageError if a record is invalid."""
    roster = frozenset(store.roster(run_id))
    records = [_record(stored) for stored in store.sums()]
    return Disclosures(
        sums=tuple(each for each in records if not roster.isdisjoint(each.clients)),
        profiles=tuple(store.profiles(run_id=run_id)),
        independent=independent,
    )


def _record(stored: SecureSum) -> SumRecord:
    try:
        return SumRecord.model_validate(stored.record)
    except ValidationError as error:
        raise StorageError(
            f"the record of secure sum {stored.session_id} can't be read; restore the database"
        ) from error
