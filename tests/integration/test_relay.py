"""A relay between hostile peers: the coordinator and the relay are processes, and the test plays
the hosts."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
import pytest_asyncio
from grpc import StatusCode as Status
from support.federation import PATIENCE_SECONDS, Federation, crash_federation, until
from support.programs import run_program
from support.promises import in_time
from support.raw_host import RawHost, Refusal, hello, refusal_of, training_of, whole
from support.relays import Relay, relays_of

from potluck.common.net.identity import Role
from potluck.common.net.tls import TlsFiles
from potluck.common.tensors.tensor_files import open_tensors
from potluck.common.updates.fixed_point import members_digest
from potluck.common.updates.sum_files import BODY, vectors_of, write_sum_file
from potluck.deploy.pki import authority as pki
from potluck.deploy.pki import certificate_register
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.rpc.v1 import operator_pb2, transfer_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")

DENIED = Status.PERMISSION_DENIED
DONE = rpc.SubmitUpdateResponse()
INCLUDED = operator_pb2.MEMBER_STATE_INCLUDED
CUT_OFF_SECONDS = 5.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def federation(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Federation]:
    folder = tmp_path_factory.mktemp("relay")
    async with crash_federation(
        folder,
        clients=6,
        hosts=3,
        count=1,
        rounds=1,
        start_hosts=False,
        # Even on a busy machine, a live peer sends something within three heartbeats.
        coordinator={"revoked": "pki/revoked.pem", "heartbeat_seconds": 3.0},
    ) as federation:
        yield federation


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def relay(federation: Federation) -> AsyncIterator[Relay]:
    """Run a relay with a certificate for the clients of host-0 and for one client of host-1."""
    async with relays_of(
        federation,
        {"gate": [0, 1]},
        claims={"gate": ["client-0:2"]},
        settings={"revoked": "pki/revoked.pem"},
    ) as relays:
        yield relays["gate"]


def files_of(federation: Federation, name: str) -> TlsFiles:
    folder = federation.files.folder / "pki"
    return TlsFiles(
        certificate=folder / f"{name}.pem",
        key=folder / f"{name}.key",
        authority=folder / "authority.pem",
    )


def behind(relay: Relay, federation: Federation, name: str) -> RawHost:
    return RawHost(relay.address, files_of(federation, name), name=name)


def direct(federation: Federation, name: str) -> RawHost:
    address = federation.files.operator.coordinator
    return RawHost(address, files_of(federation, name), name=f"{name} itself")


async def test_relay_refuses_hosts_that_register_clients_of_others(
    federation: Federation, relay: Relay
) -> None:
    async with behind(relay, federation, "host-0") as host:
        assert await host.talk(hello("client-0", "client-5")) == (DENIED, "IDENTITY_REFUSED")
        assert await host.talk(hello()) == (Status.INVALID_ARGUMENT, "PROTOCOL_VIOLATED")
        stolen = whole("run/1/1/client-2", "client-2", b"x")
        assert await host.submit(stolen) == (DENIED, "IDENTITY_REFUSED")
    async with behind(relay, federation, "host-1") as host:
        assert await host.talk(hello("client-2", "client-3")) == (DENIED, "IDENTITY_REFUSED")
        async with host.attending("client-2"):
            await only_attending(federation, "host-1")
    for name in ("operator", "gate"):
        async with behind(relay, federation, name) as host:
            assert await host.talk(hello("client-0")) == (DENIED, "IDENTITY_REFUSED")


async def only_attending(federation: Federation, host: str) -> None:
    """Wait until the coordinator lists only this host; a relay reports later that others left."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while await federation.attending_hosts() != {host}:  # noqa: ASYNC110  # by another process
            await asyncio.sleep(0.05)


