"""Every metric of Potluck: name, help, unit, labels, and the condition under which it exists.

Names follow Prometheus: the prefix `potluck_`, base units, `_total` at the end of counters. Names
of host metrics begin with `potluck_host_`, names of relay metrics with `potluck_relay_`. Values of
single clients are in the store and in the output of operators' commands, not here: the number of
series must not depend on the number of clients or hosts. Only a few series name hosts and callers,
for alerts. No metric contains a weight, a number of samples, a triplet or a key.

`make pages` writes `docs/reference/metrics.md` from this module.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from potluck.common.monitoring.metric_labels import (
    AWAY_HOST,
    DIRECTION,
    ENCODING,
    HETEROGENEITIES,
    MEASURE_NAME,
    PEER,
    PEER_ROLE,
    REASON,
    RUN,
    SECURE_PHASE,
    SIGNAL,
    SPREAD_STATISTICS,
    TRAINING_WAY,
    AttemptOutcome,
    DeliveryOutcome,
    DisclosureOutcome,
    HostStage,
    Label,
    LateOutcome,
    MeasuredParty,
    MemberOutcome,
    ProfileOutcome,
    RelayLeg,
    RelaySource,
    RoundPhase,
    RunOutcome,
    Target,
    TransferOutcome,
    Work,
    WorkOutcome,
    outcome,
)

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
"""Upper bounds of the buckets of every histogram, in seconds."""

_UNITS = ("seconds", "bytes", "bits")


class MetricKind(StrEnum):
    """The kind of a metric, as Prometheus names it."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, eq=False)
class Metric:
    """A metric. condition: condition under which the metric exists; empty if it always does.
    shared: True if coordinator, hosts and relays have it."""

    name: str
    kind: MetricKind
    help: str
    labels: tuple[Label, ...] = ()
    condition: str = ""
    shared: bool = False

    @property
    def unit(self) -> str:
        """The base unit in the metric's name; empty for a plain number."""
        last = self.name.removesuffix("_total").rpartition("_")[2]
        return last if last in _UNITS else ""

    @property
    def parties(self) -> frozenset[MeasuredParty]:
        """The parties that have the metric."""
        if self.shared:
            return frozenset(MeasuredParty)
        of = (each for each in MeasuredParty if self.name.startswith(f"potluck_{each}_"))
        return frozenset({next(of, MeasuredParty.COORDINATOR)})


def _counter(name: str, text: str, *labels: Label) -> Metric:
    return Metric(name, MetricKind.COUNTER, text, labels)


def _gauge(
    name: str, text: str, *labels: Label, condition: str = "", shared: bool = False
) -> Metric:
    if RUN in labels:
        condition = condition or "once a run has begun"
    return Metric(name, MetricKind.GAUGE, text, labels, condition, shared)


def _seconds(name: str, text: str, *labels: Label) -> Metric:
    return Metric(name, MetricKind.HISTOGRAM, text, labels)


# Every process -----------------------------------------------------------------------------------

BUILD_INFO = _gauge(
    "potluck_build_info",
    "What runs here; always 1.",
    Label(name="party", about="coordinator, host or relay"),
    Label(name="version", about="Potluck's version"),
    Label(name="python", about="Python's version"),
    shared=True,
)
CERTIFICATE_EXPIRY = _gauge(
    "potluck_certificate_expiry_timestamp_seconds",
    "When this process's TLS certificate expires, in seconds since 1970.",
    shared=True,
)
DISK_FREE = _gauge(
    "potluck_disk_free_bytes", "Space left on the disk of the state directory.", shared=True
)
DISK_SIZE = _gauge(
    "potluck_disk_size_bytes", "Size of the disk of the state directory.", shared=True
)

CLOCK = _gauge(
    "potluck_clock_timestamp_seconds",
    "The time of this machine's clock, in seconds since 1970.",
    shared=True,
)

# Certificates and records ------------------------------------------------------------------------

