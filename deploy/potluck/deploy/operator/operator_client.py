"""The operator's side of `OperatorService`: calls with deadlines, errors with remedies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from potluck.common.errors import PotluckError, ProtocolError, UnreachableError
from potluck.common.net.connection_errors import connection_error
from potluck.common.net.tls import TlsFiles, channel
from potluck.common.plain_text import make_plain
from potluck.deploy.operator.operator_config import OperatorConfig
from potluck.rpc.v1 import operator_pb2
from potluck.rpc.v1.operator_pb2_grpc import OperatorServiceStub

if TYPE_CHECKING:  # exists for type checkers only
    from potluck.rpc.v1.operator_pb2_grpc import OperatorServiceAsyncStub

PAGE_SIZE = 1000
"""Number of runs or clients requested in one call."""
CALL_SECONDS = 30.0
"""Deadline of a call with one answer, in seconds."""

START_SECONDS = 120.0
"""Deadline of starting a run, in seconds.

The coordinator imports the task and large libraries, and builds the model.
"""

STALL_SECONDS = 60.0
"""Seconds without a received byte after which a download counts as broken."""

Request = TypeVar("Request")
Answer = TypeVar("Answer", bound=Message)


class OperatorClient:
    """A connection to one coordinator.

    Every method raises PotluckError; UnreachableError if the coordinator can't be reached or was
    disconnected.
    """

    def __init__(
        self,
        connection: grpc.aio.Channel,
        address: str,
        tls: TlsFiles,
        *,
        server_name: str | None = None,
    ) -> None:
        self._address = address
        self._tls = tls
        self._server_name = server_name
        self._stub: OperatorServiceAsyncStub = OperatorServiceStub(connection)

    @property
    def address(self) -> str:
        """The coordinator's address, HOST:PORT."""
        return self._address

    async def start_run(self, run_file: str) -> str:
        """Start a run from the text of a run file. Return its id."""
        request = operator_pb2.StartRunRequest(run_file=run_file)
        call = self._stub.StartRun(request, timeout=START_SECONDS)
        return (await self._call(call, START_SECONDS)).run_id

    async def list_runs(self, *, most: int = 0) -> list[operator_pb2.RunStatus]:
        """Return all runs, newest first; if `most` is not 0, at most that number of runs."""
        runs: list[operator_pb2.RunStatus] = []
        token = ""
        while True:
            size = min(most - len(runs), PAGE_SIZE) if most else PAGE_SIZE
            request = operator_pb2.ListRunsRequest(page_size=size, page_token=token)
            answer = await self._call(self._stub.ListRuns(request, timeout=CALL_SECONDS))
            runs += answer.runs
            token = answer.next_page_token
            if not token or len(runs) >= most > 0:
                return runs

    async def lost_runs(self) -> list[str]:
        """Return one sentence per run that the database has lost, with the remedy."""
        request = operator_pb2.ListRunsRequest(page_size=1)
        answer = await self._call(self._stub.ListRuns(request, timeout=CALL_SECONDS))
        return list(answer.lost)

    async def newest_run(self) -> operator_pb2.RunStatus | None:
        """Return the run that was started last; None if there are no runs."""
        # Request at least two: the newest may be a pre-training run, which is hidden.
        request = operator_pb2.ListRunsRequest(page_size=2)
        answer = await self._call(self._stub.ListRuns(request, timeout=CALL_SECONDS))
        return answer.runs[0] if answer.runs else None

    async def list_clients(self) -> list[operator_pb2.ClientStatus]:
        """Return all clients that ever connected to the coordinator, sorted by id."""
        clients: list[operator_pb2.ClientStatus] = []
        token = ""
        while True:
            request = operator_pb2.ListClientsRequest(page_size=PAGE_SIZE, page_token=token)
            answer = await self._call(self._stub.ListClients(request, timeout=CALL_SECONDS))
            clients += answer.clients
            token = answer.next_page_token
            if not token:
                return sorted(clients, key=lambda client: client.client_id)

    async def describe_coordinator(self) -> operator_pb2.DescribeCoordinatorResponse:
        """Return the coordinator's version, disk, connected hosts and runs."""
        request = operator_pb2.DescribeCoordinatorRequest()
        return await self._call(self._stub.DescribeCoordinator(request, timeout=CALL_SECONDS))

    async def set_quarantine(self, client_id: str, reason: str | None) -> None:
        """Forbid the selection of a client; if the reason is None, allow it again."""
        request = operator_pb2.SetQuarantineRequest(
            client_id=client_id, quarantined=reason is not None, reason=reason or ""
        )
        await self._call(self._stub.SetQuarantine(request, timeout=CALL_SECONDS))

    async def install_revocations(self, revocation_list: bytes) -> tuple[int, int]:
        """Send a revocation list. Return the number of revoked certificates, and of new entries."""
        request = operator_pb2.InstallRevocationsRequest(revocation_list=revocation_list)
        call = self._stub.InstallRevocations(request, timeout=CALL_SECONDS)
        answer = await self._call(call)
        return answer.revoked, answer.new

    async def install_membership(self, document: bytes) -> operator_pb2.InstallMembershipResponse:
        """Send a members.json. Return the membership that is valid afterwards."""
        request = operator_pb2.InstallMembershipRequest(document=document)
        call = self._stub.InstallMembership(request, timeout=CALL_SECONDS)
        return await self._call(call)

    async def fetch_profiles(self, run_id: str) -> tuple[int, list[operator_pb2.ClientProfile]]:
        """Return the number of classes of a run's task, and its clients' profiles.

        Profiles contain what the clients disclosed, in roster order.
        """
        call = self._stub.FetchProfiles(operator_pb2.FetchProfilesRequest(run_id=run_id))
        answers = await self._all(call, "profiles")
        classes = answers[0].classes if answers else 0
        return classes, [client for answer in answers for client in answer.clients]

    async def audit_labels(self, run_id: str) -> list[operator_pb2.LabelAudit]:
        """Return the label counts that a run's clients claim, compared with their updates."""
        call = self._stub.AuditLabels(operator_pb2.AuditLabelsRequest(run_id=run_id))
        answers = await self._all(call, "audits")
        return [audit for answer in answers for audit in answer.audits]

    async def audit_disclosures(self, run_id: str) -> list[operator_pb2.AuditDisclosuresResponse]:
        """Return the disclosures of a run's clients, as the coordinator's messages."""
        request = operator_pb2.AuditDisclosuresRequest(run_id=run_id)
        return list(await self._all(self._stub.AuditDisclosures(request), "disclosures"))

    async def stop_run(self, run_id: str) -> operator_pb2.RunStatus:
        """Stop a run. Return its status."""
        request = operator_pb2.StopRunRequest(run_id=run_id)
        return (await self._call(self._stub.StopRun(request, timeout=CALL_SECONDS))).status

    async def resume_run(self, run_id: str) -> operator_pb2.RunStatus:
        """Resume a stopped or failed run. Return its status."""
        request = operator_pb2.ResumeRunRequest(run_id=run_id)
        return (await self._call(self._stub.ResumeRun(request, timeout=CALL_SECONDS))).status

    async def delete_run(self, run_id: str) -> operator_pb2.RunStatus:
        """Delete a run that has ended. Return its last status."""
        request = operator_pb2.DeleteRunRequest(run_id=run_id)
        return (await self._call(self._stub.DeleteRun(request, timeout=CALL_SECONDS))).status

    async def fetch_run_file(self, run_id: str) -> str:
        """Return the text of the run file with which a run was started."""
        request = operator_pb2.FetchRunFileRequest(run_id=run_id)
        return (await self._call(self._stub.FetchRunFile(request, timeout=CALL_SECONDS))).run_file

    async def watch_run(
        self, run_id: str, *, after_round: int = 0, newest_rounds: int = 0
    ) -> AsyncGenerator[operator_pb2.WatchRunResponse]:
        """Yield the events of a run: its committed rounds first, then new events until it ends.

        after_round: skip committed rounds up to this one. newest_rounds: maximum number of
        committed rounds, the newest ones; 0 for all.
        """
        request = operator_pb2.WatchRunRequest(
            run_id=run_id, after_round=after_round, newest_rounds=newest_rounds
        )
        call = self._stub.WatchRun(request)
        try:
            async for event in call:
                yield _plain(event)
        except grpc.aio.AioRpcError as error:
            raise self._translate(error) from None
        finally:
            call.cancel()

    async def find_run(self, run_id: str) -> operator_pb2.RunStatus:
        """Return the status of a run. run_id: its id, a beginning of its id, or its name."""
        async with aclosing(self.watch_run(run_id)) as events:
            async for event in events:
                return event.status  # the first event is the status
        raise ProtocolError(f"the coordinator at {self._address} sent no status of run {run_id}")

    async def fetch_model(
        self, run_id: str, *, round_number: int, blake3: str, offset: int, best: bool = False
    ) -> AsyncGenerator[operator_pb2.OperatorServiceFetchModelResponse]:
        """Yield a run's model in frames; the first frame has the model's origin.

        round_number: 0 stands for the last committed round. best: yield the run's best model
        instead; coordinators of older releases don't know this option. blake3, offset: digest of a
        partially received file, and the number of bytes already received. The stream's header names
        the file that follows, and the offset from which it is sent.
        """
        request = operator_pb2.OperatorServiceFetchModelRequest(
            run_id=run_id, round=round_number, blake3=blake3, offset=offset, best=best
        )
        call = self._stub.FetchModel(request)
        frames = aiter(call)
        try:
            while True:
                try:
                    async with asyncio.timeout(STALL_SECONDS):
                        answer = await anext(frames)
                except StopAsyncIteration:
                    return
                yield _plain(answer) if answer.HasField("origin") else answer
        except TimeoutError:
            raise UnreachableError(
                f"the coordinator at {self._address} sent nothing for {STALL_SECONDS:.0f} s; run "
                "the command again, and the download resumes where it stopped"
            ) from None
        except grpc.aio.AioRpcError as error:
            raise self._translate(error) from None
        finally:
            call.cancel()

    async def _all(
        self, call: grpc.aio.UnaryStreamCall[Request, Answer], what: str
    ) -> list[Answer]:
        try:
            async with asyncio.timeout(STALL_SECONDS):
                return [_plain(answer) async for answer in call]
        except TimeoutError:
            raise UnreachableError(
                f"the coordinator at {self._address} did not send all {what} within "
                f"{STALL_SECONDS:.0f} s; see the coordinator's log"
            ) from None
        except grpc.aio.AioRpcError as error:
            raise self._translate(error) from None
        finally:
            call.cancel()

    async def _call(self, call: Awaitable[Answer], seconds: float = CALL_SECONDS) -> Answer:
        try:
            return _plain(await call)
        except grpc.aio.AioRpcError as error:
            raise self._translate(error, seconds) from None

    def _translate(
        self, error: grpc.aio.AioRpcError, seconds: float = CALL_SECONDS
    ) -> PotluckError:
        translated = connection_error(
            error, self._address, self._tls, server_name=self._server_name
        )
        unavailable = error.code() is grpc.StatusCode.UNAVAILABLE
        if unavailable or not isinstance(translated, UnreachableError):
            return translated
        detail = " ".join((error.details() or "no details").split())
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            text = (
                f"the coordinator at {self._address} did not answer within {seconds:.0f} s; see "
                "the coordinator's log"
            )
            return UnreachableError(text, address=self._address)
        text = f"the coordinator at {self._address} failed: {detail} ({error.code().name})"
        return PotluckError(text, address=self._address)


def _plain(answer: Answer) -> Answer:
    """Escape unprintable characters in an answer's texts, since a terminal may show the texts."""
    make_plain(answer)
    return answer


@asynccontextmanager
async def connect(config: OperatorConfig) -> AsyncIterator[OperatorClient]:
    """Yield a client of the coordinator that `config` names; it connects at its first call."""
    async with channel(
        config.coordinator, config.tls, server_name=config.server_name
    ) as connection:
        yield OperatorClient(
            connection, config.coordinator, config.tls, server_name=config.server_name
        )
