"""The label counts of the whole federation, from one secure sum, for selectors that use them.

An earlier sum of the same task and the same data versions is reused, no matter which clients are
connected: a version is summed exactly only once, and a noisy sum costs privacy budget. The reused
sum does not include clients that joined later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from potluck.common.disclosure import SumKind
from potluck.common.errors import RunError
from potluck.common.learning.step_by_step import UNSAFE_STEPWISE
from potluck.secagg.coordinator.counts import SumOutcome
from potluck.secagg.coordinator.label_sums import (
    SecureLabelSums,
    epsilon_of,
    members_of,
    noise_of,
    sum_terms,
)
from potluck.server.rounds.troubles import listed
from potluck.server.store import SecureSum

_SHOWN = 3


class LabelTotals(SecureLabelSums):
    """The federation's label counts, summed once in a run."""

    _tried = False

    async def find(self, clients: Sequence[str], present: Callable[[str], bool]) -> None:
        """Find or compute the sum over these clients; if there is none, report the reason."""
        if self._tried:
            return
        self._tried = True
        stored = self._usable(await self._stored(SumKind.TOTAL), clients)
        if stored is not None:
            self._reuse(stored, clients)
            return
        if not self._sums.possible:
            self._do_without("the federation has no root; see `potluck pki root`")
            return
        terms = sum_terms(self._run_id, self._plan, SumKind.TOTAL)
        try:
            outcome = await self._sums.sum_counts(terms, clients, present=present)
        except RunError as error:
            self._do_without(error.message)
            return
        if outcome.total is None:
            self._do_without(outcome.explain())
            return
        self.totals = outcome.total.astype(np.float64)
        self._announce(outcome)

    def _usable(self, stored: Sequence[SecureSum], clients: Sequence[str]) -> SecureSum | None:
        """Return this run's own sum, or the newest sum of the same data."""
        own = [each for each in stored if each.run_id == self._run_id]
        if own:
            return own[0]
        return next((each for each in reversed(stored) if self._holds(each, clients)), None)

    def _holds(self, stored: SecureSum, clients: Sequence[str]) -> bool:
        """Return True if a sum is of current data, and good enough for these clients.

        An exact sum is always good enough, since no second one is possible. A noisy sum can be
        repeated, at the cost of ε for all clients. So it is good enough unless it lacks more than
        half of these clients.
        """
        covered = set(clients).intersection(members_of(stored))
        enough = epsilon_of(stored) is None or 2 * len(covered) >= len(clients)
        return enough and self._is_current(stored)

    def _reuse(self, stored: SecureSum, clients: Sequence[str]) -> None:
        self.totals = np.array(stored.total, dtype=np.float64)
        members = members_of(stored)
        self._say(
            f"target: the secure sum over {len(members)} clients of run {stored.run_id}, "
            f"{noise_of(epsilon_of(stored))}"
        )
        late = sorted(set(clients).difference(members))
        if late:
            self._say(
                f"the target is without {listed(late, _SHOWN)}: a sum that is there is used again "
                "as long as its clients' data stay the same",
                warning=True,
            )

    def _announce(self, outcome: SumOutcome) -> None:
        record = outcome.record
        self._say(
            f"target: a secure sum of label counts over {len(record.clients)} clients on "
            f"{record.hosts} hosts, {noise_of(record.epsilon)} ({self._trust_statement()})"
        )
        whys = {**record.refusals, **outcome.troubles}
        if whys:
            shown = "; ".join(f"{client} ({why})" for client, why in list(whys.items())[:_SHOWN])
            self._say(f"not in the sum: {shown}", warning=True)

    def _do_without(self, why: str) -> None:
        """Continue without a sum. Raises RunError if the selector can't work without it."""
        if self._profiles.disclosure == UNSAFE_STEPWISE:
            raise RunError(
                f"no secure sum of label counts, and the target is nothing else: {why}; start a "
                "run with dc-balanced, whose target is the same number of samples of each class"
            )
        self._say(
            f"no secure sum of label counts, the target is the sum of noisy ones: {why}",
            warning=True,
        )
