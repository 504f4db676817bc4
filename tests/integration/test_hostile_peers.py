"""Peers with valid certificates and bad intentions: refused with the right status, without harm.

There are a coordinator process, two honest hosts, and a third whose certificate the tests use.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
import pytest_asyncio
from grpc import StatusCode as Status
from support.federation import PATIENCE_SECONDS, Federation, crash_federation
from support.raw_host import (
    UNTOLD,
    RawHost,
    Refusal,
    chunk,
    header,
    hello,
    refusal_of,
    trailer,
    training_of,
    whole,
)

from potluck.common.errors import (
    NotFoundError,
    OpenFilesError,
    ProtocolVersionError,
    StorageError,
    from_rpc_error,
)
from potluck.common.net.protocol import VERSIONS
from potluck.common.tensors.digest import digest_of
from potluck.common.tensors.tensor_files import open_tensors, write_tensors
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.rpc.v1 import coordinator_pb2_grpc, operator_pb2, transfer_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")

ME = "client-2"
HOST = "host 'host-2'"
INCLUDED = operator_pb2.MEMBER_STATE_INCLUDED
FAILED = operator_pb2.MEMBER_STATE_FAILED
MEGABYTE = 1 << 20
GROWTH_BYTES = 48 * MEGABYTE
"""Private memory that a coordinator may keep after honest rounds."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def federation(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Federation]:
    async with crash_federation(
        tmp_path_factory.mktemp("hostile"),
        clients=3,
        hosts=3,
        count=3,
        rounds=1,
        coordinator={"stall_seconds": 5.0},
        start_hosts=False,
    ) as federation:
        for number in (0, 1):
            await federation.processes.start_host(number)
        await federation.until_attending(2)
        await federation.finished(
            await federation.start_run("clients_per_round=2", "expected_clients=2")
        )  # an honest round as warm-up
        yield federation


@pytest_asyncio.fixture(loop_scope="module")
async def hostile(federation: Federation) -> AsyncIterator[RawHost]:
    async with RawHost.of(federation.files.hosts[2]) as host:
        yield host


@contextlib.asynccontextmanager
async def memory_stays_flat(federation: Federation) -> AsyncIterator[None]:
    """Check throughout the block that the coordinator's private memory does not grow."""
    pid = await federation.processes.until_ready()
    before = private_bytes(pid)
    peak = before
    over = asyncio.Event()

    async def look() -> None:
        nonlocal peak
        while not over.is_set():
            peak = max(peak, private_bytes(pid))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), 0.02)

    looking = asyncio.create_task(look())
    try:
        yield
    finally:
        over.set()
        await looking
    assert peak - before <= GROWTH_BYTES, f"{(peak - before) / 1e6:.0f} MB more"


def private_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


async def honest_round(federation: Federation) -> None:
    """Finish a round with the honest hosts."""
    run_id = await federation.start_run("clients_per_round=2", "expected_clients=2")
    await federation.finished(run_id)


@contextlib.asynccontextmanager
async def selected(
    federation: Federation, host: RawHost, *assignments: str
) -> AsyncIterator[tuple[str, rpc.Instruction, Any]]:
    """Start a run whose cohort contains the hostile host; return its id, the instruction and the
    stream."""
    with contextlib.suppress(NotFoundError):  # other tests may have left it in quarantine
        await federation.operator.set_quarantine(ME, None)
    async with host.attending(ME) as call:
        run_id = await federation.start_run(*assignments)
        yield run_id, await training_of(call, ME, run_id), call


# Updates -----------------------------------------------------------------------------------------

VIOLATED = (Status.INVALID_ARGUMENT, "PROTOCOL_VIOLATED")
CLOSED = (Status.FAILED_PRECONDITION, "ROUND_CLOSED")
TOO_LARGE = (Status.RESOURCE_EXHAUSTED, "TOO_LARGE")
TRUNCATED = (Status.ABORTED, "TRANSFER_TRUNCATED")
OTHER_LAYOUT = (Status.INVALID_ARGUMENT, "UPDATE_LAYOUT_MISMATCH")
BY_GRPC = (Status.RESOURCE_EXHAUSTED, "")

Upload = Callable[[str, bytes], list[bytes]]


def other_id(change: Callable[[str], str]) -> Upload:
    return lambda name, content: whole(change(name), ME, content)


def other_header(**changes: Any) -> Upload:
    return lambda name, content: whole(name, ME, content, **changes)


