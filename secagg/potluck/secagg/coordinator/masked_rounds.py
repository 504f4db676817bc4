"""Rounds with masked updates: each attempt has one secure sum.

Runs on the event loop. A sum starts and ends with its attempt. Clients exchange keys and shares
while they train; the other stages run once the round has its updates. If the sum fails, the attempt
is given up, and the next one has new keys. Nothing of a sum survives the coordinator process.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeAlias

from potluck.common.disclosure import SumKind
from potluck.common.errors import (
    LayoutError,
    PotluckError,
    RoundClosedError,
    RunError,
    TrainingError,
)
from potluck.common.interruptible import in_thread
from potluck.common.monitoring.metric_labels import MASKED as MASKED_LABEL
from potluck.common.net.membership import Members
from potluck.common.run_file.run_settings import PrivateUpdates
from potluck.common.updates.training_agreement import training_sha256
from potluck.common.updates.update_report import UpdateReport
from potluck.rpc.v1 import coordinator_pb2, transfer_pb2
from potluck.secagg.coordinator.counts import SumOutcome, check_invited, convictions
from potluck.secagg.coordinator.label_sums import task_reference
from potluck.secagg.coordinator.maskable import MaskedRules, session_seconds, weight_bound
from potluck.secagg.coordinator.masked_reduction import check_masked, opened_sum
from potluck.secagg.coordinator.sum_session import RootInForce, SumTerms, earlier_certificates
from potluck.secagg.coordinator.update_session import MaskedSession, SignedInput
from potluck.secagg.masked_vectors import (
    METRIC_BOUND,
    NoiseInSums,
    metric_names,
    sum_vectors,
    vector_lengths,
)
from potluck.secagg.protocol import (
    CoordinatorSession,
    FederationRoot,
    Header,
    Purpose,
    Rule,
    Unmasking,
    complete_thresholds,
    coordinator,
    session_record,
)
from potluck.secagg.protocol.primitives.thresholds import (
    assumed_colluding_hosts,
    colluding_clients,
)
from potluck.secagg.protocol.rules import BrokenRuleError
from potluck.secagg.protocol.vectors.updates import HeadSum
from potluck.secagg.protocol.wire.messages import SESSION_ID_BYTES, Stage
from potluck.server.hosts.instructions import MASKED, task_plugin
from potluck.server.live.models import RoundModel
from potluck.server.live.run import Run
from potluck.server.machine import events as rounds
from potluck.server.plan.update_noise import adapted, clip_of, with_clip, without_clip
from potluck.server.reduce.update_files import SpooledUpdate
from potluck.server.store import SecureSum
from potluck.server.store.records import AttemptKey
from potluck.server.updates.update_path import ReceivedUpdate, UpdatePath

_RELEASED = (
    "these updates are in an earlier sum over other clients, and the difference of both sums "
    "would disclose single updates; wait until exactly the clients of the earlier sum are "
    "connected, or start a run with another seed"
)
_Ending: TypeAlias = Coroutine[Any, Any, CoordinatorSession]


@dataclass(kw_only=True)
class _Sum:
    """The secure sum of one attempt at a round.

    counted: κ; each update adds κ in the vector `WITHIN` if it is within the clip, else -κ.
    troubles: reason, by client, of each client that left the sum.
    """

    key: AttemptKey
    header: Header
    session: MaskedSession
    counted: float = 0.0
    signed: dict[str, SignedInput] = field(default_factory=dict)
    troubles: dict[str, str] = field(default_factory=dict)
    driving: asyncio.Task[Unmasking | None] | None = None


class MaskedRounds(MaskedRules, UpdatePath):
    """Handles updates that are summed securely; the coordinator sees no single update."""

    encoding = MASKED_LABEL

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._root = RootInForce(run.services.trust)
        self._sum: _Sum | None = None
        self._warned = False

    # An attempt -------------------------------------------------------------------------------

    async def begin(self, work: coordinator_pb2.Train) -> None:
        """Invite the cohort of the current attempt to a sum; set the clip of the round."""
        run, key = self._run, self._run.key
        adapting = self._adapting
        if adapting is not None:
            work.privacy.clip = clip_of(run.models.states.strategy, adapting)
        if self._sum is not None and self._sum.key == key:
            return
        cohort = run.attempt.cohort
        invited = {client: member.host for client, member in cohort.items() if member.host}
        root = self._root.require()
        header = self._header(root, invited, key, work)
        share = work.privacy.counted_share
        current = _Sum(
            key=key,
            header=header,
            session=self._session(header, invited),
            counted=work.privacy.clip * math.sqrt(share / (1 - share)),
        )
        self._sum = current
        try:
            check_invited(invited, header)
        except RunError as error:
            run.post(rounds.SumFailed(key.round, key.attempt, error.message))
            return
        for client in sorted(cohort.keys() - invited.keys()):
            self._left(client, "the client's host was disconnected when the client was selected")
        in_store, terms = run.services.in_store, current.session.terms
        certified = await earlier_certificates(in_store, terms, invited)
        step = coordinator.invite(header, invited, root, certified=certified)
        ends = current.session.run(step)
        current.driving = asyncio.create_task(self._drive(current, root, ends))

    def check_header(self, header: transfer_pb2.UpdateHeader) -> None:
        """Check the form of a header. Raises LayoutError."""
        if header.encoding != MASKED or not header.delta or header.compressed or header.members:
            raise LayoutError(
                "this run needs masked updates, but the announced update has another form; "
                "update the host's software"
            )

    async def check_file(self, update: ReceivedUpdate) -> None:
        """Check the form of a file. Its values are masked and can't be checked."""
        await asyncio.to_thread(check_masked, update.path, self._require().header)

    def check_sender(self, update: ReceivedUpdate) -> None:
        """Check the client's signed confirmation that this file is its input to the sum."""
        current, header = self._require(), update.header
        current.signed[header.client_id] = current.session.check_input(
            header.client_id, header.masked_input, bytes.fromhex(header.blake3)
        )

    def report(self, _member: transfer_pb2.SumMember, /) -> UpdateReport:
        """Return an empty report: the numbers of a single client are masked."""
        return UpdateReport()

    @property
    def _adapting(self) -> PrivateUpdates | None:
        """The run's noise settings if its clip follows a quantile; else None."""
        settings = self._run.plan.run_file.privacy
        return None if settings is None or settings.clip_quantile is None else settings

    def lose(self, client: str) -> None:
        """Remove a client from the sum of the current attempt."""
        if self._sum is not None:
            self._sum.session.lose(client)

    async def reduce(self, updates: Sequence[SpooledUpdate]) -> RoundModel | None:
        """Make the round's model from the sum of these updates."""
        run, current = self._run, self._require()
        uploads = {update.client: current.signed[update.client] for update in updates}
        current.session.certify(uploads)
        if current.driving is None:
            return None
        unmasking = await asyncio.shield(current.driving)
        if unmasking is None:
            return None
        if unmasking.survivors != tuple(uploads):
            why = "no secure sum: clients left the sum after they had uploaded"
            run.post(rounds.SumFailed(*current.key[1:], why, tuple(current.troubles.items())))
            return None
        adapting, state = self._adapting, run.models.states.strategy
        try:
            model, strategy_state, total = await in_thread(
                run.models.work.next_model_by_sum,
                run.machine.round,
                [update.client for update in updates],
                opened_sum([update.path for update in updates], unmasking),
                run.models.current,
                state if adapting is None else without_clip(state),
                clients=len(run.roster),
            )
        except (BrokenRuleError, TrainingError) as error:
            run.post(rounds.SumFailed(*current.key[1:], error.message))
            return None
        if adapting is not None:
            within, clip = total.share_within(current.counted), clip_of(state, adapting)
            strategy_state = with_clip(strategy_state, adapted(clip, within, adapting))
            run.log.info("clip adapted", within=round(within, 3), clip=clip)
        self._say(total.head, unmasking)
        loss = None if math.isnan(total.loss) else total.loss
        return RoundModel(model=model, strategy_state=strategy_state, training_loss=loss)

    def _say(self, head: HeadSum, unmasking: Unmasking) -> None:
        run = self._run
        means = {name: round(value, 6) for name, value in head.metrics.items()}
        run.log.info("unmasked", clients=head.clients, weight=head.weight, **means)
        self._warn_of_cap(head, unmasking.header.weight_bound)
        if head.failed:
            run.say(
                f"round {run.machine.round}: the training of {head.failed} of {head.clients} "
                "clients failed; masks hide which clients, so see the logs of the hosts for the "
                "reasons",
                warning=True,
            )
        if head.clipped:
            run.say(
                f"round {run.machine.round}: {head.clipped} parameter changes were clipped to "
                f"±{unmasking.header.vectors[0].clip:g}; raise masking.clip if this warning "
                "repeats",
                warning=True,
            )
        if unmasking.suspects:
            run.say(
                f"round {run.machine.round}: some shares were wrong, but the sum is correct; "
                f"clients that may have sent the wrong shares: {', '.join(unmasking.suspects)}",
                warning=True,
            )

    def _warn_of_cap(self, head: HeadSum, cap: int) -> None:
        """Warn if the mean weight exceeds half the maximum: some clients probably exceed the
        maximum.
        """
        trained = head.clients - head.failed
        if cap > 1 and 2 * head.weight > cap * trained and not self._warned:
            self._warned = True
            self._run.say(
                f"the mean weight of clients is {head.weight / trained:.0f} samples, so "
                f"masking.weight_cap = {cap} probably limits some of these weights; raise "
                "masking.weight_cap",
                warning=True,
            )

    def stop(self) -> None:
        """Cancel the session of the sum when the run stops."""
        if self._sum is not None and self._sum.driving is not None:
            self._sum.driving.cancel()

    async def give_up(self) -> None:
        """End the sum and inform its clients."""
        current, self._sum = self._sum, None
        if current is not None and current.driving is not None:
            current.driving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await current.driving

    def _require(self) -> _Sum:
        if self._sum is None or self._sum.key != self._run.key:
            raise RoundClosedError(
                "this attempt at the round has no secure sum any more; drop the update"
            )
        return self._sum

    # Its session ------------------------------------------------------------------------------

    def _header(
        self,
        root: FederationRoot,
        invited: Mapping[str, str],
        key: AttemptKey,
        work: coordinator_pb2.Train,
    ) -> Header:
        run, plan = self._run, self._run.plan
        run_file, masking = plan.run_file, plan.run_file.masking
        hosts = list(invited.values())
        colluding = masking.colluding_hosts
        if colluding is None:
            colluding = assumed_colluding_hosts(len(set(hosts)))
        thresholds = complete_thresholds(hosts, colluding)
        certain = thresholds.quorum - colluding_clients(hosts, colluding)
        noise = _noise_in_sums(work, certain, thresholds.quorum)
        metrics = metric_names(normalized=work.normalized, noisy=work.HasField("privacy"))
        lengths = vector_lengths(
            run.models.work.layout.parameters,
            metrics,
            plan.strategy.auxiliary,
            counts=work.privacy.counted_share > 0,
        )
        issued_at = int(time.time())
        return Header(
            federation=root.federation,
            session_id=os.urandom(SESSION_ID_BYTES),
            run=key.run_id,
            round=key.round,
            attempt=key.attempt,
            purpose=Purpose.UPDATE,
            subject=f"model updates of {run_file.task.name}",
            disclosure=SumKind.UPDATE.value,
            vectors=sum_vectors(lengths, masking, noise),
            metrics=metrics,
            weight_bound=weight_bound(run_file, plan.strategy),
            metric_bound=METRIC_BOUND,
            least_hosts=masking.hosts,
            colluding_hosts=colluding,
            degree=thresholds.degree,
            threshold=thresholds.threshold,
            quorum=thresholds.quorum,
            model_digest=bytes.fromhex(run.models.current.blake3),
            training_sha256=training_sha256(work),
            membership_epoch=root.members.epoch,
            membership_sha256=root.members.digest,
            issued_at=issued_at,
            expires_at=issued_at + int(session_seconds(run_file)),
        )

    def _session(self, header: Header, invited: Mapping[str, str]) -> MaskedSession:
        run, run_file = self._run, self._run.plan.run_file
        terms = SumTerms(
            run_id=run.row.run_id,
            kind=SumKind.UPDATE,
            subject=header.subject,
            task=task_plugin(run_file),
            task_reference=task_reference(run.plan),
            classes=0,
            least_hosts=header.least_hosts,
            colluding_hosts=header.colluding_hosts,
            stage_seconds=run_file.masking.stage_seconds,
            model=run.models.current.blake3,
        )
        services = run.services
        return MaskedSession(
            services.attendance,
            services.in_store,
            terms,
            run.is_present,
            self._observe,
            update_ids={client: run.instruction_id(client) for client in invited},
            key_seconds=max(terms.stage_seconds, run_file.round.deadline_seconds / 2),
            left=self._left,
        )

    def _observe(self, phase: str, seconds: float, dropped: int) -> None:
        sums = self._run.services.sums
        if sums is not None and phase != "uploading":  # skip: mostly the time of trainings
            sums.observe(phase, seconds, dropped)

    def _left(self, client: str, why: str) -> None:
        run, current = self._run, self._sum
        if current is None or current.key != run.key:
            return
        current.troubles[client] = why
        if run.machine.cohort.waits_for(client):
            run.services.attendance.retire([run.instruction_id(client)], abandon=True)
            run.post(rounds.ClientFailed(client, f"excluded from the secure sum: {why}"[:500]))

    async def _drive(
        self, current: _Sum, root: FederationRoot, session_ends: _Ending
    ) -> Unmasking | None:
        run, key = self._run, current.key
        ended = run.services.trust.listen(partial(_lose_revoked, current.session, root))
        try:
            session = await session_ends
            if session.unmasking is None and key == run.key:
                # Cancel pending uploads: they are useless now, and must not count as failures.
                pending = [run.instruction_id(client) for client in run.machine.cohort.pending]
                run.services.attendance.retire(pending, abandon=True)
            record = session_record(session, datetime.now(UTC))
            done = SecureSum(
                session_id=record.session_id,
                run_id=key.run_id,
                kind=SumKind.UPDATE.value,
                task=task_reference(run.plan),
                epochs={},
                record=record.model_dump(mode="json"),
                total=None,
            )
            await run.services.in_store(lambda store: store.add_sum(done))
        except PotluckError as error:
            run.post(rounds.ActionFailed(error.message))
            return None
        except Exception as error:
            run.log.exception("secure sum failed unexpectedly")
            run.post(rounds.ActionFailed(f"unexpected {type(error).__name__}: {error}"))
            return None
        finally:
            ended()
        if session.unmasking is not None:
            return session.unmasking
        silent = dict.fromkeys(record.missing, "no answer in time")
        convicted = convictions(record)
        troubles = silent | current.session.troubles | current.troubles | convicted
        await run.selecting.left_out.add_and_store(convicted)
        why = SumOutcome(record=record, troubles=troubles).explain()
        if Rule.RELEASED in record.refusals.values():
            why += f"; {_RELEASED}"
        if record.stage == Stage.REVEAL:
            # Exclude no client: clients that have given shares accept only the same set again.
            troubles = {}
        run.post(
            rounds.SumFailed(
                key.round, key.attempt, f"no secure sum: {why}", tuple(sorted(troubles.items()))
            )
        )
        return None


def _lose_revoked(session: MaskedSession, root: FederationRoot, members: Members) -> None:
    """Remove the clients whose keys were revoked since the session began."""
    for client, key in sorted(members.revoked):
        record = root.members.records.get(client)
        if record is not None and record.public_key == key:
            session.troubles[client] = "member key was revoked"
            session.lose(client)


def _noise_in_sums(work: coordinator_pb2.Train, certain: int, quorum: int) -> NoiseInSums | None:
    """Return the noise that clients add to their updates; None for updates without noise.

    certain: minimum number of clients in a sum that don't collude. quorum: minimum number of
    clients in a sum.
    """
    if work.privacy.unit != "client":
        return None
    return NoiseInSums(
        clip=work.privacy.clip,
        multiplier=work.privacy.noise_multiplier,
        contributors=certain,
        quorum=quorum,
        counted_share=work.privacy.counted_share,
    )