AUTHORITY_EXPIRY = _gauge(
    "potluck_authority_expiry_timestamp_seconds",
    "When the certificate of the TLS authority expires that issued the coordinator's.",
)
PEER_EXPIRY = _gauge(
    "potluck_peer_certificate_expiry_timestamp_seconds",
    "Of the certificates that callers have shown since the coordinator's start, the end of the one "
    "that expires first, for each role. A renewed certificate takes the place of the old one.",
    PEER_ROLE,
    PEER,
    condition="once somebody of that role has called",
)
MEMBER_EXPIRY = _gauge(
    "potluck_member_records_expiry_timestamp_seconds",
    "When the first of the member records in force expires.",
    condition="where `federation_root` is set",
)

# Runs --------------------------------------------------------------------------------------------

RUNS_UNDER_WAY = _gauge(
    "potluck_runs_under_way", "Runs that are waiting or running; pre-training is part of its run."
)
RUNS_ENDED = _counter("potluck_runs_ended_total", "Runs that have ended.", outcome(RunOutcome))
RUNS_RESUMED = _counter(
    "potluck_runs_resumed_total",
    "Runs that went on after a stop of the coordinator, or after `potluck resume`.",
)
RUN_INFO = _gauge(
    "potluck_run_info",
    "What a run is; always 1.",
    RUN,
    Label(name="name", about="the run's name"),
    Label(name="task", about="what is learned"),
    Label(name="selector", about="who trains"),
    Label(name="strategy", about="how updates combine"),
)
RUN_UNDER_WAY = _gauge("potluck_run_under_way", "Whether a run is waiting or running.", RUN)
RUN_FAILED = _gauge(
    "potluck_run_failed_timestamp_seconds",
    "When the run failed, in seconds since 1970; gone once it is resumed.",
    RUN,
    condition="once the run has failed",
)
RUN_AWAY_HOST = _gauge(
    "potluck_run_away_host_info",
    "Hosts with clients that the run may select and that are not connected; always 1.",
    RUN,
    AWAY_HOST,
    condition="for runs under way, while a host is away",
)
RUN_ROUNDS_COMMITTED = _gauge("potluck_run_committed_rounds", "Rounds committed.", RUN)
RUN_ROUNDS_PLANNED = _gauge("potluck_run_planned_rounds", "Rounds the run is to have.", RUN)
MODEL_TIMESTAMP = _gauge(
    "potluck_model_timestamp_seconds",
    "When the run's model was committed, or the run begun or resumed if that was later; its age "
    "is time() less this.",
    RUN,
)
MODEL_SIZE = _gauge("potluck_model_size_bytes", "Size of the run's model.", RUN)

# Rounds ------------------------------------------------------------------------------------------

ATTEMPTS = _counter(
    "potluck_rounds_total",
    "Attempts at a round by their outcome, those of pre-training as well. quorum_missed: tried "
    "again, unless that fails the run; abandoned: the run was ended, or answers from before a "
    "restart no longer fit.",
    outcome(AttemptOutcome),
)
ROUND_SECONDS = _seconds("potluck_round_seconds", "From selection to commit, of committed rounds.")
PHASE_SECONDS = _seconds(
    "potluck_round_phase_seconds",
    "Where a round's time goes. ask: profiles and what the selector asks clients; broadcast: until "
    "the last member had fetched the model; train: from then until the last update began to "
    "arrive; collect: until the last was verified.",
    Label(name="phase", values=tuple(RoundPhase)),
)

# Clients and hosts -------------------------------------------------------------------------------

