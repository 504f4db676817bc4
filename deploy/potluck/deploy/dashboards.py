"""The dashboards that come with Potluck; written by `python -m potluck.deploy.dashboards FOLDER`.

Edit here, not the JSON: a test compares the two.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from potluck.deploy.dashboard_json import Dashboard, Panel, Query, dashboard_json

_RUN = '{run=~"$run"}'
_NAMED = "{{run}}"


def _rate(metric: str, *by: str, labels: str = "") -> str:
    return f"sum by ({', '.join(by)}) (rate({metric}{labels}[$__rate_interval]))"


def _increase(metric: str, *by: str, labels: str = "") -> str:
    return f"sum by ({', '.join(by)}) (increase({metric}{labels}[$__rate_interval]))"


def _quantiles(metric: str, *by: str) -> tuple[Query, ...]:
    grouped = ", ".join(("le", *by))
    legend = " ".join(f"{{{{{label}}}}}" for label in by)
    return tuple(
        Query(
            f"histogram_quantile({share}, "
            f"sum by ({grouped}) (rate({metric}_bucket[$__rate_interval])))",
            f"{legend} {name}".strip(),
        )
        for share, name in ((0.5, "median"), (0.95, "95 %"))
    )


_PROCESS = (
    Panel(
        title="Memory",
        queries=[Query("process_resident_memory_bytes", "{{instance}}")],
        about="Resident memory, mapped model and update files included.",
        unit="bytes",
    ),
    Panel(
        title="Processor",
        queries=[Query("rate(process_cpu_seconds_total[$__rate_interval])", "{{instance}}")],
        about="Cores in use by each process.",
    ),
)

_DISK = Panel(
    title="Disk left",
    queries=[Query("potluck:disk_free:ratio", "{{instance}}")],
    about="Share of the state directory's disk that is free; an alert comes below 10 %.",
    kind="bargauge",
    unit="percentunit",
    least=0,
    most=1,
)

FEDERATION = Dashboard(
    uid="potluck-federation",
    title="Potluck: Federation",
    about="Is it healthy, at a glance.",
    rows=(
        (
            "Now",
            (
                Panel(
                    title="Alerts",
                    queries=[Query('count(ALERTS{alertstate="firing"}) or vector(0)', "firing")],
                    about="Alerts that fire; docs/operations.md says what to do about each.",
                    kind="stat",
                    width=4,
                    height=4,
                    steps=[(1, "red")],
                ),
                Panel(
                    title="Runs under way",
                    queries=[Query("sum(potluck_runs_under_way)")],
                    about="Runs that are waiting or running.",
                    kind="stat",
                    width=4,
                    height=4,
                ),
                Panel(
                    title="Hosts",
                    queries=[Query("sum(potluck_hosts_attending)")],
                    about="Hosts that are connected.",
                    kind="stat",
                    width=4,
                    height=4,
                ),
                Panel(
                    title="Clients",
                    queries=[
                        Query("sum(potluck_clients_attending)", "attending"),
                        Query("sum(potluck_clients_quarantined)", "in quarantine"),
                    ],
                    about="Clients whose host is connected, and those that may not be selected.",
                    kind="stat",
                    width=4,
                    height=4,
                ),
                Panel(
                    title="Rounds",
                    queries=[
                        Query(f"potluck_run_committed_rounds{_RUN}", _NAMED),
                        Query(f"potluck_run_planned_rounds{_RUN}", f"{_NAMED} planned"),
                    ],
                    about="Rounds committed, and how many there are to be.",
                    kind="stat",
                    width=4,
                    height=4,
                ),
                Panel(
                    title="Model age",
                    queries=[Query(f"potluck:model_age_seconds{_RUN}", _NAMED)],
                    about="Since the newest commit of a run under way; alert after 15 min.",
                    kind="stat",
                    unit="s",
                    width=4,
                    height=4,
                    steps=[(300, "orange"), (900, "red")],
                ),
            ),
        ),
        (
            "Does the model get better?",
            (
                Panel(
                    title="Accuracy",
                    queries=[
                        Query(f"potluck_model_accuracy_ratio{_RUN}", _NAMED),
                        Query(
                            f"potluck_model_worst_group_accuracy_ratio{_RUN}",
                            f"{_NAMED} worst group",
                        ),
                        Query(f"potluck_model_weighted_f1_ratio{_RUN}", f"{_NAMED} weighted F1"),
                    ],
                    about="Of the newest evaluated model; worst group where a task has groups.",
                    unit="percentunit",
                    least=0,
                    most=1,
                    width=12,
                ),
                Panel(
                    title="Loss",
                    queries=[Query(f"potluck_model_loss{_RUN}", _NAMED)],
                    about="Mean loss of the evaluation.",
                    width=6,
                ),
                Panel(
                    title="Step",
                    queries=[Query(f"potluck_model_update_norm{_RUN}", _NAMED)],
                    about="How far each round moved the model (Euclidean length).",
                    width=6,
                ),
            ),
        ),
        (
            "Do rounds advance, and who takes part?",
            (
                Panel(
                    title="Rounds by outcome",
                    queries=[Query(_increase("potluck_rounds_total", "outcome"), "{{outcome}}")],
                    about="Attempts that ended; a missed quorum is tried again with others.",
                    stacked=True,
                ),
                Panel(
                    title="Attending",
                    queries=[
                        Query("sum(potluck_hosts_attending)", "hosts"),
                        Query("sum(potluck_clients_attending)", "clients"),
                    ],
                    about="Hosts and clients that are connected.",
                ),
                Panel(
                    title="What became of selected clients",
                    queries=[
                        Query(
                            _increase(
                                "potluck_cohort_members_total",
                                "outcome",
                                labels='{outcome!="selected"}',
                            ),
                            "{{outcome}}",
                        )
                    ],
                    about="Spared: the round had enough updates without them.",
                    stacked=True,
                ),
            ),
        ),
        (
            "What is wrong?",
            (
                Panel(
                    title="Calls refused",
                    queries=[
                        Query(
                            _increase("potluck_calls_refused_total", "reason"),
                            "{{reason}}",
                        )
                    ],
                    about="By reason. ROUND_CLOSED is what late updates are told.",
                ),
                Panel(
                    title="Clients that failed",
                    queries=[
                        Query(_increase("potluck_client_failures_total", "reason"), "{{reason}}")
                    ],
                    about="Members that could not deliver an update, by reason.",
                ),
                Panel(
                    title="Hosts that came and went",
                    queries=[
                        Query(_increase("potluck_hosts_joined_total"), "joined"),
                        Query(_increase("potluck_hosts_left_total"), "left"),
                    ],
                    about="Hosts that said hello, and those whose connection ended.",
                ),
                Panel(
                    title="Runs that ended or went on",
                    queries=[
                        Query(_increase("potluck_runs_ended_total", "outcome"), "{{outcome}}"),
                        Query(_increase("potluck_runs_resumed_total"), "resumed"),
                    ],
                    about="Resumed: after a restart of the coordinator, or by `potluck resume`.",
                ),
                _DISK,
                Panel(
                    title="Certificates",
                    queries=[Query("potluck:certificate_left_seconds", "{{instance}}")],
                    about="Time until each expires; an alert comes 14 days before.",
                    kind="bargauge",
                    unit="s",
                    least=0,
                ),
                Panel(
                    title="Scraped",
                    queries=[Query('up{job=~"potluck-.*"}', "{{instance}}")],
                    about="Whether Prometheus reaches each process: 1 if it does.",
                    least=0,
                    most=1,
                ),
                Panel(
                    title="Runs",
                    queries=[Query(f"potluck_run_info{_RUN}")],
                    about="What the runs are.",
                    kind="table",
                    width=16,
                ),
                Panel(
                    title="Versions",
                    queries=[Query("count by (version, party) (potluck_build_info)")],
                    about="Processes by version; hosts and coordinator should have the same.",
                    kind="table",
                ),
            ),
        ),
    ),
)

ROUND = Dashboard(
    uid="potluck-round",
    title="Potluck: Round",
    about="Where the time goes.",
    rows=(
        (
            "Time",
            (
                Panel(
                    title="A round's phases",
                    queries=[Query("potluck:round_phase_seconds:mean5m", "{{phase}}")],
                    about="Seconds per committed round, mean of 5 minutes. ask: profiles and what "
                    "the selector asks; broadcast: until the last member had the model; train: "
                    "until the last update began to arrive; collect: until it was verified.",
                    unit="s",
                    stacked=True,
                    width=12,
                    height=10,
                ),
                Panel(
                    title="Seconds per round",
                    queries=[
                        *_quantiles("potluck_round_seconds"),
                        Query("potluck:round_seconds:mean5m", "mean"),
                    ],
                    about="From selection to commit.",
                    unit="s",
                    width=6,
                    height=10,
                ),
                Panel(
                    title="Rounds per minute",
                    queries=[Query("60 * sum(potluck:rounds_committed:rate5m)", "committed")],
                    about="Rounds committed, mean of 5 minutes.",
                    width=6,
                    height=10,
                ),
                Panel(
                    title="Seconds per phase",
                    queries=[*_quantiles("potluck_round_phase_seconds", "phase")],
                    about="Median and 95 % of each phase.",
                    unit="s",
                    width=12,
                ),
                Panel(
                    title="Answered",
                    queries=[Query("potluck:cohort_answered:ratio5m", "answered")],
                    about="Share of the selected clients whose update came in time.",
                    unit="percentunit",
                    least=0,
                    most=1,
                    width=12,
                ),
            ),
        ),
        (
            "Files",
            (
                Panel(
                    title="Bytes per second",
                    queries=[
                        Query(
                            _rate("potluck_transfer_bytes_total", "direction", "encoding"),
                            "{{direction}} {{encoding}}",
                        ),
                        Query(
                            "sum by (direction) (potluck:transfer_bytes:rate5m)", "{{direction}}"
                        ),
                    ],
                    about="Models down and updates up, by encoding, and in all (mean of 5 min).",
                    unit="Bps",
                ),
                Panel(
                    title="Transfers in flight",
                    queries=[
                        Query("sum by (direction) (potluck_transfers_in_flight)", "{{direction}}")
                    ],
                    about="Files on their way, or waiting for their turn.",
                ),
                Panel(
                    title="Transfers that broke off",
                    queries=[
                        Query(
                            _increase(
                                "potluck_transfers_total",
                                "direction",
                                labels='{outcome="broken"}',
                            ),
                            "{{direction}} broken",
                        ),
                        Query(
                            _increase("potluck_transfers_resumed_total", "direction"),
                            "{{direction}} resumed",
                        ),
                        Query(
                            _increase("potluck_transfers_retried_total", "direction"),
                            "{{direction}} retried",
                        ),
                    ],
                    about="Attempts that ended early, went on where another broke off, and tried "
                    "a file again.",
                ),
                Panel(
                    title="Model and spool",
                    queries=[
                        Query("sum(potluck_spool_size_bytes)", "spool"),
                        Query(f"potluck_model_size_bytes{_RUN}", f"{_NAMED} model"),
                    ],
                    about="Updates waiting to be reduced, and the size of a model.",
                    unit="bytes",
                ),
                Panel(
                    title="Secure aggregation",
                    queries=[
                        *_quantiles("potluck_secure_aggregation_phase_seconds", "phase"),
                    ],
                    about="Seconds in its phases; without data where no run uses it.",
                    unit="s",
                ),
                Panel(
                    title="Drop-outs of secure aggregation",
                    queries=[
                        Query(
                            _increase("potluck_secure_aggregation_dropouts_total", "phase"),
                            "{{phase}}",
                        )
                    ],
                    about="By the phase that was not finished.",
                ),
            ),
        ),
        ("Coordinator", _PROCESS),
    ),
)

SELECTION = Dashboard(
    uid="potluck-selection",
    title="Potluck: Selection",
    about="Who trains, and why it is balanced.",
    rows=(
        (
            "What cohorts hold",
            (
                Panel(
                    title="Entropy of the cohort's labels",
                    queries=[Query(f"potluck_cohort_label_entropy_bits{_RUN}", _NAMED)],
                    about="In bits; the logarithm of the number of classes is the most. With "
                    "selectors that need label counts.",
                    least=0,
                ),
                Panel(
                    title="Distance to the target",
                    queries=[
                        Query(
                            f"potluck_cohort_target_distance_ratio{_RUN}",
                            f"{_NAMED} {{{{target}}}}",
                        )
                    ],
                    about="1 less the cosine to equal numbers of each class, and to the labels of "
                    "all clients. With selectors that need label counts.",
                    least=0,
                    most=1,
                ),
                Panel(
                    title="Heterogeneity of the federation",
                    queries=[
                        Query(
                            f"potluck_federation_heterogeneity_ratio{_RUN}",
                            f"{_NAMED} {{{{measure}}}}",
                        )
                    ],
                    about="Class imbalance, attribute imbalance, spurious correlation: of all "
                    "together (g…), and the mean of clients (c…). With selectors that need "
                    "triplets or interaction matrices.",
                    least=0,
                    most=1,
                ),
            ),
        ),
        (
            "Who is selected",
            (
                Panel(
                    title="Cohort",
                    queries=[Query(f"potluck_cohort_clients{_RUN}", _NAMED)],
                    about="Clients of the newest round's cohort.",
                    least=0,
                ),
                Panel(
                    title="Most selected",
                    queries=[Query(f"potluck_selection_largest_share_ratio{_RUN}", _NAMED)],
                    about="Share of the cohorts that the client selected most was in. "
                    "`potluck report` says who.",
                    unit="percentunit",
                    least=0,
                    most=1,
                ),
                Panel(
                    title="Never selected",
                    queries=[Query(f"potluck_selection_never_selected_clients{_RUN}", _NAMED)],
                    about="Clients of the roster that were in no cohort yet.",
                    least=0,
                ),
                Panel(
                    title="What became of them",
                    queries=[
                        Query(_increase("potluck_cohort_members_total", "outcome"), "{{outcome}}")
                    ],
                    about="Selected clients, and what became of them.",
                ),
                Panel(
                    title="In quarantine",
                    queries=[Query("sum(potluck_clients_quarantined)", "clients")],
                    about="Clients that may not be selected; `potluck clients` says why.",
                    least=0,
                ),
            ),
        ),
        (
            "What clients disclose",
            (
                Panel(
                    title="Profiles",
                    queries=[
                        Query(
                            _increase("potluck_profiles_total", "signal", "outcome"),
                            "{{signal}} {{outcome}}",
                        )
                    ],
                    about="Profiles that were asked for, and what came of it.",
                ),
                Panel(
                    title="Privacy spent",
                    queries=[Query(f"potluck_privacy_largest_epsilon{_RUN}", _NAMED)],
                    about="The largest sum of ε that a client spent on this run's profiles. With "
                    "selectors that need profiles.",
                    least=0,
                ),
                Panel(
                    title="Share of the budget",
                    queries=[Query("potluck:privacy_spent:ratio", "{{instance}}")],
                    about="The client of each host that has spent most of its privacy budget; an "
                    "alert comes above 80 %.",
                    kind="bargauge",
                    unit="percentunit",
                    least=0,
                    most=1,
                    steps=[(0.8, "orange"), (1, "red")],
                ),
            ),
        ),
    ),
)

HOSTS = Dashboard(
    uid="potluck-hosts",
    title="Potluck: Hosts",
    about="The machines that train.",
    by_run=False,
    rows=(
        (
            "Connection",
            (
                Panel(
                    title="Attending",
                    queries=[Query("potluck_host_attending", "{{instance}}")],
                    about="Whether each host is connected to its coordinator.",
                    least=0,
                    most=1,
                ),
                Panel(
                    title="Reconnects",
                    queries=[
                        Query(
                            "increase(potluck_host_reconnects_total[$__rate_interval])",
                            "{{instance}}",
                        )
                    ],
                    about="Times the control stream was opened again.",
                ),
                Panel(
                    title="Clients",
                    queries=[Query("potluck_host_clients", "{{instance}}")],
                    about="Clients each host answers for.",
                    kind="bargauge",
                    least=0,
                ),
            ),
        ),
        (
            "Training",
            (
                Panel(
                    title="Seconds per training",
                    queries=[*_quantiles("potluck_host_training_seconds", "instance")],
                    about="Without moving files.",
                    unit="s",
                ),
                Panel(
                    title="Speed",
                    queries=[Query("potluck_host_training_samples_per_second", "{{instance}}")],
                    about="Samples per second of the newest training, to one significant digit.",
                ),
                Panel(
                    title="Loss",
                    queries=[Query("potluck_host_training_loss", "{{instance}}")],
                    about="Mean over the last pass of the newest training.",
                ),
                Panel(
                    title="Instructions",
                    queries=[
                        Query(
                            "sum by (instance, stage) (potluck_host_instructions)",
                            "{{instance}} {{stage}}",
                        )
                    ],
                    about="Under way, by stage; queued ones wait for the device.",
                    stacked=True,
                ),
                Panel(
                    title="Work that ended",
                    queries=[
                        Query(
                            _increase("potluck_host_work_total", "work", "outcome"),
                            "{{work}} {{outcome}}",
                        )
                    ],
                    about="Dropped: nobody waited for it any more.",
                ),
                Panel(
                    title="Failures",
                    queries=[
                        Query(
                            _increase("potluck_host_failures_total", "instance", "reason"),
                            "{{instance}} {{reason}}",
                        )
                    ],
                    about="Instructions that failed, by reason; the host's log says more.",
                ),
            ),
        ),
        (
            "GPUs",
            (
                Panel(
                    title="Utilisation",
                    queries=[
                        Query("potluck_host_gpu_utilisation_ratio", "{{instance}} GPU {{gpu}}")
                    ],
                    about="Share of the time a GPU was busy. On hosts with an NVIDIA GPU and "
                    "nvidia-ml-py.",
                    unit="percentunit",
                    least=0,
                    most=1,
                    width=12,
                ),
                Panel(
                    title="GPU memory",
                    queries=[
                        Query("potluck_host_gpu_memory_used_bytes", "{{instance}} GPU {{gpu}}"),
                        Query(
                            "potluck_host_gpu_memory_size_bytes", "{{instance}} GPU {{gpu}} in all"
                        ),
                    ],
                    about="In use, by whomever, and in all.",
                    unit="bytes",
                    width=12,
                ),
            ),
        ),
        (
            "Files, disk, memory",
            (
                Panel(
                    title="Bytes per second",
                    queries=[
                        Query(
                            _rate("potluck_host_transfer_bytes_total", "instance", "direction"),
                            "{{instance}} {{direction}}",
                        )
                    ],
                    about="Models down, updates up.",
                    unit="Bps",
                ),
                Panel(
                    title="Transfers begun again",
                    queries=[
                        Query(
                            _increase(
                                "potluck_host_transfers_retried_total", "instance", "direction"
                            ),
                            "{{instance}} {{direction}}",
                        )
                    ],
                    about="A connection broke, or the coordinator had a passing trouble.",
                ),
                _DISK,
                *_PROCESS,
                Panel(
                    title="Disclosures",
                    queries=[
                        Query(
                            _increase("potluck_host_disclosures_total", "signal", "outcome"),
                            "{{signal}} {{outcome}}",
                        )
                    ],
                    about="Requests for a profile, and what clients did.",
                ),
            ),
        ),
    ),
)

DASHBOARDS = {
    "federation": FEDERATION,
    "round": ROUND,
    "selection": SELECTION,
    "hosts": HOSTS,
}


def dashboard_files() -> dict[str, str]:
    """The JSON of each dashboard, by file name."""
    return {
        f"{name}.json": json.dumps(dashboard_json(dashboard), indent=2, ensure_ascii=False) + "\n"
        for name, dashboard in DASHBOARDS.items()
    }


if __name__ == "__main__":
    for name, text in dashboard_files().items():
        (Path(sys.argv[1]) / name).write_text(text)
