"""Secure sums over clients' label counts. The coordinator learns only sums, not a client's counts.

Runs on the event loop. A sum is tried up to three times. Each attempt is a separate session
(`sum_session.py`) with new keys and the same terms. The record of each session is stored, but the
session exists in memory only: after a restart, the coordinator begins a new one.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import structlog
from numpy.typing import NDArray

from potluck.common.errors import ConfigurationError, RunError
from potluck.secagg.coordinator.sum_session import (
    COUNTS,
    RootInForce,
    SumSession,
    SumTerms,
    earlier_certificates,
)
from potluck.secagg.protocol import (
    CoordinatorStep,
    Header,
    Noise,
    Purpose,
    Rule,
    SessionRecord,
    SumVector,
    Unmasking,
    VectorEncoding,
    complete_thresholds,
    coordinator,
    session_record,
)
from potluck.secagg.protocol.primitives.masks import word_dtype
from potluck.secagg.protocol.primitives.thresholds import (
    COMPLETE_LIMIT,
    assumed_colluding_hosts,
    colluding_clients,
)
from potluck.secagg.protocol.vectors.histograms import decode_counts
from potluck.secagg.protocol.vectors.word_limits import COUNT_LIMIT
from potluck.secagg.protocol.wire.messages import SESSION_ID_BYTES, Stage
from potluck.server.eligibility.collected_sums import PhaseObserver
from potluck.server.hosts.attendance import Attendance
from potluck.server.profiles.trust import Trust
from potluck.server.store import SecureSum
from potluck.server.store.store_thread import InStore

log = structlog.get_logger()

_SPARE_SECONDS = 60.0
"""Seconds that clients keep a session's keys beyond the maximum duration of all stages."""
_STAGES = 5
_LONGEST_REASON = 250
_MEMBERSHIP = (Rule.MEMBER, Rule.MEMBERSHIP)
_PAUSE_SECONDS = 0.2
"""Seconds before the second attempt; twice as many before the third."""


@dataclass(frozen=True, kw_only=True)
class SumOutcome:
    """Outcome of a sum: the last session's record, and the sum if there is one."""

    record: SessionRecord
    total: NDArray[np.int64] | None = None
    troubles: Mapping[str, str] = field(default_factory=dict)

    def explain(self) -> str:
        """Return the reason why the sum failed, in one line."""
        record = self.record
        if record.convicted:
            return "; ".join(convictions(record).values())
        refusing = defaultdict[str, list[str]](list)
        for who, rule in record.refusals.items():
            refusing[rule].append(who)
        whys = [self._refused(rule, clients) for rule, clients in refusing.items()]
        others = self.troubles.keys() - record.refusals.keys()
        whys += [f"{who}: {self.troubles[who]}" for who in sorted(others)]
        whys += [f"clients that may have sent wrong shares: {', '.join(record.suspects)}"] * bool(
            record.suspects
        )
        whys += [f"{len(record.missing)} clients did not answer"] * bool(
            record.missing and not whys
        )
        return (
            f"the sum was aborted at stage {record.stage}: rule {record.rule} needs {record.need} "
            f"clients or hosts, but found {record.have}; "
            f"{'; '.join(whys[:3]) or 'no host gave a reason'}"
            + f"; and {len(whys) - 3} more"
            * (len(whys) > 3)
        )

    def _refused(self, rule: str, clients: Sequence[str]) -> str:
        """Describe the refusals of clients that name this rule, with the first client's reason."""
        first, *others = clients
        more = f" and {len(others)} more" if others else ""
        return (
            f"client {first}{more} refused ({rule}): "
            f"{self.troubles.get(first, rule)[:_LONGEST_REASON]}"
        )


def convictions(record: SessionRecord) -> dict[str, str]:
    """Return the clients proven to have broken a session, each with a description of the proof."""
    return {
        accused: f"client {accused} sent client {accuser} a share that can't be decrypted, and "
        f"client {accuser} proved this"
        for accused, accuser in record.convicted.items()
    }