HOSTS_ATTENDING = _gauge("potluck_hosts_attending", "Hosts that are connected.")
CLIENTS_ATTENDING = _gauge("potluck_clients_attending", "Clients whose host is connected.")
CLIENTS_QUARANTINED = _gauge("potluck_clients_quarantined", "Clients that may not be selected.")
HOSTS_JOINED = _counter("potluck_hosts_joined_total", "Hosts that said hello.")
HOSTS_LEFT = _counter("potluck_hosts_left_total", "Hosts whose stream ended.")
MEMBERS = _counter(
    "potluck_cohort_members_total",
    "Clients selected, by what became of them, counted when their attempt is over; selected is the "
    "sum of the others. answered: its update was there; spared: the round had enough updates "
    "without it; abandoned: still at work when the attempt was given up.",
    outcome(MemberOutcome),
)
LATE_UPDATES = _counter(
    "potluck_late_updates_total",
    "Trainings that missed their round and were awaited for a later one, by what became of them. "
    "joined: the update is part of a later model.",
    outcome(LateOutcome),
)
CLIENT_FAILURES = _counter(
    "potluck_client_failures_total", "Members that could not deliver an update, by reason.", REASON
)
CALLS_REFUSED = _counter(
    "potluck_calls_refused_total", "Calls to the coordinator that it refused, by reason.", REASON
)
REFUSED_PEER = _gauge(
    "potluck_refused_peer_info",
    "The newest caller that was refused for a reason; always 1.",
    REASON,
    PEER,
    condition="once a call was refused",
)
PROFILES = _counter(
    "potluck_profiles_total",
    "Profiles asked for, by what came of it; silent: no answer in time.",
    SIGNAL,
    outcome(ProfileOutcome),
)

# Transfers ---------------------------------------------------------------------------------------

TRANSFER_BYTES = _counter(
    "potluck_transfer_bytes_total",
    "Bytes of models that hosts have received (down) and of updates that have arrived (up), by "
    "encoding. Bytes down count when the host asks for those after them, or once the whole file "
    "was handed over.",
    DIRECTION,
    ENCODING,
)
SUMS = _counter(
    "potluck_sums_received_total",
    "Sums of updates that hosts sent, in runs with host_sums.",
)
SUMMED_UPDATES = _counter(
    "potluck_summed_updates_total",
    "Updates in the sums that hosts sent.",
)
TRANSFERS_IN_FLIGHT = _gauge(
    "potluck_transfers_in_flight", "Files being transferred or queued.", DIRECTION
)
TRANSFERS = _counter(
    "potluck_transfers_total", "Attempts to move a file.", DIRECTION, outcome(TransferOutcome)
)
STORE_UP = _gauge(
    "potluck_object_store_up",
    "Whether the object store answered when it was last asked, with the bytes that were put.",
    condition="where `[files] store` is set",
)
STORE_FAILURES = _counter(
    "potluck_object_store_failures_total", "Requests of the coordinator that the store failed."
)
STORE_BYTES = _counter(
    "potluck_object_store_bytes_total",
    "Bytes that the coordinator put into the object store (down) and fetched from it (up).",
    DIRECTION,
)
_SINK = Label(name="sink", about="its name in the coordinator's configuration")
SINK_UP = _gauge(
    "potluck_sink_up",
    "Whether a sink runs and recorded everything when it was last told of something.",
    _SINK,
    condition="where `[sinks]` names one",
)
SINK_BEHIND = _gauge(
    "potluck_sink_behind_rounds",
    "Rounds that are committed and that a sink could not record; it is tried again.",
    _SINK,
    condition="where `[sinks]` names one",
)
TRANSFERS_RESUMED = _counter(
    "potluck_transfers_resumed_total", "Attempts that went on where another broke off.", DIRECTION
)
TRANSFERS_RETRIED = _counter(
    "potluck_transfers_retried_total", "Attempts at a file that had broken off before.", DIRECTION
)
TRANSFERS_FRUITLESS = _counter(
    "potluck_transfers_fruitless_total",
    "Attempts to move a file that broke off before one byte more had moved.",
    DIRECTION,
)
SPOOL_SIZE = _gauge("potluck_spool_size_bytes", "Updates waiting to be reduced.")

# The model ---------------------------------------------------------------------------------------

