"""Repeats the selections of a run from the coordinator's records, and compares the results.

Reads the database and the log of selections; changes nothing, and works while the coordinator
runs. Blocking.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidSignature

from potluck.common.errors import ConfigurationError, PotluckError, ProtocolError
from potluck.common.net.membership import Members
from potluck.server.config import CoordinatorConfig
from potluck.server.eligibility.alarms import TagLimit
from potluck.server.plan.cohort_limits import narrowed
from potluck.server.plan.plan import RunPlan, draw_up
from potluck.server.profiles.profile_reader import ProfileReader
from potluck.server.profiles.trust import load_trust
from potluck.server.select.cohort_hosts import complete
from potluck.server.select.interview import OFFERS, stored_answers, stored_sum
from potluck.server.selection import (
    Ask,
    AskSum,
    Floats,
    Population,
    Selection,
    SelectionContext,
    Selector,
)
from potluck.server.state import State
from potluck.server.store.attempt_table import Attempts
from potluck.server.store.client_table import Profiles
from potluck.server.store.records import (
    AttemptKey,
    Exchange,
    MemberState,
    Profile,
    RoundRow,
    RunRow,
)
from potluck.server.store.round_table import Rounds
from potluck.server.store.run_table import Runs
from potluck.server.store.sql.reading import open_for_reading
from potluck.verifiable.chain import check_members
from potluck.verifiable.coordinator.selection_inputs import (
    PER_CLIENT,
    inputs_sha256,
    restored,
    restored_outcome,
    state_sha256,
)
from potluck.verifiable.coordinator.selection_log import LoggedAttempt, SelectionLog
from potluck.verifiable.documents import (
    Attendees,
    BrokenSelectionError,
    Opening,
    Outcome,
    receipt,
)


class _Tables(Attempts, Profiles, Rounds, Runs):
    """The tables that an audit reads."""


@dataclass(frozen=True, kw_only=True)
class AuditedSelection:
    """Result of repeating the selection of one attempt at a round. differences: descriptions of
    what differs; empty if nothing does.

    committed: True if this attempt's model was committed. cohort: number of clients; 0 if the
    attempt ended before its outcome. documents: SHA-256 digest (hexadecimal) of each of its
    documents, by kind, as in `Chain.digests`. signatures: number of members' valid signatures on
    its documents; 0 without a federation root. due: number of signatures if each speaker had signed
    each document; 0 without a federation root. missed: number of hosts that committed to a share of
    the seed, but did not reveal it, so that the attempt was given up.
    """

    round: int
    attempt: int
    committed: bool
    cohort: int
    documents: Mapping[str, str] = field(default_factory=dict)
    signatures: int = 0
    due: int = 0
    missed: int = 0
    differences: tuple[str, ...] = ()

    @property
    def agrees(self) -> bool:
        """True if nothing differs."""
        return not self.differences


@dataclass(frozen=True, kw_only=True)
class _Recorded:
    """The clients' hosts and tag limits, as recorded for a selection; implements `Placement`."""

    attempt: LoggedAttempt

    def hosts(self) -> Sequence[str]:
        return self.attempt.hosts

    def tag_limits(self) -> Sequence[TagLimit]:
        return self.attempt.limits


@dataclass(frozen=True, kw_only=True)
class _Signatures:
    """Signatures on an attempt's documents: the clients of the valid ones, faults of the others and
    of the speakers. due: as in `AuditedSelection`."""

    due: int = 0
    valid: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