async def test_only_a_relay_can_register_other_hosts_and_it_replaces_none(
    federation: Federation, relay: Relay
) -> None:
    del relay  # started for its certificate only
    made_up = hello("client-0")
    made_up.hello.behind = "host-2"
    async with direct(federation, "host-0") as host, direct(federation, "gate") as gate:
        assert await host.talk(made_up) == (DENIED, "IDENTITY_REFUSED")
        assert await gate.talk(hello("client-0")) == (DENIED, "IDENTITY_REFUSED")
        async with direct(federation, "host-2") as honest, honest.attending("client-4") as stream:
            heartbeats = asyncio.create_task(beat(stream))
            assert await gate.talk(made_up) == (DENIED, "HOST_ATTENDS_ELSEWHERE")
            await only_attending(federation, "host-2")
            heartbeats.cancel()
            await asyncio.gather(heartbeats, return_exceptions=True)


async def beat(stream: Any) -> None:
    """Send heartbeats of a host until cancelled."""
    while True:
        await stream.write(rpc.AttendRequest(heartbeat=rpc.Heartbeat()))
        await asyncio.sleep(0.05)


async def test_relay_refuses_invalid_updates_and_deletes_them(
    federation: Federation, relay: Relay
) -> None:
    async with (
        behind(relay, federation, "host-0") as host,
        host.attending("client-0") as stream,
    ):
        run_id = await federation.start_run("expected_clients=1")
        instruction = await training_of(stream, "client-0", run_id)
        model = await host.fetch(instruction.train.model)
        unknown = whole(f"{run_id}/9/9/client-0", "client-0", model)
        assert await host.submit(unknown) == (Status.FAILED_PRECONDITION, "ROUND_CLOSED")
        nowhere = whole("norun/1/1/client-0", "client-0", model)
        assert await host.submit(nowhere) == (Status.FAILED_PRECONDITION, "ROUND_CLOSED")
        first, *rest = whole(instruction.id, "client-0", model)
        wrong = [first, *whole(instruction.id, "client-0", model[:-1] + b"!")[1:-1], rest[-1]]
        assert await host.submit(wrong) == (Status.ABORTED, "DIGEST_MISMATCH")
        assert not list((relay.state / "updates").iterdir())
        cut = await host.submit([first, rest[0]])
        assert cut == (Status.ABORTED, "TRANSFER_TRUNCATED")
        assert await host.submit([first, *rest]) == DONE
        await federation.finished(run_id)
        assert not list((relay.state / "updates").iterdir())
        assert relay.metric("potluck_relay_deliveries_total", outcome="delivered") == 1


async def test_failing_relay_disk_is_reported_as_a_relay_storage_error(
    federation: Federation, relay: Relay
) -> None:
    failed: Refusal = (Status.UNAVAILABLE, "RELAY_STORAGE_FAILED")
    async with (
        behind(relay, federation, "host-0") as host,
        host.attending("client-0") as stream,
    ):
        run_id = await federation.start_run("expected_clients=1", "seed=5")
        instruction = await training_of(stream, "client-0", run_id)
        files = relay.state / "files"
        files.rename(relay.state / "elsewhere")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await host.fetch(instruction.train.model)
        assert refusal_of(refused.value) == failed
        assert f"the relay's disk failed: can't use {relay.state}" in str(refused.value.details())
        (relay.state / "elsewhere").rename(files)
        model = await host.fetch(instruction.train.model)

        update = whole(instruction.id, "client-0", model)
        name = hashlib.sha256(instruction.id.encode()).hexdigest()[:40]
        in_the_way = relay.state / "updates" / f"{name}.safetensors"
        in_the_way.mkdir()
        assert await host.submit(update) == failed
        in_the_way.rmdir()
        assert await host.submit(update) == DONE
        await federation.finished(run_id)
    assert '"reason": "RELAY_STORAGE_FAILED"' in relay.log.read_text()


