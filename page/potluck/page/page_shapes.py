"""JSON objects that the web UI's server sends to the browser.

Shares are in [0, 1], sizes in bytes, durations in seconds, times in ISO 8601; null stands for an
unknown value.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from potluck.deploy.view.run_summary import CoverageSummary, MeasureSummary


class Shape(BaseModel):
    """A JSON object; NaN and infinities become null."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="null")


# Runs ---------------------------------------------------------------------------------------------


class StatusShown(Shape):
    """The status of a run."""

    run: str = Field(description="Id of the run.")
    name: str
    state: str = Field(description="waiting, running, finished, stopped or failed.")
    why: str = Field(description="Reason for the state, and excluded clients.")
    committed: int = Field(description="Number of committed rounds.")
    rounds: int = Field(description="Number of planned rounds.")
    task: str
    selector: str
    strategy: str
    count: int = Field(description="Number of clients selected in each round.")
    seed: int
    created_at: str
    model: str | None = Field(description="BLAKE3 digest of the last model.")
    can_stop: bool
    can_resume: bool


class NoiseShown(Shape):
    """Privacy loss of a run with `[privacy]` after a round, as the coordinator knows it."""

    delta: float
    largest: float | None = Field(
        description="Largest privacy loss ε of a client; null if unknown."
    )
    median: float | None
    near_limit: int | None = Field(
        description="Number of clients that have used 80 % of the run's trainings; null without "
        "a limit."
    )
    refused: int = Field(description="Number of clients excluded because their limit is used up.")


class RoundShown(Shape):
    """A committed round."""

    round: int
    values: dict[str, float | None] = Field(description="Metrics of the new model, by name.")
    worst_tenth: dict[str, float] = Field(
        description="Means over the worst tenth of clients, by metric."
    )
    coverage: dict[str, CoverageSummary] = Field(
        description="For each metric: number of clients that sent it, and of their samples."
    )
    spread_coverage: dict[str, CoverageSummary] = Field(
        description="For each metric with a worst tenth: number of clients, and of their samples."
    )
    seconds: float
    bytes_down: int
    bytes_up: int
    cohort: list[int] = Field(
        description="The round's clients, as indices in the run's list of clients."
    )
    left_out: list[int] = Field(description="Indices of clients whose update is not in the model.")
    late: int = Field(description="Number of late updates of earlier rounds in the model.")
    noise: NoiseShown | None = Field(
        description="Privacy loss after the round; null without `[privacy]`."
    )


class MemberShown(Shape):
    """A client in a round that has ended."""

    client: str
    host: str
    state: str
    reason: str = Field(description="The selector's reason.")
    trouble: str
    samples: int
    seconds: float


class RoundDetails(Shape):
    """Clients of a committed round, with the reasons for their selection."""

    round: int
    members: list[MemberShown]


class CohortShown(Shape):
    """The clients of the current round, in selection order, as columns of one table."""

    round: int
    attempt: int
    clients: list[str]
    hosts: list[str]
    reasons: list[str]


class StateCount(Shape):
    """Number of a round's clients that are in one state."""

    state: str
    clients: int
    troubled: bool


class LiveShown(Shape):
    """The current round. Lists have one entry for each client of its cohort."""

    round: int
    attempt: int
    phase: str = Field(description="The coordinator's current step, as text.")
    seconds: float = Field(description="Seconds since the selection.")
    done: float = Field(description="Share of the cohort's training that is done.")
    bytes_down: int
    bytes_up: int
    counts: list[StateCount]
    states: list[str]
    fractions: list[float]
    troubles: dict[int, str] = Field(
        description="Problems of clients, by the client's index in the cohort."
    )
    stragglers: list[int] = Field(
        description="Clients that take much longer than others, as indices in the cohort."
    )


class NoticeShown(Shape):
    """A notice for the operator."""

    at: str | None
    warning: bool
    text: str


class RunShown(Shape):
    """All data of a run that the page shows together."""

    status: StatusShown
    measures: list[MeasureSummary]
    clients: list[str] = Field(description="All clients that were ever selected, in any order.")
    rounds: list[RoundShown]
    earlier: int = Field(description="Number of earlier rounds that are not shown.")
    cohort: CohortShown | None
    live: LiveShown | None
    notices: list[NoticeShown]


# The federation -----------------------------------------------------------------------------------


class ConnectionShown(Shape):
    """State of the connection to the coordinator."""

    address: str
    reached: bool
    trouble: Literal["", "lost", "certificate", "fault", "other"]
    text: str = Field(description="The problem and its remedy; empty without a problem.")


