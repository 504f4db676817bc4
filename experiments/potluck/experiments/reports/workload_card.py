"""A workload's card: clients, sizes, label mixes, heterogeneity, and what there is to learn."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from potluck.common.learning.task_loading import make_task
from potluck.common.names import ClientId
from potluck.common.task import Task
from potluck.experiments.data_sets.prepare import data_sets_of, stored_sha256
from potluck.experiments.reports.partition_description import Description, describe_task
from potluck.experiments.tasks.natural import NamedClients

_LISTED: Final = 10
"""Maximum number of clients for a table with one row per client."""

_PACKAGED: Final = {
    "heart": ("potluck.experiments.tasks.heart_data", ".data"),
    "digits": ("potluck.common.tasks", "digits.csv.gz"),
    "colored-digits": ("potluck.common.tasks", "digits.csv.gz"),
}
"""Package and last characters of the files' names, for tasks whose data come with Potluck."""

Range = tuple[float, float, float]
"""Minimum, median and maximum of a number over the clients."""


@dataclass(frozen=True, kw_only=True)
class WorkloadCard:
    """Facts about a task's partition and about the model.

    description: each client's counts and the six metrics. names: the clients' names in the data.
    samples: number of training samples per client. held_classes: number of classes of a client's
    samples. distances: total variation distance in [0, 1] between a client's label mix and that of
    all samples. inputs: shape of one sample. parameters: number of the model's parameters.
    majority: share of training samples with the most frequent label of all; own_majority: mean over
    clients of the share with the client's own most frequent label. data_sha256: digest of the data
    set, as in the results of the benchmark; for data that come with Potluck, that of the names and
    digests of their files; None if unknown.
    """

    description: Description
    options: Mapping[str, Any]
    names: tuple[str, ...]
    samples: Range
    held_classes: Range
    distances: Range
    inputs: tuple[int, ...]
    parameters: int
    majority: float
    own_majority: float
    data_sha256: str | None


def workload_card(name: str, options: Mapping[str, Any], data: Path | None) -> WorkloadCard:
    """Load all clients' samples of a task and return its card. Raises as `describe_task` does."""
    description = describe_task(name, options, data)
    task = make_task(name, options)
    counts = np.array([client.label_counts for client in description.clients], dtype=np.float64)
    mixes = counts / counts.sum(axis=1, keepdims=True)
    together = counts.sum(axis=0) / counts.sum()
    first = task.client_data(ClientId("client-0"), data).train
    ids = tuple(client.id for client in description.clients)
    return WorkloadCard(
        description=description,
        options=dict(options),
        names=task.client_names(data) if isinstance(task, NamedClients) else ids,
        samples=_range(counts.sum(axis=1)),
        held_classes=_range((counts > 0).sum(axis=1)),
        distances=_range(np.abs(mixes - together).sum(axis=1) / 2),
        inputs=tuple(first.subset(_one(first)).inputs.shape[1:]),
        parameters=sum(parameter.numel() for parameter in task.model().parameters()),
        majority=float(together.max()),
        own_majority=float(mixes.max(axis=1).mean()),
        data_sha256=_data_sha256(name, task, data),
    )


def _data_sha256(name: str, task: Task, data: Path | None) -> str | None:
    """Return the digest of the task's data set or of its files in the package; None if unknown."""
    read = data_sets_of(task)
    if read:
        return stored_sha256(read[0], data)
    package, pattern = _PACKAGED.get(name, ("", ""))
    if not package:
        return None
    files = [each for each in resources.files(package).iterdir() if each.name.endswith(pattern)]
    sums = {each.name: hashlib.sha256(each.read_bytes()).hexdigest() for each in files}
    return hashlib.sha256(
        "".join(f"{file} {sums[file]}\n" for file in sorted(sums)).encode()
    ).hexdigest()


def _one(examples: Any) -> Any:
    return examples.labels.new_zeros(1)


def _range(values: NDArray[Any]) -> Range:
    return float(values.min()), float(np.median(values)), float(values.max())


def card_markdown(card: WorkloadCard, *, heading: str = "##") -> str:
    """Return the card as Markdown, ending with a line end. heading: Markdown marks of its title."""
    about, metrics = card.description, card.description.metrics
    total = sum(client.samples for client in about.clients)
    rows = [
        ("clients", f"{len(about.clients)}"),
        ("training samples", f"{total:,}; per client {_shown(card.samples, '{:,.0f}')}"),
        ("classes held by a client", f"{_shown(card.held_classes, '{:.0f}')} of {about.classes}"),
        ("distance of label mixes", _shown(card.distances, "{:.2f}")),
        ("GCI, GAI, GSC", ", ".join(map(_metric, (metrics.gci, metrics.gai, metrics.gsc)))),
        ("CCI, CAI, CSC", ", ".join(map(_metric, (metrics.cci, metrics.cai, metrics.csc)))),
        ("to learn", f"{about.classes} classes from {' × '.join(map(str, card.inputs))} numbers"),
        ("model", f"{card.parameters:,} parameters"),
        ("accuracy of one label for all", f"{card.majority:.3f}"),
        ("accuracy of one label per client", f"{card.own_majority:.3f}"),
        (
            "to know all label mixes",
            f"{len(about.clients) * about.classes:,} counts, {about.classes} per client",
        ),
    ]
    if card.data_sha256 is not None:
        rows.append(("SHA-256 of the data", f"`{card.data_sha256}`"))
    lines = [
        card_title(about.task, card.options, heading=heading),
        "",
        "| | |",
        "|---|---|",
    ]
    lines += [f"| {name} | {value} |" for name, value in rows]
    if len(about.clients) <= _LISTED:
        lines += ["", "| client | samples | labels | CI |", "|---|---:|---|---:|"]
        lines += [
            f"| {name} | {client.samples:,} | {' · '.join(map(str, client.label_counts))} | "
            f"{_metric(client.triplet[0])} |"
            for name, client in zip(card.names, about.clients, strict=True)
        ]
    return "\n".join(lines) + "\n"


def card_title(task: str, options: Mapping[str, Any], *, heading: str = "##") -> str:
    """Return the first line of a card. heading: Markdown marks of the title."""
    return ", ".join(
        [f"{heading} {task}", *(f"`{key} = {_value(value)}`" for key, value in options.items())]
    )


def _shown(values: Range, form: str) -> str:
    least, median, most = (form.format(value) for value in values)
    return f"{least} to {most}, median {median}"


def _metric(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _value(value: object) -> str:
    """Return a value as in TOML."""
    return json.dumps(value, ensure_ascii=False)
