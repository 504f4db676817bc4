"""Data classes of the store: records to store, and rows that the store returns.

All times have a time zone; they are returned in UTC with microseconds. If a float may be None, NaN
is also stored as None (SQLite has no NaN); infinities are kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Final, NamedTuple

from potluck.common.learning.spread import Coverage
from potluck.common.records.round import RoundFacts
from potluck.common.run_file.runfile import RunFile
from potluck.common.trainer import Measure
from potluck.common.updates.update_report import UpdateReport
from potluck.server.state import Scalar

JsonObject = Mapping[str, object]
"""A JSON object: values are None, bool, int, float, str, or lists and dicts of these."""


class AttemptKey(NamedTuple):
    """Identifies an attempt at a round of a run; rounds and attempts count from 1."""

    run_id: str
    round: int
    attempt: int

    def __str__(self) -> str:
        return f"attempt {self.attempt} at round {self.round} of run {self.run_id}"


class RunState(StrEnum):
    """The state of a run."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"


class MemberState(StrEnum):
    """The stored state of a member of a cohort."""

    SELECTED = "selected"
    """The client was selected, and has been or will be instructed to train."""
    RECEIVED = "received"
    """The client's update is verified and in the spool."""
    INCLUDED = "included"
    """The client's update is part of the committed model."""
    LOST = "lost"
    """The client's host disconnected."""
    FAILED = "failed"
    """The client could not train, or its update was refused."""
    LATE = "late"
    """The client missed the deadline."""
    SPARED = "spared"
    """The round had enough updates without this client, or the client skipped its upload."""


@dataclass(frozen=True, kw_only=True)
class BestSoFar:
    """The best value of the metric in a run's `[stop]` up to one of its rounds.

    round, value: the first round with the best value, and this value; both None until the metric
    was measured in an evaluation that counts. mark: last value that counted as an improvement.
    stalled: number of evaluations since that improvement.
    """

    measure: str
    round: int | None = None
    value: float | None = None
    mark: float | None = None
    stalled: int = 0


@dataclass(frozen=True, kw_only=True)
class NewRun:
    """A new run.

    seed: in [0, 2^64). rounds: number of rounds, ≥ 1. count: clients per round, ≥ 1. measures:
    metrics that the task's own trainer declares, in its order; empty for a classification task.
    """

    run_id: str
    name: str
    run_file: str
    created_at: datetime
    rounds: int
    count: int
    seed: int
    task: str
    selector: str
    strategy: str
    measures: Mapping[str, Measure] = field(default_factory=dict)

    @staticmethod
    def of(
        run_id: str, run_file: RunFile, text: str, at: datetime, measures: Mapping[str, Measure]
    ) -> NewRun:
        """Return the run to store for a run file. text: the file as written. measures: metrics of
        the task's trainer."""
        return NewRun(
            run_id=run_id,
            name=run_file.name,
            run_file=text,
            created_at=at,
            rounds=run_file.rounds,
            count=run_file.clients_per_round,
            seed=run_file.seed,
            task=run_file.task.name,
            selector=run_file.selector.name,
            strategy=run_file.strategy.name,
            measures=measures,
        )


@dataclass(frozen=True, kw_only=True)
class RunRow(NewRun):
    """A run and its state.

    reason: reason of this state; may be empty. model_blake3: digest of the last committed model;
    before round 1, of the initial model; None without a model. number: the run's number among all
    runs, from 1. best: best value after the last committed round, if the run file names a metric.
    best_model_blake3: digest of the model with this value. best_coverage: numbers of clients and
    samples from which each metric of that model was computed.
    """

    state: RunState
    reason: str
    changed_at: datetime
    committed_rounds: int
    model_blake3: str | None
    initial_model_blake3: str | None = None
    number: int = 0
    best: BestSoFar | None = None
    best_model_blake3: str | None = None
    best_coverage: Mapping[str, Coverage] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class UpdateRow(UpdateReport):
    """An update in the spool, with its report.

    size: bytes of the spooled file. seconds: seconds from instruction to update, real or simulated.
    """

    blake3: str
    size: int
    encoding: str
    delta: bool
    compressed: bool


@dataclass(frozen=True, kw_only=True)
class MemberWork:
    """The settings that a selector made for one client's work in a round.

    quotas: maximum number of samples of each class to train on; empty for no limit. weight: weight
    of the client's update; None to use its number of samples. epochs: number of passes over the
    client's samples; None for the run's number. dropped: names of the tensors that the update
    omits, sorted.
    """

    quotas: tuple[float, ...] = ()
    weight: float | None = None
    epochs: int | None = None
    dropped: tuple[str, ...] = ()


