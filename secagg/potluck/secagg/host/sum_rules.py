"""Converts the owner's policy into the rules of secure sums."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from potluck.client.base.laplace import sensitivity
from potluck.client.disclosure.disclosure_policy import DisclosurePolicy, SumName
from potluck.common.disclosure import SumKind
from potluck.common.learning.step_by_step import UNSAFE_STEPWISE
from potluck.secagg.protocol import ClientPolicy

_KINDS: Final[dict[SumName, SumKind]] = {
    "total": SumKind.TOTAL,
    "cells": SumKind.CELLS,
    UNSAFE_STEPWISE: SumKind.STEPWISE,
}


def rules_of_counts(policy: DisclosurePolicy) -> ClientPolicy:
    """Return the rules for a secure sum of label counts."""
    return ClientPolicy(
        least_hosts=policy.sum_hosts,
        colluding_hosts=policy.sum_colluding_hosts,
        disclosures=frozenset(_KINDS[name].value for name in policy.sums),
        unprotected=frozenset({SumKind.STEPWISE.value}),
        noisy=frozenset() if policy.exact_sums else frozenset({SumKind.TOTAL, SumKind.CELLS}),
        largest_epsilon=policy.epsilon,
        sensitivity=sensitivity(policy.adjacency),
    )


def rules_of_updates(policy: DisclosurePolicy) -> ClientPolicy:
    """Return the rules for a secure sum of updates."""
    return replace(
        rules_of_counts(policy),
        disclosures=frozenset({SumKind.UPDATE.value}),
        unprotected=frozenset(),
        one_set=policy.sets_per_model == "one",
        runs_per_epoch=policy.masked_runs,
        rounds_per_epoch=policy.masked_rounds,
    )