class SelectionAudit:
    """Audits the selections of one run."""

    def __init__(self, config: CoordinatorConfig, run: str) -> None:
        """run: id of the run, a unique beginning of it, or its name.

        Raises NotFoundError, StorageError, and ConfigurationError if the run did not commit to its
        selections or its plug-ins are missing.
        """
        self._tables = _Tables(open_for_reading(config.database_url()))
        self.run: RunRow = self._tables.run(run)
        self._plan: RunPlan = draw_up(
            self.run.run_file, source=f"run {self.run.run_id}", model_modules=config.model_modules
        )
        if not self._plan.run_file.selection.verifiable:
            raise ConfigurationError(
                f"run {self.run.run_id} did not commit to its selections; set verifiable = true in "
                "[selection] of the run file before a run starts"
            )
        self._log = SelectionLog(config.state_directory, self.run.run_id)
        self._trust = load_trust(config)
        self._members: Members | None = self._trust.members
        self._rounds = {row.key.round: row for row in self._tables.rounds(self.run.run_id)}

    def __len__(self) -> int:
        """Return the number of results of `results` if each committed round has an outcome."""
        return len(self._log.attempts)

    def results(self) -> Iterator[AuditedSelection]:
        """Yield the results of all logged attempts, then of committed rounds without an outcome."""
        proven = set()
        for attempt in self._log.attempts:
            opening, outcome = attempt.chain.opening, attempt.chain.outcome
            assert opening is not None  # noqa: S101  # every attempt has one
            row = self._rounds.get(opening.round)
            committed = (
                row is not None and row.key.attempt == opening.attempt and outcome is not None
            )
            if committed:
                proven.add(opening.round)
            signatures = self._signatures(attempt)
            yield AuditedSelection(
                round=opening.round,
                attempt=opening.attempt,
                committed=committed,
                cohort=0 if outcome is None else len(outcome.cohort),
                documents=attempt.chain.digests,
                signatures=len(signatures.valid),
                due=signatures.due,
                missed=len(attempt.silent),
                differences=(
                    *signatures.faults,
                    *self._differences(attempt, row if committed else None),
                ),
            )
        for number, row in self._rounds.items():
            if number not in proven:
                yield AuditedSelection(
                    round=number,
                    attempt=row.key.attempt,
                    committed=True,
                    cohort=len(row.members),
                    differences=("the log has no committed selection for this round",),
                )

    def _differences(self, attempt: LoggedAttempt, row: RoundRow | None) -> Iterator[str]:
        if not attempt.chain.whole:
            yield "the log lacks earlier documents of the run"
        outcome = attempt.chain.outcome
        if row is not None and outcome is not None:
            trained = [member.client_id for member in row.members]
            if trained != list(outcome.cohort):
                yield (
                    f"the round trained {_few(trained)}, but the committed cohort is "
                    f"{_few(outcome.cohort)}"
                )
            reasons = [member.reason for member in row.members]
            if reasons != list(attempt.reasons):
                yield "the reasons stored with the round are not the reasons of the selection"
        try:
            yield from self._wrong_inputs(attempt, row)
        except PotluckError as error:
            yield error.message
        except Exception as error:  # a plug-in may raise anything
            yield f"the selection can't be repeated: {type(error).__name__}: {error}"

    def _wrong_inputs(self, attempt: LoggedAttempt, row: RoundRow | None) -> Iterator[str]:
        """Yield differences between the committed inputs, the logged inputs and the record, then
        those of the selection that follows from the inputs. row: None unless committed."""
        opening, attendees = attempt.chain.opening, attempt.chain.attendees
        outcome = attempt.chain.outcome
        if opening is None:
            return
        if inputs_sha256(attempt.description) != opening.inputs_sha256:
            yield "the inputs of the selection are not the committed inputs"
            return
        yield from self._wrong_settings(opening, json.loads(attempt.description))
        if attendees is not None and outcome is not None:
            yield from self._replayed(attempt, opening, attendees, outcome, row)

    def _wrong_settings(self, opening: Opening, inputs: Mapping[str, Any]) -> Iterator[str]:
        """Yield the settings of a selection that differ from the run file's. inputs: the parsed
        description."""
        plan, run_file = self._plan, self._plan.run_file
        everybody = plan.selector.everybody(opening.round)
        spares = run_file.round.over_selection
        count = run_file.clients_per_round + spares
        joint = run_file.selection.hosts_verify
        settings = [
            ("the seed", opening.seed, None if joint else run_file.seed),
            ("the selector", opening.selector, run_file.selector.name),
            ("the selector of the inputs", inputs["selector"], run_file.selector.name),
            ("the options", inputs["options"], dict(run_file.selector.options)),
            ("the number of rounds", opening.rounds, run_file.rounds),
            ("the number of rounds of the inputs", inputs["rounds"], run_file.rounds),
            ("the round of the inputs", inputs["round"], opening.round),
            ("the number of clients", opening.count, 0 if everybody else count),
            ("the number of spares", inputs["spares"], spares),
            ("the number of epochs", inputs["epochs"], plan.training.epochs),
        ]
        if not everybody:
            settings.append(("the number of clients of the inputs", inputs["count"], count))
        for name, found, expected in settings:
            if found != expected:
                yield f"{name} is {found}, but {expected} by the run file"

    def _replayed(
        self,
        attempt: LoggedAttempt,
        opening: Opening,
        attendees: Attendees,
        outcome: Outcome,
        row: RoundRow | None,
    ) -> Iterator[str]:
        seed = attempt.chain.seed(outcome.share, outcome.shares)
        context, state = restored(
            attempt.description, self._log.part, seed=seed, available=attendees.available
        )
        yield from self._wrong_state(opening.round, state, context.population)
        yield from self._wrong_profiles(context.population)
        key = AttemptKey(self.run.run_id, opening.round, opening.attempt)
        found = _selected(self._plan, state, context, self._tables.answers(key), attempt, key)
        ids = context.population.ids
        cohort = [ids[row] for row in map(int, found.rows)]
        if cohort != list(outcome.cohort):
            yield (
                f"the selector chooses {_few(cohort)}, but the committed cohort is "
                f"{_few(outcome.cohort)}"
            )
        elif list(found.reasons) != list(attempt.reasons):
            yield "the selector gives other reasons than those in the log"
        if row is not None:
            yield from self._wrong_step(attempt, state, row, ids)

    def _wrong_step(
        self, attempt: LoggedAttempt, state: State, row: RoundRow, ids: Sequence[str]
    ) -> Iterator[str]:
        """Yield differences between a round's facts in the log and in the database, and between the
        state that the selector learns from them and the logged one. state: before the round."""
        if not attempt.learned:
            yield "the records lack the facts from which the selector learned"
            return
        outcome = restored_outcome(attempt.learned, self._log.part)
        included = {ids[place] for place in outcome.included.tolist()}
        recorded = {each.client_id for each in row.members if each.state is MemberState.INCLUDED}
        if outcome.round != row.key.round or included != recorded:
            yield "the selector learned from other updates than those of the round's model"
        learned = state_sha256(self._plan.selector.observe(state, outcome))
        if learned != attempt.state_after:
            yield "the selector's state after the round does not follow from the round"

    def _wrong_state(
        self, round_number: int, state: State, population: Population
    ) -> Iterator[str]:
        """Yield differences between the selector's state in the inputs and its recorded state after
        the previous round: scalars with the database, scalars and arrays with the log. Before round
        1, the state must be the selector's initial one."""
        if round_number == 1:
            if not _is_initial(self._plan.selector, state, population):
                yield "the selector's state is not its initial state"
            return
        before = self._rounds.get(round_number - 1)
        after = None if before is None else self._log.find(before.key.round, before.key.attempt)
        if before is None or after is None or not after.state_after:
            yield "the records lack the selector's state after the previous round"
        elif (dict(before.selector_scalars), after.state_after) != (
            dict(state.scalars),
            state_sha256(state),
        ):
            yield "the selector's state is not its state after the previous round"

    def _wrong_profiles(self, population: Population) -> Iterator[str]:
        """Yield the signals that the population has other numbers of than the clients disclosed. A
        client may have no numbers: it perhaps disclosed them later."""
        for signal, disclosed in self._disclosed.items():
            column = population.disclosed(signal)
            if column is None:
                continue
            made_up = [
                client
                for client, numbers in zip(population.ids, column, strict=True)
                if not np.isnan(numbers).all()
                and not any(
                    np.array_equal(numbers, each, equal_nan=True)
                    for each in disclosed.get(client, ())
                )
            ]
            if made_up:
                told = "disclosed" if self._members is None else "disclosed and signed"
                yield f"the {signal} of {_few(made_up)} are not what these clients {told}"

    @cached_property
    def _disclosed(self) -> Mapping[str, Mapping[str, Sequence[Floats]]]:
        """For each signal that the run needs, the numbers of each client's stored profiles; with a
        federation root, of those with a valid signature."""
        reader = ProfileReader(self._plan, model=self.run.initial_model_blake3)
        found: dict[str, dict[str, list[Floats]]] = {signal: {} for signal in reader.needs}
        for signal, by_client in found.items():
            for profile in self._tables.profiles(signal=signal, run_id=self.run.run_id):
                try:
                    numbers = reader.read(profile)
                except ProtocolError:  # of another run, with other parameters
                    continue
                if self._is_signed(profile):
                    by_client.setdefault(profile.client_id, []).append(numbers)
        return found

    def _is_signed(self, profile: Profile) -> bool:
        """Return True if the key in the member list signed this profile. True without a federation
        root."""
        if self._members is None:
            return True
        record = self._members.records.get(profile.client_id)
        if record is None:
            return False
        try:
            record.key().verify(profile.signature or b"", self._trust.statement(profile))
        except InvalidSignature:
            return False
        return True

    def _signatures(self, attempt: LoggedAttempt) -> _Signatures:
        """Check the members' signatures; there are none without a federation root."""
        attendees = attempt.chain.attendees
        if self._members is None or attendees is None:
            return _Signatures()
        found = _Signatures(due=len(attendees.speakers) * len(attempt.chain.digests))
        for client, text, signature in _signatures(attempt):
            record = self._members.records.get(client)
            if record is None:
                found.faults.append(
                    f"the signature of client '{client}' can't be checked, since the client is not "
                    "in the member list now"
                )
                continue
            try:
                record.key().verify(bytes.fromhex(signature), text)
                found.valid.append(client)
            except (InvalidSignature, ValueError):
                found.faults.append(
                    f"the signature of client '{client}' is not valid for its key in the member "
                    "list"
                )
        try:
            check_members(attendees, self._members.hosts)
        except BrokenSelectionError as error:
            found.faults.append(error.message.removeprefix("refused selection: "))
        return found