AS_THE_RUN_SAYS: Final = MemberWork()
"""The `MemberWork` of clients for which the selector set nothing."""


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """The versions that a client's host reported when the client was selected; None if unknown.

    data_epoch: version of the data of the host's clients. software: release of Potluck on the host.
    """

    data_epoch: int | None = None
    software: str | None = None


@dataclass(frozen=True, kw_only=True)
class MemberChange:
    """A member's new state. update: the update that arrived, with the state RECEIVED; else None."""

    client_id: str
    state: MemberState
    trouble: str | None = None
    update: UpdateRow | None = None


@dataclass(frozen=True, kw_only=True)
class MemberRow:
    """A member of a cohort: the reason for its selection, its state, its trouble and its update.

    work: what the selector set for this client, such as passes and quotas.
    """

    client_id: str
    host_id: str
    state: MemberState
    reason: str
    trouble: str | None
    update: UpdateRow | None
    work: MemberWork = field(default_factory=lambda: AS_THE_RUN_SAYS)
    provenance: Provenance = field(default_factory=Provenance)


class LateState(StrEnum):
    """The state of a training that missed its round."""

    AWAITED = "awaited"
    """The training's update may join a later round."""
    JOINED = "joined"
    """The training's update is part of a later round's model."""
    DROPPED = "dropped"
    """The coordinator no longer waits for the training's update."""


@dataclass(frozen=True, kw_only=True)
class LateRow:
    """A training that missed its own round.

    model_blake3: digest of the model from which it started. seconds_left: simulated seconds until
    its update arrives. joined_round: round whose model its update became part of. weight: weight of
    the update in that round, relative to a fresh update. update: the update, once it has arrived.
    work: as in `MemberRow`.
    """

    run_id: str
    round: int
    attempt: int
    client_id: str
    state: LateState
    model_blake3: str
    seconds_left: float = 0.0
    joined_round: int | None = None
    weight: float | None = None
    trouble: str | None = None
    update: UpdateRow | None = None
    work: MemberWork = AS_THE_RUN_SAYS

    @property
    def key(self) -> AttemptKey:
        """The attempt to which the training belongs."""
        return AttemptKey(self.run_id, self.round, self.attempt)


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """A selector's question and its answers. answers: None until the answers are stored."""

    step: int
    question: JsonObject
    answers: JsonObject | None


class AttemptState(StrEnum):
    """The state of an attempt. At most one attempt of a run is open."""

    OPEN = "open"
    COMMITTED = "committed"
    FAILED = "failed"
    """Too few updates arrived; the attempt counts against `round.attempts`."""
    EXCUSED = "excused"
    """Too few updates arrived; the attempt does not count, because clients were excluded or hosts
    disconnected."""
    ABANDONED = "abandoned"
    """The coordinator gave it up for another reason, such as the end of the run."""


@dataclass(frozen=True, kw_only=True)
class FailedAttempt:
    """An attempt in which too few updates arrived. state: FAILED or EXCUSED. members: state of each
    member. available: rows of the clients that were available; empty if not read from a store."""

    state: AttemptState
    members: Mapping[str, MemberState]
    available: tuple[int, ...] = ()

    @property
    def counts(self) -> bool:
        """True if the attempt counts against `round.attempts`."""
        return self.state is AttemptState.FAILED

    @property
    def to_avoid(self) -> set[str]:
        """Members that the next attempts at the round avoid. Clients whose host disconnected in an
        excused attempt are not among them: they may be selected once they reconnect."""
        avoided = {MemberState.FAILED, MemberState.LATE}
        if self.counts:
            avoided.add(MemberState.LOST)
        return {client for client, state in self.members.items() if state in avoided}


@dataclass(frozen=True, kw_only=True)
class AttemptRow:
    """The open attempt at a round.

    members: in the order chosen; empty before the selection. spent: number of attempts at the round
    that don't count as used.
    """

    key: AttemptKey
    begun_at: datetime
    available: Sequence[int]
    members: Sequence[MemberRow]
    exchanges: Sequence[Exchange]
    spent: int = 0


@dataclass(frozen=True, kw_only=True)
class LeftOutRow:
    """A client that can't take part in a run, with the reason.

    process_id: id of the process of the client's host at that time. A new process of the host may
    no longer have the problem.
    """

    client_id: str
    process_id: str
    trouble: str
    at: datetime


Metrics = Mapping[str, float]
"""Metrics of a model, by name; finite. Metrics that are undefined or not measured are absent."""


