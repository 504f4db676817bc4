"""Functions that the `dc` selectors share: uniform start, targets and distances."""

from __future__ import annotations

import numpy as np

from potluck.server.selection import Floats, Population, Rows, SelectionContext
from potluck.server.selectors.parts.choosing import Cohort, disclosed, profiles, with_labels


def begin(context: SelectionContext, added: int) -> tuple[Cohort, np.random.Generator]:
    """Start a cohort: draw all but `added` of its clients uniformly, at least one.

    All `dc` selectors start like this. With the same seed they start with the same clients, so that
    their cohorts can be compared.
    """
    generator = context.generator("dc")
    cohort = Cohort(context, generator)
    cohort.draw(max(cohort.size - added, 1), "drawn uniformly")
    return cohort, generator


def balanced(population: Population) -> Floats:
    """Return a target with the same number of samples of each class."""
    return np.ones(population.classes)


def federation_total(population: Population) -> Floats:
    """Return the sum of all clients' label counts: the secure sum if the run has one, else computed
    here."""
    if population.label_totals is not None:
        return population.label_totals.clip(min=0.0)
    if population.label_counts is None:
        return np.zeros(population.classes)
    total: Floats = np.nansum(population.label_counts.clip(min=0.0), axis=0)
    return total


def candidates(context: SelectionContext, cohort: Cohort) -> tuple[Rows, Floats, Floats]:
    """Return the rows with label counts that are not chosen yet, their counts, and the summed
    counts of the chosen rows."""
    table = context.population.label_counts
    if table is None:
        return context.available[:0], np.zeros((0, 1)), np.zeros(1)
    chosen = disclosed(table, np.array(cohort.rows, dtype=np.int64))
    rows = with_labels(table, context.available)
    rows = rows[~np.isin(rows, chosen)]
    return rows, profiles(table, rows).clip(min=0.0), table[chosen].clip(min=0.0).sum(axis=0)


def distance(counts: Floats, target: Floats) -> float:
    """Return the cosine distance (1 − cosine) between two label distributions; 1 if one of them has
    no samples."""
    norms = float(np.linalg.norm(counts) * np.linalg.norm(target))
    return 1.0 - float(counts @ target) / norms if norms > 0 else 1.0