def _signatures(attempt: LoggedAttempt) -> list[tuple[str, bytes, str]]:
    """Return (client, signed text, hexadecimal signature) for each signature on an attempt's
    documents. A speaker without a signature has an empty one."""
    chain = attempt.chain
    speakers = chain.attendees.speakers if chain.attendees else ()
    on_opening = [
        (each.client, receipt(chain.opening_sha256, each.client, each.commitment), each.signature)
        for each in speakers
    ]
    return on_opening + [
        (client, receipt(sha256, client), each)
        for sha256, signatures in attempt.receipts.items()
        for client, each in signatures.items()
    ]


def _is_initial(selector: Selector, state: State, population: Population) -> bool:
    """Return whether a state is a selector's initial one for these clients, or for the first of
    them: others may have joined before round 1."""
    found = state_sha256(state)
    return any(
        state_sha256(selector.init(_first(population, clients))) == found
        for clients in range(len(population), 0, -1)
    )


def _first(population: Population, clients: int) -> Population:
    """Return the first clients of a population."""
    columns: dict[str, Any] = {name: getattr(population, name) for name in PER_CLIENT}
    rows = {name: each[:clients] for name, each in columns.items() if each is not None}
    signals = {name: column[:clients] for name, column in population.signals.items()}
    return replace(population, ids=population.ids[:clients], signals=signals, **rows)


