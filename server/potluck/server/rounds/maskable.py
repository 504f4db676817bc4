"""What goes together with masked updates, and how they are weighed; checked before a run starts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from potluck.common.disclosure import Weighting
from potluck.common.errors import ConfigurationError
from potluck.common.run_file.run_settings import DirectionSettings, RoundPolicy
from potluck.common.run_file.runfile import RunFile
from potluck.common.secagg import complete_thresholds
from potluck.common.secagg.coordinator.coordinator_side import MOST_ATTEMPTS
from potluck.common.secagg.policy.sum_policy import ClientPolicy
from potluck.common.secagg.primitives.thresholds import COMPLETE_LIMIT
from potluck.server.rounds.compatibility import check_maskable
from potluck.server.selection import Selector
from potluck.server.strategy import Strategy, Summation

_STAGES: Final = 4
_SPARE_SECONDS: Final = 60.0
"""Clients keep their keys for this long beyond training and all stages."""


def check_masking(
    run_file: RunFile, strategy: Strategy, selector: Selector, *, source: str
) -> None:
    """Raise ConfigurationError where a run with masked updates needs what is hidden then."""
    if not run_file.secure_aggregation:
        return
    try:
        check_maskable(run_file.strategy.name, strategy)
        _check_kept(run_file, strategy)
        _check_selector(run_file.selector.name, selector)
        _check_form(run_file)
        _check_sizes(run_file)
    except ConfigurationError as error:
        raise ConfigurationError(f"{source}: {error.message}", **error.metadata) from None


def weight_bound(run_file: RunFile, strategy: Strategy) -> int:
    """The largest weight a client may have in a round's sum."""
    alike = run_file.weighting is Weighting.EQUAL or strategy.summation is Summation.EQUAL
    return 1 if alike else run_file.masking.weight_cap


def session_seconds(run_file: RunFile) -> float:
    """How long the session of a round may last."""
    stages = _STAGES * run_file.masking.stage_seconds
    return run_file.round.deadline_seconds + stages + _SPARE_SECONDS


def masked_policy(run_file: RunFile) -> RoundPolicy:
    """The run's policy as masked rounds keep to it: with fewer updates than a sum needs there is no
    point in waiting, and a sum is tried so often and not more often."""
    needed = max(_quorum(run_file), run_file.masking.hosts)
    share = min(1.0, needed / run_file.count)
    return run_file.round.model_copy(
        update={
            "quorum": max(run_file.round.quorum, share),
            "attempts": min(run_file.round.attempts, MOST_ATTEMPTS),
        }
    )


def sum_suffices(hosts: Sequence[str], run_file: RunFile) -> bool:
    """Return whether a cohort can end in a secure sum if none of its clients is lost.

    hosts: one entry per client; empty if unknown.
    """
    known, masking = [host for host in hosts if host], run_file.masking
    quorum = complete_thresholds(known, masking.colluding_hosts).quorum
    return len(set(known)) >= masking.fewest_hosts and quorum <= min(len(known), run_file.count)


def _quorum(run_file: RunFile) -> int:
    """Of a cohort with one client to a host."""
    cohort = run_file.count + run_file.round.over_selection
    hosts = [str(each) for each in range(cohort)]
    return complete_thresholds(hosts, run_file.masking.colluding_hosts).quorum


def _check_kept(run_file: RunFile, strategy: Strategy) -> None:
    """Refuse states that clients keep of earlier trainings and that their updates depend on.

    The coordinator names the training whose state counts, for each client. One that lies would
    learn a single update from two sums.
    """
    what = ""
    if strategy.correction is not None and strategy.correction.keeps:
        what = f"strategy {run_file.strategy.name}"
    elif run_file.model is not None and run_file.model.keep:
        what = "`keep` of [model]"
    if what:
        raise ConfigurationError(
            f"{what} is not compatible with secure aggregation: clients begin from states of "
            "earlier trainings, and a coordinator that names another one to a client could "
            "compute its update from the sums; choose fedavg or fednova without `keep`, or "
            "unmasked updates"
        )


def _check_selector(name: str, selector: Selector) -> None:
    reports = sorted(selector.reports)
    why = ""
    if reports:
        why = f"goes by what each client reports with its update ({', '.join(reports)})"
    elif selector.learns:
        why = f"learns of each update its {', '.join(sorted(selector.learns))}"
    elif selector.measures:
        why = "has means of some updates measured"
    elif selector.weighs:
        why = "says what each update counts with"
    elif selector.limits or selector.paces or selector.drops:
        what = (
            "how many samples each client trains on"
            if selector.limits
            else "how many passes each client makes"
            if selector.paces
            else "what each leaves out"
        )
        why = f"says {what}, where all clients of a masked round train alike"
    if why:
        raise ConfigurationError(
            f"selector {name} and secure aggregation don't go together: {name} {why}, and of "
            "masked updates the coordinator learns only sums; choose another selector, or unmasked "
            "updates",
            selector=name,
        )
    if selector.before_upload(2) is not None:
        raise ConfigurationError(
            f"selector {name} and secure aggregation don't go together: {name} spares clients "
            "their uploads for what each says of its model, and masks are removed from all updates "
            "of a cohort together; choose another selector, or unmasked updates",
            selector=name,
        )
    if selector.everybody(1):
        raise ConfigurationError(
            f"selector {name} and secure aggregation don't go together: {name} has all clients "
            "train in a round, and the sum of a masked round is over as many as the run asks for; "
            "choose another selector or option, or unmasked updates",
            selector=name,
        )


def _check_form(run_file: RunFile) -> None:
    if run_file.transport.up != DirectionSettings():
        raise ConfigurationError(
            "transport.up and secure aggregation don't go together: masked updates have an "
            "encoding of their own, and masks don't compress; remove [transport.up]"
        )
    if run_file.virtual_clock.enabled:
        raise ConfigurationError(
            "virtual_clock and secure aggregation don't go together: the simulated seconds that "
            "a client reports tell its number of samples; remove one of them"
        )


def _check_sizes(run_file: RunFile) -> None:
    masking, count = run_file.masking, run_file.count
    cohort = count + run_file.round.over_selection
    if count < masking.hosts:
        raise ConfigurationError(
            f"a round of {count} clients can't be on {masking.hosts} hosts, as masking.hosts wants "
            f"for secure aggregation; raise `count` to {masking.hosts} or more",
            count=count,
            hosts=masking.hosts,
        )
    if cohort > COMPLETE_LIMIT:
        raise ConfigurationError(
            f"a round of {cohort} clients is too large for secure aggregation, which is made for "
            f"{COMPLETE_LIMIT}; lower `count`",
            count=cohort,
        )
    quorum = _quorum(run_file)
    if count < quorum:
        raise ConfigurationError(
            f"of {cohort} clients {quorum} must stay for a secure sum, and the round closes at "
            f"{count}; lower round.over_selection or masking.colluding_hosts",
            count=count,
            quorum=quorum,
        )
    longest = ClientPolicy().longest_session_seconds
    if session_seconds(run_file) > longest:
        most = math.floor(longest - _SPARE_SECONDS - _STAGES * masking.stage_seconds)
        raise ConfigurationError(
            f"clients keep their keys for a secure sum for {longest:.0f} s at most; lower "
            f"round.deadline_seconds to {most} or less",
            deadline=run_file.round.deadline_seconds,
        )
