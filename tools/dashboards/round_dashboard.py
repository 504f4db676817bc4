"""Dashboard of how the time of a round is spent."""

from __future__ import annotations

from dashboards.grafana_json import Dashboard, Panel, Query
from dashboards.panels import BY_RUN, OF_RUN, PROCESS, increase, quantiles, rate

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
                        *quantiles("potluck_round_seconds"),
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
                    queries=[*quantiles("potluck_round_phase_seconds", "phase")],
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
                            rate("potluck_transfer_bytes_total", "direction", "encoding"),
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
                    about="Files being transferred or queued.",
                ),
                Panel(
                    title="Transfers that broke off",
                    queries=[
                        Query(
                            increase(
                                "potluck_transfers_total",
                                "direction",
                                labels='{outcome="broken"}',
                            ),
                            "{{direction}} broken",
                        ),
                        Query(
                            increase("potluck_transfers_resumed_total", "direction"),
                            "{{direction}} resumed",
                        ),
                        Query(
                            increase("potluck_transfers_retried_total", "direction"),
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
                        Query(f"potluck_model_size_bytes{OF_RUN}", f"{BY_RUN} model"),
                    ],
                    about="Updates waiting to be reduced, and the size of a model.",
                    unit="bytes",
                ),
                Panel(
                    title="Object store",
                    queries=[
                        Query("min(potluck_object_store_up)", "answers"),
                        Query(
                            increase("potluck_object_store_failures_total", "job"),
                            "requests that failed",
                        ),
                    ],
                    about="Whether the store that files go through answers, and how often it "
                    "failed; without data where there is none.",
                ),
                Panel(
                    title="Sinks",
                    queries=[
                        Query("min(potluck_sink_up) by (sink)", "{{sink}} records"),
                        Query("max(potluck_sink_behind_rounds) by (sink)", "{{sink}} lacks"),
                    ],
                    about="Whether each sink records, and rounds that it lacks; without data "
                    "where there are none.",
                ),
                Panel(
                    title="Bytes per second of the object store",
                    queries=[
                        Query(
                            rate("potluck_object_store_bytes_total", "direction"), "{{direction}}"
                        ),
                    ],
                    about="Models that the coordinator put there, updates that it fetched.",
                    unit="Bps",
                ),
                Panel(
                    title="Sums at the host",
                    queries=[
                        Query(increase("potluck_sums_received_total", "job"), "sums"),
                        Query(increase("potluck_summed_updates_total", "job"), "updates in them"),
                    ],
                    about="Sums of updates that came, and how many updates they held; without data "
                    "where no run uses them.",
                ),
                Panel(
                    title="Secure aggregation",
                    queries=[
                        *quantiles("potluck_secure_aggregation_phase_seconds", "phase"),
                    ],
                    about="Seconds in its phases; without data where no run uses it.",
                    unit="s",
                ),
                Panel(
                    title="Drop-outs of secure aggregation",
                    queries=[
                        Query(
                            increase("potluck_secure_aggregation_dropouts_total", "phase"),
                            "{{phase}}",
                        )
                    ],
                    about="By the phase that was not finished.",
                ),
            ),
        ),
        ("Coordinator", PROCESS),
    ),
)