_EVALUATED = "once a round was evaluated"
ACCURACY = _gauge(
    "potluck_model_accuracy_ratio",
    "Share of the evaluation's samples that the newest evaluated model gets right.",
    RUN,
    condition=_EVALUATED,
)
WORST_GROUP_ACCURACY = _gauge(
    "potluck_model_worst_group_accuracy_ratio",
    "The same in the group where it is lowest.",
    RUN,
    condition=f"{_EVALUATED}, for tasks with groups",
)
WEIGHTED_F1 = _gauge(
    "potluck_model_weighted_f1_ratio",
    "F1 of the classes, weighted by their size.",
    RUN,
    condition=_EVALUATED,
)
LOSS = _gauge("potluck_model_loss", "Mean loss of the evaluation.", RUN, condition=_EVALUATED)
MEASURE = _gauge(
    "potluck_model_measure",
    "Mean of a measure over the newest round that has it, as the task's trainer declares it.",
    RUN,
    MEASURE_NAME,
    condition=_EVALUATED,
)
MEASURE_CLIENTS = _gauge(
    "potluck_model_measure_clients",
    "Clients that were asked for a measure in the newest round that has it, and clients that "
    "measured it. 0 on the coordinator's own data.",
    RUN,
    MEASURE_NAME,
    Label(name="state", values=("asked", "measured")),
    condition=_EVALUATED,
)
MEASURE_SAMPLES = _gauge(
    "potluck_model_measure_samples",
    "Samples behind a measure of the newest round that has it; 0 where masked updates hide it.",
    RUN,
    MEASURE_NAME,
    condition=_EVALUATED,
)
MEASURE_PARTIAL = _gauge(
    "potluck_model_measure_partial",
    "1 where fewer of the clients asked than evaluation.least_share measured it, else 0.",
    RUN,
    MEASURE_NAME,
    condition=_EVALUATED,
)
_SPREAD = "where evaluation.spread is on and evaluation.least_group clients have measured"
MEASURE_OVER_CLIENTS = _gauge(
    "potluck_model_measure_over_clients",
    "Spread of a measure over the clients that measured the newest evaluated model.",
    RUN,
    MEASURE_NAME,
    Label(name="statistic", values=SPREAD_STATISTICS),
    condition=_SPREAD,
)
MEASURING_CLIENTS = _gauge(
    "potluck_model_measuring_clients",
    "Clients behind that spread.",
    RUN,
    MEASURE_NAME,
    condition=_SPREAD,
)
MEASURING_SAMPLES = _gauge(
    "potluck_model_measuring_samples",
    "Samples behind that spread; 0 where masked updates hide them.",
    RUN,
    MEASURE_NAME,
    condition=_SPREAD,
)
UPDATE_NORM = _gauge(
    "potluck_model_update_norm",
    "Euclidean length of the step that the newest round moved the model.",
    RUN,
    condition="once a round was committed",
)

# Selection ---------------------------------------------------------------------------------------

_LABELS_KNOWN = "for selectors that need label counts, once a round was committed"
COHORT_CLIENTS = _gauge(
    "potluck_cohort_clients",
    "Clients in the newest round's cohort.",
    RUN,
    condition="once a round was committed",
)
LABEL_ENTROPY = _gauge(
    "potluck_cohort_label_entropy_bits",
    "Entropy of the labels of the newest round's cohort together, as its clients disclosed them.",
    RUN,
    condition=_LABELS_KNOWN,
)
TARGET_DISTANCE = _gauge(
    "potluck_cohort_target_distance_ratio",
    "1 less the cosine between these labels and equal numbers of each class (balanced), or the "
    "labels of all clients (federation).",
    RUN,
    Label(name="target", values=tuple(Target)),
    condition=_LABELS_KNOWN,
)
HETEROGENEITY = _gauge(
    "potluck_federation_heterogeneity_ratio",
    "How uneven classes and attributes are: gci, gai, gsc of all samples together; cci, cai, csc "
    "the mean of the clients' own triplets.",
    RUN,
    Label(name="measure", values=HETEROGENEITIES),
    condition="for selectors that need interaction matrices; cci, cai, csc also with triplets",
)
LARGEST_SHARE = _gauge(
    "potluck_selection_largest_share_ratio",
    "Share of the run's cohorts that the client selected most was in.",
    RUN,
    condition="once a round was committed",
)
LARGEST_WEIGHT = _gauge(
    "potluck_cohort_largest_weight_ratio",
    "The largest share of one client in the samples of the newest round, as they count within the "
    "run's sample_limits.",
    RUN,
    condition="once a round was committed, without masks",
)
NEVER_SELECTED = _gauge(
    "potluck_selection_never_selected_clients",
    "Clients of the run's roster that were in no cohort yet.",
    RUN,
    condition="once a round was committed",
)

