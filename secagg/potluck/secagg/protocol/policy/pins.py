"""Limits on masked updates that are made from one version of a client's data.

A mask hides an update in one sum only. An attacker can compare sums over the same data from several
runs, settings or weight bounds, and the difference may disclose one sample. So the data's owner
limits the runs and rounds per data version (epoch), and a run must keep the settings and the weight
bound that it began with.
"""

from __future__ import annotations

from potluck.secagg.protocol.policy.ledger import Ledger
from potluck.secagg.protocol.policy.sum_policy import ClientPolicy, Expectation
from potluck.secagg.protocol.rules import Rule, require
from potluck.secagg.protocol.wire.messages import Header


def check_pins(ledger: Ledger, header: Header, expected: Expectation, policy: ClientPolicy) -> None:
    """Raise BrokenRuleError (policy) if a sum exceeds what the owner allows for its data epoch.

    Only inputs with an `Expectation.data` are limited: updates, not label counts.
    """
    if not expected.data:
        return
    earlier = [each for each in ledger.uploads if each.data == expected.data]
    runs = {each.run for each in earlier}
    require(
        header.run in runs or len(runs) < policy.runs_per_epoch,
        Rule.POLICY,
        f"updates from this data version are in masked rounds of {len(runs)} other "
        f"run{'s' * (len(runs) != 1)}, and the data owner allows {policy.runs_per_epoch}: sums of "
        "several runs can disclose single samples; the owner can raise masked_runs of "
        "[disclosure], or increase data_epoch if the data have changed",
    )
    models = {each.input_id for each in earlier}
    require(
        expected.input_id in models or len(models) < policy.rounds_per_epoch,
        Rule.POLICY,
        f"updates from this data version are in {len(models)} masked rounds, the maximum that the "
        "data owner allows; the data owner can raise masked_rounds of [disclosure]",
    )
    settings = expected.settings_sha256.hex()
    for each in earlier:
        if each.run == header.run:
            require(
                (each.settings, each.weight_bound) == (settings, header.weight_bound),
                Rule.POLICY,
                "the run's training settings or its weight bound changed between rounds; start "
                "another run for other settings",
            )
