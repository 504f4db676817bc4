"""Stores the attempts at rounds, with all data that a coordinator needs to resume them after a
kill."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, and_, bindparam, func, insert, select, update

from potluck.common.errors import NotFoundError
from potluck.server.store.member_rows import (
    member_values,
    provenance_values,
    read_members,
    work_values,
)
from potluck.server.store.part import Part, attempt_parameters, of_attempt, of_some_attempt
from potluck.server.store.records import (
    AS_THE_RUN_SAYS,
    AttemptKey,
    AttemptRow,
    AttemptState,
    Exchange,
    FailedAttempt,
    JsonObject,
    MemberChange,
    MemberRow,
    MemberState,
    MemberWork,
    Provenance,
    UpdateRow,
)
from potluck.server.store.sql import schema
from potluck.server.store.sql.column_types import (
    Reader,
    decode_json,
    decode_rows,
    decode_time,
    encode_json,
    encode_rows,
    encode_text,
    encode_time,
    read_rows,
)


@dataclass(frozen=True, kw_only=True)
class _Begun:
    run_id: str
    round: int
    attempt: int
    begun_at: datetime
    available: tuple[int, ...]
    spent: int


_read_begun = Reader(
    _Begun,
    "attempts",
    ["run_id", "round", "attempt"],
    {"begun_at": decode_time, "available": decode_rows},
)
_read_exchange = Reader(
    Exchange,
    "exchanges",
    ["run_id", "round", "attempt", "step"],
    {
        "question": decode_json,
        "answers": lambda value: None if value is None else decode_json(value),
    },
)
_STATE = select(schema.attempts.c.state).where(of_some_attempt(schema.attempts))
_CHANGE_MEMBER = update(schema.members).where(
    of_some_attempt(schema.members), schema.members.c.client_id == bindparam("key_client_id")
)


class Attempts(Part):
    """Stores attempts at rounds, with their questions and cohorts. Only the open attempt can
    change."""

    def begin_attempt(
        self, key: AttemptKey, available: Iterable[int], at: datetime, *, spent: int = 0
    ) -> None:
        """Store a new attempt, before the selection. available: rows of the available clients.

        spent: number of attempts at the round that don't count as used. Raises StorageError unless
        the round follows the last committed one, and the attempt follows the round's last one,
        which must not be open.
        """
        with self._database.transaction() as connection:
            committed, model = last_commit(connection, key.run_id)
            if model is None:
                raise self._refusal(f"{key} can't begin before the initial model is stored")
            if key.round != committed + 1:
                raise self._refusal(f"{key} can't begin after round {committed}")
            last = _last_attempt(connection, key.run_id, key.round)
            if key.attempt != last + 1:
                raise self._refusal(f"{key} can't begin after attempt {last}")
            if _is_open(connection, key._replace(attempt=last)):
                raise self._refusal(f"{key} can't begin before attempt {last} is abandoned")
            row = {
                **key._asdict(),
                "begun_at": encode_time(at),
                "available": encode_rows(available),
                "state": AttemptState.OPEN.value,
                "reason": "",
                "spent": spent,
            }
            connection.execute(insert(schema.attempts), row)

    def last_attempt(self, run_id: str, round_number: int) -> int:
        """Return the number of the last attempt at a round, in any state; 0 if there is none."""
        with self._database.transaction() as connection:
            return _last_attempt(connection, run_id, round_number)

    def failed_attempts(self, run_id: str, round_number: int) -> list[FailedAttempt]:
        """Return the attempts at a round in which too few updates arrived, in order."""
        attempts, members = schema.attempts, schema.members
        query = (
            select(attempts.c.attempt, attempts.c.state, attempts.c.available)
            .where(
                attempts.c.run_id == run_id,
                attempts.c.round == round_number,
                attempts.c.state.in_((AttemptState.FAILED.value, AttemptState.EXCUSED.value)),
            )
            .order_by(attempts.c.attempt)
        )
        of_round = and_(members.c.run_id == run_id, members.c.round == round_number)
        with self._database.transaction() as connection:
            failed = {
                AttemptKey(run_id, round_number, attempt): (AttemptState(state), rows)
                for attempt, state, rows in connection.execute(query)
            }
            found = read_members(connection, of_round) if failed else {}
        return [
            FailedAttempt(
                state=state,
                members={member.client_id: member.state for member in found.get(key, ())},
                available=tuple(decode_rows(rows)),
            )
            for key, (state, rows) in failed.items()
        ]

    def add_question(self, key: AttemptKey, step: int, question: JsonObject) -> None:
        """Store a selector's question before it is sent. The same question may be stored again.

        Raises StorageError if another question is stored for this step.
        """
        with self._database.transaction() as connection:
            self._require_open(connection, key)
            self._put_question(connection, key, step, question)

    def add_answers(
        self,
        key: AttemptKey,
        step: int,
        question: JsonObject,
        answers: JsonObject,
    ) -> None:
        """Store the answers to a question, before the selector gets them.

        Raises StorageError if another question is stored for this step, or if this step has answers
        already.
        """
        table = schema.exchanges
        with self._database.transaction() as connection:
            self._require_open(connection, key)
            self._put_question(connection, key, step, question)
            change = (
                update(table)
                .where(
                    of_attempt(table, key),
                    table.c.step == step,
                    table.c.answers.is_(None),
                )
                .values(answers=encode_json(answers))
            )
            if connection.execute(change).rowcount != 1:
                raise self._refusal(f"question {step} in {key} already has answers")

    def answers(self, key: AttemptKey) -> list[Exchange]:
        """Return the questions and answers of an attempt, in order."""
        with self._database.transaction() as connection:
            return _exchanges(connection, key)

    def set_cohort(
        self,
        key: AttemptKey,
        cohort: Sequence[tuple[str, str, str]],
        works: Mapping[str, MemberWork] | None = None,
        provenance: Mapping[str, Provenance] | None = None,
    ) -> None:
        """Store the client id, host id and reason of each member, in order, before any member gets
        an instruction.

        works: for each client, the settings that the selector made for its work. provenance:
        versions that each client's host reported. Raises StorageError if the attempt already has a
        cohort, or if this cohort is empty or names a client twice.
        """
        clients = {client_id for client_id, _, _ in cohort}
        if len(clients) != len(cohort) or not cohort:
            raise self._refusal(f"the cohort of {key} is empty or repeats a client")
        rows = [
            {
                **key._asdict(),
                "position": position,
                "client_id": client_id,
                "host_id": host_id,
                "state": MemberState.SELECTED.value,
                "reason": encode_text(reason),
                **work_values((works or {}).get(client_id, AS_THE_RUN_SAYS)),
                **provenance_values((provenance or {}).get(client_id, Provenance())),
            }
            for position, (client_id, host_id, reason) in enumerate(cohort)
        ]
        members = schema.members
        with self._database.transaction() as connection:
            self._require_open(connection, key)
            query = select(members.c.position).where(of_attempt(members, key)).limit(1)
            if connection.execute(query).first() is not None:
                raise self._refusal(f"{key} already has a cohort")
            connection.execute(insert(members), rows)

    def set_member(
        self,
        key: AttemptKey,
        client_id: str,
        state: MemberState,
        *,
        trouble: str | None = None,
        update: UpdateRow | None = None,
    ) -> None:
        """Store one member's new state; see `set_members`."""
        change = MemberChange(client_id=client_id, state=state, trouble=trouble, update=update)
        self.set_members(key, [change])

    def set_members(self, key: AttemptKey, changes: Sequence[MemberChange]) -> None:
        """Store new states of members, all in one transaction.

        Raises NotFoundError if a client is not in the cohort. Raises StorageError for the state
        RECEIVED without an update, for an update with another state, and for INCLUDED, which only a
        commit sets.
        """
        with self._database.transaction() as connection:
            self._require_open(connection, key)
            for change in changes:
                received = change.state is MemberState.RECEIVED
                if change.state is MemberState.INCLUDED or received != (change.update is not None):
                    raise self._refusal(
                        f"client {change.client_id} can't become {change.state} in {key} "
                        f"{'with' if change.update else 'without'} an update",
                        client=change.client_id,
                    )
                named = {**attempt_parameters(key), "key_client_id": change.client_id}
                result = connection.execute(_CHANGE_MEMBER, {**named, **member_values(change)})
                if result.rowcount != 1:
                    raise NotFoundError(
                        f"client {change.client_id} is not in the cohort of {key}",
                        client=change.client_id,
                    )

    def abandon_attempt(
        self, key: AttemptKey, reason: str, state: AttemptState = AttemptState.ABANDONED
    ) -> None:
        """Mark an attempt as given up. state: how it ended. Raises StorageError if it is not
        open."""
        attempts = schema.attempts
        with self._database.transaction() as connection:
            self._require_open(connection, key)
            connection.execute(
                update(attempts)
                .where(of_attempt(attempts, key))
                .values(state=state.value, reason=encode_text(reason))
            )

    def current_attempt(self, run_id: str) -> AttemptRow | None:
        """Return the open attempt of a run, with all data needed to continue it; None if no attempt
        is open."""
        attempts = schema.attempts
        # Only the newest attempt can be open, see begin_attempt. A search would read all attempts.
        newest = (
            select(attempts)
            .where(attempts.c.run_id == run_id)
            .order_by(attempts.c.round.desc(), attempts.c.attempt.desc())
            .limit(1)
        )
        with self._database.transaction() as connection:
            rows = read_rows(connection, newest)
            if not rows or rows[0]["state"] != AttemptState.OPEN.value:
                return None
            begun = _read_begun(rows[0])
            key = AttemptKey(begun.run_id, begun.round, begun.attempt)
            found = read_members(connection, of_attempt(schema.members, key))
            return AttemptRow(
                key=key,
                begun_at=begun.begun_at,
                available=begun.available,
                members=tuple(found.get(key, list[MemberRow]())),
                exchanges=tuple(_exchanges(connection, key)),
                spent=begun.spent,
            )

    def _require_open(self, connection: Connection, key: AttemptKey) -> None:
        if not _is_open(connection, key):
            raise self._refusal(f"{key} is not open")

    def _put_question(
        self,
        connection: Connection,
        key: AttemptKey,
        step: int,
        question: JsonObject,
    ) -> None:
        table = schema.exchanges
        query = select(table.c.question).where(of_attempt(table, key), table.c.step == step)
        text = encode_json(question)
        asked = connection.execute(query).scalar_one_or_none()
        if asked is None:
            row = {**key._asdict(), "step": step, "question": text}
            connection.execute(insert(table), row)
        elif asked != text:
            raise self._refusal(
                f"another question was asked at step {step} in {key}: the selector is not "
                "deterministic",
            )


