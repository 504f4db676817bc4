"""The Prometheus metrics of one run, which the run's parts update.

No clock: times are arguments, in monotonic seconds. Used on the event loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime

from potluck.common.learning.measures import TRAINING
from potluck.common.learning.spread import Spread
from potluck.common.monitoring import definitions as metrics
from potluck.common.monitoring.instruments import Instruments
from potluck.common.monitoring.metric_labels import (
    SPREAD_STATISTICS,
    AttemptOutcome,
    Direction,
    LateOutcome,
    MemberOutcome,
    ProfileOutcome,
    RoundPhase,
    RunOutcome,
    Target,
    known_reason,
    known_signal,
)
from potluck.common.records.privacy_loss import RoundPrivacy
from potluck.common.tensors.encoding import Encoding
from potluck.server.hosts.attendance import Clock
from potluck.server.live.cohort_labels import CohortLabels
from potluck.server.machine import events as rounds
from potluck.server.machine.machine import Phase
from potluck.server.store.records import LateRow, LateState, MemberState, RoundRow, RunRow

_OUTCOMES = {
    MemberState.RECEIVED: MemberOutcome.ANSWERED,
    MemberState.LATE: MemberOutcome.LATE,
    MemberState.SPARED: MemberOutcome.SPARED,
    MemberState.LOST: MemberOutcome.LOST,
    MemberState.FAILED: MemberOutcome.FAILED,
}
_AT_WORK = MemberOutcome.ABANDONED
"""Outcome of a member that is still at work when the attempt ends."""
_PHASES = {
    Phase.REDUCING: RoundPhase.REDUCE,
    Phase.EVALUATING: RoundPhase.EVALUATE,
    Phase.COMMITTING: RoundPhase.COMMIT,
}
_OF_CLASSIFICATION = {
    "accuracy": metrics.ACCURACY,
    "worst_group_accuracy": metrics.WORST_GROUP_ACCURACY,
    "weighted_f1": metrics.WEIGHTED_F1,
    "loss": metrics.LOSS,
}
_OPEN = (Phase.SELECTING, Phase.TRAINING, Phase.REDUCING)
"""Phases of an attempt that is neither committed nor given up."""


class RunObserver:
    """Updates metrics from the events of a run.

    shown: False for a pre-training run, which has no metric series of its own.
    """

    def __init__(
        self, instruments: Instruments, run_id: str, clock: Clock, *, shown: bool = True
    ) -> None:
        self._instruments = instruments
        self._run = run_id
        self._clock = clock
        self._shown = shown
        self._phase = Phase.WAITING
        self._spreads: frozenset[str] = frozenset()
        self._open = False
        self._cohort: dict[str, MemberOutcome] = {}  # outcome of each client so far
        self._since = clock()
        self._asked = 0.0
        self._last_fetch = self._since
        self._last_upload = self._since

    # The run ----------------------------------------------------------------------------------

    def began(self, row: RunRow) -> None:
        """Record that the run has started or resumed."""
        if self._shown:
            self._instruments.set(
                metrics.RUN_INFO,
                1,
                run=self._run,
                name=row.name,
                task=row.task,
                selector=row.selector,
                strategy=row.strategy,
            )
        self._set(metrics.RUN_UNDER_WAY, 1)
        self._set(metrics.RUN_FAILED, None)
        self._set(metrics.RUN_ROUNDS_PLANNED, row.rounds)
        self._set(metrics.RUN_ROUNDS_COMMITTED, row.committed_rounds)
        self._set(metrics.MODEL_TIMESTAMP, row.changed_at.timestamp())

    def resumed(
        self,
        begun: RunRow,
        last: RoundRow | None,
        cohort: Sequence[tuple[str, MemberState]] = (),
    ) -> None:
        """Record that the run resumes after its last committed round, with the cohort of the open
        round, if any."""
        if self._shown:
            self._instruments.count(metrics.RUNS_RESUMED)
        self._cohort = {client: _OUTCOMES.get(state, _AT_WORK) for client, state in cohort}
        if last is not None:
            newer = max(last.committed_at, begun.changed_at)
            self._set(metrics.MODEL_TIMESTAMP, newer.timestamp())
            self._set(metrics.COHORT_CLIENTS, len(last.members))
            self._evaluated(last)
            self._spent_on_updates(last.privacy)

    def ended(self, ending: rounds.RunEnding, at: datetime) -> None:
        """Record that the run has ended, and when."""
        if self._open:
            self._close(AttemptOutcome.ABANDONED)
        if self._shown:
            self._instruments.count(metrics.RUNS_ENDED, outcome=RunOutcome(ending))
        self._set(metrics.RUN_UNDER_WAY, 0)
        failed = at.timestamp() if ending is rounds.RunEnding.FAILED else None
        self._set(metrics.RUN_FAILED, failed)

    # Rounds -----------------------------------------------------------------------------------

    def noted(self, event: rounds.Event, actions: Sequence[rounds.Action], phase: Phase) -> None:
        """Record an event that the state machine has handled. phase: its phase afterwards."""
        match event:
            case rounds.UpdateArrived(client) if self._cohort.get(client) is _AT_WORK:
                self._cohort[client] = MemberOutcome.ANSWERED
            case rounds.SumArrived(updates):
                self._summed([client for client, _ in updates])
            case rounds.TooFewEligible():
                self._open = False  # not an attempt: there were too few clients to select among
        for action in actions:
            match action:
                case rounds.Train(client):
                    self._cohort[client] = _AT_WORK
                case rounds.MarkMember(client=client, state=state):
                    self._cohort[client] = _OUTCOMES[state]
                case rounds.GiveUpAttempt():
                    missed = bool(self._cohort)
                    self._close(
                        AttemptOutcome.QUORUM_MISSED if missed else AttemptOutcome.ABANDONED
                    )
        if phase is not self._phase:
            if phase is not Phase.ENDED or isinstance(event, rounds.Committed):
                self._leave_phase(self._clock())
            self._phase = phase
        if phase in _OPEN or phase is Phase.WAITING:
            self._open = phase is not Phase.WAITING

    def _summed(self, clients: Sequence[str]) -> None:
        """Record that a sum of these clients' updates has arrived."""
        self._instruments.count(metrics.SUMS)
        self._instruments.count(metrics.SUMMED_UPDATES, len(clients))
        for client in clients:
            if self._cohort.get(client) is _AT_WORK:
                self._cohort[client] = MemberOutcome.ANSWERED

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Measure the time in which clients are asked before the cohort is chosen."""
        begun = self._clock()
        try:
            yield
        finally:
            self._asked += self._clock() - begun

    def _leave_phase(self, now: float) -> None:
        if self._phase is Phase.SELECTING:
            self._spent(RoundPhase.ASK, self._asked)
            self._spent(RoundPhase.SELECT, now - self._since - self._asked)
        elif self._phase is Phase.TRAINING:
            fetched = max(self._since, self._last_fetch)
            uploading = max(fetched, self._last_upload)
            self._spent(RoundPhase.BROADCAST, fetched - self._since)
            self._spent(RoundPhase.TRAIN, uploading - fetched)
            self._spent(RoundPhase.COLLECT, now - uploading)
        elif self._phase in _PHASES:
            self._spent(_PHASES[self._phase], now - self._since)
        self._since, self._asked = now, 0.0

    def _spent(self, phase: RoundPhase, seconds: float) -> None:
        self._instruments.observe(metrics.PHASE_SECONDS, seconds, phase=phase)

    def _close(self, outcome: AttemptOutcome) -> None:
        """Count the current attempt and the outcomes of its members; `outcome` is that of the
        attempt."""
        self._open = False
        self._instruments.count(metrics.ATTEMPTS, outcome=outcome)
        self._members(MemberOutcome.SELECTED, len(self._cohort))
        for became, count in Counter(self._cohort.values()).items():
            self._members(became, count)
        self._cohort = {}

    def committed(self, row: RoundRow, model_bytes: int) -> None:
        """Record a committed round."""
        self._close(AttemptOutcome.COMMITTED)
        self._instruments.observe(metrics.ROUND_SECONDS, row.seconds)
        self._set(metrics.RUN_ROUNDS_COMMITTED, row.key.round)
        self._set(metrics.MODEL_TIMESTAMP, row.committed_at.timestamp())
        self._set(metrics.MODEL_SIZE, model_bytes)
        self._set(metrics.COHORT_CLIENTS, len(row.members))
        self._evaluated(row)
        self._spent_on_updates(row.privacy)

    def late(self, rows: Sequence[LateRow]) -> None:
        """Count those of these late trainings that the run no longer waits for."""
        for row in rows:
            if row.state is not LateState.AWAITED:
                self._instruments.count(metrics.LATE_UPDATES, outcome=LateOutcome(row.state.value))

    def moved(self, step_norm: float) -> None:
        """Show the L2 norm of the last round's change of the model."""
        self._set(metrics.UPDATE_NORM, step_norm)

    def _evaluated(self, row: RoundRow) -> None:
        found = row.metrics
        # Without an evaluation, the metrics keep their last values.
        if not all(name.startswith(TRAINING) for name in {*found, *row.coverage}):
            for name, metric in _OF_CLASSIFICATION.items():
                self._set(metric, found.get(name))
            self._spread(row.spreads)
        for name, value in found.items():
            self._set(metrics.MEASURE, value, measure=name)
        for name, each in row.coverage.items():
            if name not in found:  # requested, but not measured by any client
                self._set(metrics.MEASURE, None, measure=name)
            for state, clients in (("asked", each.asked), ("measured", each.clients)):
                self._set(metrics.MEASURE_CLIENTS, clients, measure=name, state=state)
            self._set(metrics.MEASURE_SAMPLES, each.samples, measure=name)
            self._set(metrics.MEASURE_PARTIAL, each.partial, measure=name)

    def _spread(self, found: Mapping[str, Spread]) -> None:
        """Show the spread over clients of the newest evaluated model's metrics."""
        for name in {*self._spreads, *found}:
            each = found.get(name)
            values = (None,) * len(SPREAD_STATISTICS) if each is None else each.statistics
            for statistic, value in zip(SPREAD_STATISTICS, values, strict=True):
                self._set(metrics.MEASURE_OVER_CLIENTS, value, measure=name, statistic=statistic)
            clients, samples = (None, None) if each is None else (each.clients, each.samples)
            self._set(metrics.MEASURING_CLIENTS, clients, measure=name)
            self._set(metrics.MEASURING_SAMPLES, samples, measure=name)
        self._spreads = frozenset(found)

    # Clients ----------------------------------------------------------------------------------

    def failed(self, reason: str) -> None:
        """Count a client that could not deliver an update. The reason may come from the host; an
        unknown one is counted as OTHER."""
        self._instruments.count(metrics.CLIENT_FAILURES, reason=known_reason(reason))

    def profile(self, signal: str, outcome: ProfileOutcome, count: int = 1) -> None:
        """Count clients that were asked for a profile, with this outcome."""
        self._instruments.count(
            metrics.PROFILES, count, signal=known_signal(signal), outcome=outcome
        )

    def _members(self, outcome: MemberOutcome, count: int = 1) -> None:
        self._instruments.count(metrics.MEMBERS, count, outcome=outcome)

    # Files ------------------------------------------------------------------------------------

    def sent(self, encoding: Encoding, size: int) -> None:
        """Count bytes of a model that a host has received."""
        self._last_fetch = self._clock()
        self._moved(Direction.DOWN, encoding, size)

    def upload_begins(self) -> None:
        """Record that a member's update starts to arrive."""
        self._last_upload = self._clock()

    def received(self, encoding: str, size: int) -> None:
        """Count received bytes of an update."""
        self._moved(Direction.UP, encoding, size)

    def _moved(self, direction: Direction, encoding: str, size: int) -> None:
        self._instruments.count(
            metrics.TRANSFER_BYTES, size, direction=direction, encoding=encoding
        )

    # Selection --------------------------------------------------------------------------------

    def cohort(self, labels: CohortLabels | None) -> None:
        """Show the metrics of the newest cohort's labels, if they are known."""
        if labels is None:
            return
        self._set(metrics.LABEL_ENTROPY, _number(labels.entropy[0]))
        for target, distance in (
            (Target.BALANCED, labels.to_balanced[0]),
            (Target.FEDERATION, labels.to_federation[0]),
        ):
            self._set(metrics.TARGET_DISTANCE, _number(distance), target=target)

    def picks(self, largest: int, never: int, committed: int) -> None:
        """Show the largest number of picks of a client, and the number of clients never picked."""
        self._set(metrics.LARGEST_SHARE, largest / committed if committed else None)
        self._set(metrics.NEVER_SELECTED, never)

    def largest_weight(self, share: float | None) -> None:
        """Show the largest share of one client in the newest round's weights."""
        self._set(metrics.LARGEST_WEIGHT, share)

    def heterogeneity(self, measures: Mapping[str, float]) -> None:
        """Show the metrics of the federation's heterogeneity."""
        for measure, value in measures.items():
            self._set(metrics.HETEROGENEITY, value, measure=measure)

    def privacy(self, largest_epsilon: float | None) -> None:
        """Show the largest ε that a client has spent on profiles."""
        self._set(metrics.PRIVACY_SPENT, largest_epsilon)

    def _spent_on_updates(self, found: RoundPrivacy | None) -> None:
        """Show the privacy loss of a run with `[privacy]`."""
        if found is not None:
            self._set(metrics.TRAINING_PRIVACY_SPENT, found.largest)
            self._set(metrics.NEAR_PRIVACY_LIMIT, found.near_limit)
            self._set(metrics.PRIVACY_REFUSED, found.refused)

    def _set(self, metric: metrics.Metric, value: float | None, **labels: str) -> None:
        if self._shown:
            self._instruments.set(metric, value, run=self._run, **labels)


def _number(value: float) -> float | None:
    """Return the number; None for NaN."""
    return float(value) if value == value else None