def _selected(
    plan: RunPlan,
    state: State,
    context: SelectionContext,
    exchanges: Sequence[Exchange],
    attempt: LoggedAttempt,
    key: AttemptKey,
) -> Selection:
    """Select again, with the clients' stored answers to the selector's questions."""
    placement, available = _Recorded(attempt=attempt), context.available
    limits = [(values, most) for _, values, most in placement.tag_limits()]
    stored = iter([each for each in exchanges if not each.question.get(OFFERS)])
    while True:
        said = plan.selector.select(state, context)
        if isinstance(said, Generator):
            said = _answered(said, stored, key)
        fewer = narrowed(said.rows, context.available, limits)
        if fewer is None:
            whole = replace(context, available=available)
            return complete(placement, plan, said, whole)
        context = replace(context, available=fewer)


def _answered(
    interview: Generator[Any, Any, Any], stored: Iterator[Exchange], key: AttemptKey
) -> Selection:
    """Run a selector that asks clients, with their stored answers; return its selection."""
    answers: Any = None
    try:
        while True:
            asked = interview.send(answers)
            found = next(stored, None)
            if found is None or found.answers is None:
                raise ConfigurationError(
                    "the store lacks answers to the selector's questions, "
                    "so the selection can't be repeated"
                )
            rows = found.question.get("sum" if isinstance(asked, AskSum) else "rows")
            if not np.array_equal(np.array(rows), asked.rows):
                raise ConfigurationError(
                    "the selector asks other clients than during the run, "
                    "so the selection can't be repeated"
                )
            if isinstance(asked, Ask):
                answers = stored_answers(found.answers, key)
            else:
                answers = stored_sum(found.answers, key)
    except StopIteration as stop:
        chosen: Selection = stop.value
        return chosen
    finally:
        interview.close()


def _few(clients: Sequence[str]) -> str:
    more = f" and {len(clients) - 5} more" if len(clients) > 5 else ""
    return ", ".join(clients[:5]) + more
