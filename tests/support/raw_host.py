"""A host that sends any messages that a test sets: raw stubs over real mutual TLS."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from potluck.client.config import ClientConfig
from potluck.common.errors import PotluckError, from_rpc_error
from potluck.common.net.protocol import FRAMING_VERSION, PROTOCOL_VERSION, VERSIONS
from potluck.common.net.tls import CHANNEL_OPTIONS, TlsFiles, channel_credentials
from potluck.common.settings import plugins
from potluck.common.settings.configuration import load
from potluck.common.tensors.digest import digest_of
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.rpc.v1 import coordinator_pb2_grpc, transfer_pb2

PATIENCE_SECONDS = 240.0
_METHOD = "/potluck.rpc.v1.CoordinatorService/"

Refusal = tuple[grpc.StatusCode, str]
"""Status and reason; the reason is empty if gRPC itself refused the call."""


def refusal_of(error: grpc.aio.AioRpcError) -> Refusal:
    found = from_rpc_error(error)
    known = type(found) is not PotluckError and found.code is error.code()
    return error.code(), found.reason if known and found.reason != "UNREACHABLE" else ""


UNTOLD: Refusal = (grpc.StatusCode.INTERNAL, "")
"""Error that gRPC may report in place of the refusal if the coordinator refuses a call before all
messages are written."""


class RawHost:
    """A host's connection to the coordinator, with the host's certificate. Use it as a context
    manager."""

    def __init__(self, address: str, tls: TlsFiles, *, name: str = "raw") -> None:
        options = (
            *(o for o in CHANNEL_OPTIONS if "message_length" not in o[0]),
            ("grpc.max_send_message_length", -1),
            ("grpc.use_local_subchannel_pool", 1),  # don't share the connection
            ("potluck.raw", name),
        )
        self.channel = grpc.aio.secure_channel(address, channel_credentials(tls), options=options)
        self.stub: coordinator_pb2_grpc.CoordinatorServiceAsyncStub = (
            coordinator_pb2_grpc.CoordinatorServiceStub(self.channel)
        )
        self.submit_bytes: Any = self.channel.stream_unary(f"{_METHOD}SubmitUpdate")
        """The call SubmitUpdate with any bytes as messages."""

    @classmethod
    def of(cls, config: Path, **others: Any) -> RawHost:
        settings = load(ClientConfig, config, environment_prefix="RAW_HOST", overrides={})
        return cls(settings.coordinator, settings.tls, **others)

    async def __aenter__(self) -> RawHost:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close(None)

    # Control -------------------------------------------------------------------------------------

    async def talk(self, *messages: rpc.AttendRequest) -> Refusal:
        """Send messages on a control stream; return the refusal."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (refusal := await self._talk(*messages)) == UNTOLD:
                pass
            return refusal

    async def _talk(self, *messages: rpc.AttendRequest) -> Refusal:
        call = self.stub.Attend()
        try:
            for message in messages:
                with contextlib.suppress(asyncio.InvalidStateError):
                    await call.write(message)
            while await call.read() is not grpc.aio.EOF:
                pass
        except grpc.aio.AioRpcError as error:
            return refusal_of(error)
        finally:
            call.cancel()
        raise AssertionError("it was not refused")

    @contextlib.asynccontextmanager
    async def attending(self, *clients: str) -> AsyncIterator[Any]:
        """Open a control stream that the coordinator accepts."""
        call = self.stub.Attend()
        await call.write(hello(*clients))
        first = await asyncio.wait_for(call.read(), PATIENCE_SECONDS)
        assert isinstance(first, rpc.AttendResponse)
        assert first.WhichOneof("message") == "welcome"
        try:
            yield call
        finally:
            call.cancel()

    # Data ----------------------------------------------------------------------------------------

    async def fetch(self, reference: transfer_pb2.ModelReference) -> bytes:
        """Return the bytes of a model's float32 file."""
        request = rpc.CoordinatorServiceFetchModelRequest(blake3=reference.blake3)
        frames = [response.frame async for response in self.stub.FetchModel(request)]
        content = b"".join(frame.chunk for frame in frames)
        assert digest_of(content) == reference.blake3
        return content

    async def submit(self, messages: Iterable[bytes]) -> rpc.SubmitUpdateResponse | Refusal:
        """Send these messages; return the answer or the refusal."""
        sent = list(messages)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (answer := await self._submit(sent)) == UNTOLD:
                pass
            return answer

    async def _submit(self, messages: Iterable[bytes]) -> rpc.SubmitUpdateResponse | Refusal:
        async def stream() -> AsyncIterator[bytes]:
            for message in messages:
                yield message

        try:
            answer = await self.submit_bytes(stream())
        except grpc.aio.AioRpcError as error:
            return refusal_of(error)
        return rpc.SubmitUpdateResponse.FromString(answer)


def hello(*clients: str, version: int = PROTOCOL_VERSION) -> rpc.AttendRequest:
    return rpc.AttendRequest(
        hello=rpc.Hello(
            protocol_version=version,
            versions={**VERSIONS, "protocol": version},
            client_ids=clients,
            device="cpu",
            tasks=plugins.installed(plugins.TASKS),
        )
    )


async def training_of(call: Any, client: str, run_id: str) -> rpc.Instruction:
    """Return the run's next instruction for a client to train."""
    while (instruction := await next_training(call, run_id)).client_id != client:
        pass
    return instruction


async def next_training(call: Any, run_id: str) -> rpc.Instruction:
    """Return the run's next instruction for any client of the host to train."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            response = await call.read()
            assert isinstance(response, rpc.AttendResponse), "the stream has ended"
            instruction = response.instruction
            if instruction.HasField("check"):
                checked = rpc.Answer(instruction_id=instruction.id, checked=rpc.Checked())
                await call.write(rpc.AttendRequest(answer=checked))
            if instruction.run_id == run_id and instruction.HasField("train"):
                return instruction


def header(update_id: str, client: str, content: bytes, **changes: Any) -> bytes:
    values: dict[str, Any] = {
        "version": FRAMING_VERSION,
        "update_id": update_id,
        "run_id": update_id.partition("/")[0],
        "client_id": client,
        "blake3": digest_of(content),
        "size": len(content),
        "encoding": transfer_pb2.ENCODING_FLOAT32,
        "report": transfer_pb2.TrainingReport(samples=32, steps=1, seconds=0.1, loss=1.0),
    }
    part = transfer_pb2.UpdateHeader(**(values | changes))
    return _message(transfer_pb2.UpdateFrame(header=part))


def chunk(content: bytes) -> bytes:
    return _message(transfer_pb2.UpdateFrame(chunk=content))


def chunks(content: bytes, size: int = 1 << 18) -> Sequence[bytes]:
    return [chunk(content[begin : begin + size]) for begin in range(0, len(content), size)]


def trailer(content: bytes) -> bytes:
    part = transfer_pb2.FileTrailer(blake3=digest_of(content))
    return _message(transfer_pb2.UpdateFrame(trailer=part))


def whole(update_id: str, client: str, content: bytes, **changes: Any) -> list[bytes]:
    """Return the messages of a correct upload of any content."""
    first = header(update_id, client, content, **changes)
    return [first, *chunks(content), trailer(content)]


def _message(frame: transfer_pb2.UpdateFrame) -> bytes:
    return rpc.SubmitUpdateRequest(frame=frame).SerializeToString()
