"""Dashboard of the federation's health."""

from __future__ import annotations

from dashboards.grafana_json import Dashboard, Panel, Query
from dashboards.panels import BY_RUN, DISK, OF_RUN, increase

OF_SPREAD = '{run=~"$run",statistic=~"p50|p10|worst_tenth"}'

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
                    about="Alerts that fire. docs/operate/alerts.md explains each.",
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
                        Query(f"potluck_run_committed_rounds{OF_RUN}", BY_RUN),
                        Query(f"potluck_run_planned_rounds{OF_RUN}", f"{BY_RUN} planned"),
                    ],
                    about="Rounds committed, and how many there are to be.",
                    kind="stat",
                    width=4,
                    height=4,
                ),
                Panel(
                    title="Model age",
                    queries=[Query(f"potluck:model_age_seconds{OF_RUN}", BY_RUN)],
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
                        Query(f"potluck_model_accuracy_ratio{OF_RUN}", BY_RUN),
                        Query(
                            f"potluck_model_worst_group_accuracy_ratio{OF_RUN}",
                            f"{BY_RUN} worst group",
                        ),
                        Query(f"potluck_model_weighted_f1_ratio{OF_RUN}", f"{BY_RUN} weighted F1"),
                    ],
                    about="Of the newest evaluated model; worst group where a task has groups.",
                    unit="percentunit",
                    least=0,
                    most=1,
                    width=12,
                ),
                Panel(
                    title="Loss",
                    queries=[Query(f"potluck_model_loss{OF_RUN}", BY_RUN)],
                    about="Mean loss of the evaluation.",
                    width=6,
                ),
                Panel(
                    title="Step",
                    queries=[Query(f"potluck_model_update_norm{OF_RUN}", BY_RUN)],
                    about="How far each round moved the model (Euclidean length).",
                    width=6,
                ),
                Panel(
                    title="Measures",
                    queries=[Query(f"potluck_model_measure{OF_RUN}", f"{BY_RUN} {{{{measure}}}}")],
                    about="All that the task measures, as its trainer declares it; those of the "
                    "rounds' trainings begin with training_.",
                    width=10,
                ),
                Panel(
                    title="Clients behind measures",
                    queries=[
                        Query(
                            f"potluck_model_measure_clients{OF_RUN}",
                            f"{BY_RUN} {{{{measure}}}} {{{{state}}}}",
                        )
                    ],
                    about="Clients asked for each measure, and those that measured it. They differ "
                    "where evaluations failed or came late.",
                    width=10,
                ),
                Panel(
                    title="Samples behind measures",
                    queries=[
                        Query(f"potluck_model_measure_samples{OF_RUN}", f"{BY_RUN} {{{{measure}}}}")
                    ],
                    about="Samples behind each measure of the newest round that has it.",
                    width=10,
                ),
                Panel(
                    title="Partial measures",
                    queries=[
                        Query(f"sum by (run) (potluck_model_measure_partial{OF_RUN})", BY_RUN)
                    ],
                    about="Measures over fewer of the clients asked than evaluation.least_share.",
                    kind="stat",
                    width=4,
                ),
                Panel(
                    title="Measures over clients",
                    queries=[
                        Query(
                            f"potluck_model_measure_over_clients{OF_SPREAD}",
                            f"{BY_RUN} {{{{measure}}}} {{{{statistic}}}}",
                        )
                    ],
                    about="Where evaluation.spread is on: median, tenth percentile and mean of the "
                    "tenth of the clients for which a measure is worst; each client counts once.",
                    width=10,
                ),
                Panel(
                    title="Clients and samples that measure",
                    queries=[
                        Query(
                            f"max by (run) (potluck_model_measuring_{each}{OF_RUN})",
                            f"{BY_RUN} {each}",
                        )
                        for each in ("clients", "samples")
                    ],
                    about="Behind the measures over clients.",
                    kind="stat",
                    width=4,
                ),
            ),
        ),
        (
            "Do rounds advance, and who takes part?",
            (
                Panel(
                    title="Rounds by outcome",
                    queries=[Query(increase("potluck_rounds_total", "outcome"), "{{outcome}}")],
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
                            increase(
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
                            increase("potluck_calls_refused_total", "reason"),
                            "{{reason}}",
                        )
                    ],
                    about="By reason. Late updates get ROUND_CLOSED.",
                ),
                Panel(
                    title="Clients that failed",
                    queries=[
                        Query(increase("potluck_client_failures_total", "reason"), "{{reason}}")
                    ],
                    about="Members that could not deliver an update, by reason.",
                ),
                Panel(
                    title="Hosts that came and went",
                    queries=[
                        Query(increase("potluck_hosts_joined_total"), "joined"),
                        Query(increase("potluck_hosts_left_total"), "left"),
                    ],
                    about="Hosts that said hello, and those whose connection ended.",
                ),
                Panel(
                    title="Runs that ended or went on",
                    queries=[
                        Query(increase("potluck_runs_ended_total", "outcome"), "{{outcome}}"),
                        Query(increase("potluck_runs_resumed_total"), "resumed"),
                    ],
                    about="Resumed: after a restart of the coordinator, or by `potluck resume`.",
                ),
                DISK,
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
                    queries=[Query(f"potluck_run_info{OF_RUN}")],
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
