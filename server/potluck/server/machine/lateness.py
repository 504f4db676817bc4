"""Tracks updates that missed their round and may join a later one. Pure.

A client has at most one late training at a time. After the commit of its round, the run waits for
the update, for as many further rounds as the run file allows. On a real clock, an update joins the
round that is under way when the update arrives. On a virtual clock, it joins the round in whose
simulated time it would have arrived.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from potluck.server.store.records import (
    AS_THE_RUN_SAYS,
    AttemptKey,
    LateRow,
    LateState,
    MemberWork,
    UpdateRow,
)

SELECTED_AGAIN = "the client was selected again"


@dataclass(kw_only=True)
class LateRegister:
    """The trainings of one run that missed their round, and whose updates may still join a later
    one.

    simulated: True on a virtual clock. most_rounds: maximum number of rounds by which an update may
    be late.
    """

    simulated: bool
    most_rounds: int
    _awaited: dict[str, LateRow]
    _failed: list[LateRow] = field(default_factory=list)  # rows to store with the next round

    @classmethod
    def of(cls, rows: Iterable[LateRow], *, simulated: bool, most_rounds: int) -> LateRegister:
        """Return a register of the trainings that the run awaited before a restart."""
        awaited = {row.client_id: row for row in rows if row.state is LateState.AWAITED}
        return cls(simulated=simulated, most_rounds=most_rounds, _awaited=awaited)

    @property
    def awaited(self) -> Sequence[LateRow]:
        """The trainings whose updates are awaited, sorted by client."""
        return [self._awaited[client] for client in sorted(self._awaited)]

    def find(self, client: str) -> LateRow | None:
        """Return the awaited training of a client; None if there is none."""
        return self._awaited.get(client)

    def receive(self, client: str, update: UpdateRow) -> None:
        """Record that a late update has arrived. Does nothing if it is not awaited."""
        row = self._awaited.get(client)
        if row is not None:
            self._awaited[client] = replace(row, update=update)

    def lose(self, client: str) -> None:
        """Record that the coordinator has lost a late update that its client can send again."""
        row = self._awaited.get(client)
        if row is not None:
            self._awaited[client] = replace(row, update=None)

    def drop(self, client: str, trouble: str) -> LateRow | None:
        """Stop awaiting a client's training. Return the row to store; None if it was not
        awaited."""
        row = self._awaited.pop(client, None)
        return None if row is None else replace(row, state=LateState.DROPPED, trouble=trouble)

    def fail(self, client: str, trouble: str) -> LateRow | None:
        """Stop awaiting a training that failed. The row is stored with the next round; if the
        coordinator is killed before, the training fails again."""
        row = self.drop(client, trouble)
        self._failed += [] if row is None else [row]
        return row

    def joining(self, round_seconds: float) -> Sequence[LateRow]:
        """Return the late trainings whose update joins the current round, sorted by client.

        round_seconds: simulated duration of the current round.
        """
        return [
            row
            for row in self.awaited
            if row.update is not None and (not self.simulated or row.seconds_left <= round_seconds)
        ]

    def close_round(
        self,
        key: AttemptKey,
        joined: Mapping[str, float],
        missed: Mapping[str, UpdateRow | None],
        *,
        model_blake3: str,
        round_seconds: float,
        work: Mapping[str, MemberWork],
    ) -> Sequence[LateRow]:
        """Close a committed round; return the rows of late trainings to store with it.

        joined: weight of each late update in the round's model, by client. missed: clients of the
        round whose update may still join a later round, each with the update if it has arrived.
        model_blake3: digest of the model from which the round's clients started. round_seconds:
        simulated duration of the round. work: the work that the selector set for each client.
        """
        changed, self._failed = self._failed, []
        for row in self.awaited:
            if row.client_id in joined:
                weight = joined[row.client_id]
                state = replace(row, state=LateState.JOINED, joined_round=key.round, weight=weight)
            else:
                state = replace(row, seconds_left=self._left(row.seconds_left, round_seconds))
            changed.append(self._aged(state, key.round))
        for client, update in sorted(missed.items()):
            seconds = 0.0 if update is None else update.seconds
            row = LateRow(
                run_id=key.run_id,
                round=key.round,
                attempt=key.attempt,
                client_id=client,
                state=LateState.AWAITED,
                model_blake3=model_blake3,
                seconds_left=self._left(seconds, round_seconds),
                update=update,
                work=work.get(client, AS_THE_RUN_SAYS),
            )
            changed.append(self._aged(row, key.round))
        self._awaited = {row.client_id: row for row in changed if row.state is LateState.AWAITED}
        return changed

    def _left(self, seconds: float, passed: float) -> float:
        return max(0.0, seconds - passed) if self.simulated else 0.0

    def _aged(self, row: LateRow, committed: int) -> LateRow:
        """Return the training's row, marked as dropped if its update would be too late for the next
        round."""
        if row.state is LateState.AWAITED and committed + 1 - row.round > self.most_rounds:
            trouble = f"not within {self.most_rounds} more rounds"
            return replace(row, state=LateState.DROPPED, trouble=trouble)
        return row
