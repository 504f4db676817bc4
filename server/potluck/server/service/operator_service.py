"""The service for operators: queries and changes of runs, clients and models."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from potluck.common.disclosure import parse_parameters
from potluck.common.errors import ConfigurationError, ProtocolError
from potluck.common.interruptible import shielded
from potluck.rpc.v1 import operator_pb2, operator_pb2_grpc
from potluck.server.live.feed import (
    Event,
    best_message,
    committed_round_message,
    run_status,
)
from potluck.server.plan.pretraining import is_pretraining, pretraining_id
from potluck.server.reduce.audit.label_audit import ClientAudit, Contradiction, LabelVerdict
from potluck.server.selection import Population
from potluck.server.service.archive import Disclosures, SumRecord
from potluck.server.service.coordinator import Coordinator
from potluck.server.service.guard import Context
from potluck.server.service.revocations import Revoking
from potluck.server.service.transfers import send_file
from potluck.server.store import Profile
from potluck.server.store.records import RunRow

# Messages -----------------------------------------------------------------------------------------

_ENTRIES_PER_MESSAGE = 100_000
_AUDITS_PER_MESSAGE = 1000
_PROFILES_PER_MESSAGE = 1000
_VERDICTS: Mapping[LabelVerdict, operator_pb2.LabelVerdict.ValueType] = {
    LabelVerdict.CONSISTENT: operator_pb2.LABEL_VERDICT_CONSISTENT,
    LabelVerdict.SUSPICIOUS: operator_pb2.LABEL_VERDICT_SUSPICIOUS,
    LabelVerdict.UNKNOWN: operator_pb2.LABEL_VERDICT_UNKNOWN,
}


def profile_messages(population: Population) -> Iterator[operator_pb2.FetchProfilesResponse]:
    """Yield messages with the clients in roster order, several per message; one empty message if
    there are no clients."""
    per_message = max(1, _ENTRIES_PER_MESSAGE // (3 * population.classes + 3))
    for start in range(0, max(1, len(population)), per_message):
        rows = range(start, min(start + per_message, len(population)))
        yield operator_pb2.FetchProfilesResponse(
            classes=population.classes, clients=[_client(population, row) for row in rows]
        )


def _client(population: Population, row: int) -> operator_pb2.ClientProfile:
    return operator_pb2.ClientProfile(
        client_id=population.ids[row],
        samples=int(population.samples[row]),
        label_counts=_entries(population.label_counts, row),
        triplet=_entries(population.triplets, row),
        interaction_matrix=_entries(population.interaction_matrices, row),
    )


def _entries(column: NDArray[np.float64] | None, row: int) -> list[float]:
    if column is None or np.isnan(column[row]).any():
        return []
    entries: list[float] = column[row].ravel().tolist()
    return entries


def audit_messages(
    population: Population, audits: Sequence[ClientAudit]
) -> Iterator[operator_pb2.AuditLabelsResponse]:
    """Yield messages with the audits in roster order, several per message; one empty message if
    there are no audits."""
    for start in range(0, max(1, len(audits)), _AUDITS_PER_MESSAGE):
        some = audits[start : start + _AUDITS_PER_MESSAGE]
        yield operator_pb2.AuditLabelsResponse(
            audits=[_audit(population.ids[audit.row], audit) for audit in some]
        )


def _audit(client: str, audit: ClientAudit) -> operator_pb2.LabelAudit:
    return operator_pb2.LabelAudit(
        client_id=client,
        verdict=_VERDICTS[audit.verdict],
        rounds=audit.rounds,
        suspicions=[
            operator_pb2.LabelSuspicion(
                label=each.label,
                hidden=each.contradiction is Contradiction.HIDDEN,
                claimed=each.claimed,
                bound=each.bound,
                rises=each.rises,
                probability=each.probability,
            )
            for each in audit.suspicions
        ],
    )


def disclosure_messages(found: Disclosures) -> Iterator[operator_pb2.AuditDisclosuresResponse]:
    """Yield one message for each sum, then messages with several profiles each; at least one
    message."""
    independent = found.independent
    for record in found.sums:
        yield operator_pb2.AuditDisclosuresResponse(
            sums=[_audited_sum(record)], independent_root=independent
        )
    for start in range(0, max(1, len(found.profiles)), _PROFILES_PER_MESSAGE):
        some = found.profiles[start : start + _PROFILES_PER_MESSAGE]
        yield operator_pb2.AuditDisclosuresResponse(
            profiles=[_audited_profile(each) for each in some], independent_root=independent
        )


def _audited_sum(record: SumRecord) -> operator_pb2.AuditedSum:
    return operator_pb2.AuditedSum(
        session_id=record.session_id,
        run_id=record.run,
        disclosure=record.disclosure,
        subject=record.subject,
        released=record.outcome == "released",
        hosts=record.clients,
        least_hosts=record.least_hosts,
        colluding_hosts=record.colluding_hosts,
        quorum=record.quorum,
        epsilon=record.epsilon or 0.0,
        refusals=record.refusals,
        convicted=record.convicted,
        verdict=base64.b64decode(record.verdict),
        stage=record.stage,
        rule=record.rule,
        have=record.have,
        need=record.need,
        at=record.at.isoformat(),
        attempt=record.attempt,
        round=record.round,
    )


def _audited_profile(profile: Profile) -> operator_pb2.AuditedProfile:
    return operator_pb2.AuditedProfile(
        client_id=profile.client_id,
        signal=profile.signal,
        data_epoch=profile.data_epoch,
        epsilon=parse_parameters(profile.parameters_json).epsilon or 0.0,
        at=profile.received_at.isoformat(),
    )


# The service --------------------------------------------------------------------------------------

PROGRESS_SECONDS = 0.25
"""Seconds between two progress reports on the current round to a watcher."""


def _number(token: str) -> int:
    try:
        return int(token)
    except ValueError:
        raise ProtocolError(
            f"{token[:40]!r} is not a page token of this coordinator; request the first page"
        ) from None


class OperatorService(operator_pb2_grpc.OperatorServiceServicer):
    """The service for operators. `guard.py` turns exceptions into statuses.

    An operation on the store that has started is finished, even if the operator disconnects.
    """

    def __init__(self, coordinator: Coordinator, revoking: Revoking) -> None:
        self._coordinator = coordinator
        self._archive = coordinator.archive
        self._runs = coordinator.runs
        self._revoking = revoking

    async def StartRun(
        self, request: operator_pb2.StartRunRequest, context: Context
    ) -> operator_pb2.StartRunResponse:
        """Check a run file and start the run."""
        row = await shielded(self._coordinator.start_run(request.run_file))
        return operator_pb2.StartRunResponse(run_id=row.run_id)

    async def StopRun(
        self, request: operator_pb2.StopRunRequest, context: Context
    ) -> operator_pb2.StopRunResponse:
        """Stop a run."""
        row = await self._coordinator.stop_run(request.run_id)
        return operator_pb2.StopRunResponse(status=run_status(row))

    async def ResumeRun(
        self, request: operator_pb2.ResumeRunRequest, context: Context
    ) -> operator_pb2.ResumeRunResponse:
        """Resume a stopped or failed run."""
        row = await shielded(self._coordinator.resume_run(request.run_id))
        return operator_pb2.ResumeRunResponse(status=run_status(row))

    async def DeleteRun(
        self, request: operator_pb2.DeleteRunRequest, context: Context
    ) -> operator_pb2.DeleteRunResponse:
        """Delete an ended run."""
        row = await shielded(self._coordinator.delete_run(request.run_id))
        return operator_pb2.DeleteRunResponse(status=run_status(row))

    async def FetchRunFile(
        self, request: operator_pb2.FetchRunFileRequest, context: Context
    ) -> operator_pb2.FetchRunFileResponse:
        """Send the run file with which a run was started."""
        row = await self._archive.run(request.run_id)
        return operator_pb2.FetchRunFileResponse(run_id=row.run_id, run_file=row.run_file)

    async def ListRuns(
        self, request: operator_pb2.ListRunsRequest, context: Context
    ) -> operator_pb2.ListRunsResponse:
        """Return all runs except pre-training runs, in pages if the request has a page size."""
        before = None if not request.page_token else _number(request.page_token)
        size = request.page_size or None
        rows = await self._archive.runs(before=before, limit=size)
        shown = await self._statuses([row for row in rows if not is_pretraining(row.run_id)])
        more = str(rows[-1].number) if size is not None and len(rows) == size else ""
        lost = [] if before is not None else self._archive.lost.values()
        return operator_pb2.ListRunsResponse(runs=shown, next_page_token=more, lost=lost)

    async def ListClients(
        self, request: operator_pb2.ListClientsRequest, context: Context
    ) -> operator_pb2.ListClientsResponse:
        """Return all known clients, in pages if the request has a page size."""
        clients: list[operator_pb2.ClientStatus] = []
        size = request.page_size or None
        rows = await self._archive.clients(after=request.page_token, limit=size)
        for row in rows:
            session = self._coordinator.attendance.session_of(row.client_id)
            status = operator_pb2.ClientStatus(
                client_id=row.client_id,
                host_id=row.host_id,
                attending=session is not None,
                device=row.device,
                selected=row.selected,
                included=row.included,
                quarantined=row.quarantine is not None,
                quarantine_reason=row.quarantine or "",
                left_out=self._runs.left_out_of(row.client_id),
                tags=session.tags if session is not None else {},
                relay=session.relay if session is not None else "",
                software_version=session.software_version if session is not None else "",
            )
            last_heard = row.last_seen_at if session is None else session.last_heard
            status.last_seen.FromDatetime(max(row.last_seen_at, last_heard))
            if session is not None and session.certificate_expires is not None:
                status.certificate_expires_at.FromDatetime(session.certificate_expires)
            clients.append(status)
        more = rows[-1].client_id if size is not None and len(rows) == size else ""
        return operator_pb2.ListClientsResponse(clients=clients, next_page_token=more)

    async def WatchRun(
        self, request: operator_pb2.WatchRunRequest, context: Context
    ) -> AsyncIterator[operator_pb2.WatchRunResponse]:
        """Send all events of a run until it ends."""
        run_id = (await self._archive.run(request.run_id)).run_id
        driver = self._runs.driver(run_id)
        watcher = driver.feed.watch() if driver is not None else None
        try:
            # Register the watcher before reading the store: rounds may come twice, but none is
            # missed.
            row = await self._archive.run(run_id)
            [status] = await self._statuses([row])
            yield Event(status=status)
            waiting = status.waiting
            sent = min(request.after_round, row.committed_rounds)
            if request.newest_rounds:
                sent = max(sent, row.committed_rounds - request.newest_rounds)
            async for each in self._archive.committed_rounds(run_id, after=sent):
                sent = each.key.round
                yield Event(committed=committed_round_message(each))
            while driver is not None and watcher is not None:
                try:
                    async with asyncio.timeout(PROGRESS_SECONDS):
                        event = await watcher.get()
                except TimeoutError:
                    status, progress = self._status(driver.row), driver.progress()
                    if status.waiting != waiting:
                        waiting = status.waiting
                        yield Event(status=status)
                    if progress is not None:
                        yield Event(progress=progress)
                    continue
                if event is None:
                    break
                if event.WhichOneof("event") != "committed":
                    if event.HasField("status"):
                        waiting = event.status.waiting
                    yield event
                elif event.committed.round > sent:
                    sent = event.committed.round
                    yield event
            [status] = await self._statuses([await self._archive.run(run_id)])
            yield Event(status=status)
        finally:
            if driver is not None and watcher is not None:
                driver.feed.unwatch(watcher)

    async def _statuses(self, rows: Sequence[RunRow]) -> list[operator_pb2.RunStatus]:
        """Return the states of runs; those that have ended with the clients excluded from them."""
        ended = [row.run_id for row in rows if self._runs.driver(row.run_id) is None]
        left_out = await self._archive.left_out(ended) if ended else {}
        return [self._status(row, left_out.get(row.run_id, "")) for row in rows]

    def _status(self, row: RunRow, left_out: str = "") -> operator_pb2.RunStatus:
        driver = self._runs.driver(row.run_id)
        if driver is None:
            return run_status(row, left_out=left_out)
        status = driver.status()
        pretraining = self._runs.driver(pretraining_id(row.run_id))
        if pretraining is not None:
            status.MergeFrom(operator_pb2.RunStatus(waiting=pretraining.waiting()))
        return status

    async def SetQuarantine(
        self, request: operator_pb2.SetQuarantineRequest, context: Context
    ) -> operator_pb2.SetQuarantineResponse:
        """Put a client into quarantine, or readmit it."""
        reason = request.reason[:500] or "no reason given"
        reason_or_none = reason if request.quarantined else None
        await shielded(self._coordinator.set_quarantine(request.client_id, reason_or_none))
        return operator_pb2.SetQuarantineResponse()

    async def FetchProfiles(
        self, request: operator_pb2.FetchProfilesRequest, context: Context
    ) -> AsyncIterator[operator_pb2.FetchProfilesResponse]:
        """Send the disclosed profiles of a run's clients."""
        population = await self._archive.profiles(request.run_id)
        for message in profile_messages(population):
            yield message

    async def AuditLabels(
        self, request: operator_pb2.AuditLabelsRequest, context: Context
    ) -> AsyncIterator[operator_pb2.AuditLabelsResponse]:
        """Compare the label counts that a run's clients claim with their updates."""
        population, audits = await self._archive.audit_labels(request.run_id)
        for message in audit_messages(population, audits):
            yield message

    async def AuditDisclosures(
        self, request: operator_pb2.AuditDisclosuresRequest, context: Context
    ) -> AsyncIterator[operator_pb2.AuditDisclosuresResponse]:
        """Send a list of all data that left the clients of a run."""
        found = await self._archive.audit_disclosures(request.run_id)
        for message in disclosure_messages(found):
            yield message

    async def DescribeCoordinator(
        self, request: operator_pb2.DescribeCoordinatorRequest, context: Context
    ) -> operator_pb2.DescribeCoordinatorResponse:
        """Describe the coordinator and its state."""
        described = self._coordinator.metrics.description()
        described.runs.extend(self._status(row) for row in self._runs.rows())
        stored = self._coordinator.stored
        if stored is not None:
            described.object_store = stored.address
            described.object_store_trouble = await stored.probe()
        return described

    async def InstallRevocations(
        self, request: operator_pb2.InstallRevocationsRequest, context: Context
    ) -> operator_pb2.InstallRevocationsResponse:
        """Install a revocation list, and disconnect peers whose certificate is on it."""
        revoked, new = self._revoking.install(request.revocation_list)
        return operator_pb2.InstallRevocationsResponse(revoked=revoked, new=new)

    async def InstallMembership(
        self, request: operator_pb2.InstallMembershipRequest, context: Context
    ) -> operator_pb2.InstallMembershipResponse:
        """Install a newer member list, and send it to the hosts."""
        membership = self._coordinator.trust.membership
        if membership is None:
            raise ConfigurationError(
                "this coordinator has no federation root; set federation_root and members in its "
                "configuration"
            )
        taken = membership.take(request.document, "the membership sent")
        members = 0 if membership.members is None else len(membership.members.records)
        return operator_pb2.InstallMembershipResponse(
            epoch=membership.epoch, taken=taken, members=members
        )

    async def FetchModel(
        self, request: operator_pb2.OperatorServiceFetchModelRequest, context: Context
    ) -> AsyncIterator[Any]:
        """Send a run's model: messages, and chunks already encoded (see `guard.py`)."""
        row, number, blake3, committed = await self._archive.model_of(
            request.run_id, request.round, best=request.best
        )
        origin = operator_pb2.ModelOrigin(
            run_id=row.run_id,
            name=row.name,
            round=number,
            run_file=row.run_file,
            best=best_message(row) if request.best else None,
        )
        if committed is not None:
            origin.committed.CopyFrom(committed_round_message(replace(committed, members=())))
        with self._coordinator.files.lent(blake3) as path:
            async with self._coordinator.transfers.place():
                offset = request.offset if request.blake3 == blake3 else 0
                reply = operator_pb2.OperatorServiceFetchModelResponse
                for message in send_file(path, blake3, offset, reply):
                    if isinstance(message, reply) and message.frame.HasField("header"):
                        message.origin.CopyFrom(origin)
                    yield message