def reporting(**changes: Any) -> Upload:
    values: dict[str, Any] = {"samples": 32, "steps": 3, "seconds": 0.1, "loss": 1.0}
    return other_header(report=transfer_pb2.TrainingReport(**(values | changes)))


UPLOADS: dict[str, tuple[Upload, Refusal]] = {
    "nothing": (lambda name, content: [], VIOLATED),
    "garbage": (lambda name, content: [b"\xff" * 100], VIOLATED),
    "chunk first": (lambda name, content: [chunk(content)], VIOLATED),
    "trailer first": (lambda name, content: [trailer(content)], VIOLATED),
    "two headers": (lambda name, content: [header(name, ME, content)] * 2, VIOLATED),
    "empty chunk": (lambda name, content: [header(name, ME, content), chunk(b"")], VIOLATED),
    "garbage inside": (lambda name, content: [header(name, ME, content), b"\x08"], VIOLATED),
    "another version": (
        other_header(version=99),
        (Status.FAILED_PRECONDITION, "PROTOCOL_VERSION_UNSUPPORTED"),
    ),
    "no digest": (other_header(blake3="../../../etc/passwd"), VIOLATED),
    "2^60 bytes": (other_header(size=1 << 60), TOO_LARGE),
    "too many bytes": (other_header(size=10), TOO_LARGE),
    "offset in nowhere": (other_header(offset=7), TRUNCATED),
    "offset beyond the end": (other_header(offset=1 << 50), VIOLATED),
    "no samples": (
        lambda name, content: [header(name, ME, content, report=None)],
        OTHER_LAYOUT,
    ),
    "more steps than the run takes": (reporting(steps=4), OTHER_LAYOUT),
    "steps that amount to too much": (reporting(steps=3, normalizer=3.1), OTHER_LAYOUT),
    "steps that amount to endlessly much": (reporting(steps=3, normalizer=np.inf), OTHER_LAYOUT),
    "steps that amount to nothing": (reporting(steps=3, normalizer=1e-300), OTHER_LAYOUT),
    "steps that amount to less": (reporting(steps=3, normalizer=-1.0), OTHER_LAYOUT),
    "steps that amount to no number": (reporting(steps=3, normalizer=np.nan), OTHER_LAYOUT),
    "a loss that is not a number": (reporting(steps=1, loss=np.nan), OTHER_LAYOUT),
    "an endless loss": (reporting(steps=1, loss=np.inf), OTHER_LAYOUT),
    "a training of endless seconds": (reporting(steps=1, seconds=np.inf), OTHER_LAYOUT),
    "early trailer": (
        lambda name, content: [header(name, ME, content), chunk(content[:9]), trailer(content)],
        TRUNCATED,
    ),
    "no trailer": (lambda name, content: whole(name, ME, content)[:-1], TRUNCATED),
    "another digest": (
        other_header(blake3="0" * 64),
        (Status.ABORTED, "DIGEST_MISMATCH"),
    ),
    "another's client": (
        lambda name, content: whole(name.replace(ME, "client-0"), "client-0", content),
        (Status.PERMISSION_DENIED, "IDENTITY_REFUSED"),
    ),
    "a client that is none": (
        lambda name, content: whole(name, "../" + ME, content),
        (Status.PERMISSION_DENIED, "IDENTITY_REFUSED"),
    ),
    "another's update": (other_id(lambda name: name.replace(ME, "client-0")), CLOSED),
    "an unknown run": (other_id(lambda name: "ffffffff" + name[8:]), CLOSED),
    "for another run": (other_header(run_id="ffffffff"), CLOSED),
    "for no run": (other_header(run_id=""), CLOSED),
    "a stale round": (other_id(lambda name: name.replace("/1.1/", "/0.1/")), CLOSED),
    "another attempt": (other_id(lambda name: name.replace("/1.1/", "/1.2/")), CLOSED),
    "a long id": (other_id(lambda name: name + "x" * 3 * MEGABYTE), CLOSED),
    "an endless header": (
        lambda name, content: [header(name + "x" * 5 * MEGABYTE, ME, content)],
        BY_GRPC,
    ),
    "an oversize chunk": (
        lambda name, content: [header(name, ME, content), chunk(bytes(5 * MEGABYTE))],
        BY_GRPC,
    ),
}


