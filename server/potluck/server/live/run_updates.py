"""The updates of a run: those of the current attempt, late ones, and their files."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from potluck.common.interruptible import in_thread
from potluck.server.hosts.attendance import Attendance
from potluck.server.hosts.gather import announce_dropped
from potluck.server.hosts.instructions import train_instruction_id
from potluck.server.live.spool import Spool, intact
from potluck.server.machine import events as rounds
from potluck.server.machine.lateness import SELECTED_AGAIN, LateRegister
from potluck.server.plan.plan import RunPlan
from potluck.server.reduce.late_updates import LateUpdate
from potluck.server.reduce.update_files import SpooledUpdate
from potluck.server.store.records import (
    AttemptKey,
    LateRow,
    MemberWork,
    Participation,
    RoundRow,
    UpdateRow,
)
from potluck.server.store.store_thread import InStore


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A client's offer of an update that it has not sent yet. numbers: the client's answers, in the
    order of the requested names."""

    numbers: Sequence[float]
    samples: int


class Updates:
    """The updates of a run, and their files. Used on the event loop.

    spool: the updates' files. late: trainings that missed their round and may join a later one.
    received: updates of the current attempt, by client. offers: offers of updates that clients have
    not sent yet, by client. joining: late trainings whose updates become part of the round's model.
    bytes_down, bytes_up: bytes transferred in the current attempt.
    """

    def __init__(
        self,
        run_id: str,
        plan: RunPlan,
        spool: Spool,
        *,
        attendance: Attendance,
        in_store: InStore,
        offended: Callable[[Iterable[str]], Awaitable[Mapping[str, str]]],
        post: Callable[[rounds.Event], None],
        warn: Callable[[str], None],
    ) -> None:
        """offended: function that counts offences of clients; it returns the clients that it has
        put into quarantine, with reasons."""
        self._run_id = run_id
        self._attendance = attendance
        self._in_store = in_store
        self._offended = offended
        self._post = post
        self._warn = warn
        self._offenders: set[str] = set()
        self._included: dict[str, str] = {}
        self._late_since: dict[str, float] = {}
        self.spool = spool
        self.late = LateRegister.of(
            [],
            simulated=plan.run_file.virtual_clock.enabled,
            most_rounds=plan.run_file.round.late_updates.rounds,
        )
        self.begin_attempt()

    # The attempt under way --------------------------------------------------------------------

    def begin_attempt(self) -> None:
        """Discard the updates and counts of the previous attempt."""
        self._instructed: dict[str, float] = {}
        self.offers: dict[str, Offer] = {}
        self.received: dict[str, SpooledUpdate] = {}
        self.joining: Sequence[LateRow] = ()
        self.bytes_down = 0
        self.bytes_up = 0

    def note_instructed(self, client: str, at: float) -> None:
        """Record the time at which a client first received its instruction to train."""
        self._instructed.setdefault(client, at)

    def note_instructed_late(self, client: str, at: float) -> None:
        """Record when a client first received the instruction of a training whose round is closed.
        The time recorded in that round, if any, has precedence."""
        self._late_since.setdefault(client, self._instructed.get(client, at))

    def seconds(self, client: str, at: float, *, late: bool) -> float:
        """Return the seconds from a client's instruction until `at`; 0 if a restart lost the time
        of the instruction."""
        since = self._late_since if late else self._instructed
        return at - since.get(client, at)

    # In the model, or refused -----------------------------------------------------------------

    def included(self, client: str) -> str:
        """Return the id of a client's last update that became part of the model; empty if none
        did."""
        return self._included.get(client, "")

    def note_included(self, row: RoundRow) -> None:
        """Record which updates are part of a committed round's model."""
        for member in row.included:
            self._included[member.client_id] = train_instruction_id(*row.key, member.client_id)
        for late in row.late:
            self._included[late.client_id] = train_instruction_id(*late.key, late.client_id)

    def recall(self, participations: Sequence[Participation]) -> None:
        """Record which updates are part of the model, for the rounds committed before the run was
        resumed."""
        for each in participations:
            if each.included_round is not None and each.included_attempt is not None:
                key = (self._run_id, each.included_round, each.included_attempt)
                self._included[each.client_id] = train_instruction_id(*key, each.client_id)

    def note_offender(self, client: str) -> None:
        """Record that a client's update was refused because its numbers are not finite or out of
        bounds."""
        self._offenders.add(client)

    async def judge_offenders(self) -> None:
        """Report the clients with refused updates to `Offences`, which may quarantine them. Call it
        after an attempt with accepted updates."""
        offenders, self._offenders = self._offenders, set()
        for client, why in (await self._offended(sorted(offenders))).items():
            self._warn(f"{client} is in quarantine: {why}; see `potluck clients`")

    # Late ones --------------------------------------------------------------------------------

    async def restore(self, cohort: Sequence[str]) -> None:
        """Wait again for late updates from before a restart, except those of the current cohort."""
        run_id, late = self._run_id, self.late
        rows: list[LateRow] = await self._in_store(lambda store: store.awaited(run_id))
        self.late = LateRegister.of(rows, simulated=late.simulated, most_rounds=late.most_rounds)
        for row in rows:
            if row.update is None:
                continue
            path = self._spooled(row, row.update).path
            if not await in_thread(intact, path, row.update.blake3):
                self.late.lose(row.client_id)  # damaged by a crash; the client sends it again
        for client in cohort:
            await self.give_up(client)

    def join(self, round_seconds: float, allowed: Callable[[Iterable[str]], Iterable[str]]) -> None:
        """Choose the late trainings whose updates become part of the current round's model, in
        client order.

        round_seconds: simulated duration of the round. allowed: function that returns which of the
        given clients may take part.
        """
        found = self.late.joining(round_seconds)
        clients = set(allowed(row.client_id for row in found))
        self.joining = [row for row in found if row.client_id in clients]

    def late_updates(self, round_number: int) -> list[LateUpdate]:
        """Return the late updates that join the round's model."""
        return [
            LateUpdate(
                update=self._spooled(row, row.update),
                age=round_number - row.round,
                model_blake3=row.model_blake3,
            )
            for row in self.joining
            if row.update is not None
        ]

    def close_round(
        self,
        key: AttemptKey,
        weights: Sequence[float],
        missed: Collection[str],
        *,
        model_blake3: str,
        round_seconds: float,
        work: Mapping[str, MemberWork],
    ) -> Sequence[LateRow]:
        """Record which late updates are part of the round, and which are awaited from now on.

        weights: weights of the updates that joined, in the order in which they joined. missed:
        clients of the round whose updates are not part of it. Other arguments: as in
        `LateRegister.close_round`.
        """
        joined = zip(self.joining, weights, strict=True)
        changed = self.late.close_round(
            key,
            {row.client_id: weight for row, weight in joined},
            {
                client: self.received[client].row if client in self.received else None
                for client in missed
                if client in self.received or not self.late.simulated
            },
            model_blake3=model_blake3,
            round_seconds=round_seconds,
            work=work,
        )
        begun = {**self._late_since, **self._instructed}
        self._late_since = {
            row.client_id: begun[row.client_id]
            for row in self.late.awaited
            if row.client_id in begun
        }
        return changed

    def kept_clients(self) -> dict[tuple[int, int], set[str]]:
        """Return the clients whose spooled updates must be kept, by round and attempt."""
        found: dict[tuple[int, int], set[str]] = {}
        for row in self.late.awaited:
            found.setdefault((row.round, row.attempt), set()).add(row.client_id)
        return found

    async def give_up(self, client: str) -> None:
        """Stop awaiting the late update of a client that was selected again."""
        row = self.late.drop(client, SELECTED_AGAIN)
        if row is not None:
            await self._in_store(lambda store: store.set_late([row]))
            self.let_go([row])

    def let_go(self, rows: Sequence[LateRow]) -> None:
        """Instruct hosts to stop late trainings that the run no longer awaits."""
        ids = [train_instruction_id(*row.key, row.client_id) for row in rows]
        self._attendance.retire(ids, abandon=True)
        announce_dropped(self._attendance, rows)

    def post_awaited(self) -> None:
        """Inform the state machine which clients still train for a closed round."""
        self._post(rounds.StillTraining(tuple(row.client_id for row in self.late.awaited)))

    def _spooled(self, row: LateRow, update: UpdateRow) -> SpooledUpdate:
        path = self.spool.path(row.round, row.attempt, row.client_id, update.blake3)
        return SpooledUpdate(client=row.client_id, path=path, row=update)
