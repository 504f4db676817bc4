"""The service hosts call: the control stream, models down, updates up."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from potluck.common.errors import (
    IdentityError,
    LayoutError,
    ProtocolError,
    ProtocolVersionError,
    RoundClosedError,
    StorageError,
    TooLargeError,
    TruncatedError,
    UpdateError,
)
from potluck.common.finite_screen import FiniteScreen
from potluck.common.frames import require
from potluck.common.identity import Identity
from potluck.common.local_steps import LEAST_NORMALIZER, largest_normalizer
from potluck.common.metric_labels import MASKED as MASKED_LABEL
from potluck.common.metric_labels import Direction
from potluck.common.names import is_name
from potluck.common.protocol import FRAMING_VERSION, PROTOCOL_VERSION
from potluck.common.training import LocalTraining
from potluck.common.transfer import FileReceiver, check_digest, held_bytes
from potluck.rpc.v1 import coordinator_pb2, coordinator_pb2_grpc, transfer_pb2
from potluck.server.attendance import LARGEST_EPOCH, Session
from potluck.server.coordinator import Coordinator
from potluck.server.coordinator_metrics import Transfer
from potluck.server.engine import RunEngine
from potluck.server.guard import Context, credential_of, identity_of
from potluck.server.model_files import Published
from potluck.server.outgoing import send_file
from potluck.server.round_events import Broke
from potluck.server.store.records import UpdateRow
from potluck.server.update_files import SpooledUpdate
from potluck.server.wire import ENCODINGS, MASKED

log = structlog.get_logger()

_MOST_SAMPLES = 1 << 40


class CoordinatorService(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Exceptions become statuses in `guard.py`."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    # Control ----------------------------------------------------------------------------------

    async def Attend(
        self, request_iterator: AsyncIterator[coordinator_pb2.AttendRequest], context: Context
    ) -> AsyncIterator[coordinator_pb2.AttendResponse]:
        """The control stream of a host."""
        first = await anext(aiter(request_iterator), None)
        session = self._greet(first, identity_of(context))
        session.certificate_expires = credential_of(context).expires
        await self._coordinator.host_attends(session)
        reader = asyncio.create_task(self._listen(session, request_iterator))
        try:
            yield self._coordinator.welcome()
            while (instruction := await session.outbox.get()) is not None:
                yield coordinator_pb2.AttendResponse(instruction=instruction)
            with contextlib.suppress(asyncio.CancelledError):
                if reader.done():
                    reader.result()
        finally:
            reader.cancel()
            self._coordinator.host_left(session)

    def _greet(self, first: coordinator_pb2.AttendRequest | None, identity: Identity) -> Session:
        if first is None or first.WhichOneof("message") != "hello":
            raise ProtocolError("the first message on the control stream must be a hello")
        hello = first.hello
        if hello.protocol_version != PROTOCOL_VERSION:
            raise ProtocolVersionError(
                f"host '{identity.name}' speaks protocol version {hello.protocol_version}, this "
                f"coordinator {PROTOCOL_VERSION}; install the same release of Potluck on both",
                host=hello.protocol_version,
                coordinator=PROTOCOL_VERSION,
            )
        clients = tuple(hello.client_ids)
        if not clients:
            raise ProtocolError(f"host '{identity.name}' says hello without clients")
        if len(set(clients)) != len(clients):
            raise ProtocolError(f"host '{identity.name}' names a client twice")
        for client in clients:
            _check_client(client, identity)
        return Session(
            host_id=identity.name,
            client_ids=clients,
            device=hello.device[:64],
            tasks=frozenset(name[:64] for name in hello.tasks[:1000]),
            data_epoch=min(hello.data_epoch, LARGEST_EPOCH),
        )

    async def _listen(
        self, session: Session, requests: AsyncIterator[coordinator_pb2.AttendRequest]
    ) -> None:
        attendance = self._coordinator.attendance
        try:
            async for request in requests:
                match request.WhichOneof("message"):
                    case "heartbeat":
                        for progress in request.heartbeat.progress:
                            attendance.report(session, progress)
                    case "acknowledgement":
                        attendance.acknowledge(session, request.acknowledgement.instruction_id)
                    case "answer":
                        attendance.answer(session, request.answer)
                    case other:
                        raise ProtocolError(f"unexpected '{other}' on the control stream")
        finally:
            session.outbox.put_nowait(None)  # the host's half is closed, so close ours

    # Models down ------------------------------------------------------------------------------

    async def FetchModel(
        self, request: coordinator_pb2.CoordinatorServiceFetchModelRequest, context: Context
    ) -> AsyncIterator[Any]:
        """A model file by its digest: messages, and chunks already encoded (see `guard.py`)."""
        blake3 = check_digest(request.blake3)
        peer = identity_of(context).name
        moving = self._coordinator.moving(Direction.DOWN, peer, blake3, offset=request.offset)
        with self._coordinator.files.lent(blake3) as path:
            async with moving as transfer:
                reply = coordinator_pb2.CoordinatorServiceFetchModelResponse
                for message in send_file(path, blake3, request.offset, reply):
                    if isinstance(message, bytes):
                        transfer.moved += len(message)
                        self._coordinator.count_down(blake3, len(message))
                    elif isinstance(message, reply) and message.frame.HasField("trailer"):
                        transfer.complete()  # a host that has it may end the call at once
                    yield message

    # Updates up -------------------------------------------------------------------------------

    async def LocateUpload(
        self, request: coordinator_pb2.LocateUploadRequest, context: Context
    ) -> coordinator_pb2.LocateUploadResponse:
        """How much of an update has arrived."""
        _check_client(request.client_id, identity_of(context))
        engine = await self._coordinator.engine_of(request.update_id)
        if engine.has(request.client_id, request.update_id):
            return coordinator_pb2.LocateUploadResponse(complete=True)
        _check_expected(engine, request.client_id, request.update_id)
        check_digest(request.blake3)
        held = held_bytes(engine.spool_path(request.client_id, request.blake3))
        return coordinator_pb2.LocateUploadResponse(offset=held)

    async def SubmitUpdate(
        self, request_iterator: AsyncIterator[Any], context: Context
    ) -> coordinator_pb2.SubmitUpdateResponse:
        """An update: one header, chunks as views of their bytes (see `guard.py`), one trailer."""
        requests = aiter(request_iterator)
        header = _header(await anext(requests, None))
        client = header.client_id
        _check_client(client, identity_of(context))
        engine = await self._coordinator.engine_of(header.update_id)
        if engine.has(client, header.update_id):
            return coordinator_pb2.SubmitUpdateResponse(duplicate=True)
        _check_expected(engine, client, header.update_id)
        if engine.masking is None:
            _check_report(header)
            _check_steps(header.report, engine.blueprint.training)
        _check_form(header, engine)
        moving = self._coordinator.moving(
            Direction.UP, identity_of(context).name, header.blake3, offset=header.offset
        )
        async with self._coordinator.uploading(header.update_id), moving as transfer:
            model = engine.model
            _check_expected(engine, client, header.update_id)
            if model is None:
                raise RoundClosedError("the run has no model yet")
            try:
                engine.upload_begins()
                screen = FiniteScreen() if header.offset == 0 else None
                path = await self._receive(header, engine, requests, transfer, screen)
                finite = screen is not None and screen.clean
                answer = await self._accept(header, engine, model, path, finite=finite)
                transfer.complete()
                return answer
            except StorageError as error:
                _check_expected(engine, client, header.update_id)
                engine.post(Broke(error.message))  # sending it again can't help
                raise

    async def _receive(
        self,
        header: transfer_pb2.UpdateHeader,
        engine: RunEngine,
        requests: AsyncIterator[Any],
        transfer: Transfer,
        screen: FiniteScreen | None,
    ) -> Path:
        folder = engine.spool.folder
        try:
            path = engine.spool_path(header.client_id, header.blake3)
            engine.spool.clear_others(path)
            announced = min(engine.work.largest_upload(), self._coordinator.maximum_model_bytes)
            over = engine.spool.take_spare()
            receiver = await _receiver(path, header, maximum=announced, over=over)
            with contextlib.closing(receiver):
                return await self._fill(receiver, header, engine, requests, transfer, screen)
        except OSError as error:
            raise StorageError(
                f"can't spool an update to {folder}: {error.strerror}; make room there, or put it "
                "right, and resume the run",
                path=folder,
            ) from error

    async def _fill(
        self,
        receiver: FileReceiver,
        header: transfer_pb2.UpdateHeader,
        engine: RunEngine,
        requests: AsyncIterator[Any],
        transfer: Transfer,
        screen: FiniteScreen | None,
    ) -> Path:
        async for request in requests:
            if isinstance(request, memoryview):
                receiver.write(request)
                if screen is not None:
                    screen.see(request)
                transfer.moved += len(request)
                engine.count_up(len(request))
            else:
                frame = require(request, "a chunk or a trailer").frame
                if frame.WhichOneof("part") != "trailer":
                    raise ProtocolError("after an upload's header come chunks, then a trailer")
                return receiver.finish(frame.trailer.blake3)
        raise TruncatedError(
            f"the upload ended without a trailer after {receiver.received} of {header.size} "
            "bytes; send the rest",
            received=receiver.received,
            size=header.size,
        )

    async def _accept(
        self,
        header: transfer_pb2.UpdateHeader,
        engine: RunEngine,
        model: Published,
        path: Path,
        *,
        finite: bool,
    ) -> coordinator_pb2.SubmitUpdateResponse:
        client = header.client_id
        try:
            if engine.masking is None:
                await asyncio.to_thread(
                    engine.work.check_update,
                    path,
                    model,
                    compressed=header.compressed,
                    finite=finite,
                )
            else:
                await asyncio.to_thread(engine.masking.check, path)
                engine.masking.vouch(client, header.masked_input, header.blake3)
        except (UpdateError, TooLargeError, ProtocolError) as error:
            await asyncio.to_thread(path.unlink, missing_ok=True)
            if engine.expects(client, header.update_id):
                engine.fail(client, error.message, error.reason)
            raise
        _check_expected(engine, client, header.update_id)
        report = header.report
        up, masked = engine.blueprint.run_file.transport.up, engine.masking is not None
        if masked:
            report = transfer_pb2.TrainingReport()  # whatever it says is none of our business
        row = UpdateRow(
            blake3=header.blake3,
            size=header.size,
            encoding=MASKED_LABEL if masked else up.encoding.value,
            delta=header.delta,
            compressed=header.compressed,
            samples=report.samples,
            steps=report.steps,
            seconds=_seconds(engine, client, report),
            loss=None if masked else report.loss,
            normalizer=report.normalizer or None,
            reports=_reports(engine, report),
        )
        update = SpooledUpdate(client=client, path=path, row=row)
        await engine.accept(client, header.update_id, update)
        return coordinator_pb2.SubmitUpdateResponse()


async def _receiver(
    path: Path, header: transfer_pb2.UpdateHeader, *, maximum: int, over: Path | None
) -> FileReceiver:
    begin = partial(
        FileReceiver,
        path,
        blake3=header.blake3,
        size=header.size,
        offset=header.offset,
        maximum=maximum,
        over=over,
    )
    # Going on means hashing what is there, which must not stop everything else.
    return await asyncio.to_thread(begin) if header.offset else begin()


def _check_client(client: str, identity: Identity) -> None:
    if not is_name(client) or not identity.may_speak_for(client):
        raise IdentityError(
            f"host '{identity.name}' may not speak for client {client[:80]!r}; its certificate "
            "does not name it: issue one that does with `potluck pki issue … --clients`",
            host=identity.name,
            client=client[:80],
        )


def _check_expected(engine: RunEngine, client: str, update_id: str) -> None:
    if not engine.expects(client, update_id):
        raise RoundClosedError(
            f"nobody waits for update '{update_id[:200]}' of client '{client}' any more; drop it",
            update=update_id[:200],
            client=client,
        )


def _header(first: Any) -> transfer_pb2.UpdateHeader:
    request = require(first, "an upload's header")
    if request.frame.WhichOneof("part") != "header":
        raise ProtocolError("the first frame of an upload must be its header")
    header: transfer_pb2.UpdateHeader = request.frame.header
    if header.version != FRAMING_VERSION:
        raise ProtocolVersionError(
            f"the upload is framed in version {header.version}, this coordinator reads "
            f"{FRAMING_VERSION}",
            version=header.version,
        )
    check_digest(header.blake3)
    return header


def _check_form(header: transfer_pb2.UpdateHeader, engine: RunEngine) -> None:
    up = engine.blueprint.run_file.transport.up
    if engine.masking is not None:
        if header.encoding != MASKED or not header.delta or header.compressed:
            raise LayoutError(
                "this run wants masked updates; the update announced is in another form"
            )
        return
    if (
        header.encoding != ENCODINGS[up.encoding]
        or header.delta != up.delta
        or (header.compressed and not up.compress)
    ):
        raise LayoutError(
            f"this run wants updates as {up.encoding}{' delta' if up.delta else ''}, "
            f"{'compressed or not' if up.compress else 'not compressed'}; the update announced "
            "is in another form"
        )


def _seconds(engine: RunEngine, client: str, report: transfer_pb2.TrainingReport) -> float:
    """How long the client took: on a virtual clock it says so itself, else it is measured here."""
    if engine.blueprint.run_file.virtual_clock.enabled:
        return report.seconds
    return engine.seconds_since_told(client)


def _reports(engine: RunEngine, report: transfer_pb2.TrainingReport) -> dict[str, float]:
    """What the selector wants to know, as far as it was reported and is a number."""
    return {
        name: report.reports[name]
        for name in sorted(engine.blueprint.reports)
        if name in report.reports and math.isfinite(report.reports[name])
    }


def _check_report(header: transfer_pb2.UpdateHeader) -> None:
    report = header.report
    if not 1 <= report.samples <= _MOST_SAMPLES:
        raise LayoutError(
            f"an update from {report.samples} samples can't be weighted; it must be from 1 to "
            f"{_MOST_SAMPLES}",
            samples=report.samples,
        )
    if not (0 <= report.seconds < math.inf and math.isfinite(report.loss)):
        raise LayoutError(
            f"the update reports {report.seconds} s of training and a loss of {report.loss}; "
            "both must be finite, and the seconds not below 0",
        )


def _check_steps(report: transfer_pb2.TrainingReport, training: LocalTraining) -> None:
    """Strategies weigh by them, so they must be what such a client can have done."""
    planned = training.planned_steps(report.samples)
    if report.steps > planned:
        raise LayoutError(
            f"an update from {report.samples} samples reports {report.steps} steps; this run "
            f"takes {planned} at most",
            steps=report.steps,
        )
    most = largest_normalizer(training, planned)
    unsaid = report.normalizer == 0.0
    if not (unsaid or LEAST_NORMALIZER <= report.normalizer <= most):
        raise LayoutError(
            f"an update reports that its {report.steps} steps amount to {report.normalizer}; it "
            f"must be from {LEAST_NORMALIZER} to {most:g}",
            normalizer=report.normalizer,
        )