@dataclass(frozen=True, kw_only=True)
class StoredRound(RoundFacts):
    """A committed round as the table of rounds has it.

    state_blake3: digest of the file with the arrays of the selector's and the strategy's states.
    best: best value after this round, see `RunRow`.
    """

    key: AttemptKey
    model_blake3: str
    state_blake3: str | None = None
    selector_scalars: Mapping[str, Scalar] = field(default_factory=dict)
    strategy_scalars: Mapping[str, Scalar] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=dict)
    committed_at: datetime = field()  # a dataclass would otherwise take the default of `RoundFacts`
    late: Sequence[LateRow] = ()
    best: BestSoFar | None = None


@dataclass(frozen=True, kw_only=True)
class RoundCommit(StoredRound):
    """All data stored with a round.

    included: clients whose update is part of the model. set_aside: clients whose received update is
    excluded from the model, each with the reason. late: late trainings whose state has changed, see
    `LateRow`.
    """

    included: Sequence[str]
    set_aside: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RoundRow(StoredRound):
    """A committed round.

    members: the whole cohort in the order chosen. late: trainings for earlier rounds whose updates
    joined this one.
    """

    members: Sequence[MemberRow]

    @property
    def included(self) -> Sequence[MemberRow]:
        """The members whose updates are part of the model."""
        return [member for member in self.members if member.state is MemberState.INCLUDED]

    @property
    def disclosed_samples(self) -> Mapping[str, int]:
        """Number of training samples of each client, as disclosed with the updates in the model.

        Late updates are omitted, because a kill may change which ones were included. Empty if
        updates are masked.
        """
        updates = {member.client_id: member.update for member in self.included}
        updates |= {each.client_id: each.update for each in self.late}
        return {
            client: update.samples
            for client, update in updates.items()
            if update and update.samples
        }


@dataclass(frozen=True, kw_only=True)
class FileReference:
    """The files that a round's row references; round 0 is the initial model."""

    run_id: str
    round: int
    model_blake3: str
    state_blake3: str | None


@dataclass(frozen=True, kw_only=True)
class FileHolder:
    """A round whose row references a file; round 0 is the initial model.

    of_state: True if the file contains the round's states, False if it contains its model.
    committed_rounds, run_file: number of committed rounds, and run file, of the round's run.
    best_round: round of the run's best model, if this model is kept.
    """

    blake3: str
    run_id: str
    round: int
    of_state: bool
    committed_rounds: int
    run_file: str
    best_round: int | None = None


@dataclass(frozen=True, kw_only=True)
class Participation:
    """A client's participation in a run's committed rounds.

    picks: number of rounds in which the client was selected. samples: number of samples in its last
    included update; None without one. included_round, included_attempt: round and attempt of that
    update; None without one.
    """

    client_id: str
    picks: int
    samples: int | None
    included_round: int | None
    included_attempt: int | None


@dataclass(frozen=True, kw_only=True)
class ClientSeen:
    """The time at which a client was last in contact, with its host and device."""

    client_id: str
    host_id: str
    device: str
    at: datetime


@dataclass(frozen=True, kw_only=True)
class ClientRow:
    """A client known to the coordinator.

    selected: number of cohorts with this client, including those of abandoned attempts. included:
    number of models with an update of this client. Both are over all runs. quarantine: reason of
    the client's quarantine; None if it is not in quarantine.
    """

    client_id: str
    host_id: str
    device: str
    first_seen_at: datetime
    last_seen_at: datetime
    selected: int
    included: int
    quarantine: str | None


@dataclass(frozen=True, kw_only=True)
class QuarantineRow:
    """A client in quarantine, which must not be selected."""

    client_id: str
    reason: str
    at: datetime


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A profile that a client disclosed, stored unchanged because it may be signed.

    parameters_json: canonical JSON, because it is part of the key. payload_json: any JSON.
    """

    client_id: str
    data_epoch: int
    signal: str
    parameters_json: str
    payload_json: str
    signature: bytes | None
    received_at: datetime


@dataclass(frozen=True, kw_only=True)
class SecureSum:
    """The outcome of one session of secure aggregation.

    kind: `total`, or `cells`. task: the task's reference, canonical JSON. epochs: data epoch of
    each invited client. record: a `SessionRecord` as JSON values. total: the sum; None if the
    session failed.
    """

    number: int = 0
    session_id: str
    run_id: str
    kind: str
    task: str
    epochs: Mapping[str, int]
    record: JsonObject
    total: tuple[int, ...] | None