async def test_relay_answers_a_resent_delivered_update_as_duplicate(
    federation: Federation, relay: Relay
) -> None:
    async with (
        behind(relay, federation, "host-0") as host,
        behind(relay, federation, "host-1") as other,
        host.attending("client-0") as stream,
        other.attending("client-2") as other_stream,
    ):
        run_id = await federation.start_run(
            "expected_clients=2", "clients_per_round=2", 'selector.name="uniform"'
        )
        mine, others = await asyncio.gather(
            training_of(stream, "client-0", run_id), training_of(other_stream, "client-2", run_id)
        )
        model = await host.fetch(mine.train.model)
        assert await host.submit(whole(mine.id, "client-0", model)) == DONE
        # Send header and trailer only, as a host does that knows that all bytes have arrived.
        resumed = whole(mine.id, "client-0", model, offset=len(model))
        again = await host.submit([resumed[0], resumed[-1]])
        assert again == rpc.SubmitUpdateResponse(duplicate=True)
        early = whole(others.id, "client-2", model, offset=len(model))
        cut = await other.submit([early[0], early[-1]])
        assert cut == (Status.ABORTED, "TRANSFER_TRUNCATED"), "it is to be sent from its start"
        assert not list((relay.state / "updates").iterdir())
        assert await other.submit(whole(others.id, "client-2", model)) == DONE
        await federation.finished(run_id)


async def test_relay_drops_partial_updates_when_their_round_ends(
    federation: Federation, relay: Relay
) -> None:
    folder = relay.state / "updates"
    over = asyncio.Event()

    async def without_end(update: list[bytes]) -> AsyncIterator[bytes]:
        for message in update[:-1]:
            yield message
        await over.wait()

    async with (
        behind(relay, federation, "host-0") as host,
        direct(federation, "host-0") as beside,
        host.attending("client-0") as stream,
    ):
        for cut_before in (True, False):
            run_id = await federation.start_run("expected_clients=1", 'selector.name="uniform"')
            mine = await training_of(stream, "client-0", run_id)
            update = whole(mine.id, "client-0", await host.fetch(mine.train.model))
            if cut_before:
                assert await host.submit(update[:-1]) == (Status.ABORTED, "TRANSFER_TRUNCATED")
                sending = None
            else:
                sending = asyncio.ensure_future(host.submit_bytes(without_end(update)))
                await until(lambda: bool(list(folder.iterdir())), "something arrives")
            assert [path.suffix for path in folder.iterdir()] == [".part"]
            assert await beside.submit(update) == DONE
            await federation.finished(run_id)
            if sending is not None:
                over.set()
                with pytest.raises(grpc.aio.AioRpcError, match="without a trailer"):
                    await sending
            await until(lambda: not list(folder.iterdir()), "the relay drops what arrived")


def sum_of_zeros(
    folder: Path, model: bytes, instruction: rpc.Instruction, *members: str
) -> list[bytes]:
    """Return the messages that upload a sum of zero differences. members: update ids in the file,
    if they differ from those in the header."""
    (folder / "model").write_bytes(model)
    with open_tensors(folder / "model") as file:
        vectors = vectors_of(file.layout.parameters, ())
    ids = members or (instruction.id,)
    readers = {BODY: lambda begin, end: np.zeros(end - begin, np.int64)}
    write_sum_file(folder / "sum", readers, vectors, members_digest(ids))
    report = transfer_pb2.TrainingReport(samples=32, steps=1, seconds=0.1, loss=1.0)
    member = transfer_pb2.SumMember(
        client_id=instruction.client_id, update_id=instruction.id, report=report
    )
    return whole(
        instruction.id,
        instruction.client_id,
        (folder / "sum").read_bytes(),
        encoding=transfer_pb2.ENCODING_SUM,
        delta=True,
        report=None,
        members=[member],
    )


async def test_invalid_host_sum_is_refused_without_other_hosts(
    federation: Federation, relay: Relay, tmp_path: Path
) -> None:
    async with (
        behind(relay, federation, "host-0") as host,
        behind(relay, federation, "host-1") as hostile,
        host.attending("client-0") as stream,
        hostile.attending("client-2") as other_stream,
    ):
        run_id = await federation.start_run(
            *("expected_clients=2", "clients_per_round=2", "host_sums.enabled=true"),
            *('selector.name="uniform"', 'strategy.name="fedavg"'),
        )
        mine, others = await asyncio.gather(
            training_of(stream, "client-0", run_id), training_of(other_stream, "client-2", run_id)
        )
        model = await host.fetch(mine.train.model)
        honest = asyncio.create_task(host.submit(sum_of_zeros(tmp_path, model, mine)))
        await until(lambda: len(relay.held()) == 1, "the honest sum is held")
        stolen = sum_of_zeros(tmp_path, model, others)
        stolen[0] = sum_of_zeros(tmp_path, model, mine)[0]
        assert await hostile.submit(stolen) == (DENIED, "IDENTITY_REFUSED")
        wrong = sum_of_zeros(tmp_path, model, others, others.id, mine.id)
        assert await hostile.submit(wrong) == (Status.INVALID_ARGUMENT, "UPDATE_LAYOUT_MISMATCH")
        assert not honest.done(), "it waits for the other's"
        assert await hostile.submit(sum_of_zeros(tmp_path, model, others)) == DONE
        assert await honest == DONE
        await federation.finished(run_id)
        [committed] = await federation.history(run_id)
        assert [member.state for member in committed.members] == [INCLUDED] * 2
        assert not list((relay.state / "updates").iterdir())


