"""Profiles and noisy secure sums are paid for from one budget."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from potluck.client.disclosure.disclosure_policy import DisclosurePolicy
from potluck.client.disclosure.release_ledger import ReleaseLedger
from potluck.client.disclosure.releases import Asker, Discloser
from potluck.common.disclosure import Mode, Request
from potluck.common.errors import DisclosureRefusedError
from potluck.rpc.v1 import coordinator_pb2 as rpc

ASKED = rpc.Instruction(
    id="i",
    client_id="a",
    run_id="r",
    disclose=rpc.Disclose(
        signal="label_counts",
        parameters_json=Request(mode=Mode.NOISY, epsilon=0.5).canonical(),
        task=rpc.Plugin(name="digits"),
    ),
)


@pytest.mark.parametrize(("before", "meanwhile"), [("0.75", "0"), ("0", "0.75")])
async def test_what_sums_cost_is_not_there_for_profiles(
    tmp_path: Path, before: str, meanwhile: str
) -> None:
    spent = Fraction(before)

    async def measure(_: Any) -> dict[str, Any]:
        nonlocal spent
        spent += Fraction(meanwhile)
        return {"label_counts": [1, 2]}

    discloser = Discloser(
        policy=DisclosurePolicy(epsilon_budget=1.0),
        ledger=ReleaseLedger(tmp_path),
        asker=Asker(federation="f", coordinator="c"),
        member_key=None,
        spent_on_sums=lambda _: spent,
    )
    with pytest.raises(DisclosureRefusedError, match=r"ε = 0\.75 has been spent"):
        await discloser.answer(ASKED, measure)
    assert discloser.ledger.of("a").releases == ()
    spent = Fraction("0.5")
    meanwhile = "0"
    assert (await discloser.answer(ASKED, measure)).payload_json
