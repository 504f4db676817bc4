"""Cohorts of complementary heterogeneity (FedDiverse Alg. 5 and 6)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from potluck.common.learning.heterogeneity import triplets as triplets_of
from potluck.server.selection import (
    Floats,
    Population,
    Rows,
    Selection,
    SelectionContext,
    Selector,
    Signal,
)
from potluck.server.selectors.parts.choosing import Cohort, disclosed, largest, profiles, weighted
from potluck.server.state import State

_COMPONENTS = ("ci", "ai", "sc")
_ROTATION = (2, 0, 1)
"""Alg. 6: round 1 starts from spurious correlation, 2 from class, 3 from attribute imbalance."""


@dataclass(kw_only=True)
class FedDiverse(Selector):
    """Combines clients whose classes and attributes complement one another.

    Draws a client by a component of its triplet, adds its complement, then a client with what both
    lack. rotation: when the component changes: each round (`round`, Alg. 6), or after every three
    clients (`triplet`, the paper's text). cross_product: the third client is the one furthest along
    the cross product of the first two, in either direction (`absolute`, which reproduces the
    paper's figures), or in the direction of the product only (`signed`, as printed). triplets:
    `estimated` by the clients, or `known`, computed from their interaction matrices.

    Clients without a triplet are chosen only if no other client is left. O(count · K).
    """

    rotation: Literal["round", "triplet"] = "round"
    cross_product: Literal["absolute", "signed"] = "absolute"
    triplets: Literal["estimated", "known"] = "estimated"

    def __post_init__(self) -> None:
        known = self.triplets == "known"
        self.needs_profiles = frozenset({Signal.INTERACTION_MATRIX if known else Signal.TRIPLET})

    def select(self, state: State, context: SelectionContext) -> Selection:
        """Return `count` clients, in groups of three complementary ones."""
        generator = context.generator("feddiverse")
        cohort = Cohort(context, generator)
        table = self._triplets(context.population)
        rows = disclosed(table, context.available)
        if table is not None and len(rows):
            self._add_threes(cohort, profiles(table, rows), rows, context, generator)
        cohort.draw(cohort.missing, "no triplet; drawn uniformly")
        return cohort.selection()

    def _triplets(self, population: Population) -> Floats | None:
        if self.triplets == "estimated":
            return population.triplets
        matrices = population.interaction_matrices
        if matrices is None:
            return None
        found = triplets_of(matrices)
        found[~matrices.any(axis=(1, 2))] = np.nan  # a client without samples has nothing to add
        return found

    def _add_threes(
        self,
        cohort: Cohort,
        triplets: Floats,
        rows: Rows,
        context: SelectionContext,
        generator: np.random.Generator,
    ) -> None:
        ids = context.population.ids
        candidates = _Candidates(triplets, generator)
        size = min(cohort.size, len(rows))
        for three, taken in enumerate(range(0, size, 3)):
            turn = context.round - 1 + (three if self.rotation == "triplet" else 0)
            component = _ROTATION[turn % 3]
            first = candidates.by_component(component)
            cohort.add(int(rows[first]), f"{_COMPONENTS[component]}-weighted")
            if taken + 1 == size:
                break
            second = candidates.complement(first)
            cohort.add(int(rows[second]), f"complement of {ids[rows[first]]}")
            if taken + 2 == size:
                break
            third = candidates.furthest(first, second, signed=self.cross_product == "signed")
            pair = f"{ids[rows[first]]} and {ids[rows[second]]}"
            cohort.add(int(rows[third]), f"has what {pair} lack")


class _Candidates:
    """Clients with triplets; each can be taken once. Positions are indices into the arrays given at
    creation."""

    def __init__(self, triplets: Floats, generator: np.random.Generator) -> None:
        self._weights = np.ascontiguousarray(triplets.T)
        self._directions = _directions(self._weights)
        self._taken: list[int] = []
        self._generator = generator

    def by_component(self, component: int) -> int:
        """Draw a client with probability ∝ this component of its triplet; uniformly if all are
        0."""
        position = weighted(self._weights[component], self._generator)
        if position is None:
            free = np.ones(self._weights.shape[1])
            free[self._taken] = 0.0
            position = weighted(free, self._generator)
        return self._take(-1 if position is None else position)

    def complement(self, first: int) -> int:
        """Take the client whose triplet has the smallest projection on the triplet of `first`."""
        return self._best(-(self._directions[:, first] @ self._directions))

    def furthest(self, first: int, second: int, *, signed: bool) -> int:
        """Take the client furthest along the normal of the plane of two other clients' triplets.

        signed: True to look in the direction of the cross product only.
        """
        normal = np.cross(self._directions[:, first], self._directions[:, second])
        scores = normal @ self._directions
        return self._best(scores if signed else np.abs(scores, out=scores))

    def _best(self, scores: Floats) -> int:
        scores[self._taken] = -np.inf
        return self._take(largest(scores, self._generator))

    def _take(self, position: int) -> int:
        self._taken.append(position)
        self._weights[:, position] = 0.0
        return position


def _directions(triplets: Floats) -> Floats:
    """Return triplets (3 × K) scaled to an L1 norm of 1; a zero triplet becomes (⅓, ⅓, ⅓)."""
    norms = triplets.sum(axis=0)
    result = np.full(triplets.shape, 1 / 3)
    np.divide(triplets, norms, out=result, where=norms > 0)
    return result
