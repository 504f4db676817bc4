"""Serves the coordinator's services on a port."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import grpc
import grpc.aio
import structlog

from potluck.common.errors import PotluckError
from potluck.common.monitoring.instruments import Instruments
from potluck.common.monitoring.metric_labels import MeasuredParty
from potluck.common.monitoring.metrics_server import Readiness, monitoring
from potluck.common.net.identity import Credential
from potluck.common.net.listening import bind
from potluck.common.net.tls import SERVER_OPTIONS
from potluck.common.process.memory import spare_what_is_loaded
from potluck.rpc.v1 import coordinator_pb2_grpc, operator_pb2_grpc
from potluck.server.config import CoordinatorConfig
from potluck.server.hosts.limits import Limits
from potluck.server.service.certificate import ServerCertificate
from potluck.server.service.coordinator import Coordinator
from potluck.server.service.guard import Guard
from potluck.server.service.host_service import CoordinatorService
from potluck.server.service.operator_service import OperatorService
from potluck.server.service.revocations import Revoking

log = structlog.get_logger()

STOP_SECONDS = 2.0
"""Seconds that open calls have to end when the coordinator stops."""


@contextlib.asynccontextmanager
async def serving(
    settings: CoordinatorConfig, broken: Callable[[PotluckError], None] = lambda _: None
) -> AsyncIterator[str]:
    """Serve hosts and operators; yield the address to which they can connect.

    broken: function called with the error if the coordinator can't continue; the caller must then
    leave the block and raise this error. Raises ConfigurationError or IdentityError if certificates
    can't be used, StorageError if the state directory can't be used, UnreachableError if the
    coordinator can't listen on the address.
    """
    certificate = ServerCertificate(settings.tls)
    if settings.metrics_tls is not None:
        settings.metrics_tls.check(settings.tls)
    instruments, readiness = Instruments(MeasuredParty.COORDINATOR), Readiness("starting")
    async with (
        monitoring(
            settings.metrics_address, instruments, readiness, settings.metrics_tls
        ) as metrics_address,
        Coordinator.opened(settings, instruments) as coordinator,
    ):
        coordinator.metrics.watch_certificate(
            lambda: certificate.expires, lambda: certificate.authority_expires
        )
        coordinator.store.watch(readiness.interrupt, readiness.break_down)
        coordinator.runs.broken.add_done_callback(lambda done: broken(done.result()))
        options = (*SERVER_OPTIONS, ("grpc.max_concurrent_streams", settings.calls_per_peer))
        revoking = Revoking(settings.state_directory, settings.tls.authority, settings.revoked)

        def check(credential: Credential) -> None:
            revoking.check(credential)
            coordinator.metrics.seen(credential)

        guard = Guard(_limits(settings), check, coordinator.metrics.refused)
        revoking.listen(guard.cut_off)
        server = grpc.aio.server(interceptors=[guard], options=options)
        coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(
            CoordinatorService(coordinator), server
        )
        operator_pb2_grpc.add_OperatorServiceServicer_to_server(
            OperatorService(coordinator, revoking), server
        )
        address = bind(server, settings.listen, certificate.credentials())
        await server.start()
        spare_what_is_loaded()
        background = (revoking.watch(), guard.watch_expiry(), coordinator.store.look_for_ever())
        watching = [asyncio.create_task(each) for each in background]
        readiness.reason = ""
        if metrics_address:
            log.info("serving metrics", address=metrics_address)
        try:
            yield address
        finally:
            readiness.reason = "stopping"
            for each in watching:
                each.cancel()
            coordinator.attendance.close()
            await server.stop(STOP_SECONDS)


def _limits(settings: CoordinatorConfig) -> Limits:
    return Limits(
        calls_per_peer=settings.calls_per_peer,
        transfers_per_peer=settings.transfers_per_peer,
        stall_seconds=settings.stall_seconds,
        least_bytes_per_second=settings.least_bytes_per_second,
    )