async def test_relay_check_reports_valid_and_invalid_settings(
    federation: Federation, relay: Relay, tmp_path: Path
) -> None:
    other = tmp_path / "other.toml"
    text = relay.config.read_text().replace('"gate"', f'"{tmp_path / "state"}"')
    text = text.replace('"pki/revoked.pem"', f'"{relay.folder / "pki" / "revoked.pem"}"')
    other.write_text(text.replace(relay.address, "127.0.0.1:0"))
    found = await asyncio.to_thread(check, other)
    assert found.startswith(
        "certificate      relay gate of federation demo\n  sends for      client-0:2\n"
    )
    assert "  addresses      127.0.0.1\n" in found
    assert "revoked.pem, lists 0 certificates\n" in found
    assert found.endswith(f"{federation.files.operator.coordinator} admits this relay\n")
    assert f"can't listen on {relay.address}" in await asyncio.to_thread(check, relay.config)
    other.write_text(text.replace("gate.pem", "host-0.pem").replace("gate.key", "host-0.key"))
    assert "is for the role host, but relay is needed" in await asyncio.to_thread(check, other)


def check(config: Path) -> str:
    ended = run_program("potluck-relay", "check", "--config", str(config), folder=config.parent)
    return (ended.stdout + ended.stderr).decode()


async def until_ended(stream: Any) -> None:
    """Read a control stream to its end."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while await stream.read() is not grpc.aio.EOF:
            pass


async def test_relay_uses_a_renewed_certificate_at_once(
    federation: Federation, relay: Relay
) -> None:
    async with behind(relay, federation, "host-0") as host:
        async with host.attending("client-0") as stream:
            certificate_register.renew(federation.files.folder / "pki", "gate")
            with pytest.raises(grpc.aio.AioRpcError, match="the relay is reconnecting"):
                await until_ended(stream)
        async with host.attending("client-0"):
            await only_attending(federation, "host-0")
    assert relay.events().count("certificate renewed, reconnecting") == 1


async def nobody_attends(federation: Federation) -> None:
    """Wait until the revoked hosts are disconnected."""

    async def gone() -> None:
        while await federation.attending_hosts():  # noqa: ASYNC110  # by another process
            await asyncio.sleep(0.05)

    await in_time(CUT_OFF_SECONDS, gone())


async def test_revoked_host_is_disconnected_and_hosts_behind_a_revoked_relay_wait(
    federation: Federation, relay: Relay
) -> None:
    folder = federation.files.folder / "pki"
    async with behind(relay, federation, "host-0") as host:
        async with host.attending("client-0"):
            certificate_register.revoke(folder, "host-0")  # only the relay has this list
            await nobody_attends(federation)
        assert await host.talk(hello("client-0")) == (DENIED, "IDENTITY_REFUSED")
    async with behind(relay, federation, "host-1") as host:
        async with host.attending("client-2"):
            certificate_register.revoke(folder, "gate")
            await nobody_attends(federation)
        assert await host.talk(hello("client-2")) == (Status.UNAVAILABLE, "")
        await until(lambda: "the coordinator refuses this relay" in relay.events())
        await relay.kill()
        pki.issue(
            folder, Role.RELAY, "gate", clients=["client-0:2"], hosts=["127.0.0.1"], force=True
        )
        await relay.start()
        async with host.attending("client-2"):
            await only_attending(federation, "host-1")