# Privacy -----------------------------------------------------------------------------------------

PRIVACY_SPENT = _gauge(
    "potluck_privacy_largest_epsilon",
    "The largest sum of ε that a client of the run has spent on profiles this run uses.",
    RUN,
    condition="for selectors that need profiles",
)
_WITH_NOISE = "for runs with `[privacy]`, once a round was committed"
TRAINING_PRIVACY_SPENT = _gauge(
    "potluck_privacy_trainings_largest_epsilon",
    "The largest ε that a client has spent on its updates in this run, as far as the coordinator "
    "knows.",
    RUN,
    condition=f"{_WITH_NOISE}, if the coordinator has the extra `privacy`",
)
NEAR_PRIVACY_LIMIT = _gauge(
    "potluck_privacy_near_limit_clients",
    "Clients that have used at least 80 % of the trainings that the run's `epsilon` is for.",
    RUN,
    condition="for runs with `epsilon` in `[privacy]`, once a round was committed",
)
PRIVACY_REFUSED = _gauge(
    "potluck_privacy_refused_clients",
    "Clients that are excluded from the run because their owner's limit, or the run's number of "
    "trainings, is used up.",
    RUN,
    condition=_WITH_NOISE,
)
SECURE_PHASE_SECONDS = _seconds(
    "potluck_secure_aggregation_phase_seconds",
    "Time in the phases of secure aggregation.",
    SECURE_PHASE,
)
SECURE_DROPOUTS = _counter(
    "potluck_secure_aggregation_dropouts_total",
    "Members that dropped out of secure aggregation, by the phase they did not finish.",
    SECURE_PHASE,
)

# Hosts -------------------------------------------------------------------------------------------

_GPU = Label(name="gpu", about="its number on this machine")
_WITH_GPU = "on machines with an NVIDIA GPU and the package nvidia-ml-py"