def last_commit(connection: Connection, run_id: str) -> tuple[int, str | None]:
    """Return the last committed round and the digest of its model. Before the first commit, return
    0 and the digest of the initial model, or (0, None) without a model."""
    rounds, runs = schema.rounds, schema.runs
    row = connection.execute(
        select(rounds.c.round, rounds.c.model_blake3)
        .where(rounds.c.run_id == run_id)
        .order_by(rounds.c.round.desc())
        .limit(1)
    ).one_or_none()
    if row is not None:
        return row[0], row[1]
    initial = connection.execute(
        select(runs.c.initial_model_blake3).where(runs.c.run_id == run_id)
    ).scalar_one_or_none()
    return 0, initial


def _last_attempt(connection: Connection, run_id: str, round_number: int) -> int:
    attempts = schema.attempts
    query = select(func.coalesce(func.max(attempts.c.attempt), 0)).where(
        attempts.c.run_id == run_id, attempts.c.round == round_number
    )
    return int(connection.execute(query).scalar_one())


def _is_open(connection: Connection, key: AttemptKey) -> bool:
    state = connection.execute(_STATE, attempt_parameters(key)).scalar_one_or_none()
    return state == AttemptState.OPEN.value


def _exchanges(connection: Connection, key: AttemptKey) -> list[Exchange]:
    table = schema.exchanges
    query = select(table).where(of_attempt(table, key)).order_by(table.c.step)
    return [_read_exchange(row) for row in read_rows(connection, query)]