class SecureSums:
    """Computes secure sums over clients' label counts, one sum at a time."""

    def __init__(
        self,
        attendance: Attendance,
        in_store: InStore,
        trust: Trust,
        observe: PhaseObserver = lambda *_: None,
    ) -> None:
        self.attendance = attendance
        self.in_store = in_store
        self.trust = trust
        self.observe = observe
        self._root = RootInForce(trust)
        self._one_at_a_time = asyncio.Lock()

    @property
    def possible(self) -> bool:
        """True if the federation has a root; without one, the coordinator can't verify members."""
        return self._root.now is not None

    async def sum_counts(
        self, terms: SumTerms, clients: Sequence[str], *, present: Callable[[str], bool]
    ) -> SumOutcome:
        """Return the sum over the clients that stay connected; try up to three times with new keys.

        Raises RunError if the sum is impossible: no root, too few hosts, too many clients.
        """
        self._root.require()
        async with self._one_at_a_time:
            invited, epochs = self._invited(clients)
            header = _header(self.trust.federation, terms, invited)
            convicted = dict[str, str]()
            while True:
                root = self._root.require()
                header = replace(
                    header,
                    membership_epoch=root.members.epoch,
                    membership_sha256=root.members.digest,
                )
                certified = await earlier_certificates(self.in_store, terms, invited)
                step = coordinator.invite(header, invited, root, certified=certified)
                outcome = await self._attempt(terms, step, epochs, present)
                convicted |= convictions(outcome.record)
                outcome = replace(outcome, troubles={**outcome.troubles, **convicted})
                if outcome.total is not None:
                    return outcome
                log.warning("secure sum failed", run=terms.run_id, why=outcome.explain())
                unwilling = self._unwilling(outcome, header)
                invited, epochs = self._invited([c for c in invited if c not in unwilling])
                try:
                    header = coordinator.retry_header(
                        header, random=os.urandom, issued_at=int(time.time())
                    )
                    check_invited(invited, header)
                except (ConfigurationError, RunError):
                    return outcome
                await asyncio.sleep(_PAUSE_SECONDS * (header.attempt - 1))

    def _unwilling(self, outcome: SumOutcome, header: Header) -> set[str]:
        """Return the clients that the next attempt excludes: those that refused or could not join.

        None after a failure to reveal exact counts: clients that have given shares accept only the
        same set again. If the membership has changed since the session began, clients that refused
        because of the old membership are invited again, under the new one.
        """
        if outcome.record.stage == Stage.REVEAL and header.noise is None:
            return set()
        refusals = outcome.record.refusals
        unwilling = refusals.keys() | outcome.troubles.keys()
        if self._root.require().members.epoch == header.membership_epoch:
            return unwilling
        return {who for who in unwilling if refusals.get(who) not in _MEMBERSHIP}

    def _invited(self, clients: Sequence[str]) -> tuple[dict[str, str], dict[str, int]]:
        """Return the hosts and the data epochs of these clients, if they are connected members."""
        members = sorted(filter(self.trust.is_member, clients))
        sessions = {client: self.attendance.session_of(client) for client in members}
        attending = {client: session for client, session in sessions.items() if session}
        return (
            {client: session.host_id for client, session in attending.items()},
            {client: session.data_epoch for client, session in attending.items()},
        )

    async def _attempt(
        self,
        terms: SumTerms,
        step: CoordinatorStep,
        epochs: Mapping[str, int],
        present: Callable[[str], bool],
    ) -> SumOutcome:
        drive = SumSession(self.attendance, self.in_store, terms, present, self.observe)
        session = await drive.run(step)
        record = session_record(session, datetime.now(UTC))
        unmasking, total = session.unmasking, None
        if unmasking is not None:
            total = await asyncio.to_thread(_total, drive.uploads, unmasking)
        done = SecureSum(
            session_id=record.session_id,
            run_id=terms.run_id,
            kind=terms.kind.value,
            task=terms.task_reference,
            epochs=epochs,
            record=record.model_dump(mode="json"),
            total=None if total is None else tuple(total.tolist()),
        )
        await self.in_store(lambda store: store.add_sum(done))
        refused = {client: why.detail for client, why in session.refusals.items()}
        return SumOutcome(record=record, total=total, troubles=refused | drive.troubles)


def _header(federation: str, terms: SumTerms, invited: Mapping[str, str]) -> Header:
    """Return the header of a session. Raises RunError if these clients can't have a sum."""
    hosts = list(invited.values())
    colluding = terms.colluding_hosts
    if colluding is None:
        colluding = assumed_colluding_hosts(len(set(hosts)))
    thresholds = complete_thresholds(hosts, colluding)
    issued_at = int(time.time())
    header = Header(
        federation=federation,
        session_id=os.urandom(SESSION_ID_BYTES),
        run=terms.run_id,
        purpose=Purpose.HISTOGRAM,
        subject=terms.subject,
        disclosure=terms.kind.value,
        vectors=(
            SumVector(
                name=COUNTS,
                length=terms.classes,
                modulus_bits=64,
                encoding=VectorEncoding.COUNTS,
                clip=float(COUNT_LIMIT),
            ),
        ),
        least_hosts=terms.least_hosts,
        colluding_hosts=colluding,
        degree=thresholds.degree,
        threshold=thresholds.threshold,
        quorum=thresholds.quorum,
        issued_at=issued_at,
        expires_at=issued_at + int(_STAGES * terms.stage_seconds + _SPARE_SECONDS),
    )
    check_invited(invited, header)
    if terms.epsilon is None:
        return header
    honest = thresholds.quorum - colluding_clients(hosts, colluding)
    noise = Noise(epsilon=terms.epsilon, sensitivity=terms.sensitivity, contributors=max(1, honest))
    return replace(header, noise=noise)


def check_invited(invited: Mapping[str, str], header: Header) -> None:
    """Raise RunError if these clients are too few, or too many, for a secure sum."""
    hosts = len(set(invited.values()))
    needed = max(header.quorum, header.threshold, header.least_hosts)
    if hosts < header.least_hosts or len(invited) < needed:
        raise RunError(
            f"{len(invited)} clients on {hosts} hosts are connected, but a secure sum over these "
            f"clients needs at least {needed} clients on at least {header.least_hosts} hosts",
            clients=len(invited),
            hosts=hosts,
        )
    if len(invited) > COMPLETE_LIMIT:
        raise RunError(
            f"{len(invited)} clients are too many for a secure sum, which supports up to "
            f'{COMPLETE_LIMIT}; set profiles.disclosure = "cells" in the run file',
            clients=len(invited),
        )


def _total(uploads: Mapping[str, bytes], unmasking: Unmasking) -> NDArray[np.int64]:
    """Return the unmasked sum of the survivors' uploads."""
    vector = unmasking.header.vector(COUNTS)
    words: NDArray[Any] = np.zeros(vector.length, word_dtype(vector.modulus_bits))
    for client in unmasking.survivors:
        words += np.frombuffer(uploads[client], words.dtype)
    unmasking.remove(COUNTS, words)
    return decode_counts(words)
