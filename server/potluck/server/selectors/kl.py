"""A selector that adds clients with samples of the scarcest class (Seol & Kim 2023, Alg. 2)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from pydantic import NonNegativeFloat

from potluck.server.selection import Floats, Rows, Selection, SelectionContext, Selector, Signal
from potluck.server.selectors.parts.choosing import Cohort, profiles, with_labels
from potluck.server.state import State


@dataclass(frozen=True, kw_only=True)
class KullbackLeibler(Selector):
    """Adds clients, largest first, that have samples of the cohort's rarest class.

    Deterministic except for the uniform draws: the same available clients give the same cohort
    every round. Clients of equal size stay in row order. If several classes are equally scarce, the
    first is used.

    theta: Kullback–Leibler divergence from uniform, in nats, below which the method stops; the rest
    of the cohort is drawn uniformly. truncate: True if clients must not train on more samples of a
    class than the method counts (`Selection.quotas`).

    O(K · (log K + classes)).
    """

    theta: NonNegativeFloat = 0.01
    truncate: bool = False

    needs_profiles = frozenset({Signal.LABEL_COUNTS})

    def __post_init__(self) -> None:
        object.__setattr__(self, "sets_quotas", self.truncate)  # the dataclass is frozen

    def select(self, state: State, context: SelectionContext) -> Selection:
        """Return the clients that Alg. 2 accepts, then uniform ones up to `count`."""
        cohort = Cohort(context, context.generator("kl"))
        table = context.population.label_counts
        rows = with_labels(table, context.available)
        quotas = np.full((cohort.size, context.population.classes), np.inf)
        if table is not None and len(rows):
            walk = Walk(profiles(table, rows).clip(min=0.0))
            while cohort.missing and walk.divergence >= self.theta:
                found = walk.next()
                if found is None:
                    break
                reason = f"largest with class {found.wanted}, the scarcest"
                quotas[len(cohort.rows)] = found.counted
                cohort.add(int(rows[found.position]), reason if cohort.rows else "most samples")
        cohort.draw(cohort.missing, "no scarce class to fill; drawn uniformly")
        selection = cohort.selection()
        if not self.truncate:
            return selection
        return Selection(rows=selection.rows, reasons=selection.reasons, quotas=quotas)


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """An accepted client.

    position: row of the counts. wanted: class for which the client was accepted. counted: number of
    its samples that the method counts, per class.
    """

    position: int
    wanted: int
    counted: Floats


class Walk:
    """Alg. 2: goes through clients by falling number of samples, and accepts some of them.

    v is the number of samples counted up to now, per class. In no class does it exceed the largest
    count of the first client.
    """

    def __init__(self, counts: Floats) -> None:
        self._counts = counts
        self._order: Rows = np.argsort(-counts.sum(axis=1), kind="stable")
        self._holders: dict[int, Rows] = {}
        self._taken: set[int] = set()
        self._place = -1
        self._counted = np.zeros(counts.shape[1])
        self._cap = 0.0

    @property
    def divergence(self) -> float:
        """KL(v‖uniform) in nats; infinite before the first client."""
        total = self._counted.sum()
        if total <= 0:
            return float("inf")
        shares = self._counted[self._counted > 0] / total
        return float((shares * np.log(shares * len(self._counted))).sum())

    def next(self) -> Accepted | None:
        """Return the next client to accept; None if no client has the scarcest class."""
        scarcest = int(self._counted.argmin())
        place = 0 if self._place < 0 else self._after(scarcest)
        if place is None:
            return None
        position = int(self._order[place])
        counts = self._counts[position]
        if self._place < 0:
            self._cap = counts.max()
        self._place = place
        self._taken.add(place)
        taken: Floats = np.minimum(self._cap - self._counted, counts)
        self._counted = self._counted + taken
        return Accepted(position=position, wanted=scarcest, counted=taken)

    def _after(self, scarcest: int) -> int | None:
        """Return the position, in the order of the walk, of the next client that has samples of
        this class and was not taken; None if no such client is left.

        The search is cyclic.
        """
        if scarcest not in self._holders:
            has = self._counts[self._order, scarcest] > 0
            self._holders[scarcest] = np.flatnonzero(has)
        holders = self._holders[scarcest]
        start = int(np.searchsorted(holders, self._place))
        enough = len(self._taken) + 1
        ahead, behind = holders[start : start + enough], holders[: min(start, enough)]
        return next((p for p in (*ahead.tolist(), *behind.tolist()) if p not in self._taken), None)