async def test_uploads_that_violate_the_protocol_are_refused(
    federation: Federation, hostile: RawHost
) -> None:
    async with (
        selected(federation, hostile) as (run_id, instruction, _),
        memory_stays_flat(federation),
    ):
        content = await hostile.fetch(instruction.train.model)
        for what, (upload, expected) in UPLOADS.items():
            assert await hostile.submit(upload(instruction.id, content)) == expected, what
        assert (
            await hostile.submit(whole(instruction.id, ME, content)) == rpc.SubmitUpdateResponse()
        )
        again = await hostile.submit(whole(instruction.id, ME, content))
        assert again in (rpc.SubmitUpdateResponse(duplicate=True), CLOSED)
        await federation.finished(run_id)
    [entry] = await federation.history(run_id)
    assert {member.client_id: member.state for member in entry.members} == {
        "client-0": INCLUDED,
        "client-1": INCLUDED,
        ME: INCLUDED,
    }


async def test_delayed_older_upload_does_not_overwrite_a_newer_one(
    federation: Federation, hostile: RawHost
) -> None:
    async with selected(federation, hostile) as (run_id, instruction, _):
        content, name = await hostile.fetch(instruction.train.model), instruction.id
        half, more = len(content) // 2, len(content) // 4
        over = asyncio.Event()
        question = rpc.LocateUploadRequest(
            update_id=name, run_id=run_id, client_id=ME, blake3=digest_of(content)
        )

        async def held() -> int:
            return int((await hostile.stub.LocateUpload(question)).offset)

        def first(offset: int, **changes: Any) -> bytes:
            return header(name, ME, content, offset=offset, **changes)

        async def stalling() -> AsyncIterator[bytes]:
            yield first(0, sequence=1)
            yield chunk(content[:half])
            await over.wait()

        older = asyncio.ensure_future(hostile.submit_bytes(stalling()))
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not older.done() and not await held():
                pass
            question.resume = True
            located = await hostile.stub.LocateUpload(question)
            assert (located.offset, located.sequence) == (half, 2)
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await older
        over.set()
        assert refusal_of(ended.value) == TRUNCATED
        question.resume = False
        late = [first(0, sequence=1), chunk(content[:more])]
        assert await hostile.submit(late) == TRUNCATED
        assert await held() == half
        piece = [first(half, sequence=2, until=half + more), chunk(content[half : half + more])]
        answer = await hostile.submit(piece)
        assert isinstance(answer, rpc.SubmitUpdateResponse)
        assert answer.received == half + more == await held()
        rest = [first(half + more, sequence=3), chunk(content[half + more :]), trailer(content)]
        assert await hostile.submit(rest) == rpc.SubmitUpdateResponse()
        await federation.finished(run_id)
    [entry] = await federation.history(run_id)
    assert {member.state for member in entry.members} == {INCLUDED}


def not_finite(content: bytes, folder: Path) -> bytes:
    return changed(content, folder, lambda arrays: arrays["ballast"].fill(np.nan))


def other_shape(content: bytes, folder: Path) -> bytes:
    return changed(content, folder, lambda arrays: arrays.update(ballast=np.zeros((2, 500), "f4")))


def another_tensor(content: bytes, folder: Path) -> bytes:
    return changed(content, folder, lambda arrays: arrays.update(more=np.zeros(1, "f4")))


def changed(content: bytes, folder: Path, change: Callable[[dict[str, Any]], None]) -> bytes:
    path = folder / "update"
    path.write_bytes(content)
    with open_tensors(path) as file:
        arrays = {name: array.copy() for name, array in file.arrays.items()}
    change(arrays)
    write_tensors(path, arrays)
    return path.read_bytes()


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (not_finite, "UPDATE_NOT_FINITE"),
        (other_shape, "UPDATE_LAYOUT_MISMATCH"),
        (another_tensor, "UPDATE_LAYOUT_MISMATCH"),
        (lambda content, folder: content[:-8], "UPDATE_LAYOUT_MISMATCH"),
        (lambda content, folder: b"", "UPDATE_LAYOUT_MISMATCH"),
        (lambda content, folder: bytes(len(content)), "UPDATE_LAYOUT_MISMATCH"),
        (lambda content, folder: b"\0" * 7 + b"\x10" + content[8:], "UPDATE_LAYOUT_MISMATCH"),
    ],
    ids=["NaN", "shape", "tensor", "truncated", "empty", "zeros", "header of 2^60 bytes"],
)
async def test_invalid_update_is_refused_and_its_client_fails(
    federation: Federation,
    hostile: RawHost,
    tmp_path: Path,
    spoil: Callable[[bytes, Path], bytes],
    reason: str,
) -> None:
    async with selected(federation, hostile) as (run_id, instruction, _):
        content = spoil(await hostile.fetch(instruction.train.model), tmp_path)
        refusal = await hostile.submit(whole(instruction.id, ME, content))
        assert refusal == (Status.INVALID_ARGUMENT, reason)
        await federation.finished(run_id)
    [entry] = await federation.history(run_id)
    states = {member.client_id: member.state for member in entry.members}
    assert states == {"client-0": INCLUDED, "client-1": INCLUDED, ME: FAILED}
    [trouble] = [member.trouble for member in entry.members if member.client_id == ME]
    assert reason in trouble


