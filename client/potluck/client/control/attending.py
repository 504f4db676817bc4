"""The connection to the coordinator: one control stream after another while the host runs."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from functools import partial

import grpc.aio
import structlog

from potluck.client.base.backoff import Backoff
from potluck.client.base.host_metrics import HostMetrics
from potluck.client.config import ClientConfig
from potluck.client.control.host_certificate import HostCertificate
from potluck.client.control.inbox import Instructions
from potluck.client.transfer.link import Link
from potluck.common.errors import (
    AttendsElsewhereError,
    CertificateExpiredError,
    ConfigurationError,
    IdentityError,
    PotluckError,
    ProtocolError,
    UnreachableError,
    from_rpc_error,
)
from potluck.common.net.connection_errors import connection_error
from potluck.common.net.membership_in_force import MembershipInForce
from potluck.common.net.protocol import VERSIONS, check_agreement
from potluck.common.net.tls import channel
from potluck.common.plain_text import make_plain
from potluck.common.real_time import seconds_of
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.rpc.v1 import coordinator_pb2_grpc

# One control stream -------------------------------------------------------------------------------

_LEAST_INTERVAL_SECONDS = 0.05
_CLOSE_SECONDS = 1.0


class ControlStream:
    """A control stream that is open. Runs on the event loop; raises what grpc.aio raises."""

    def __init__(
        self,
        stub: coordinator_pb2_grpc.CoordinatorServiceAsyncStub,
        *,
        heartbeat: Callable[[], rpc.Heartbeat],
    ) -> None:
        self._call = stub.Attend()
        self._heartbeat = heartbeat
        self._outbox: asyncio.Queue[rpc.AttendRequest] = asyncio.Queue()

    def say(self, message: rpc.AttendRequest) -> None:
        """Queue a message for sending."""
        self._outbox.put_nowait(message)

    async def open(self, hello: rpc.Hello) -> rpc.Welcome:
        """Send the hello and wait for the coordinator's welcome."""
        # the stream has ended: `read` raises the cause
        with contextlib.suppress(asyncio.InvalidStateError):
            await self._call.write(rpc.AttendRequest(hello=hello))
        first = await self._call.read()
        if not isinstance(first, rpc.AttendResponse):
            raise UnreachableError("the coordinator ended the stream before its welcome message")
        if first.WhichOneof("message") != "welcome":
            raise ProtocolError(
                "the coordinator's first message is not a welcome message; install the same "
                "release on the host and the coordinator"
            )
        make_plain(first)
        return first.welcome

    async def attend(
        self, welcome: rpc.Welcome, receive: Callable[[rpc.AttendResponse], None]
    ) -> None:
        """Send heartbeats and messages until the stream ends; pass each received message to
        `receive`."""
        seconds = seconds_of(welcome.heartbeat_interval)
        writer = asyncio.create_task(self._write(max(seconds, _LEAST_INTERVAL_SECONDS)))
        reader = asyncio.create_task(self._read(receive))
        try:
            await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
            if writer.done():
                # Ignore a failed write: only reading returns the status of a broken stream.
                with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    await writer
            await reader
        finally:
            for task in (reader, writer):
                task.cancel()
            await asyncio.gather(reader, writer, return_exceptions=True)

    async def close(self) -> None:
        """End the stream: signal the coordinator that no more messages will come."""
        with contextlib.suppress(Exception):  # the stream may be broken already
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self._call.done_writing()
        self._call.cancel()

    async def _read(self, receive: Callable[[rpc.AttendResponse], None]) -> None:
        while isinstance(response := await self._call.read(), rpc.AttendResponse):
            make_plain(response)
            receive(response)

    async def _write(self, interval: float) -> None:
        """Send heartbeats when they are due, and messages in between."""
        clock = asyncio.get_running_loop().time
        due = clock()
        while True:
            if clock() >= due:
                await self._call.write(rpc.AttendRequest(heartbeat=self._heartbeat()))
                due = clock() + interval
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(due):
                    message = await self._outbox.get()
                await self._call.write(message)


