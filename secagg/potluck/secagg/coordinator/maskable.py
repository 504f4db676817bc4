"""The sizes of masked rounds, checked before a run starts, and the weights of their updates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from potluck.common.disclosure import Weighting
from potluck.common.errors import ConfigurationError
from potluck.common.run_file.run_settings import RoundPolicy
from potluck.common.run_file.runfile import RunFile
from potluck.secagg.protocol import complete_thresholds
from potluck.secagg.protocol.coordinator.coordinator_side import MOST_ATTEMPTS
from potluck.secagg.protocol.policy.sum_policy import ClientPolicy
from potluck.secagg.protocol.primitives.thresholds import COMPLETE_LIMIT
from potluck.server.plan.path_rules import PathRules
from potluck.server.strategy import Strategy, Summation

_STAGES: Final = 4
_SPARE_SECONDS: Final = 60.0
"""Seconds that clients keep a session's keys beyond training and all stages."""


def weight_bound(run_file: RunFile, strategy: Strategy) -> int:
    """Return the largest weight that a client may have in a round's sum."""
    alike = run_file.weighting is Weighting.EQUAL or strategy.summation is Summation.EQUAL
    privacy = run_file.privacy
    # Noise on whole updates needs equal weights, so each client has weight 1.
    noisy = privacy is not None and privacy.unit == "client"
    return 1 if alike or noisy else run_file.masking.weight_cap


def session_seconds(run_file: RunFile) -> float:
    """Return the maximum duration of a round's session, in seconds."""
    stages = _STAGES * run_file.masking.stage_seconds
    return run_file.round.deadline_seconds + stages + _SPARE_SECONDS


def _quorum(run_file: RunFile) -> int:
    """Return the quorum of a cohort with one client per host."""
    cohort = run_file.clients_per_round + run_file.round.over_selection
    hosts = [str(each) for each in range(cohort)]
    return complete_thresholds(hosts, run_file.masking.colluding_hosts).quorum


class MaskedRules(PathRules):
    """The requirements of masked rounds, which a run's plan must meet."""

    resumes = False  # a restarted coordinator has lost the session
    members_only = True

    @classmethod
    def check_sizes(cls, run_file: RunFile) -> None:
        """Raise ConfigurationError if a run's cohorts or deadlines don't allow secure sums."""
        masking, count = run_file.masking, run_file.clients_per_round
        cohort = count + run_file.round.over_selection
        if count < masking.hosts:
            raise ConfigurationError(
                f"a round of {count} clients can't be on {masking.hosts} hosts, as masking.hosts "
                f"requires for secure aggregation; raise `clients_per_round` to {masking.hosts} or "
                "more",
                count=count,
                hosts=masking.hosts,
            )
        if cohort > COMPLETE_LIMIT:
            raise ConfigurationError(
                f"a round of {cohort} clients is too large for secure aggregation, which "
                f"supports up to {COMPLETE_LIMIT}; lower `clients_per_round`",
                count=cohort,
            )
        quorum = _quorum(run_file)
        if count < quorum:
            raise ConfigurationError(
                f"a secure sum needs {quorum} of {cohort} clients, but the round closes with "
                f"{count} updates; lower round.over_selection or masking.colluding_hosts",
                count=count,
                quorum=quorum,
            )
        longest = ClientPolicy().longest_session_seconds
        if session_seconds(run_file) > longest:
            most = math.floor(longest - _SPARE_SECONDS - _STAGES * masking.stage_seconds)
            raise ConfigurationError(
                "the round lasts longer than clients keep the keys of a secure sum, "
                f"{longest:.0f} s at most; lower round.deadline_seconds to {most} or less",
                deadline=run_file.round.deadline_seconds,
            )

    @classmethod
    def policy(cls, run_file: RunFile) -> RoundPolicy:
        """Return the run's policy for rounds, with the quorum and attempts that secure sums need.

        A sum needs a minimum number of updates, and is tried a limited number of times.
        """
        needed = max(_quorum(run_file), run_file.masking.hosts)
        share = min(1.0, needed / run_file.clients_per_round)
        return run_file.round.model_copy(
            update={
                "quorum": max(run_file.round.quorum, share),
                "attempts": min(run_file.round.attempts, MOST_ATTEMPTS),
            }
        )

    @classmethod
    def fewest_hosts(cls, run_file: RunFile) -> int:
        """Return the minimum number of hosts that a round's clients must be on."""
        return run_file.masking.fewest_hosts

    @classmethod
    def suffices(cls, hosts: Sequence[str], run_file: RunFile) -> bool:
        """Return True if these clients suffice for a secure sum, provided that none drops out.

        hosts: one entry per client; empty if unknown.
        """
        known, masking = [host for host in hosts if host], run_file.masking
        quorum = complete_thresholds(known, masking.colluding_hosts).quorum
        cohort = min(len(known), run_file.clients_per_round)
        return len(set(known)) >= masking.fewest_hosts and quorum <= cohort
