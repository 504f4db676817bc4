"""The connections of a relay to its coordinator: one for control streams, one for files."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import grpc
import grpc.aio
import structlog

from potluck.client.control.host_certificate import HostCertificate
from potluck.client.transfer.link import Link, calling
from potluck.common.errors import (
    AttendsElsewhereError,
    IdentityError,
    PotluckError,
    UnreachableError,
)
from potluck.common.net.connection_errors import connection_error
from potluck.common.net.identity import Identity, Role
from potluck.common.net.tls import DATA_OPTIONS, channel
from potluck.relay.config import RelayConfig
from potluck.relay.relay_metrics import RelayMetrics
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.rpc.v1 import coordinator_pb2_grpc

log = structlog.get_logger()


class Upstream:
    """A relay's connections to its coordinator. Runs on the event loop."""

    def __init__(
        self, config: RelayConfig, *, generator: random.Random, metrics: RelayMetrics
    ) -> None:
        """`generator`: jitter of the pauses between attempts.

        Raises ConfigurationError or IdentityError for certificates that can't be used.
        """
        self._config = config
        self._metrics = metrics
        self._certificate = HostCertificate(config.tls, Role.RELAY)
        self.identity: Identity = self._certificate.show().identity
        """Identity of the relay, from the certificate that it shows."""
        self._control = channel(config.coordinator, config.tls)
        self._calls: set[Any] = set()
        self.link = Link(
            lambda: channel(config.coordinator, config.tls, options=DATA_OPTIONS),
            generator=generator,
            maximum_seconds=config.reconnect_maximum_seconds,
            concurrent=config.concurrent_transfers,
            metrics=metrics,
        )

    async def locate(self, request: rpc.LocateUploadRequest) -> rpc.LocateUploadResponse:
        """Return the number of bytes of an update that the coordinator has.

        Raises the coordinator's error, converted by `for_hosts`.
        """
        try:
            with calling():
                return await self.link.stub.LocateUpload(request)
        except PotluckError as error:
            raise for_hosts(error) from error

    def attend(self) -> Any:
        """Open a control stream and return its call. Pass the call to `left` when the stream is
        over."""
        stub: coordinator_pb2_grpc.CoordinatorServiceAsyncStub = (
            coordinator_pb2_grpc.CoordinatorServiceStub(self._control)
        )
        call = stub.Attend()
        self._calls.add(call)
        return call

    def left(self, call: Any) -> None:
        """Cancel a control stream that is over, and remove its record."""
        self._calls.discard(call)
        call.cancel()

    async def next_word(self, call: Any) -> rpc.AttendResponse | None:
        """Return the coordinator's next message on a control stream; None at the end of the stream.

        Raises the error that ended the stream, converted by `for_hosts`.
        """
        try:
            response = await call.read()
        except grpc.aio.AioRpcError as error:
            address, files = self._config.coordinator, self._config.tls
            raise for_hosts(connection_error(error, address, files)) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise UnreachableError(
                "the relay is reconnecting to the coordinator; connect again"
            ) from None
        return response if isinstance(response, rpc.AttendResponse) else None

    async def watch(self) -> None:
        """Keep the connection up, and reload changed certificate files, until cancelled."""
        renewed = asyncio.create_task(self._certificate.until_renewed())
        connected = False
        try:
            while True:
                state = self._control.get_state(try_to_connect=True)
                stands = state is grpc.ChannelConnectivity.READY
                if stands != connected:
                    connected = stands
                    self._tell(stands)
                changed = asyncio.create_task(self._control.wait_for_state_change(state))
                try:
                    await asyncio.wait((changed, renewed), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    changed.cancel()
                    await asyncio.gather(changed, return_exceptions=True)
                if renewed.done():
                    await self._renew()
                    renewed = asyncio.create_task(self._certificate.until_renewed())
        finally:
            renewed.cancel()
            self._metrics.connection(stands=False)

    def _tell(self, stands: bool) -> None:
        self._metrics.connection(stands=stands)
        if stands:
            log.info("connected", coordinator=self._config.coordinator)
            self.link.renew()
        else:
            log.warning("connection lost, trying again", coordinator=self._config.coordinator)

    async def _renew(self) -> None:
        """Connect again, with the new certificate. It ends the hosts' streams; they reconnect."""
        log.info("certificate renewed, reconnecting")
        self.identity = self._certificate.show().identity
        before, self._control = self._control, channel(self._config.coordinator, self._config.tls)
        self.link.renew()
        for call in list(self._calls):
            call.cancel()
        await before.close(None)

    async def close(self) -> None:
        """End all calls."""
        await self.link.close()
        await self._control.close(None)


def for_hosts(error: PotluckError) -> PotluckError:
    """Convert an error from the coordinator into the error for a host behind the relay.

    A host must not exit because of a problem with the relay's certificate. So such an error becomes
    a temporary one. Errors about the host or its clients are passed on.
    """
    of_host = isinstance(error, AttendsElsewhereError) or "client" in error.metadata
    if isinstance(error, IdentityError) and not of_host:
        log.error("the coordinator refuses this relay", why=error.message)
        return UnreachableError(f"the coordinator refuses the relay: {error.message}")
    return error
