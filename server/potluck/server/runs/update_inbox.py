"""The inbox of a run: updates of the attempt under way, checked, recorded and reported to it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
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
)
from potluck.common.net.transfer import FileReceiver, held_bytes
from potluck.common.plain_text import plain
from potluck.rpc.v1 import transfer_pb2
from potluck.server.aggregation.update_files import SpooledUpdate
from potluck.server.clock import now
from potluck.server.hosts.offences import OFFENCES
from potluck.server.rounds import events as rounds
from potluck.server.rounds.machine import Phase
from potluck.server.runs.run import Run
from potluck.server.runs.update_path import ReceivedUpdate, UpdatePath
from potluck.server.store.model_files import ModelVersion
from potluck.server.store.records import AttemptKey, MemberChange, MemberState, UpdateRow


@dataclass(frozen=True)
class _Arrival:
    """An update that is to be recorded."""

    key: AttemptKey
    change: MemberChange
    recorded: asyncio.Future[None]


class UpdateInbox:
    """Takes the updates of a prepared run. Lives on the event loop."""

    def __init__(self, run: Run, path: UpdatePath) -> None:
        self._run = run
        self._path = path
        self._arrivals: list[_Arrival] = []
        self._recording: asyncio.Task[None] | None = None

    @property
    def model(self) -> ModelVersion:
        """The model clients train from."""
        return self._run.model

    # Which updates ----------------------------------------------------------------------------

    def has(self, client: str, update_id: str) -> bool:
        """True if the update with this id is spooled in the attempt under way."""
        run = self._run
        return client in run.intake.updates and update_id == run.instruction_id(client)

    def expects(self, client: str, update_id: str) -> bool:
        """True if an update with this id is waited for; not while it is undecided whose are."""
        run, machine = self._run, self._run.machine
        waits = machine.cohort.waits_for(client) and not machine.cohort.undecided
        under_way = machine.phase is not Phase.ENDED and waits
        return under_way and update_id == run.instruction_id(client)

    def require(self, client: str, update_id: str) -> None:
        """Raises RoundClosedError unless an update with this id is waited for."""
        if not self.expects(client, update_id):
            raise RoundClosedError(
                f"update '{update_id[:200]}' of client '{client}' is not waited for any more; "
                "drop it",
                update=update_id[:200],
                client=client,
            )

    # While one arrives ------------------------------------------------------------------------

    def announced(self, header: transfer_pb2.UpdateHeader) -> None:
        """Check an announced update. Raises RoundClosedError, LayoutError."""
        self.require(header.client_id, header.update_id)
        self._path.check_header(header)

    def held_bytes(self, client: str, blake3: str) -> int:
        """Bytes that have arrived of the client's file with this digest."""
        return held_bytes(self._file(client, blake3))

    def receiver(self, header: transfer_pb2.UpdateHeader, maximum: int) -> FileReceiver:
        """Receiver of the update's file, of at most so many bytes. Raises RoundClosedError."""
        run = self._run
        self.require(header.client_id, header.update_id)
        run.services.observer.upload_begins()
        path = self._file(header.client_id, header.blake3)
        run.spool.clear_others(path)
        return FileReceiver(
            path,
            blake3=header.blake3,
            size=header.size,
            offset=header.offset,
            maximum=min(run.work.largest_upload(), maximum),
            over=None if header.offset else run.spool.take_spare(),
        )

    def count_up(self, received: int) -> None:
        """Count bytes of an update that came in."""
        self._run.intake.bytes_up += received
        self._run.services.observer.received(self._path.encoding, received)

    @contextlib.contextmanager
    def spooling(self, header: transfer_pb2.UpdateHeader) -> Iterator[None]:
        """A disk that refuses the update ends the run: sending it again can't help."""
        folder = self._run.spool.folder
        try:
            try:
                yield
            except OSError as error:
                raise StorageError(
                    f"can't spool an update to {folder}: {error.strerror}; make room there, or put "
                    "it right, and resume the run",
                    path=folder,
                ) from error
        except StorageError as error:
            self.require(header.client_id, header.update_id)
            self._run.post(rounds.Broke(error.message))
            raise

    def _file(self, client: str, blake3: str) -> Path:
        machine = self._run.machine
        return self._run.spool.path(machine.round, machine.attempt, client, blake3)

    # Once it is whole -------------------------------------------------------------------------

    async def take(self, update: ReceivedUpdate) -> None:
        """Check an update and have it recorded; delete its file if it is refused.

        Raises RoundClosedError, UpdateError, TooLargeError, ProtocolError.
        """
        header, path = update.header, update.path
        client, update_id = header.client_id, header.update_id
        try:
            await self._path.check_file(update)
            self.require(client, update_id)
            self._path.check_sender(update)
        except (UpdateError, TooLargeError, ProtocolError) as error:
            await asyncio.to_thread(path.unlink, missing_ok=True)
            if self.expects(client, update_id):
                self._reject(client, error)
            raise
        member = self._run.attempt.cohort.get(client)
        spooled = SpooledUpdate(
            client=client,
            path=path,
            row=self._row(header),
            dropped=() if member is None else member.work.dropped,
        )
        await self.accept(update_id, spooled)

    async def accept(self, update_id: str, update: SpooledUpdate) -> None:
        """Record a verified update, then tell the machine."""
        run, client = self._run, update.client
        change = MemberChange(client_id=client, state=MemberState.RECEIVED, update=update.row)
        await self._record(run.key, change)
        if not self.expects(client, update_id):
            return
        run.intake.updates[client] = update
        run.services.attendance.retire([update_id])
        run.post(rounds.UpdateArrived(client, update.row.seconds))

    def fail(self, client: str, message: str, reason: str) -> None:
        """A client can't deliver an update in the round under way."""
        run = self._run
        run.services.attendance.retire([run.instruction_id(client)])
        run.services.observer.failed(reason)
        trouble = plain(f"{message[:400]} ({reason[:80]})", 500)
        if is_permanent(reason):
            run.left_out.add({client: trouble})
        run.post(rounds.ClientFailed(client, trouble))

    def _reject(self, client: str, error: PotluckError) -> None:
        """The update of a client that is in the round under way can't be used."""
        if error.reason in OFFENCES:
            self._run.offenders.add(client)
        self.fail(client, error.message, error.reason)

    def _row(self, header: transfer_pb2.UpdateHeader) -> UpdateRow:
        run, report = self._run, self._path.report(header)
        if not run.plan.run_file.virtual_clock.enabled:  # else the client says it
            instructed = run.intake.instructed.get(header.client_id, now())
            report = replace(report, seconds=now() - instructed)
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
        """Wait until the updates that have arrived by now are stored and posted to the machine."""
        if self._recording is not None:
            await asyncio.wait({self._recording})

    async def _record(self, key: AttemptKey, change: MemberChange) -> None:
        """Store that an update arrived, with those that arrive while others are being stored."""
        arrival = _Arrival(key, change, asyncio.get_running_loop().create_future())
        self._arrivals.append(arrival)
        if self._recording is None or self._recording.done():
            self._recording = asyncio.create_task(self._record_arrivals())
        await arrival.recorded

    async def _record_arrivals(self) -> None:
        while self._arrivals:
            batch, self._arrivals = self._arrivals, []
            if len({arrival.key for arrival in batch}) > 1 or not await self._try_record(batch):
                for arrival in batch:  # so that each learns what is wrong with its own
                    await self._try_record([arrival], last=True)

    async def _try_record(self, batch: list[_Arrival], *, last: bool = False) -> bool:
        key, changes = batch[0].key, [arrival.change for arrival in batch]
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
