"""The report of a run's selections: cohorts as planned, and as realised in the model.

A selector chooses a cohort for its combined data. A lost client changes this combination. So each
round is measured twice: as planned and as realised. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from potluck.common.errors import RunError
from potluck.common.learning.measures import MeasuredModel
from potluck.common.learning.spread import Coverage, Spread
from potluck.common.records.privacy_loss import RoundPrivacy
from potluck.common.records.round import INCLUDED, Round
from potluck.common.trainer import Measure
from potluck.deploy.operator.json_view import other_measures, spread_values
from potluck.deploy.view.readable import natural_order
from potluck.deploy.view.selection_plots import HETEROGENEITIES, dominant_heterogeneity
from potluck.rpc.v1 import operator_pb2
from potluck.server.live.cohort_labels import cohort_labels
from potluck.server.selection import Population, Rows

Floats = NDArray[np.float64]
_ACCURACIES = {f"{model}accuracy": model.rstrip("_") for model in MeasuredModel}
"""The measured model by the accuracy's name; empty for the round's own model."""


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """A run's committed rounds.

    planned: clients that the selector chose. realised: clients that were included. Both are given
    by round, as rows of the population. accuracies: shares in [0, 1], by name and round. measures:
    metrics of a task with its own trainer, by name and round. spreads: distributions of metrics
    over clients, by round and name; only rounds that have them. coverage: clients and samples
    behind metrics, by round and name. privacy: privacy loss of the updates, by round; only in runs
    with `[privacy]`.
    """

    population: Population
    planned: Mapping[int, Rows]
    realised: Mapping[int, Rows]
    accuracies: Mapping[str, Mapping[int, float]]
    measures: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    spreads: Mapping[int, Mapping[str, Spread]] = field(default_factory=dict)
    coverage: Mapping[int, Mapping[str, Coverage]] = field(default_factory=dict)
    privacy: Mapping[int, RoundPrivacy] = field(default_factory=dict)


def run_report(
    rounds: Sequence[Round],
    classes: int,
    clients: Sequence[operator_pb2.ClientProfile],
) -> RunReport:
    """Return the report of a run, from its rounds and its clients' disclosures.

    Raises RunError if no round is committed.
    """
    if not rounds:
        raise RunError("the run has no committed round yet, so there is nothing to report")
    population = _population(classes, sorted(clients, key=lambda c: natural_order(c.client_id)))
    row_of = {client: row for row, client in enumerate(population.ids)}
    planned: dict[int, Rows] = {}
    realised: dict[int, Rows] = {}
    accuracies: dict[str, dict[int, float]] = {}
    measures: dict[str, dict[int, float]] = {}
    spreads: dict[int, Mapping[str, Spread]] = {}
    for one in rounds:
        rows = [row_of[client] for client in one.cohort]
        included = [each.state == INCLUDED for each in one.members]
        planned[one.number] = np.array(rows, dtype=np.int64)
        realised[one.number] = planned[one.number][np.array(included, dtype=bool)]
        for name, key in (("mean", "accuracy"), ("worst group", "worst_group_accuracy")):
            if key in one.measures:
                accuracies.setdefault(name, {})[one.number] = one.measures[key]
        for line, value in _accuracies_of_clients(one).items():
            accuracies.setdefault(line, {})[one.number] = value
        for name, value in other_measures(one).items():
            if name not in _ACCURACIES:
                measures.setdefault(name, {})[one.number] = value
        if one.spreads:
            spreads[one.number] = one.spreads
    return RunReport(
        population=population,
        planned=planned,
        realised=realised,
        accuracies=accuracies,
        measures=measures,
        spreads=spreads,
        coverage={one.number: one.coverage for one in rounds if one.coverage},
        privacy={one.number: one.privacy for one in rounds if one.privacy is not None},
    )


def _accuracies_of_clients(one: Round) -> dict[str, float]:
    """Return accuracies by their names in the plot.

    Among them are accuracies of models that clients derive from the run's model, and of the worst
    tenth of clients.
    """
    found = {}
    for name, model in _ACCURACIES.items():
        if model and name in one.measures:
            found[f"{model} mean"] = one.measures[name]
        if name in one.spreads:
            found[f"{model} worst tenth".strip()] = one.spreads[name].worst_tenth
    return found


def titled_measures(
    found: RunReport, shown: Mapping[str, Measure]
) -> dict[str, Mapping[int, float]]:
    """Return the metrics of a task's own trainer: values by round, by readable title.

    The most important metric is first.
    """
    titled: dict[str, Mapping[int, float]] = {}
    for name, measure in shown.items():
        if name not in found.measures:
            continue
        unit = f" in {measure.unit}" if measure.unit else ""
        better = "higher" if measure.higher_is_better else "lower"
        titled[f"{measure.label}{unit}, {better} is better"] = found.measures[name]
        worst = {
            number: spreads[name].worst_tenth
            for number, spreads in found.spreads.items()
            if name in spreads
        }
        if worst:
            titled[f"{measure.label}{unit} of the worst tenth of clients"] = worst
    return titled


def report_values(report: RunReport) -> list[dict[str, Any]]:
    """Return one record per round that compares the planned and the realised cohort.

    For each cohort, a record has the number of clients. If label counts are known, it has the
    entropy of the cohort's labels in bits, and their distances to equal counts and to the
    federation's labels. If triplets are known, it has the number of clients of each type.
    """
    sides = [
        (name, cohorts, _measured(report.population, cohorts))
        for name, cohorts in (("planned", report.planned), ("realised", report.realised))
    ]
    return [
        {"round": number}
        | {
            name: {"clients": len(cohorts[number])} | measured[index]
            for name, cohorts, measured in sides
        }
        | _spreads(report.spreads.get(number, {}))
        | _coverage(report.coverage.get(number, {}))
        | ({"privacy": vars(report.privacy[number])} if number in report.privacy else {})
        for index, number in enumerate(report.planned)
    ]


def _spreads(spreads: Mapping[str, Spread]) -> dict[str, Any]:
    """Return the spreads of metrics over clients under one key; empty if there are none."""
    values = {name: spread_values(spread) for name, spread in sorted(spreads.items())}
    return {"spreads": values} if values else {}


def _coverage(coverage: Mapping[str, Coverage]) -> dict[str, Any]:
    """Return the clients and samples behind metrics under one key; empty if they are unknown."""
    return {"coverage": {n: vars(each) for n, each in coverage.items()}} if coverage else {}


def _measured(population: Population, cohorts: Mapping[int, Rows]) -> list[dict[str, Any]]:
    measured: list[dict[str, Any]] = [{} for _ in cohorts]
    if population.label_counts is not None:
        labels = cohort_labels(population.label_counts, cohorts)
        for index, values in enumerate(measured):
            values["entropy"] = float(labels.entropy[index])
            values["to_balanced"] = float(labels.to_balanced[index])
            values["to_federation"] = float(labels.to_federation[index])
    if population.triplets is not None or population.interaction_matrices is not None:
        groups = dominant_heterogeneity(population)
        for values, rows in zip(measured, cohorts.values(), strict=True):
            counts = np.bincount(groups[rows], minlength=len(HETEROGENEITIES)).tolist()
            values["types"] = dict(zip(HETEROGENEITIES, counts, strict=True))
    return measured


def _population(classes: int, clients: Sequence[operator_pb2.ClientProfile]) -> Population:
    def column(entries: Sequence[Sequence[float]], shape: tuple[int, ...]) -> Floats | None:
        if not any(entries):
            return None
        found = np.full((len(clients), *shape), np.nan)
        for row, values in enumerate(entries):
            if values:
                found[row] = np.reshape(values, shape)
        return found

    return Population(
        ids=[client.client_id for client in clients],
        classes=classes,
        samples=np.array([client.samples for client in clients], dtype=np.int64),
        label_counts=column([list(each.label_counts) for each in clients], (classes,)),
        triplets=column([list(each.triplet) for each in clients], (3,)),
        interaction_matrices=column(
            [list(each.interaction_matrix) for each in clients], (classes, 2)
        ),
    )