# One stream after another -------------------------------------------------------------------------

log = structlog.get_logger()

_HOPELESS = (ConfigurationError, IdentityError, ProtocolError)
"""Errors that reconnecting can't fix."""

_WELCOME_SECONDS = 30.0
"""Maximum seconds to wait for the welcome. Keepalive detects a dead coordinator earlier."""

_SENT_AWAY_SECONDS = 10.0
"""Seconds; if the coordinator ends a stream sooner, the next pause before reconnecting is longer.
"""

_REFUSALS = 10
"""Maximum number of refusals in a row that the host retries if another process of this host is
connected. That process may be about to end.
"""


class Attending:
    """The control streams of a host. Runs on the event loop."""

    def __init__(
        self,
        config: ClientConfig,
        hello: rpc.Hello,
        *,
        generator: random.Random,
        metrics: HostMetrics,
        membership: MembershipInForce | None = None,
    ) -> None:
        """`generator`: jitter of the pauses between attempts. `membership`: receives the membership
        that the coordinator sends; None if the host has no federation root."""
        self._config = config
        self._hello = hello
        self._metrics = metrics
        self._membership = membership
        self._certificate = HostCertificate(config.tls)
        self._backoff = Backoff(generator, maximum=config.reconnect_maximum_seconds)
        self._stream: ControlStream | None = None
        self._before = contextlib.AsyncExitStack()
        """The old stream, kept open until the stream with the renewed certificate is accepted."""
        self._welcomed = False

    def say(self, message: rpc.AttendRequest) -> None:
        """Send a message to the coordinator, or drop it while there is no connection."""
        if self._stream is not None:
            self._stream.say(message)

    async def for_ever(self, instructions: Instructions, link: Link) -> None:
        """Stay connected until cancelled. Raises errors that connecting again can't fix."""
        logged, refusals = "", 0
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(lambda: self._before.aclose())
            while True:
                try:
                    if await self._attend(instructions, link):
                        continue
                    trouble: PotluckError = UnreachableError(
                        "the coordinator ended the stream: it is stopping, or another process is "
                        "connected with the same certificate"
                    )
                except grpc.aio.AioRpcError as error:
                    trouble = self._explain(error)
                except UnreachableError as error:
                    trouble = error
                except ConfigurationError as error:
                    if not self._welcomed:
                        raise
                    # Try again: the certificate has expired, or is being replaced.
                    trouble = UnreachableError(error.message)
                await self._before.aclose()
                elsewhere = isinstance(trouble, AttendsElsewhereError)
                refusals = refusals + 1 if elsewhere else 0
                if isinstance(trouble, _HOPELESS) and not self._may_pass(trouble, refusals):
                    raise trouble
                await self._pause(trouble, again=trouble.message == logged)
                logged = trouble.message

    async def _pause(self, trouble: PotluckError, *, again: bool) -> None:
        """Log the cause and wait before the next attempt; a repeated cause is logged as debug."""
        seconds = self._backoff.next_seconds()
        write = log.debug if again and self._backoff.attempt > 1 else log.warning
        write(
            "not connected, trying again",
            coordinator=self._config.coordinator,
            cause=trouble.message,
            seconds=round(seconds, 2),
        )
        await asyncio.sleep(seconds)

    def _may_pass(self, trouble: PotluckError, refusals: int) -> bool:
        """Return True if an error may disappear without a restart of this host."""
        if isinstance(trouble, AttendsElsewhereError):
            return refusals < _REFUSALS
        if isinstance(trouble, CertificateExpiredError) and self._welcomed:
            return True
        return self._certificate.renewed()

    async def _attend(self, instructions: Instructions, link: Link) -> bool:
        """Run one control stream, on its own connection.

        Returns True if the certificate was renewed: the next stream is then opened while this
        stream is still open.
        """
        host_name = self._certificate.show().identity.name
        async with contextlib.AsyncExitStack() as stack:
            connection = channel(self._config.coordinator, self._config.tls)
            control = await stack.enter_async_context(connection)
            stub: coordinator_pb2_grpc.CoordinatorServiceAsyncStub = (
                coordinator_pb2_grpc.CoordinatorServiceStub(control)
            )
            stream = ControlStream(
                stub, heartbeat=lambda: rpc.Heartbeat(progress=instructions.log.progress())
            )
            stack.push_async_callback(stream.close)
            welcome = await self._open(stream)
            check_agreement(VERSIONS, welcome.versions, host_name=host_name)
            self._is_welcome(stream, welcome, instructions, link)
            stack.callback(self._lost, stream)
            await self._before.aclose()
            clock = asyncio.get_running_loop().time
            begun, sent_away = clock(), False
            attending = asyncio.create_task(
                stream.attend(welcome, partial(self._receive, instructions))
            )
            stack.push_async_callback(_ended, attending)
            renewed = asyncio.create_task(self._certificate.until_renewed())
            stack.callback(renewed.cancel)
            try:
                await asyncio.wait((attending, renewed), return_when=asyncio.FIRST_COMPLETED)
                if not attending.done():
                    log.info("certificate renewed, reconnecting")
                    self._before = stack.pop_all()
                    return True
                attending.result()
                sent_away = clock() - begun < _SENT_AWAY_SECONDS
            finally:
                if not sent_away:
                    self._backoff.reset()
        return False

    async def _open(self, stream: ControlStream) -> rpc.Welcome:
        if self._membership is not None:
            self._hello.membership_epoch = self._membership.epoch
        try:
            async with asyncio.timeout(_WELCOME_SECONDS):
                return await stream.open(self._hello)
        except TimeoutError:
            raise UnreachableError(
                "the coordinator did not answer the first message of this host within "
                f"{_WELCOME_SECONDS:.0f} s"
            ) from None

    def _receive(self, instructions: Instructions, message: rpc.AttendResponse) -> None:
        """Handle a message that the coordinator sends after its welcome."""
        match message.WhichOneof("message"):
            case "instruction":
                instructions.receive(message.instruction)
            case "membership" if self._membership is not None:
                try:
                    self._membership.take(message.membership.document, "from the coordinator")
                except PotluckError as error:
                    log.error("member list refused", why=error.message)

    def _is_welcome(
        self, stream: ControlStream, welcome: rpc.Welcome, instructions: Instructions, link: Link
    ) -> None:
        """Record that the coordinator has accepted the connection."""
        log.info(
            "attending",
            coordinator=self._config.coordinator,
            restarted=instructions.log.coordinator_id not in ("", welcome.coordinator_id),
            clients=len(self._hello.client_ids),
        )
        link.stores.offered = welcome.object_store
        if self._welcomed:
            link.renew()
        if instructions.log.coordinator_id != welcome.coordinator_id:
            instructions.log.coordinator_is(welcome.coordinator_id)
        self._welcomed = True
        self._stream = stream
        self._metrics.attends()

    def _lost(self, stream: ControlStream) -> None:
        if self._stream is stream:
            self._stream = None
            self._metrics.lost()

    def _explain(self, error: grpc.aio.AioRpcError) -> PotluckError:
        """Return the error that ended a control stream.

        An invalid certificate ends a process that has never been connected. A process that has
        been connected keeps trying: the coordinator's certificate may have expired, and will be
        renewed.
        """
        trouble = connection_error(error, self._config.coordinator, self._config.tls)
        stated = from_rpc_error(error)
        if self._welcomed and not isinstance(stated, _HOPELESS):
            return UnreachableError(trouble.message)
        return trouble


async def _ended(attending: asyncio.Task[None]) -> None:
    attending.cancel()
    await asyncio.gather(attending, return_exceptions=True)
