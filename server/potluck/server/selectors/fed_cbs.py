"""Fed-CBS: draws clients whose pooled labels are nearly balanced.

Zhang et al., "Fed-CBS: A Heterogeneity-Aware Client Sampling Mechanism for Federated Learning via
Class-Imbalance Reduction", ICML 2023. The measure of imbalance is the quadratic class-imbalance
degree (QCID).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field, NonNegativeFloat

from potluck.server.selection import (
    Floats,
    Population,
    RoundOutcome,
    Selection,
    SelectionContext,
    Selector,
    Signal,
)
from potluck.server.selectors.parts.choosing import Cohort, disclosed, profiles, weighted
from potluck.server.selectors.parts.parallel import Pass, passes
from potluck.server.selectors.parts.selection_counts import counted, no_selections, selections_of
from potluck.server.state import State

_LEAST = 1e-6
"""Minimum imbalance, as for labels that are even within 0.1 %; a smaller one would divide by 0."""


@dataclass(frozen=True, kw_only=True)
class FedCBS(Selector):
    """Draws one client after another; prefers those that even out the cohort's labels.

    QCID(S) = Σ_b (N_b / N − 1/B)² over the B classes; N_b: samples of class b of the clients in S;
    N = Σ_b N_b. Client c is the first with probability ∝ QCID({c})^−β₁ + λ √(3 ln t / (2 T_c)). t:
    number of the round. T_c: one more than the number of earlier selections of c. Given the clients
    S before, c is the m-th with probability ∝ QCID(S ∪ {c})^−β_m. exploration: λ. power: β_m /
    m.

    Clients without samples or without a profile come last, drawn uniformly. O(count · K · classes).
    """

    exploration: NonNegativeFloat = 10.0
    power: Annotated[float, Field(gt=0, le=10)] = 1.0

    needs_profiles = frozenset({Signal.LABEL_COUNTS})

    def init(self, population: Population) -> State:
        """Return a state in which no client was selected."""
        return State(arrays=no_selections(len(population)))

    def select(self, state: State, context: SelectionContext) -> Selection:
        """Return the cohort, in the order drawn."""
        generator = context.generator("fed-cbs")
        cohort = Cohort(context, generator)
        table = context.population.label_counts
        rows = disclosed(table, context.available)
        if table is not None and len(rows):
            counts = profiles(table, rows).clip(min=0.0)
            pool = Pool(counts)
            before = selections_of(state, len(context.population))[rows]
            bonus = self.exploration * np.sqrt(3 * np.log(context.round) / (2 * (1 + before)))
            with passes(len(rows)) as run:
                while cohort.missing:
                    found = pool.imbalances(run)
                    power = self.power * (1 + len(cohort.rows))
                    if cohort.rows:
                        chances = later_chances(found, power)
                    else:
                        chances = first_chances(found, power, bonus)
                    place = weighted(chances, generator)
                    if place is None:
                        break
                    reached = float(found[place])
                    cohort.add(int(rows[place]), f"imbalance of the labels becomes {reached:.4f}")
                    pool.take(place)
        cohort.draw(cohort.missing, "no label counts; drawn uniformly")
        return cohort.selection()

    def observe(self, state: State, outcome: RoundOutcome) -> State:
        """Count the selections of this round's cohort."""
        return State(arrays=counted(state, outcome))


def first_chances(imbalances: Floats, power: float, bonus: Floats) -> Floats:
    """Return the weight of each client for the first draw; 0 if its imbalance is infinite.

    bonus: exploration term added to each weight, ≥ 0.
    """
    found: Floats = np.maximum(imbalances, _LEAST) ** -power + bonus
    found[np.isinf(imbalances)] = 0.0
    return found


def later_chances(imbalances: Floats, power: float) -> Floats:
    """Return the weight of each client for a later draw, at most 1; 0 if its imbalance is
    infinite."""
    limited = np.maximum(imbalances, _LEAST)
    least = limited.min(initial=np.inf)
    if not np.isfinite(least):
        return np.zeros(len(limited))
    found: Floats = (least / limited) ** power  # keeps the largest weight at 1
    return found


class Pool:
    """Label counts (K × classes, ≥ 0) of clients, and their sum over the clients taken."""

    def __init__(self, counts: Floats) -> None:
        self._counts = counts
        self._squares = np.einsum("ij,ij->i", counts, counts)
        self._sizes = counts.sum(axis=1)
        self._closed = np.flatnonzero(self._sizes <= 0).tolist()
        self._sum = np.zeros(counts.shape[1])
        self._found = np.empty(len(counts))

    def take(self, place: int) -> None:
        """Add a client to the sum."""
        self._sum = self._sum + self._counts[place]
        self._closed.append(place)

    def imbalances(self, run: Pass) -> Floats:
        """Return the QCID of the sum with each client added; infinite for clients that are taken or
        have no samples.

        The next call overwrites the returned array.
        """
        size, square = float(self._sum.sum()), float(self._sum @ self._sum)
        even = 1 / self._counts.shape[1]

        def block(start: int, stop: int) -> None:
            # QCID = Σ_b (N_b / N)² − 1/B; with V a client's counts and C the sum, Σ_b N_b² = |V +
            # C|² = |V|² + 2 V·C + |C|²
            found = self._counts[start:stop] @ (2 * self._sum)
            found += self._squares[start:stop]
            found += square
            sizes = self._sizes[start:stop] + size
            found /= np.where(sizes > 0, sizes, 1.0) ** 2
            self._found[start:stop] = found - even

        run(block)
        self._found[self._closed] = np.inf
        return self._found
