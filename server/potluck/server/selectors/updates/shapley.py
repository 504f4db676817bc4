"""Shapley values by truncated permutations in which each player is first in turn (GTG-Shapley).

Liu et al., "GTG-Shapley: Efficient and Accurate Participant Contribution Evaluation in Federated
Learning", 2022, Algorithm 1; the convergence criterion is that of the authors' program.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Final

import numpy as np

from potluck.server.selection import Floats

Coalition = tuple[int, ...]
"""A set of players, sorted."""

_LEAST_PERMUTATIONS: Final = 30
_LOOKED_AT: Final = 10
_CONVERGED: Final = 0.05


def shapley_values(
    players: int, generator: np.random.Generator, *, tolerance: float, permutations: int
) -> Generator[Coalition, float, Floats]:
    """Yield coalitions, each once, and receive the value of each; return the Shapley value of each
    player.

    tolerance: once the value of a permutation's first players is within this distance of the value
    of all players, the players that follow add nothing. If the value of all players is within this
    distance of that of the empty coalition, all Shapley values are 0. permutations: maximum number
    of permutations, rounded up to a multiple of players. Stops earlier if the last means differ by
    at most 5 % on average.
    """
    of_none = yield ()
    of_all = yield tuple(range(players))
    known: dict[Coalition, float] = {(): of_none, tuple(range(players)): of_all}
    if abs(of_all - of_none) <= tolerance:
        return np.zeros(players)
    total, means = np.zeros(players), list[Floats]()
    while len(means) < permutations and not _converged(means):
        for leader in range(players):
            others = generator.permutation([each for each in range(players) if each != leader])
            members, worth = list[int](), of_none
            for player in (leader, *others.tolist()):
                if abs(of_all - worth) <= tolerance:
                    break
                members.append(int(player))
                coalition = tuple(sorted(members))
                if coalition not in known:
                    known[coalition] = yield coalition
                total[player] += known[coalition] - worth
                worth = known[coalition]
            means.append(total / (len(means) + 1))
    return means[-1]


def _converged(means: list[Floats]) -> bool:
    if len(means) < _LEAST_PERMUTATIONS:
        return False
    last = np.array(means[-_LOOKED_AT:])
    differences = np.abs(last - last[-1]) / (np.abs(last[-1]) + 1e-12)
    return bool(differences.mean(axis=1).max() <= _CONVERGED)