ATTENDING = _gauge("potluck_host_attending", "Whether this host is connected to its coordinator.")
RECONNECTS = _counter("potluck_host_reconnects_total", "Times the control stream was opened again.")
HOST_CLIENTS = _gauge("potluck_host_clients", "Clients this host answers for.")
INSTRUCTIONS = _gauge(
    "potluck_host_instructions",
    "Instructions under way, by stage; queued ones wait for the device.",
    Label(name="stage", values=tuple(HostStage)),
)
WORK = _counter(
    "potluck_host_work_total",
    "Instructions that ended; dropped: no longer awaited.",
    Label(name="work", values=tuple(Work)),
    outcome(WorkOutcome),
)
WORK_FAILURES = _counter(
    "potluck_host_failures_total",
    "Instructions that failed, by reason; not those of masked trainings.",
    REASON,
)
TRAINING_SECONDS = _seconds(
    "potluck_host_training_seconds", "Local trainings, without moving files."
)
TRAININGS = _counter(
    "potluck_host_trainings_total",
    "Trainings of clients, in batched steps with others or by themselves; the log says why.",
    TRAINING_WAY,
)
TRAINING_SPEED = _gauge(
    "potluck_host_training_samples_per_second",
    "Speed of the newest training, to one significant digit, so that it doesn't tell how many "
    "samples a client has.",
    condition="once a client was trained",
)
TRAINING_LOSS = _gauge(
    "potluck_host_training_loss",
    "Mean loss over the last pass of the newest training.",
    condition="once a client was trained",
)
HOST_BYTES = _counter(
    "potluck_host_transfer_bytes_total", "Bytes of models (down) and updates (up) moved.", DIRECTION
)
HOST_STORE_BYTES = _counter(
    "potluck_host_object_store_bytes_total",
    "Those of them that went through an object store.",
    DIRECTION,
)
HOST_RETRIES = _counter("potluck_host_transfers_retried_total", "Transfers begun again.", DIRECTION)
GPU_USED = _gauge(
    "potluck_host_gpu_memory_used_bytes",
    "Memory in use on a GPU, by whomever.",
    _GPU,
    condition=_WITH_GPU,
)
GPU_SIZE = _gauge(
    "potluck_host_gpu_memory_size_bytes", "Memory of a GPU.", _GPU, condition=_WITH_GPU
)
GPU_UTILISATION = _gauge(
    "potluck_host_gpu_utilisation_ratio",
    "Share of the time in which a GPU was busy, by whomever.",
    _GPU,
    condition=_WITH_GPU,
)
DISCLOSURES = _counter(
    "potluck_host_disclosures_total",
    "Requests for a profile, by what a client did: made a new release, repeated an old one, "
    "refused.",
    SIGNAL,
    outcome(DisclosureOutcome),
)
HOST_PRIVACY_SPENT = _gauge(
    "potluck_host_privacy_spent_epsilon",
    "The largest sum of ε that a client of this host has spent.",
)
HOST_PRIVACY_BUDGET = _gauge(
    "potluck_host_privacy_budget_epsilon", "What a client of this host may spend."
)
HOST_TRAINING_PRIVACY_SPENT = _gauge(
    "potluck_host_privacy_trainings_spent_epsilon",
    "The largest ε that a client of this host has spent on trainings with noise, over all runs on "
    "the current version of its data, to two significant digits; `potluck-client privacy` lists "
    "all clients.",
    condition="once a client was trained with noise",
)
HOST_TRAINING_PRIVACY_LEFT = _gauge(
    "potluck_host_privacy_trainings_left_epsilon",
    "What this client has left of `training_epsilon`.",
    condition="once a client was trained with noise",
)
HOST_NEAR_PRIVACY_LIMIT = _gauge(
    "potluck_host_privacy_near_limit_clients",
    "Clients of this host that have spent at least 80 % of `training_epsilon`.",
    condition="once a client was trained with noise",
)

# Relays ------------------------------------------------------------------------------------------

RELAY_CONNECTED = _gauge(
    "potluck_relay_connected", "Whether the relay's connection to the coordinator stands."
)
RELAY_HOSTS = _gauge(
    "potluck_relay_hosts_attending", "Hosts that are connected through this relay."
)
RELAY_CLIENTS = _gauge(
    "potluck_relay_clients_attending", "Clients whose host is connected through this relay."
)
RELAY_BYTES = _counter(
    "potluck_relay_transfer_bytes_total",
    "Bytes of models (down) and updates (up) moved, between the relay and its hosts or the "
    "coordinator.",
    Label(name="leg", values=tuple(RelayLeg)),
    DIRECTION,
)
RELAY_RETRIES = _counter(
    "potluck_relay_transfers_retried_total",
    "Transfers to or from the coordinator begun again.",
    DIRECTION,
)
RELAY_DOWNLOADS = _counter(
    "potluck_relay_downloads_total",
    "Files that hosts asked for, by whether they were here or came from the coordinator.",
    Label(name="source", values=tuple(RelaySource)),
)
RELAY_UPDATES_HELD = _gauge(
    "potluck_relay_updates_held", "Updates on disk that the coordinator does not have yet."
)
RELAY_DELIVERIES = _counter(
    "potluck_relay_deliveries_total",
    "Updates that were held, by what became of them; refused: by the coordinator, most often "
    "because their round was over.",
    outcome(DeliveryOutcome),
)
RELAY_REFUSALS = _counter(
    "potluck_relay_calls_refused_total", "Calls of hosts that the relay refused, by reason.", REASON
)

METRICS: tuple[Metric, ...] = tuple(
    value for value in list(globals().values()) if isinstance(value, Metric)
)
"""All metrics, in the order above."""


def metrics_of(party: MeasuredParty) -> tuple[Metric, ...]:
    """Return the metrics that a party has."""
    return tuple(metric for metric in METRICS if party in metric.parties)
