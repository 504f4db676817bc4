"""A host that puts something else into the object store than it announced, or nothing at all.

A coordinator process whose files go only through a real S3 server, one honest host, and the hostile
host.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from base64 import b64encode
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import parse_qs, urlsplit

import grpc
import pytest
import pytest_asyncio
import urllib3
from grpc import StatusCode as Status
from support.federation import PATIENCE_SECONDS, Federation, crash_federation, set_values, until
from support.raw_host import RawHost, Refusal, header, refusal_of, training_of, whole
from support.s3_server import ENVIRONMENT, S3Server, s3_server

from potluck.common.tensors.digest import digest_of
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.rpc.v1 import operator_pb2, transfer_pb2

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

ME, OTHER = "client-1", "client-0"
MISMATCH: Refusal = (Status.ABORTED, "DIGEST_MISMATCH")
ABSENT: Refusal = (Status.UNAVAILABLE, "OBJECT_STORE_FAILED")
PROTOCOL: Refusal = (Status.INVALID_ARGUMENT, "PROTOCOL_VIOLATED")
POOL = urllib3.PoolManager()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[S3Server]:
    with mock.patch.dict(os.environ, ENVIRONMENT):
        async with s3_server(tmp_path_factory.mktemp("s3")) as server:
            yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def federation(
    server: S3Server, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Federation]:
    async with crash_federation(
        tmp_path_factory.mktemp("hostile"),
        clients=2,
        hosts=2,
        count=2,
        rounds=1,
        coordinator={"files": server.files()},
        start_hosts=False,
    ) as federation:
        set_values(federation.files.hosts[0], {"object_stores": [server.origin]})
        await federation.processes.start_host(0)
        await federation.until_attending(1)
        yield federation


class Liar:
    """The hostile host with its training instruction."""

    def __init__(self, host: RawHost, told: rpc.Instruction, server: S3Server) -> None:
        self.host = host
        self.told = told
        self.server = server

    def header(self, content: bytes, **changes: Any) -> transfer_pb2.UpdateHeader:
        message = header(self.told.id, ME, content, **changes)
        return rpc.SubmitUpdateRequest.FromString(message).frame.header

    async def locate(
        self, announced: transfer_pb2.UpdateHeader, sha256: str, **changes: Any
    ) -> rpc.LocateUploadResponse | Refusal:
        same = {name: getattr(announced, name) for name in ("update_id", "client_id", "run_id")}
        values = {**same, "blake3": announced.blake3, "header": announced, "sha256": sha256}
        try:
            request = rpc.LocateUploadRequest(**(values | changes))
            return await self.host.stub.LocateUpload(request)
        except grpc.aio.AioRpcError as error:
            return refusal_of(error)

    async def submit(self, content: bytes, **changes: Any) -> rpc.SubmitUpdateResponse | Refusal:
        return await self.host.submit([header(self.told.id, ME, content, stored=True, **changes)])

    async def place(self, content: bytes) -> str:
        found = await self.locate(self.header(content), hashlib.sha256(content).hexdigest())
        assert isinstance(found, rpc.LocateUploadResponse)
        assert not found.place.direct
        return found.place.url

    async def model(self) -> bytes:
        request = rpc.CoordinatorServiceFetchModelRequest(
            blake3=self.told.train.model.blake3, from_store=True
        )
        [frame] = [response.frame async for response in self.host.stub.FetchModel(request)]
        content = await asyncio.to_thread(lambda: POOL.request("GET", frame.elsewhere.url).data)
        assert digest_of(content) == self.told.train.model.blake3
        return content

    def put(self, url: str, content: bytes) -> None:
        """Upload content to a store that checks nothing."""
        assert POOL.request("PUT", url, body=content).status == 200


async def test_coordinator_accepts_only_the_announced_bytes_from_the_store(
    federation: Federation, server: S3Server, tmp_path: Path
) -> None:
    async with (
        RawHost.of(federation.files.hosts[1]) as host,
        host.attending(ME) as call,
    ):
        run_id = await federation.start_run('strategy.name="fedavg"')
        liar = Liar(host, await training_of(call, ME, run_id), server)
        update = await liar.model()
        digest = hashlib.sha256(update).hexdigest()

        # Announcements are checked like headers of direct uploads.
        assert await liar.locate(liar.header(update), "none") == PROTOCOL
        assert await liar.locate(liar.header(update), digest, update_id="other") in (
            PROTOCOL,
            (Status.FAILED_PRECONDITION, "ROUND_CLOSED"),
        )
        huge = liar.header(update, size=1 << 50)
        assert await liar.locate(huge, digest) == (Status.RESOURCE_EXHAUSTED, "TOO_LARGE")
        others = liar.header(update, client_id=OTHER)
        assert await liar.locate(others, digest) == (Status.PERMISSION_DENIED, "IDENTITY_REFUSED")

        # The URL allows the store to accept only this content.
        url = await liar.place(update)
        query = parse_qs(urlsplit(url).query)
        assert query["X-Amz-SignedHeaders"] == ["content-length;host;x-amz-checksum-sha256"]
        checksum = b64encode(bytes.fromhex(digest)).decode()
        assert checksum not in url

        # Even if the store accepts other content, the coordinator does not use it.
        assert await liar.submit(update) == ABSENT
        for wrong in (bytes(len(update)), update + b"0", update[:-1]):
            liar.put(await liar.place(update), wrong)
            assert await liar.submit(update) == MISMATCH
        await liar.place(update)
        assert await liar.submit(update) == ABSENT, "what was wrong is deleted"
        straight = await host.submit(whole(liar.told.id, ME, update))
        assert straight == (Status.INVALID_ARGUMENT, "CONFIGURATION_INVALID")
        assert not [path for path in federation.spooled() if ME in path.name]

        liar.put(await liar.place(update), update)
        answer = await liar.submit(update)
        assert isinstance(answer, rpc.SubmitUpdateResponse)
        await federation.finished(run_id)
    [entry] = await federation.history(run_id)
    assert {member.state for member in entry.members} == {operator_pb2.MEMBER_STATE_INCLUDED}
    await until(lambda: not server.names("updates"), "updates that were taken are deleted")


async def test_host_without_the_object_store_is_excluded_with_a_remedy(
    federation: Federation,
) -> None:
    set_values(federation.files.hosts[1], {"object_stores": []})
    await federation.processes.start_host(1)
    await federation.until_attending(2)
    run_id = await federation.start_run()
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            clients = {each.client_id: each for each in await federation.operator.list_clients()}
            if clients[ME].left_out:
                break
    assert "install the extra s3 and name the store" in clients[ME].left_out[run_id]
    await federation.operator.stop_run(run_id)
    assert not clients[OTHER].left_out
