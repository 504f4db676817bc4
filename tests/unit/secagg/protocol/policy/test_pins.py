"""An owner's limits on runs and rounds with masked updates from one version of the data."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from support.secure_sums import Federation

from potluck.secagg.protocol import ClientPolicy, Ledger, Purpose, Rule
from potluck.secagg.protocol.policy.ledger import upload_entry
from potluck.secagg.protocol.policy.pins import check_pins
from potluck.secagg.protocol.policy.sum_policy import Expectation
from potluck.secagg.protocol.rules import BrokenRuleError
from potluck.secagg.protocol.wire.messages import Header

FEDERATION = Federation(purpose=Purpose.UPDATE)
NOW = datetime(2030, 5, 1, tzinfo=UTC)


def header(run: str = "run-1", weight_bound: int = 1000) -> Header:
    return FEDERATION.header(run=run, weight_bound=weight_bound)


def expected(model: int = 0, settings: int = 0, epoch: int = 1) -> Expectation:
    return FEDERATION.expected(
        header(),
        input_id=f"update {model}/epoch {epoch}",
        settings_sha256=bytes([settings]),
        data=f"updates/epoch {epoch}",
    )


LEDGER = Ledger(
    entries=tuple(upload_entry(header(), expected(model), None, NOW) for model in range(3))
)


@pytest.mark.parametrize(
    ("made", "of", "policy", "message"),
    [
        (header(), expected(), {}, ""),
        (header(), expected(3), {}, ""),
        (header(), expected(3), {"rounds_per_epoch": 3}, "are in 3 masked rounds"),
        (header(), expected(2), {"rounds_per_epoch": 3}, ""),  # a recorded round again counts once
        (header(), expected(3, settings=1), {}, "settings or its weight bound changed"),
        (header(weight_bound=999), expected(3), {}, "settings or its weight bound changed"),
        (header("run-2"), expected(3), {}, "masked rounds of 1 other run, and .* allows 1"),
        (header("run-2"), expected(3, settings=1), {"runs_per_epoch": 2}, ""),
        (header("run-2"), expected(3, epoch=2), {}, ""),
    ],
)
def test_masked_round_beyond_the_limits_of_the_owner_is_refused(
    made: Header, of: Expectation, policy: dict[str, Any], message: str
) -> None:
    rules = ClientPolicy(**policy)
    if not message:
        check_pins(LEDGER, made, of, rules)
        return
    with pytest.raises(BrokenRuleError, match=message) as refused:
        check_pins(LEDGER, made, of, rules)
    assert refused.value.refusal.rule is Rule.POLICY