CONTROL = "auxiliary/control/ballast"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda arrays: arrays[CONTROL].fill(np.nan), "UPDATE_NOT_FINITE"),
        (lambda arrays: arrays[CONTROL].fill(-np.inf), "UPDATE_NOT_FINITE"),
        (lambda arrays: arrays.pop(CONTROL), "UPDATE_LAYOUT_MISMATCH"),
        (
            lambda arrays: arrays.update({CONTROL: np.zeros((2, 500), "f4")}),
            "UPDATE_LAYOUT_MISMATCH",
        ),
        (lambda arrays: arrays.update({CONTROL: np.zeros(1000)}), "UPDATE_LAYOUT_MISMATCH"),
        (
            lambda arrays: arrays.update({"auxiliary/u/ballast": np.zeros(1000, "f4")}),
            "UPDATE_LAYOUT_MISMATCH",
        ),
        (lambda arrays: arrays["ballast"].fill(np.nan), "UPDATE_NOT_FINITE"),
    ],
    ids=["NaN", "infinite", "missing", "shape", "type", "another", "NaN in the weights"],
)
async def test_invalid_auxiliary_tensors_are_refused_and_their_client_fails(
    federation: Federation,
    hostile: RawHost,
    tmp_path: Path,
    change: Callable[[dict[str, Any]], Any],
    reason: str,
) -> None:
    async with selected(federation, hostile, 'strategy.name="scaffold"') as (run_id, told, _):
        content = await hostile.fetch(told.train.model)
        path = tmp_path / "auxiliaries"
        path.write_bytes(await hostile.fetch(told.train.auxiliary.shared))
        with open_tensors(path) as file:
            beside = {name: array.copy() for name, array in file.arrays.items()}
        assert CONTROL in beside

        def spoil(arrays: dict[str, Any]) -> None:
            arrays.update(beside)
            change(arrays)

        spoiled = changed(content, tmp_path, spoil)
        refusal = await hostile.submit(whole(told.id, ME, spoiled))
        assert refusal == (Status.INVALID_ARGUMENT, reason)
        await federation.finished(run_id)
    [entry] = await federation.history(run_id)
    states = {member.client_id: member.state for member in entry.members}
    assert states == {"client-0": INCLUDED, "client-1": INCLUDED, ME: FAILED}


async def test_decompression_bomb_is_refused(federation: Federation) -> None:
    """Four megabytes of gzip hold four gigabytes."""
    async with RawHost.of(federation.files.hosts[2]) as host, memory_stays_flat(federation):

        async def bombs() -> AsyncIterator[bytes]:
            yield bytes(512 * MEGABYTE)

        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await host.submit_bytes(bombs(), compression=grpc.Compression.Gzip)
        assert refused.value.code() in (Status.UNIMPLEMENTED, Status.RESOURCE_EXHAUSTED)
        await honest_round(federation)


async def drained(call: Any) -> None:
    """Read a stream to its end."""
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_file_truncated_while_it_is_served_fails_only_that_call(
    federation: Federation, hostile: RawHost
) -> None:
    content = bytes(64 * MEGABYTE)  # more than a connection buffers
    path = federation.state / "models" / f"{digest_of(content)}.safetensors"
    path.write_bytes(content)
    request = rpc.CoordinatorServiceFetchModelRequest(blake3=path.stem)
    call: Any = hostile.stub.FetchModel(request)
    assert (await call.read()).frame.header.size == len(content)
    os.truncate(path, 1000)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await drained(call)
    error = from_rpc_error(refused.value)
    assert isinstance(error, StorageError)
    assert "bytes were expected" in error.message
    path.unlink()
    await honest_round(federation)


