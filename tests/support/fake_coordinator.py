"""A coordinator controlled by a test: real gRPC over mutual TLS, without runs or a store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.duration_pb2 import Duration
from grpc_status import rpc_status
from support.fake_store import FakeStore
from support.pki import server_credentials

from potluck.common.errors import (
    DigestMismatchError,
    NotFoundError,
    ObjectStoreError,
    PotluckError,
    to_status,
)
from potluck.common.net.protocol import FRAMING_VERSION, PROTOCOL_VERSION, VERSIONS
from potluck.common.net.tls import SERVER_OPTIONS, TlsFiles
from potluck.common.tensors.digest import digest_of
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.rpc.v1 import coordinator_pb2_grpc, transfer_pb2

Context = grpc.aio.ServicerContext[Any, Any]
_CHUNK = 1 << 16
_PATIENCE_SECONDS = 240.0


async def refuse(context: Context, error: PotluckError) -> NoReturn:
    await context.abort_with_status(rpc_status.to_status(to_status(error)))
    raise AssertionError("abort always raises")


@dataclass
class Upload:
    """The received part of an update."""

    header: transfer_pb2.UpdateHeader
    content: bytes = b""
    confirmed: int = 0
    """End of the last piece that was confirmed; the next piece of this attempt begins there."""
    cut: int | None = None
    complete: bool = False


@dataclass
class FakeCoordinator(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Coordinator that records all messages of hosts. Its attributes set its deliberate errors."""

    files: dict[str, bytes] = field(default_factory=dict)
    arrivals: int = 0
    """Number of hosts that connected, including those that have disconnected."""
    hellos: list[rpc.Hello] = field(default_factory=list)
    heartbeats: list[rpc.Heartbeat] = field(default_factory=list)
    acknowledged: list[str] = field(default_factory=list)
    answers: list[rpc.Answer] = field(default_factory=list)
    fetches: list[tuple[str, int]] = field(default_factory=list)
    uploads: dict[str, Upload] = field(default_factory=dict)
    headers: list[transfer_pb2.UpdateHeader] = field(default_factory=list)
    """The header of the first piece of each attempt to send an update."""
    hosts: int = 0
    port: int = 0
    versions: Mapping[str, int] = field(default_factory=lambda: VERSIONS)
    coordinator_id: str = "fake"
    """Id of the coordinator's process; a new value simulates a restart."""
    heartbeat_interval: Duration = field(default_factory=lambda: Duration(nanos=50_000_000))
    refuse_hello: PotluckError | None = None
    refuse_update: PotluckError | None = None
    judge: Callable[[transfer_pb2.UpdateHeader], PotluckError | None] = lambda _: None
    """Function that returns the error with which to refuse an announced update; None to accept
    it."""
    mismatches: int = 0
    """Number of uploads to report as having a wrong digest."""
    corrupt: int = 0
    """Number of downloads in which to change a byte."""
    cut_download_after: list[int] = field(default_factory=list)
    """For each of the next downloads, the number of bytes after which to break it off."""
    cut_upload_after: list[int] = field(default_factory=list)
    hold_downloads: asyncio.Event | None = None
    """Event for which downloads wait; None if they don't wait."""
    hold_uploads: asyncio.Event | None = None
    """Event for which uploads wait; None if they don't wait."""
    held_uploads: int = 0
    """Number of uploads that wait for `hold_uploads`."""
    store: FakeStore | None = None
    """Store from which hosts fetch files and to which they upload."""
    direct: bool = True
    """True if files may also be sent directly."""
    named: str = ""
    """Origin of a store that hosts receive in place of the real one; empty for the real one."""
    distrusted: int = 0
    """Number of model requests in which hosts reported that the store has wrong content."""
    _outboxes: list[asyncio.Queue[rpc.Instruction | None]] = field(default_factory=list)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    # For tests ---------------------------------------------------------------------------------

    def offer(self, content: bytes) -> str:
        """Offer a file for download; return its digest."""
        blake3 = digest_of(content)
        self.files[blake3] = content
        return blake3

    def instruct(self, instruction: rpc.Instruction) -> None:
        """Send an instruction to the host that connected last."""
        self._outboxes[-1].put_nowait(instruction)

    def abandon(self, *instruction_ids: str) -> None:
        """Cancel these instructions."""
        off = rpc.Abandon(instruction_ids=instruction_ids)
        self._outboxes[-1].put_nowait(rpc.Instruction(id="abandon", abandon=off))

    def send_away(self) -> None:
        """End the control stream of the host that connected last."""
        self._outboxes[-1].put_nowait(None)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until messages of hosts make `condition` true."""
        async with asyncio.timeout(_PATIENCE_SECONDS), self._changed:
            await self._changed.wait_for(condition)

    async def completed(self, update_id: str) -> Upload:
        await self.until(lambda: update_id in self.uploads and self.uploads[update_id].complete)
        return self.uploads[update_id]

    async def idle(self) -> None:
        """Wait for a heartbeat that reports no work."""
        self.heartbeats.clear()
        await self.until(lambda: any(not each.progress for each in self.heartbeats))

    async def computing(self, instruction_id: str) -> None:
        """Wait for a heartbeat that reports the instruction as computing."""
        await self._at_stage(instruction_id, rpc.Progress.STAGE_COMPUTING)

    async def downloading(self, instruction_id: str) -> None:
        """Wait for a heartbeat that reports the instruction as downloading."""
        await self._at_stage(instruction_id, rpc.Progress.STAGE_DOWNLOADING)

    async def _at_stage(self, instruction_id: str, stage: rpc.Progress.Stage.ValueType) -> None:
        await self.until(
            lambda: any(
                (progress.instruction_id, progress.stage) == (instruction_id, stage)
                for heartbeat in self.heartbeats[-1:]
                for progress in heartbeat.progress
            )
        )

    async def answered(self, instruction_id: str, times: int = 1) -> rpc.Answer:
        def found() -> list[rpc.Answer]:
            return [each for each in self.answers if each.instruction_id == instruction_id]

        await self.until(lambda: len(found()) >= times)
        return found()[-1]

    async def _hold(self, released: asyncio.Event) -> None:
        self.held_uploads += 1
        try:
            await released.wait()
        finally:
            self.held_uploads -= 1
            await self._note()

    async def _note(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    # The service -------------------------------------------------------------------------------

    async def Attend(  # noqa: N802  the service's name for it
        self, request_iterator: AsyncIterator[rpc.AttendRequest], context: Context
    ) -> AsyncIterator[rpc.AttendResponse]:
        hello = (await anext(request_iterator)).hello
        self.hellos.append(hello)
        if self.refuse_hello is not None:
            await refuse(context, self.refuse_hello)
        assert hello.protocol_version == PROTOCOL_VERSION
        outbox: asyncio.Queue[rpc.Instruction | None] = asyncio.Queue()
        self._outboxes.append(outbox)
        welcome = rpc.Welcome(coordinator_id=self.coordinator_id, versions=self.versions)
        welcome.object_store = self.store is not None
        welcome.heartbeat_interval.CopyFrom(self.heartbeat_interval)
        yield rpc.AttendResponse(welcome=welcome)
        self.hosts += 1
        self.arrivals += 1
        await self._note()
        listening = asyncio.create_task(self._listen(request_iterator))
        try:
            while (instruction := await outbox.get()) is not None:
                yield rpc.AttendResponse(instruction=instruction)
        finally:
            listening.cancel()
            self.hosts -= 1
            await asyncio.shield(self._note())

    async def _listen(self, requests: AsyncIterator[rpc.AttendRequest]) -> None:
        async for request in requests:
            kind = request.WhichOneof("message")
            if kind == "heartbeat":
                self.heartbeats.append(request.heartbeat)
            elif kind == "acknowledgement":
                self.acknowledged.append(request.acknowledgement.instruction_id)
            elif kind == "answer":
                self.answers.append(request.answer)
            await self._note()

    async def FetchModel(  # noqa: N802  the service's name for it
        self, request: rpc.CoordinatorServiceFetchModelRequest, context: Context
    ) -> AsyncIterator[rpc.CoordinatorServiceFetchModelResponse]:
        self.fetches.append((request.blake3, request.offset))
        await self._note()
        if request.blake3 not in self.files:
            await refuse(context, NotFoundError("there is no such file"))
        content = self.files[request.blake3]
        if request.from_store and self.store is not None:
            self.distrusted += request.distrust
            self.store.objects.setdefault(f"/{request.blake3}", content)
            yield _down(transfer_pb2.ModelFrame(elsewhere=self._place(request.blake3)))
            return
        header = transfer_pb2.FileHeader(
            version=FRAMING_VERSION, blake3=request.blake3, size=len(content), offset=request.offset
        )
        yield _down(transfer_pb2.ModelFrame(header=header))
        if self.hold_downloads is not None:
            await self.hold_downloads.wait()
        if self.corrupt:
            self.corrupt -= 1
            content = content[:-1] + bytes([content[-1] ^ 1])
        cut = self.cut_download_after.pop(0) if self.cut_download_after else None
        for begin in range(request.offset, len(content), _CHUNK):
            if cut is not None and begin - request.offset >= cut:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "cut by the test")
            yield _down(transfer_pb2.ModelFrame(chunk=content[begin : begin + _CHUNK]))
        yield _down(
            transfer_pb2.ModelFrame(trailer=transfer_pb2.FileTrailer(blake3=request.blake3))
        )

    async def SubmitUpdate(  # noqa: N802  the service's name for it
        self, request_iterator: AsyncIterator[rpc.SubmitUpdateRequest], context: Context
    ) -> rpc.SubmitUpdateResponse:
        header = (await anext(request_iterator)).frame.header
        upload = self.uploads.get(header.update_id)
        follows = upload is not None and 0 < header.offset == upload.confirmed
        if not follows:
            self.headers.append(header)
        await self._note()
        if self.hold_uploads is not None:
            await self._hold(self.hold_uploads)
        refusal = self.refuse_update or self.judge(header)
        if refusal is not None:
            await refuse(context, refusal)
        if header.stored and self.store is not None:
            found = self.store.objects.get(f"/{header.blake3}")
            if found is None:
                await refuse(context, ObjectStoreError("there is no such object"))
            if self.mismatches:
                self.mismatches -= 1
                await refuse(context, DigestMismatchError("the object has another digest"))
            self.uploads[header.update_id] = Upload(header, content=found or b"", complete=True)
            await self._note()
            return rpc.SubmitUpdateResponse()
        upload = self.uploads.get(header.update_id)
        if upload is None or not header.offset:
            upload = self.uploads[header.update_id] = Upload(header)
        assert header.offset <= len(upload.content)
        upload.content = upload.content[: header.offset]
        if not follows:
            upload.cut = self.cut_upload_after.pop(0) if self.cut_upload_after else None
        cut = upload.cut
        async for request in request_iterator:
            if request.frame.WhichOneof("part") == "trailer":
                break
            upload.content += request.frame.chunk
            if cut is not None and len(upload.content) >= cut:
                upload.content = upload.content[:cut]
                await context.abort(grpc.StatusCode.UNAVAILABLE, "cut by the test")
        if header.until:
            assert len(upload.content) == header.until
            upload.confirmed = header.until
            return rpc.SubmitUpdateResponse(received=header.until)
        if self.mismatches:
            self.mismatches -= 1
            del self.uploads[header.update_id]
            await refuse(context, DigestMismatchError("the digest does not match, says the test"))
        assert digest_of(upload.content) == header.blake3
        upload.complete = True
        await self._note()
        return rpc.SubmitUpdateResponse()

    async def LocateUpload(  # noqa: N802  the service's name for it
        self, request: rpc.LocateUploadRequest, context: Context
    ) -> rpc.LocateUploadResponse:
        upload = self.uploads.get(request.update_id)
        if request.HasField("header") and self.store is not None and upload is None:
            there = request.header.stored and f"/{request.blake3}" in self.store.objects
            return rpc.LocateUploadResponse(place=self._place(request.blake3), stored=there)
        if upload is None or upload.header.blake3 != request.blake3:
            return rpc.LocateUploadResponse()
        return rpc.LocateUploadResponse(offset=len(upload.content), complete=upload.complete)

    def _place(self, name: str) -> transfer_pb2.StoredFile:
        assert self.store is not None
        return transfer_pb2.StoredFile(
            url=f"{self.named or self.store.origin}/{name}", direct=self.direct
        )


def _down(frame: transfer_pb2.ModelFrame) -> rpc.CoordinatorServiceFetchModelResponse:
    return rpc.CoordinatorServiceFetchModelResponse(frame=frame)


@asynccontextmanager
async def serving(fake: FakeCoordinator, tls: TlsFiles, *, port: int = 0) -> AsyncIterator[int]:
    """Serve the fake coordinator on a loopback port; yield the port."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(fake, server)
    bound = server.add_secure_port(f"127.0.0.1:{port}", server_credentials(tls))
    await server.start()
    try:
        yield bound
    finally:
        await server.stop(None)
