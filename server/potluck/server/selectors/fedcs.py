"""FedCS: selects as many fast clients as can finish before a deadline.

Nishio and Yonetani, "Client Selection for Federated Learning with Heterogeneous Resources in Mobile
Edge", 2019, Alg. 3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field, PositiveFloat

from potluck.server.selection import (
    Floats,
    Population,
    RoundOutcome,
    Rows,
    Selection,
    SelectionContext,
    Selector,
)
from potluck.server.selectors.parts.choosing import Cohort, grown
from potluck.server.selectors.parts.durations import LEAST, noted
from potluck.server.state import State

Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, kw_only=True)
class FedCS(Selector):
    """Adds the client that prolongs the round least, until the deadline is reached.

    Clients train at the same time and upload one after another: after time Θ, a client with t_train
    and t_upload prolongs the round by t_upload + max(0, t_train − Θ). Times are those of a client's
    last training; a client that has not trained yet is added first, but only once.

    deadline_seconds: time in which all selected clients must finish. upload_share: share of a
    client's time that is its upload; 0 if uploads don't wait for one another. candidates: share of
    the available clients that are considered, drawn at random, at least twice the cohort's size.
    stop_early: True if the cohort ends at the deadline; False: it is filled with the fastest of the
    other candidates. O(K · count).
    """

    deadline_seconds: PositiveFloat = 180.0
    upload_share: Share = 0.2
    candidates: Share = 0.1
    stop_early: bool = False

    def init(self, population: Population) -> State:
        """Return a state with the seconds of each row's last training; NaN if unknown."""
        return State(arrays={"seconds": np.full(len(population), np.nan)})

    def select(self, state: State, context: SelectionContext) -> Selection:
        """Return the clients that Alg. 3 adds, in this order."""
        generator = context.generator("fedcs")
        cohort = Cohort(context, generator)
        wanted = max(math.ceil(self.candidates * len(context.available)), 2 * cohort.size)
        rows = generator.permutation(context.available)[:wanted]
        seconds = grown(state.arrays["seconds"], len(context.population), math.nan)
        times = np.maximum(seconds, LEAST)[rows]  # NaN stays
        new = rows[np.isnan(times)][: cohort.size]
        cohort.extend(new.tolist(), ["its time is not known yet"] * len(new))
        known, times = rows[~np.isnan(times)], times[~np.isnan(times)]
        uploads = self.upload_share * times
        order, ends = greedy(times - uploads, uploads, self.deadline_seconds, cohort.missing)
        cohort.extend(known[order].tolist(), [f"done after {end:.4g} s" for end in ends.tolist()])
        if not self.stop_early or not cohort.rows:
            left = np.setdiff1d(np.arange(len(known)), order)
            fastest = left[np.argsort(times[left], kind="stable")][: cohort.missing]
            reasons = [f"takes {seconds:.4g} s, beyond the deadline" for seconds in times[fastest]]
            cohort.extend(known[fastest].tolist(), reasons)
        return cohort.selection()

    def observe(self, state: State, outcome: RoundOutcome) -> State:
        """Store the clients' durations."""
        length = max(len(state.arrays["seconds"]), int(outcome.cohort.max(initial=-1)) + 1)
        seconds = grown(state.arrays["seconds"], length, math.nan)
        failed = np.setdiff1d(outcome.selected, outcome.included)
        after = noted(seconds, outcome)
        # without a deadline, a failed client has no duration; it must not go first again
        after[failed[np.isnan(after[failed])]] = self.deadline_seconds
        return State(arrays={"seconds": after})


def greedy(training: Floats, uploads: Floats, deadline: float, count: int) -> tuple[Rows, Floats]:
    """Return the positions that Alg. 3 adds, in order, and the time Θ after each.

    training, uploads: seconds ≥ 0 of each client. Each step adds the client that prolongs the round
    least, the first of equal ones. If that client would miss the deadline, so would all others.
    """
    order: list[int] = []
    ends: list[float] = []
    elapsed = 0.0
    left = np.ones(len(training), dtype=bool)
    while len(order) < min(count, len(training)):
        added = np.where(left, uploads + np.maximum(0.0, training - elapsed), np.inf)
        best = int(added.argmin())
        if elapsed + added[best] >= deadline:
            break
        elapsed += float(added[best])
        left[best] = False
        order.append(best)
        ends.append(elapsed)
    return np.array(order, dtype=np.int64), np.array(ends)