async def test_coordinator_without_file_descriptors_names_the_limit_and_recovers(
    federation: Federation, hostile: RawHost
) -> None:
    pid = await federation.processes.until_ready()
    content = b"a small file"
    path = federation.state / "models" / f"{digest_of(content)}.safetensors"
    path.write_bytes(content)
    model = transfer_pb2.ModelReference(blake3=path.stem)
    assert await hostile.fetch(model) == content
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await hostile.fetch(model)
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    assert refused.value.code() is Status.UNAVAILABLE
    error = from_rpc_error(refused.value)
    assert isinstance(error, OpenFilesError)
    assert "limit of open files (RLIMIT_NOFILE) is 3; raise it with LimitNOFILE=" in error.message
    assert "(RLIMIT_NOFILE) is 3" in federation.files.log("coordinator").read_text()
    assert await hostile.fetch(model) == content
    path.unlink()


# The control stream ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([rpc.AttendRequest(heartbeat=rpc.Heartbeat())], VIOLATED),
        ([rpc.AttendRequest()], VIOLATED),
        ([hello()], VIOLATED),
        ([hello(ME, ME)], VIOLATED),
        ([hello(ME), hello(ME)], VIOLATED),
        ([hello(ME), rpc.AttendRequest()], VIOLATED),
        ([hello("client-0")], (Status.PERMISSION_DENIED, "IDENTITY_REFUSED")),
        ([hello("../x")], (Status.PERMISSION_DENIED, "IDENTITY_REFUSED")),
        (
            [hello(ME, version=2**31)],
            (Status.FAILED_PRECONDITION, "PROTOCOL_VERSION_UNSUPPORTED"),
        ),
        ([hello(*[f"client-{k}" for k in range(600_000)])], BY_GRPC),
    ],
    ids=[
        "heartbeat first",
        "nothing first",
        "no clients",
        "a client twice",
        "hello twice",
        "nothing later",
        "another's client",
        "no client",
        "version",
        "endless hello",
    ],
)
async def test_control_streams_that_violate_the_protocol_are_refused(
    hostile: RawHost, messages: list[rpc.AttendRequest], expected: Refusal
) -> None:
    assert await hostile.talk(*messages) == expected


@pytest.mark.parametrize(
    ("versions", "told", "mover"),
    [
        ({}, "framing: version none on the host, 3 on the coordinator", HOST),
        ({**VERSIONS, "framing": 2}, "framing: version 2 on the host, 3 on the coordinator", HOST),
        ({**VERSIONS, "framing": 4}, "framing: version 4 on the host, 3 on", "the coordinator"),
        ({**VERSIONS, "relays": 1}, "relays: version 1 on the host, none on", "the coordinator"),
    ],
    ids=["no versions", "older", "newer", "additional version"],
)
async def test_host_of_an_incompatible_release_is_refused_at_hello(
    hostile: RawHost, versions: dict[str, int], told: str, mover: str
) -> None:
    said = hello(ME)
    said.hello.ClearField("versions")
    said.hello.versions.update(versions)
    call = hostile.stub.Attend()
    await call.write(said)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call.read()
    error = from_rpc_error(refused.value)
    assert isinstance(error, ProtocolVersionError)
    assert told in error.message
    assert error.message.endswith(f"; upgrade Potluck on {mover}")


async def test_answers_about_clients_of_other_hosts_are_ignored(
    federation: Federation, hostile: RawHost
) -> None:
    async with selected(federation, hostile, "round.quorum=0.3") as (run_id, instruction, call):
        for other in ("client-0", "client-1"):
            name = instruction.id.replace(ME, other)
            progress = rpc.Progress(instruction_id=name, fraction=0.5)
            failure = rpc.Failure(reason="TRAINING_FAILED", message="says somebody else")
            await call.write(rpc.AttendRequest(heartbeat=rpc.Heartbeat(progress=[progress])))
            await call.write(
                rpc.AttendRequest(acknowledgement=rpc.Acknowledgement(instruction_id=name))
            )
            await call.write(
                rpc.AttendRequest(answer=rpc.Answer(instruction_id=name, failure=failure))
            )
        mine = rpc.Failure(reason="TRAINING_FAILED", message="no wish to")
        await call.write(
            rpc.AttendRequest(answer=rpc.Answer(instruction_id=instruction.id, failure=mine))
        )
        await federation.finished(run_id)
    [entry] = await federation.history(run_id)
    states = {member.client_id: member.state for member in entry.members}
    assert states == {"client-0": INCLUDED, "client-1": INCLUDED, ME: FAILED}


