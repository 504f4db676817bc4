"""Heterogeneity of a task's partition: each client's counts, and six metrics over all clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from potluck.common.errors import ConfigurationError
from potluck.common.learning.heterogeneity import federated_heterogeneity, triplet
from potluck.common.learning.sample_counts import interaction_matrix, label_counts
from potluck.common.names import ClientId
from potluck.common.settings import plugins
from potluck.common.task import Examples, Task

Share = float | None


@dataclass(frozen=True, kw_only=True)
class ClientDescription:
    """A client's training samples.

    interaction_matrix: None if the task has no attributes. triplet: (CI, AI, SC); AI and SC are
    None if the task has no attributes.
    """

    id: str
    samples: int
    label_counts: list[int]
    interaction_matrix: list[list[int]] | None
    triplet: tuple[Share, Share, Share]


@dataclass(frozen=True, kw_only=True)
class PartitionMetrics:
    """See `FederatedHeterogeneity`; metrics of attributes are None if the task has none."""

    gci: float
    gai: Share
    gsc: Share
    cci: float
    cai: Share
    csc: Share


@dataclass(frozen=True, kw_only=True)
class Description:
    """Description of how a task's samples are split over clients."""

    task: str
    classes: int
    metrics: PartitionMetrics
    clients: list[ClientDescription]


def describe_task(
    name: str, options: Mapping[str, Any], data_directory: Path | None
) -> Description:
    """Load all clients' samples of a task and count them.

    Raises PluginError for an unknown task or option, ConfigurationError if the task does not
    declare its number of clients, and the errors of the task.
    """
    task = plugins.create(Task, name, options)
    if not task.clients:
        raise ConfigurationError(
            f"task {name} does not declare its number of clients: it needs an attribute `clients`, "
            "and data for client-0, client-1 …",
            task=name,
        )
    names = [ClientId(f"client-{part}") for part in range(task.clients)]
    with_attributes = task.groups == 2 * task.classes and all(
        _has_attributes(task.client_data(name, data_directory).train) for name in names
    )
    clients = [
        _describe(task, name, data_directory, with_attributes=with_attributes) for name in names
    ]
    return Description(
        task=name,
        classes=task.classes,
        metrics=_metrics(clients, with_attributes=with_attributes),
        clients=clients,
    )


def _has_attributes(examples: Examples) -> bool:
    """Return True if groups are class × 2 + attribute; groups may also be hospitals."""
    return examples.groups is not None and bool((examples.groups // 2 == examples.labels).all())


def _describe(
    task: Task, client: ClientId, data_directory: Path | None, *, with_attributes: bool
) -> ClientDescription:
    examples = task.client_data(client, data_directory).train
    counts = label_counts(examples, task.classes)
    matrix = None
    if with_attributes:
        matrix = interaction_matrix(examples, task.classes, task.groups)
    ci, ai, sc = triplet(matrix or _one_attribute(counts))
    return ClientDescription(
        id=client,
        samples=len(examples),
        label_counts=counts,
        interaction_matrix=matrix,
        triplet=(ci, ai, sc) if matrix else (ci, None, None),
    )


def _metrics(clients: Sequence[ClientDescription], *, with_attributes: bool) -> PartitionMetrics:
    matrices = [
        client.interaction_matrix or _one_attribute(client.label_counts) for client in clients
    ]
    found = federated_heterogeneity(np.array(matrices))
    if with_attributes:
        return PartitionMetrics(
            gci=found.gci, gai=found.gai, gsc=found.gsc, cci=found.cci, cai=found.cai, csc=found.csc
        )
    return PartitionMetrics(gci=found.gci, gai=None, gsc=None, cci=found.cci, cai=None, csc=None)


def _one_attribute(counts: Sequence[int]) -> list[list[int]]:
    return [[count, 0] for count in counts]