class CoordinatorShown(Shape):
    """The coordinator, from its latest description."""

    version: str
    hosts: int
    clients: int
    certificate_expires_at: str | None
    disk_free: int
    disk_size: int


class OverviewShown(Shape):
    """Data that every view of the page shows, and the list of runs."""

    connection: ConnectionShown
    coordinator: CoordinatorShown | None
    runs: list[StatusShown]
    more_runs: bool = Field(description="True if older runs exist that are not listed.")


class ClientShown(Shape):
    """A client as the coordinator knows it."""

    client: str
    selected: int
    included: int
    note: str = Field(
        description="Quarantine of the client, and runs that exclude it; empty without either."
    )


class HostShown(Shape):
    """A host and its clients."""

    host: str
    attending: bool
    last_seen: str | None
    device: str
    version: str
    relay: str
    tags: str
    certificate_expires_at: str | None
    clients: list[ClientShown]


class HostsShown(Shape):
    """All hosts that ever connected to the coordinator."""

    summary: str
    hosts: list[HostShown]


# What clients disclosed ---------------------------------------------------------------------------


class MixRound(Shape):
    """Combined labels of a cohort: shares by class; null if none of its clients disclosed any."""

    round: int
    selected: list[float] | None
    included: list[float] | None
    entropy: float | None = Field(description="Entropy of the selected labels, in bits.")


class MixShown(Shape):
    """Label mix of cohorts, from the label counts that clients disclosed."""

    classes: int
    clients: int = Field(description="Number of clients in the run's roster.")
    disclosed: int = Field(
        description="Number of clients in the roster that disclosed label counts."
    )
    federation: list[float] | None
    rounds: list[MixRound]


class ClientPrivacy(Shape):
    """Data that a client disclosed, and the privacy loss of these disclosures."""

    client: str
    epsilon: float = Field(description="Total privacy loss ε of the client's noisy disclosures.")
    sums: int = Field(description="Number of secure sums that include the client.")
    least_hosts: int | None = Field(description="Number of hosts in the smallest of these sums.")
    disclosed: list[str] = Field(
        description="Signals that the client disclosed, other than in secure sums."
    )
    updates: float | None = Field(
        description="Privacy loss ε of the client's updates; null without noise."
    )


class PrivacyShown(Shape):
    """Privacy spent in a run."""

    clients: list[ClientPrivacy]
    largest: float
    median: float
    sums_released: int
    sums_aborted: int
    holds_against: str = Field(description="Parties from which secure sums hide single values.")
    claim: str = Field(description="Protection of updates; empty if none is claimed.")


class DisclosedShown(Shape):
    """Disclosed facts about the data of a run's clients, and the privacy spent on them."""

    mix: MixShown
    privacy: PrivacyShown
    roster: list[str]


# Starting and comparing ---------------------------------------------------------------------------


class FieldShown(Shape):
    """A field of the form that starts a run."""

    key: str = Field(description="Dotted key of the run file.")
    label: str
    hint: str
    kind: Literal["text", "integer", "number"]
    choices: list[str]
    default: str


class Problem(Shape):
    """A problem of a run file."""

    key: str = Field(description="Dotted key; empty for the file as a whole.")
    line: int | None = Field(description="Line of the run file, from 1.")
    text: str


class DraftShown(Shape):
    """A run file that the operator is writing."""

    run_file: str
    values: dict[str, str] = Field(description="Values of the form fields that the file sets.")
    problems: list[Problem]


class FormShown(Shape):
    """The form that starts a run, and its first draft."""

    fields: list[FieldShown]
    draft: DraftShown


class DraftSent(Shape):
    """A draft as the browser sends it: the run file, and form fields to write into it."""

    run_file: str = Field(max_length=1_000_000)
    changes: dict[str, str] = Field(default={}, max_length=100)


class Started(Shape):
    """A run that was started."""

    run: str


class RunFileShown(Shape):
    """The run file with which a run was started."""

    run: str
    run_file: str


class Difference(Shape):
    """A setting in which runs differ, with its value in each."""

    key: str
    values: list[str]


class ComparisonShown(Shape):
    """A comparison of several runs."""

    runs: list[RunShown]
    differences: list[Difference]


class Refused(Shape):
    """An error as text."""

    error: str
    trouble: Literal["lost", "certificate", "fault", "refused", "missing", "access"]
    problems: list[Problem] = []
