"""The inbox of a run: checks received updates, stores them and posts them to the state machine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from potluck.common.errors import (
    PotluckError,
    ProtocolError,
    RoundClosedError,
    StorageError,
    TooLargeError,
    UpdateError,
    is_permanent,
    open_files_error,
)
from potluck.common.monitoring.metric_labels import SUM
from potluck.common.net.transfer import FileReceiver, check_size, held_bytes
from potluck.common.plain_text import plain
from potluck.rpc.v1 import transfer_pb2
from potluck.server.clock import now
from potluck.server.hosts.instructions import train_instruction_id
from potluck.server.hosts.offences import OFFENCES
from potluck.server.live.run import Run
from potluck.server.machine import events as rounds
from potluck.server.machine.machine import Phase
from potluck.server.reduce.update_files import SpooledUpdate
from potluck.server.store.model_files import ModelVersion
from potluck.server.store.records import AttemptKey, LateRow, MemberChange, MemberState, UpdateRow
from potluck.server.updates.update_path import ReceivedUpdate, UpdatePath

MOST_NAMED = 50
"""Maximum number of a sum's clients that an error message names. The message must fit into a call's
metadata."""


def members_of(header: transfer_pb2.UpdateHeader) -> Sequence[transfer_pb2.SumMember]:
    """Return the updates in an announced file: its single update, or the members of a sum."""
    if header.members:
        return header.members
    return [
        transfer_pb2.SumMember(
            client_id=header.client_id, update_id=header.update_id, report=header.report
        )
    ]


@dataclass(frozen=True)
class _Arrival:
    """An update that is being recorded in the store, or all updates of one sum."""

    key: AttemptKey
    changes: Sequence[MemberChange]
    recorded: asyncio.Future[None]


class UpdateInbox:
    """Receives the updates of a prepared run. Used on the event loop."""

    def __init__(self, run: Run, path: UpdatePath) -> None:
        self._run = run
        self._path = path
        self._arrivals: list[_Arrival] = []
        self._recording: asyncio.Task[None] | None = None
        # ids of updates that are being stored; no second upload may contain them
        self._being_recorded: set[str] = set()

    def model(self, client: str, update_id: str) -> ModelVersion:
        """Return the model that an update was trained from."""
        late = self._late(client, update_id)
        models = self._run.models
        return models.current if late is None else models.whole(late.model_blake3)

    # Which updates ----------------------------------------------------------------------------

    def has(self, client: str, update_id: str, blake3: str) -> bool:
        """Return True if this update is spooled in the current attempt, or is a late update that
        has arrived.

        An update in a sum must have arrived in the file with this digest.
        """
        run, late = self._run, self._late(client, update_id)
        if late is not None:
            return late.update is not None
        update = run.updates.received.get(client)
        if update is None or update_id != run.instruction_id(client):
            return False
        return update.row.encoding != SUM or update.row.blake3 == blake3

    def expects(self, client: str, update_id: str) -> bool:
        """Return True if the round waits for this update. Returns False until the selector has
        decided which updates are wanted."""
        run, machine = self._run, self._run.machine
        waits = machine.cohort.waits_for(client) and not machine.cohort.undecided
        under_way = machine.phase is not Phase.ENDED and waits
        return under_way and update_id == run.instruction_id(client)

    def _late(self, client: str, update_id: str) -> LateRow | None:
        """Return the late training that this update results from; None if it is not a late
        update."""
        late = self._run.updates.late.find(client)
        if late is None or update_id != train_instruction_id(*late.key, client):
            return None
        return late

    def _key(self, client: str, update_id: str) -> AttemptKey | None:
        """Return the attempt that waits for an update; None if there is none."""
        run, machine, late = self._run, self._run.machine, self._late(client, update_id)
        if late is not None:
            return None if machine.phase is Phase.ENDED else late.key
        if self.expects(client, update_id):
            return run.key
        missed = machine.phase is not Phase.ENDED and client in machine.cohort.missed
        if missed and not run.updates.late.simulated and update_id == run.instruction_id(client):
            return run.key
        return None

    def require(self, client: str, update_id: str) -> None:
        """Raise RoundClosedError unless an attempt waits for the update with this id."""
        self._require([transfer_pb2.SumMember(client_id=client, update_id=update_id)])

    def _require(self, members: Iterable[transfer_pb2.SumMember]) -> None:
        """Raise RoundClosedError, naming the clients, unless an attempt waits for each of these
        updates."""
        gone = [each for each in members if self._key(each.client_id, each.update_id) is None]
        self._refuse_for(gone)

    def _refuse_for(self, gone: Sequence[transfer_pb2.SumMember]) -> None:
        if gone:
            client, update_id = gone[0].client_id, gone[0].update_id[:200]
            raise RoundClosedError(
                f"update '{update_id}' of client '{client}' is no longer needed; delete it",
                update=update_id,
                client=client,
                clients=",".join(each.client_id for each in gone[:MOST_NAMED]),
            )

    # While one arrives ------------------------------------------------------------------------

    def announced(self, header: transfer_pb2.UpdateHeader) -> None:
        """Check an announced update. Raises RoundClosedError, LayoutError."""
        self._require(members_of(header))
        self._path.check_header(header)

    def held_bytes(self, client: str, update_id: str, blake3: str) -> int:
        """Return the number of bytes already received of the client's file with this digest."""
        return held_bytes(self._file(client, update_id, blake3))

    def receiver(self, header: transfer_pb2.UpdateHeader, maximum: int) -> FileReceiver:
        """Return a receiver of the update's file, up to `maximum` bytes. Raises
        RoundClosedError."""
        run = self._run
        self._require(members_of(header))
        if not header.offset:
            run.services.observer.upload_begins()
        path = self._file(header.client_id, header.update_id, header.blake3)
        run.updates.spool.clear_others(path)
        return FileReceiver(
            path,
            blake3=header.blake3,
            size=header.size,
            offset=header.offset,
            maximum=min(run.models.work.largest_upload(), maximum),
            over=None if header.offset else run.updates.spool.take_spare(),
        )

    def check_size(self, header: transfer_pb2.UpdateHeader, maximum: int) -> None:
        """Raise TooLargeError if the announced size is above `maximum`, as `receiver` would."""
        check_size(header.size, min(self._run.models.work.largest_upload(), maximum))

    def count_up(self, received: int) -> None:
        """Count received bytes of an update."""
        self._run.updates.bytes_up += received
        self._run.services.observer.received(self._path.encoding, received)

    @contextlib.contextmanager
    def spooling(self, header: transfer_pb2.UpdateHeader) -> Iterator[None]:
        """While the block runs, end the run if the disk can't store the update, because sending the
        update again would not help."""
        folder = self._run.updates.spool.folder
        try:
            try:
                yield
            except OSError as error:
                if (passing := open_files_error(error, "coordinator")) is not None:
                    raise passing from error
                raise StorageError(
                    f"can't spool an update to {folder}: {error.strerror}; free space or repair "
                    "the disk, then resume the run",
                    path=folder,
                ) from error
        except StorageError as error:
            self.require(header.client_id, header.update_id)
            self._run.post(rounds.ActionFailed(error.message))
            raise

    def _file(self, client: str, update_id: str, blake3: str) -> Path:
        key = self._key(client, update_id) or self._run.key
        return self._run.updates.spool.path(key.round, key.attempt, client, blake3)

    # Once it is whole -------------------------------------------------------------------------

    async def take(self, update: ReceivedUpdate) -> None:
        """Check an update and store it. Delete its file if it is refused.

        Raises RoundClosedError, UpdateError, TooLargeError, ProtocolError.
        """
        header, path, members = update.header, update.path, members_of(update.header)
        try:
            await self._path.check_file(update)
            self._require(members)
            self._refuse_for([each for each in members if each.update_id in self._being_recorded])
            self._path.check_sender(update)
        except (UpdateError, TooLargeError, ProtocolError) as error:
            await asyncio.to_thread(path.unlink, missing_ok=True)
            for each in members:
                if self.expects(each.client_id, each.update_id):
                    self._reject(each.client_id, error)
                elif self._late(each.client_id, each.update_id) is not None:
                    self.fail_late(each.client_id, f"{error.message} ({error.reason})")
            raise
        await self.accept({each.update_id: self._spooled(header, each, path) for each in members})

    async def accept(self, updates: Mapping[str, SpooledUpdate]) -> None:
        """Record a verified update, or all updates of one sum, in the store; then post them to the
        state machine. updates: by update id.

        Raises RoundClosedError if some updates of a sum are no longer awaited.
        """
        run = self._run
        if await self._accepted_late(updates):
            return
        changes = [
            MemberChange(client_id=each.client, state=MemberState.RECEIVED, update=each.row)
            for each in updates.values()
        ]
        self._being_recorded.update(updates)
        try:
            await self._record(run.key, changes)
        finally:
            self._being_recorded.difference_update(updates)
        awaited = [self.expects(each.client, update_id) for update_id, each in updates.items()]
        if not any(awaited):
            # it is late: the round no longer waits for this client
            await self._accepted_late(updates)
            return
        if not all(awaited):
            self._require(
                transfer_pb2.SumMember(client_id=each.client, update_id=update_id)
                for update_id, each in updates.items()
            )
        run.updates.received.update({each.client: each for each in updates.values()})
        run.services.attendance.retire(list(updates))
        arrived = tuple(
            (each.client, run.arrival(each.client, each.row.seconds)) for each in updates.values()
        )
        summed = next(iter(updates.values())).row.encoding == SUM
        run.post(rounds.SumArrived(arrived) if summed else rounds.UpdateArrived(*arrived[0]))

    async def _accepted_late(self, updates: Mapping[str, SpooledUpdate]) -> bool:
        """Store an update that may join a later round. Return False if it is not such an update.

        Sums never join a later round.
        """
        [(update_id, update), *others] = updates.items()
        run, client = self._run, update.client
        key = self._key(client, update_id)
        if others or key is None or self.expects(client, update_id):
            return False
        await run.services.in_store(lambda store: store.add_late_update(key, client, update.row))
        if self._late(client, update_id) is not None:
            run.updates.late.receive(client, update.row)
        elif self._key(client, update_id) is not None:
            run.updates.received[client] = update
        run.services.attendance.retire([update_id])
        return True

    def fail_late(self, client: str, trouble: str) -> None:
        """Record that a client can't deliver its update for a closed round."""
        run = self._run
        row = run.updates.late.fail(client, plain(trouble, 500))
        if row is not None:
            run.services.attendance.retire([train_instruction_id(*row.key, client)])
            run.say(
                f"round {row.round}: the late update of {client} will not be received: "
                f"{row.trouble}"
            )
            run.updates.post_awaited()

    def fail(self, client: str, message: str, reason: str) -> None:
        """Record that a client can't deliver an update in the current round."""
        run = self._run
        run.services.attendance.retire([run.instruction_id(client)])
        run.services.observer.failed(reason)
        trouble = plain(f"{message[:400]} ({reason[:80]})", 500)
        if is_permanent(reason):
            run.selecting.left_out.add({client: trouble})
        run.post(rounds.ClientFailed(client, trouble))

    def _reject(self, client: str, error: PotluckError) -> None:
        """Record that a client's update in the current round can't be used."""
        if error.reason in OFFENCES:
            self._run.updates.note_offender(client)
        self.fail(client, error.message, error.reason)

    def _spooled(
        self, header: transfer_pb2.UpdateHeader, member: transfer_pb2.SumMember, path: Path
    ) -> SpooledUpdate:
        chosen = self._run.attempt.cohort.get(member.client_id)
        return SpooledUpdate(
            client=member.client_id,
            path=path,
            row=self._row(header, member),
            dropped=() if chosen is None else chosen.work.dropped,
        )

    def _row(self, header: transfer_pb2.UpdateHeader, member: transfer_pb2.SumMember) -> UpdateRow:
        run, report = self._run, self._path.report(member)
        # on a virtual clock, the client reports its seconds
        if not run.plan.run_file.virtual_clock.enabled:
            late = self._late(member.client_id, member.update_id) is not None
            seconds = run.updates.seconds(member.client_id, now(), late=late)
            report = replace(report, seconds=seconds)
        return UpdateRow(
            blake3=header.blake3,
            size=header.size,
            encoding=self._path.encoding,
            delta=header.delta,
            compressed=header.compressed,
            **report.values(),
        )

    # Records ----------------------------------------------------------------------------------

    async def recorded(self) -> None:
        """Wait until all updates that have arrived are stored and posted to the machine."""
        if self._recording is not None:
            await asyncio.wait({self._recording})

    async def _record(self, key: AttemptKey, changes: Sequence[MemberChange]) -> None:
        """Record in the store that updates arrived. Updates that arrive during a write are recorded
        together in the next write."""
        arrival = _Arrival(key, changes, asyncio.get_running_loop().create_future())
        self._arrivals.append(arrival)
        if self._recording is None or self._recording.done():
            self._recording = asyncio.create_task(self._record_arrivals())
        await arrival.recorded

    async def _record_arrivals(self) -> None:
        while self._arrivals:
            batch, self._arrivals = self._arrivals, []
            if len({arrival.key for arrival in batch}) > 1 or not await self._try_record(batch):
                for arrival in batch:  # so that each caller gets its own error
                    await self._try_record([arrival], last=True)

    async def _try_record(self, batch: list[_Arrival], *, last: bool = False) -> bool:
        key = batch[0].key
        changes = [change for arrival in batch for change in arrival.changes]
        try:
            await self._run.services.in_store(lambda store: store.set_members(key, changes))
        except Exception as error:
            if last or len(batch) == 1:
                _resolve(batch[0], error)
            return last or len(batch) == 1
        for arrival in batch:
            _resolve(arrival, None)
        return True


def _resolve(arrival: _Arrival, error: Exception | None) -> None:
    if arrival.recorded.done():
        return  # the call that waited for it was cancelled
    if error is None:
        arrival.recorded.set_result(None)
    else:
        arrival.recorded.set_exception(error)
