"""Serves a relay on a port."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import structlog

from potluck.client.transfer.model_cache import ModelCache
from potluck.common.monitoring.metrics_server import monitoring
from potluck.common.net.identity import Role
from potluck.common.net.listening import not_listening
from potluck.common.net.tls import SERVER_OPTIONS
from potluck.common.process.memory import spare_what_is_loaded
from potluck.relay.config import RelayConfig
from potluck.relay.held_updates import HeldUpdates
from potluck.relay.relay_metrics import RelayMetrics
from potluck.relay.relay_service import RelayService
from potluck.relay.relay_state import RelayState
from potluck.relay.relayed_files import RelayedFiles
from potluck.relay.relayed_updates import RelayedUpdates
from potluck.relay.upstream import Upstream
from potluck.rpc.v1 import coordinator_pb2_grpc
from potluck.server.hosts.limits import Limits
from potluck.server.service.certificate import ServerCertificate
from potluck.server.service.guard import HOSTS, Guard
from potluck.server.service.revocations import Revoking

log = structlog.get_logger()

STOP_SECONDS = 2.0
"""Seconds that active calls get to end when the relay stops."""


@contextlib.asynccontextmanager
async def serving(config: RelayConfig, state: RelayState) -> AsyncIterator[str]:
    """Serve hosts while the block runs. Yield the address that they can dial.

    Raises ConfigurationError or IdentityError for certificates that can't be used, UnreachableError
    if it can't listen at the address.
    """
    certificate = ServerCertificate(config.tls, Role.RELAY)
    if config.metrics_tls is not None:
        config.metrics_tls.check(config.tls)
    metrics = RelayMetrics()
    upstream = Upstream(config, generator=random.Random(), metrics=metrics)
    held = HeldUpdates(state.updates, now=time.time())
    updates = RelayedUpdates(
        upstream,
        held,
        maximum_bytes=config.maximum_model_bytes,
        wait_seconds=config.sum_wait_seconds,
        clock=time.time,
        metrics=metrics,
    )
    files = RelayedFiles(
        upstream.link,
        ModelCache(state.files, keep=config.cached_files),
        state.fetched,
        maximum_bytes=config.maximum_model_bytes,
        metrics=metrics,
    )
    metrics.watch(state=state.path, tls=config.tls, held=lambda: len(held))
    revoking = Revoking(state.path, config.tls.authority, config.revoked)
    guard = Guard(
        _limits(config),
        revoking.check,
        metrics.refused,
        roles={HOSTS: frozenset({Role.HOST})},
        program="relay",
    )
    revoking.listen(guard.cut_off)
    server = grpc.aio.server(interceptors=[guard], options=SERVER_OPTIONS)
    coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(
        RelayService(upstream, files, updates, metrics), server
    )
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(upstream.close)
        stack.push_async_callback(updates.close)
        address = _bind(server, config.listen, certificate.credentials())
        served = await stack.enter_async_context(
            monitoring(
                config.metrics_address, metrics.instruments, metrics.ready, config.metrics_tls
            )
        )
        await server.start()
        stack.push_async_callback(server.stop, STOP_SECONDS)
        spare_what_is_loaded()
        if served:
            log.info("serving metrics", address=served)
        for work in (upstream.watch(), revoking.watch(), guard.watch_expiry()):
            stack.callback(asyncio.create_task(work).cancel)
        updates.go_on()
        yield address


def _limits(config: RelayConfig) -> Limits:
    return Limits(
        transfers_per_peer=config.transfers_per_peer,
        stall_seconds=config.stall_seconds,
        least_bytes_per_second=config.least_bytes_per_second,
    )


def _bind(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials) -> str:
    try:
        port = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise not_listening(address) from error
    return f"{address.rpartition(':')[0]}:{port}"
