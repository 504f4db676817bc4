"""Dashboard of the hosts and relays."""

from __future__ import annotations

from dashboards.grafana_json import Dashboard, Panel, Query
from dashboards.panels import DISK, PROCESS, increase, quantiles, rate

HOSTS = Dashboard(
    uid="potluck-hosts",
    title="Potluck: Hosts",
    about="The machines that train, and the relays before them.",
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
                    queries=[*quantiles("potluck_host_training_seconds", "instance")],
                    about="Without moving files.",
                    unit="s",
                ),
                Panel(
                    title="Trainings",
                    queries=[
                        Query(
                            increase("potluck_host_trainings_total", "instance", "way"),
                            "{{instance}} {{way}}",
                        )
                    ],
                    about="Of clients: batched with others, or alone; the host's log says why.",
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
                            increase("potluck_host_work_total", "work", "outcome"),
                            "{{work}} {{outcome}}",
                        )
                    ],
                    about="Dropped: no longer awaited.",
                ),
                Panel(
                    title="Failures",
                    queries=[
                        Query(
                            increase("potluck_host_failures_total", "instance", "reason"),
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
                            rate("potluck_host_transfer_bytes_total", "instance", "direction"),
                            "{{instance}} {{direction}}",
                        ),
                        Query(
                            rate("potluck_host_object_store_bytes_total", "instance", "direction"),
                            "{{instance}} {{direction}}, by an object store",
                        ),
                    ],
                    about="Models down, updates up; and those of them that an object store moved.",
                    unit="Bps",
                ),
                Panel(
                    title="Transfers begun again",
                    queries=[
                        Query(
                            increase(
                                "potluck_host_transfers_retried_total", "instance", "direction"
                            ),
                            "{{instance}} {{direction}}",
                        )
                    ],
                    about="A connection broke, or the coordinator had a passing trouble.",
                ),
                DISK,
                *PROCESS,
                Panel(
                    title="Disclosures",
                    queries=[
                        Query(
                            increase("potluck_host_disclosures_total", "signal", "outcome"),
                            "{{signal}} {{outcome}}",
                        )
                    ],
                    about="Requests for a profile, and what clients did.",
                ),
            ),
        ),
        (
            "Relays",
            (
                Panel(
                    title="Relays connected",
                    queries=[Query("potluck_relay_connected", "{{instance}}")],
                    about="Whether each relay is connected to the coordinator.",
                    least=0,
                    most=1,
                ),
                Panel(
                    title="Behind relays",
                    queries=[
                        Query("potluck_relay_hosts_attending", "{{instance}} hosts"),
                        Query("potluck_relay_clients_attending", "{{instance}} clients"),
                    ],
                    about="Hosts and clients that attend through each relay.",
                ),
                Panel(
                    title="Bytes per second through relays",
                    queries=[
                        Query(
                            rate(
                                "potluck_relay_transfer_bytes_total", "instance", "leg", "direction"
                            ),
                            "{{instance}} {{leg}} {{direction}}",
                        )
                    ],
                    about="On both legs: less of the coordinator's than of the hosts' is what a "
                    "relay saves.",
                    unit="Bps",
                ),
                Panel(
                    title="Files lent",
                    queries=[
                        Query(increase("potluck_relay_downloads_total", "source"), "{{source}}")
                    ],
                    about="Files that hosts fetched of a relay, by where it had them from.",
                ),
                Panel(
                    title="Updates held",
                    queries=[
                        Query("potluck_relay_updates_held", "{{instance}}"),
                        Query(increase("potluck_relay_deliveries_total", "outcome"), "{{outcome}}"),
                    ],
                    about="Waiting for the coordinator, and what became of those before them.",
                ),
                Panel(
                    title="Relays in trouble",
                    queries=[
                        Query(
                            increase("potluck_relay_transfers_retried_total", "direction"),
                            "begun again {{direction}}",
                        ),
                        Query(
                            increase("potluck_relay_calls_refused_total", "reason"),
                            "refused {{reason}}",
                        ),
                    ],
                    about="Transfers begun again, and calls of hosts that were refused.",
                ),
            ),
        ),
    ),
)
