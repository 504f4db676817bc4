"""A scripted coordinator, as an operator sees it, over real mutual TLS."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
import grpc.aio
from support.pki import TestFederation, server_credentials

from potluck.common.errors import NotFoundError, PotluckError, RunError, to_status
from potluck.common.net.protocol import FRAMING_VERSION
from potluck.common.net.tls import SERVER_OPTIONS
from potluck.common.run_file.runfile import parse_run_file
from potluck.common.tensors.digest import digest_of
from potluck.deploy.operator.operator_config import OperatorConfig
from potluck.rpc.v1 import operator_pb2, transfer_pb2
from potluck.rpc.v1.operator_pb2 import MemberState, RunState
from potluck.rpc.v1.operator_pb2_grpc import (
    OperatorServiceServicer,
    add_OperatorServiceServicer_to_server,
)

if TYPE_CHECKING:  # the class is generic only in the stubs
    Context = grpc.aio.ServicerContext[Any, Any]

RUN_ID = "3f9ac0de"
Event = operator_pb2.WatchRunResponse


def status(
    state: RunState.ValueType = RunState.RUN_STATE_RUNNING,
    *,
    committed: int = 0,
    rounds: int = 3,
    reason: str = "",
) -> Event:
    return Event(
        status=operator_pb2.RunStatus(
            run_id=RUN_ID,
            name="tea",
            state=state,
            reason=reason,
            committed_rounds=committed,
            rounds=rounds,
            task="colored-digits",
            selector="uniform",
            strategy="fedavg",
            count=3,
            seed=7,
        )
    )


NOON = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


def waits(event: Event, *, clients: int = 6, needed: int = 9, seconds: float | None = 300) -> Event:
    """Return the status of a run that waits for clients until `seconds` after noon."""
    waiting = event.status.waiting
    waiting.what = (
        f"{clients} of {needed} clients are connected; waiting for {needed - clients} more"
    )
    waiting.clients, waiting.clients_needed = clients, needed
    waiting.away[:] = [f"client-{number}" for number in range(clients, needed)]
    waiting.away_count = needed - clients
    if seconds is not None:
        waiting.until.FromDatetime(NOON + timedelta(seconds=seconds))
    return event


def member(
    number: int,
    state: MemberState.ValueType = MemberState.MEMBER_STATE_INCLUDED,
    fraction: float = 0.0,
) -> operator_pb2.Member:
    return operator_pb2.Member(
        client_id=f"client-{number}",
        host_id="host-0",
        state=state,
        reason="uniform",
        fraction=fraction,
    )


def committed(number: int, accuracy: float, *members: operator_pb2.Member) -> Event:
    metrics = operator_pb2.Metrics(
        loss=1.0 - accuracy, accuracy=accuracy, worst_group_accuracy=accuracy / 2
    )
    return Event(
        committed=operator_pb2.CommittedRound(
            round=number,
            members=members or [member(0), member(1), member(2)],
            metrics=metrics,
            seconds=1.5,
            bytes_down=1_200_000,
            bytes_up=800_000,
            model_blake3=digest_of(bytes([number])),
        )
    )


def covering(event: Event, clients: int, asked: int, samples: int, *, partial: bool) -> Event:
    """Return a committed round whose metrics are over these clients and samples."""
    for name in ("accuracy", "loss", "worst_group_accuracy"):
        event.committed.coverage[name].CopyFrom(
            operator_pb2.Coverage(clients=clients, asked=asked, samples=samples, partial=partial)
        )
    return event


def spread_out(event: Event) -> Event:
    """Return the event of a committed round, with the spread of its accuracy over twelve
    clients."""
    known = {"clients": 12, "mean": 0.5, "quantiles": [0.2, 0.3, 0.5, 0.7, 0.9], "worst_tenth": 0.1}
    event.committed.spreads["accuracy"].CopyFrom(operator_pb2.Spread(**known))  # type: ignore[arg-type]  # by name
    return event


def progress(number: int, phase: str = "train", *members: operator_pb2.Member) -> Event:
    return Event(
        progress=operator_pb2.RoundProgress(
            round=number, attempt=1, phase=phase, members=members, seconds=0.4
        )
    )


def notice(text: str, *, warning: bool = True) -> Event:
    return Event(notice=operator_pb2.Notice(text=text, warning=warning))


@dataclass
class FakeOperatorService(OperatorServiceServicer):
    """Answers from its attributes. `watches`: one list of events per call of WatchRun.

    A list that does not end the run is followed by UNAVAILABLE, as if the coordinator had died,
    or, with `holds`, by nothing: the stream stays open. `missing`: id of a run that it does not
    know. `unwatched`: set when a watcher disconnects. `epsilons`: privacy losses of clients'
    profiles, if not 1. `model_breaks`: offsets at which downloads break off, one per call.
    """

    runs: Sequence[operator_pb2.RunStatus] = ()
    clients: Sequence[operator_pb2.ClientStatus] = ()
    watches: list[list[Event]] = field(default_factory=list)
    holds: bool = False
    missing: str = ""
    unwatched: asyncio.Event = field(default_factory=asyncio.Event)
    model: bytes = b""
    model_breaks: list[int] = field(default_factory=list)
    origin: operator_pb2.ModelOrigin = field(default_factory=operator_pb2.ModelOrigin)
    profiles: Sequence[operator_pb2.ClientProfile] = ()
    epsilons: Mapping[str, float] = field(default_factory=dict)
    watched: int = 0
    stopped: list[str] = field(default_factory=list)
    resumed: list[str] = field(default_factory=list)
    started: list[str] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)

    async def StartRun(  # noqa: N802  # named by the protocol
        self,
        request: operator_pb2.StartRunRequest,
        context: Context,
    ) -> operator_pb2.StartRunResponse:
        try:
            run_file = parse_run_file(request.run_file, source="run file")
            if run_file.selector.name != "uniform":
                raise NotFoundError(f"'{run_file.selector.name}' is not installed")
        except PotluckError as error:
            await abort(context, error)
        self.started.append(request.run_file)
        return operator_pb2.StartRunResponse(run_id=RUN_ID)

    async def ListRuns(  # noqa: N802  # named by the protocol
        self,
        request: operator_pb2.ListRunsRequest,
        context: Context,
    ) -> operator_pb2.ListRunsResponse:
        return operator_pb2.ListRunsResponse(runs=self.runs)

    async def ListClients(  # noqa: N802  # named by the protocol
        self,
        request: operator_pb2.ListClientsRequest,
        context: Context,
    ) -> operator_pb2.ListClientsResponse:
        return operator_pb2.ListClientsResponse(clients=self.clients)

    async def StopRun(  # noqa: N802  # named by the protocol
        self,
        request: operator_pb2.StopRunRequest,
        context: Context,
    ) -> operator_pb2.StopRunResponse:
        self.stopped.append(request.run_id)
        if not RUN_ID.startswith(request.run_id):
            await abort(context, NotFoundError(f"no run begins with '{request.run_id}'"))
        stopped = status(RunState.RUN_STATE_STOPPED, committed=1, reason="by an operator").status
        return operator_pb2.StopRunResponse(status=stopped)

    async def DeleteRun(  # noqa: N802  # named by the protocol
        self,
        request: operator_pb2.DeleteRunRequest,
        context: Context,
    ) -> operator_pb2.DeleteRunResponse:
        self.deleted.append(request.run_id)
        finished = status(RunState.RUN_STATE_FINISHED, committed=2).status
        return operator_pb2.DeleteRunResponse(status=finished)

    async def FetchRunFile(  # noqa: N802  # named by the protocol
        self,
        request: operator_pb2.FetchRunFileRequest,
        context: Context,
    ) -> operator_pb2.FetchRunFileResponse:
        return operator_pb2.FetchRunFileResponse(run_id=RUN_ID, run_file=(self.started or [""])[-1])

    async def ResumeRun(  # noqa: N802  # named by the protocol
        self,
        request: operator_pb2.ResumeRunRequest,
        context: Context,
    ) -> operator_pb2.ResumeRunResponse:
        self.resumed.append(request.run_id)
        if not RUN_ID.startswith(request.run_id):
            await abort(context, RunError(f"run {request.run_id} is finished"))
        waiting = status(RunState.RUN_STATE_WAITING, committed=1).status
        return operator_pb2.ResumeRunResponse(status=waiting)

    async def WatchRun(  # noqa: N802  # named by the protocol
        self,
        request: operator_pb2.WatchRunRequest,
        context: Context,
    ) -> AsyncGenerator[Event]:
        self.watched += 1
        if request.run_id == self.missing:
            await abort(context, NotFoundError(f"no run begins with '{request.run_id}'"))
        events = self.watches.pop(0)
        for event in events:
            yield event
        ends = {RunState.RUN_STATE_FINISHED, RunState.RUN_STATE_STOPPED, RunState.RUN_STATE_FAILED}
        if events[-1].status.state not in ends:
            if self.holds:
                try:
                    await asyncio.get_running_loop().create_future()  # until the call is cancelled
                finally:
                    self.unwatched.set()
            await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    async def FetchProfiles(  # noqa: N802  # named by the protocol
        self,
        request: operator_pb2.FetchProfilesRequest,
        context: Context,
    ) -> AsyncGenerator[operator_pb2.FetchProfilesResponse]:
        classes = max((len(each.label_counts) for each in self.profiles), default=0)
        yield operator_pb2.FetchProfilesResponse(classes=classes, clients=self.profiles)

    async def AuditDisclosures(  # noqa: N802  # named by the protocol
        self,
        request: operator_pb2.AuditDisclosuresRequest,
        context: Context,
    ) -> AsyncGenerator[operator_pb2.AuditDisclosuresResponse]:
        yield operator_pb2.AuditDisclosuresResponse(
            profiles=[
                operator_pb2.AuditedProfile(
                    client_id=each.client_id,
                    signal="label_counts",
                    data_epoch=1,
                    epsilon=self.epsilons.get(each.client_id, 1.0),
                )
                for each in self.profiles
                if each.label_counts
            ]
        )

    async def DescribeCoordinator(  # noqa: N802  # named by the protocol
        self,
        request: operator_pb2.DescribeCoordinatorRequest,
        context: Context,
    ) -> operator_pb2.DescribeCoordinatorResponse:
        attending = [client for client in self.clients if client.attending]
        return operator_pb2.DescribeCoordinatorResponse(
            software_version="0.1.0",
            hosts_attending=len({client.host_id for client in attending}),
            clients_attending=len(attending),
        )

    async def FetchModel(  # noqa: N802  # named by the protocol
        self,
        request: operator_pb2.OperatorServiceFetchModelRequest,
        context: Context,
    ) -> AsyncGenerator[operator_pb2.OperatorServiceFetchModelResponse]:
        blake3 = digest_of(self.model)
        offset = request.offset if request.blake3 == blake3 else 0
        self.offsets.append(offset)
        end = self.model_breaks.pop(0) if self.model_breaks else len(self.model)
        header = transfer_pb2.FileHeader(
            version=FRAMING_VERSION, blake3=blake3, size=len(self.model), offset=offset
        )
        first = _frame(transfer_pb2.ModelFrame(header=header))
        first.origin.CopyFrom(self.origin)
        yield first
        for start in range(offset, end, 1000):
            yield _frame(transfer_pb2.ModelFrame(chunk=self.model[start : min(start + 1000, end)]))
        if end < len(self.model):
            await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        yield _frame(transfer_pb2.ModelFrame(trailer=transfer_pb2.FileTrailer(blake3=blake3)))


def _frame(frame: transfer_pb2.ModelFrame) -> operator_pb2.OperatorServiceFetchModelResponse:
    return operator_pb2.OperatorServiceFetchModelResponse(frame=frame)


async def abort(context: Context, error: PotluckError) -> NoReturn:
    rich = to_status(error)
    metadata = (("grpc-status-details-bin", rich.SerializeToString()),)
    await context.abort(error.code, error.message, trailing_metadata=metadata)


@asynccontextmanager
async def running_operator_service(
    service: FakeOperatorService, federation: TestFederation
) -> AsyncIterator[OperatorConfig]:
    """Serve on a free port; yield the configuration with which an operator connects."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    add_OperatorServiceServicer_to_server(service, server)
    port = server.add_secure_port("127.0.0.1:0", server_credentials(federation.coordinator))
    await server.start()
    try:
        yield OperatorConfig(coordinator=f"127.0.0.1:{port}", tls=federation.operator)
    finally:
        await server.stop(0)
