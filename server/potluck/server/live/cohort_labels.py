"""Metrics of a cohort's labels, from the label counts that its clients disclosed. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from potluck.common.learning.heterogeneity import entropy, federated_heterogeneity
from potluck.common.monitoring.metric_labels import HETEROGENEITIES
from potluck.server.selection import Population, Rows

Floats = NDArray[np.float64]

LEAST_CLIENTS = 5
"""Minimum number of clients in a mean of triplets. A mean over fewer would reveal too much about
each client."""


@dataclass(frozen=True, kw_only=True)
class CohortLabels:
    """Metrics of each cohort's summed labels, one value per cohort; NaN if none of its clients
    disclosed labels.

    entropy: in bits. to_balanced: cosine distance (1 − cosine) to equal numbers of each class.
    to_federation: cosine distance to the sum of all clients' labels.
    """

    entropy: Floats
    to_balanced: Floats
    to_federation: Floats


def cohort_labels(label_counts: Floats, cohorts: Mapping[int, Rows]) -> CohortLabels:
    """Return the metrics of each cohort. label_counts: K × classes; rows of NaN are ignored."""
    known = np.nan_to_num(label_counts).clip(min=0.0)
    sums = np.array([known[rows].sum(axis=0) for rows in cohorts.values()])
    sums[sums.sum(axis=1) == 0] = np.nan
    return CohortLabels(
        entropy=np.where(np.isnan(sums[:, 0]), np.nan, entropy(np.nan_to_num(sums)) / np.log(2)),
        to_balanced=_distances(sums, np.ones(known.shape[1])),
        to_federation=_distances(sums, known.sum(axis=0)),
    )


def _distances(sums: Floats, target: Floats) -> Floats:
    norms = np.linalg.norm(sums, axis=1) * np.linalg.norm(target)
    result: Floats = 1 - (sums @ target) / np.where(norms > 0, norms, np.nan)
    return result


def heterogeneity(population: Population) -> dict[str, float]:
    """Return the measures of the federation's heterogeneity, each in [0, 1], by name.

    All six of `HETEROGENEITIES` are computed if clients have disclosed interaction matrices. If
    they have disclosed triplets instead, their means over clients are returned. Empty if fewer than
    `LEAST_CLIENTS` clients have disclosed theirs.
    """
    matrices, triplets = population.interaction_matrices, population.triplets
    if matrices is not None:
        known = matrices[~np.isnan(matrices).any(axis=(1, 2))].clip(min=0.0)
        if len(known) >= LEAST_CLIENTS:
            found = federated_heterogeneity(known)
            return {name: getattr(found, name) for name in HETEROGENEITIES}
    elif triplets is not None:
        known = triplets[~np.isnan(triplets).any(axis=1)]
        if len(known) >= LEAST_CLIENTS:
            means: list[float] = known.mean(axis=0).tolist()
            return dict(zip(("cci", "cai", "csc"), means, strict=True))
    return {}