async def test_certificate_of_one_role_is_refused_by_the_service_of_another(
    federation: Federation,
) -> None:
    operator = federation.files.operator
    refused = (Status.PERMISSION_DENIED, "IDENTITY_REFUSED")
    async with RawHost(operator.coordinator, operator.tls) as host:
        assert await host.talk(hello(ME)) == refused
        assert await host.submit([]) == refused
    async with RawHost.of(federation.files.hosts[2]) as host:
        stop: Any = host.channel.unary_unary(
            "/potluck.rpc.v1.OperatorService/StopRun",
            request_serializer=operator_pb2.StopRunRequest.SerializeToString,
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stop(operator_pb2.StopRunRequest(run_id="0"))
        assert refusal_of(caught.value) == refused


# Slowness and numbers ----------------------------------------------------------------------------


async def test_too_slow_upload_is_cut_off(federation: Federation, hostile: RawHost) -> None:
    async with selected(federation, hostile) as (run_id, instruction, _):
        content = await hostile.fetch(instruction.train.model)

        async def drip() -> AsyncIterator[bytes]:
            yield header(instruction.id, ME, content)
            for place in range(len(content)):
                yield chunk(content[place : place + 1])
                await asyncio.sleep(0.05)

        refusal, details = UNTOLD, ""
        while refusal == UNTOLD:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await asyncio.wait_for(hostile.submit_bytes(drip()), PATIENCE_SECONDS)
            refusal, details = refusal_of(caught.value), caught.value.details() or ""
        assert refusal == TRUNCATED
        assert "bytes per second" in details
        await federation.operator.stop_run(run_id)


async def test_unread_downloads_do_not_block_other_hosts(
    federation: Federation, hostile: RawHost
) -> None:
    large = "task.parameters=16000000"
    async with selected(federation, hostile, large) as (run_id, instruction, _):
        request = rpc.CoordinatorServiceFetchModelRequest(blake3=instruction.train.model.blake3)
        calls = [hostile.stub.FetchModel(request) for _ in range(8)]
        for call in calls:  # all of this host's places are then taken
            await asyncio.wait_for(call.initial_metadata(), PATIENCE_SECONDS)
        async with RawHost.of(federation.files.hosts[2], name="another") as another:
            await asyncio.wait_for(another.fetch(instruction.train.model), PATIENCE_SECONDS)
        for call in calls:
            call.cancel()
        await federation.operator.stop_run(run_id)


async def test_ten_thousand_streams_are_refused_without_memory_growth(
    federation: Federation,
) -> None:
    refusals: list[Refusal] = []
    async with contextlib.AsyncExitStack() as stack, memory_stays_flat(federation):
        hosts = [
            await stack.enter_async_context(RawHost.of(federation.files.hosts[2], name=f"{k}"))
            for k in range(40)
        ]
        calls: list[Any] = []
        for host in hosts:
            calls += [open_stream(host) for _ in range(250)]
            await host.channel.channel_ready()

        async def refused(call: Any) -> None:
            try:
                await call.read()
            except grpc.aio.AioRpcError as error:
                refusals.append(refusal_of(error))

        reading = [asyncio.create_task(refused(call)) for call in calls]
        async with asyncio.timeout(240):
            while len(refusals) < len(calls) - 300:  # noqa: ASYNC110  # counted by many tasks
                await asyncio.sleep(0.02)
        await honest_round(federation)
        # Accepted streams stay open for a while. Then each is refused because it sends nothing, and
        # a later stream takes its place; the slower the machine, the more often.
        overloaded = (Status.RESOURCE_EXHAUSTED, "OVERLOADED")
        silent = (Status.INVALID_ARGUMENT, "PROTOCOL_VIOLATED")
        # gRPC itself cancels calls if too many wait for the coordinator, or wait too long.
        shed = (Status.CANCELLED, "")
        assert set(refusals) <= {overloaded, silent, shed}
        assert refusals.count(overloaded) + refusals.count(shed) > 0.5 * len(calls)
        assert refusals.count(overloaded)
        for call in calls:
            call.cancel()
        await asyncio.gather(*reading, return_exceptions=True)


def open_stream(host: RawHost) -> Any:
    stub: coordinator_pb2_grpc.CoordinatorServiceAsyncStub = host.stub
    return stub.Attend()
