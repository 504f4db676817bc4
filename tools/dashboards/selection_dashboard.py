"""Dashboard of the selected clients and of the balance of the selection."""

from __future__ import annotations

from dashboards.grafana_json import Dashboard, Panel, Query
from dashboards.panels import BY_RUN, OF_RUN, increase

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
                    queries=[Query(f"potluck_cohort_label_entropy_bits{OF_RUN}", BY_RUN)],
                    about="In bits; the logarithm of the number of classes is the most. With "
                    "selectors that need label counts.",
                    least=0,
                ),
                Panel(
                    title="Distance to the target",
                    queries=[
                        Query(
                            f"potluck_cohort_target_distance_ratio{OF_RUN}",
                            f"{BY_RUN} {{{{target}}}}",
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
                            f"potluck_federation_heterogeneity_ratio{OF_RUN}",
                            f"{BY_RUN} {{{{measure}}}}",
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
                    queries=[Query(f"potluck_cohort_clients{OF_RUN}", BY_RUN)],
                    about="Clients of the newest round's cohort.",
                    least=0,
                ),
                Panel(
                    title="Most selected",
                    queries=[Query(f"potluck_selection_largest_share_ratio{OF_RUN}", BY_RUN)],
                    about="Share of the cohorts that the client selected most was in. "
                    "`potluck report` says who.",
                    unit="percentunit",
                    least=0,
                    most=1,
                ),
                Panel(
                    title="Largest weight",
                    queries=[Query(f"potluck_cohort_largest_weight_ratio{OF_RUN}", BY_RUN)],
                    about="The largest share of one client in the newest round's samples, as they "
                    "count. Near 1, the model is that client's.",
                    unit="percentunit",
                    least=0,
                    most=1,
                ),
                Panel(
                    title="Never selected",
                    queries=[Query(f"potluck_selection_never_selected_clients{OF_RUN}", BY_RUN)],
                    about="Clients of the roster that were in no cohort yet.",
                    least=0,
                ),
                Panel(
                    title="What became of them",
                    queries=[
                        Query(increase("potluck_cohort_members_total", "outcome"), "{{outcome}}"),
                        Query(
                            increase("potluck_late_updates_total", "outcome"), "late, {{outcome}}"
                        ),
                    ],
                    about="Selected clients, and what became of them; of those awaited after their "
                    "round, whether their updates joined a later one.",
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
                            increase("potluck_profiles_total", "signal", "outcome"),
                            "{{signal}} {{outcome}}",
                        )
                    ],
                    about="Profiles that were asked for, and what came of it.",
                ),
                Panel(
                    title="Privacy spent",
                    queries=[Query(f"potluck_privacy_largest_epsilon{OF_RUN}", BY_RUN)],
                    about="The largest sum of ε that a client spent on this run's profiles. With "
                    "selectors that need profiles.",
                    least=0,
                ),
                Panel(
                    title="Privacy spent on updates",
                    queries=[
                        Query(f"potluck_privacy_trainings_largest_epsilon{OF_RUN}", BY_RUN),
                    ],
                    about="The largest ε that a client spent on its updates, as far as the "
                    "coordinator knows. With `[privacy]` in the run file.",
                    least=0,
                ),
                Panel(
                    title="Clients at their limit",
                    queries=[
                        Query(f"potluck_privacy_near_limit_clients{OF_RUN}", f"{BY_RUN} near"),
                        Query(f"potluck_privacy_refused_clients{OF_RUN}", f"{BY_RUN} refused"),
                    ],
                    about="Clients that have used 80 % of the trainings that the run's `epsilon` "
                    "is for, and clients that may train no more.",
                    least=0,
                ),
                Panel(
                    title="Share of the limit for trainings",
                    queries=[Query("potluck:trainings_privacy_spent:ratio", "{{instance}}")],
                    about="The client of each host that has spent most of what its owner allows "
                    "for trainings with noise; an alert comes above 80 %.",
                    kind="bargauge",
                    unit="percentunit",
                    least=0,
                    most=1,
                    steps=[(0.8, "orange"), (1, "red")],
                ),
                Panel(
                    title="Clients of hosts near their limit",
                    queries=[
                        Query("potluck_host_privacy_near_limit_clients", "{{instance}}"),
                    ],
                    about="Clients of each host that have spent 80 % of what their owner allows "
                    "for trainings with noise.",
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
