"""The check that a coordinator admits a host. It connects with the host's own certificate.

A valid certificate may have been revoked, or may not allow a client that the configuration names.
Only the coordinator can report that.
"""

from __future__ import annotations

import asyncio

import grpc.aio

from potluck.client.config import ClientConfig
from potluck.common.errors import PotluckError, RoundClosedError, UnreachableError
from potluck.common.net.connection_errors import connection_error
from potluck.common.net.tls import channel
from potluck.deploy.doctor.diagnosis import Finding, Verdict
from potluck.rpc.v1 import coordinator_pb2, coordinator_pb2_grpc

ANSWER_SECONDS = 15.0
_NO_UPDATE = "doctor"
"""Id of an update that does not exist. A coordinator that reports so has admitted the host."""


def admission(config: ClientConfig) -> Finding:
    """Check that the coordinator admits the host, by a question about a missing update. Blocks."""
    try:
        asyncio.run(_ask(config))
    except RoundClosedError:
        return Finding("coordinator", Verdict.OK, f"{config.coordinator} lets this host in")
    except TimeoutError:
        found = f"{config.coordinator} did not answer within {ANSWER_SECONDS:.0f} s"
        remedy = "see that the address is right and no firewall drops packets to its port"
        return Finding("coordinator", Verdict.ERROR, found, remedy)
    except UnreachableError as error:
        found, _, remedy = error.message.partition("; ")
        return Finding("coordinator", Verdict.WARNING, found, remedy or "see that it runs")
    except PotluckError as error:
        found, _, remedy = error.message.partition("; ")
        return Finding("coordinator", Verdict.ERROR, found, remedy or "see the coordinator's log")
    return Finding("coordinator", Verdict.OK, f"{config.coordinator} lets this host in")


async def _ask(config: ClientConfig) -> None:
    async with asyncio.timeout(ANSWER_SECONDS), channel(config.coordinator, config.tls) as link:
        stub: coordinator_pb2_grpc.CoordinatorServiceAsyncStub = (
            coordinator_pb2_grpc.CoordinatorServiceStub(link)
        )
        for client in config.client_ids()[:1]:
            request = coordinator_pb2.LocateUploadRequest(update_id=_NO_UPDATE, client_id=client)
            try:
                await stub.LocateUpload(request)
            except grpc.aio.AioRpcError as error:
                raise connection_error(error, config.coordinator, config.tls) from error
