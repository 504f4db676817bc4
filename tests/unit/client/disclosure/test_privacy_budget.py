"""Profiles and noisy secure sums share one privacy budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from fractions import Fraction
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from potluck.client.base.host_metrics import HostMetrics
from potluck.client.disclosure.disclosure_policy import DisclosurePolicy
from potluck.client.disclosure.privacy_budget import PrivacyBudget
from potluck.client.disclosure.releases import Asker, Discloser
from potluck.common.disclosure import Mode, Request
from potluck.common.errors import DisclosureRefusedError
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.secagg.host.sum_ledger import SumLedger
from potluck.secagg.protocol.policy.ledger import Upload

AT = datetime(2026, 5, 4, tzinfo=UTC)
SESSIONS: Iterator[int] = count(1)


def asked(epsilon: float) -> rpc.Instruction:
    return rpc.Instruction(
        id="i",
        client_id="a",
        run_id="r",
        disclose=rpc.Disclose(
            signal="label_counts",
            parameters_json=Request(mode=Mode.NOISY, epsilon=epsilon).canonical(),
            task=rpc.Plugin(name="digits"),
        ),
    )


def upload(epsilon: float | None) -> Upload:
    session = next(SESSIONS).to_bytes(16, "big").hex()
    return Upload(session_id=session, input_id="labels", epsilon=epsilon, at=AT)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    for folder in ("disclosures", "sums"):
        (tmp_path / folder).mkdir()
    return tmp_path


def budget_of(state: Path, metrics: HostMetrics | None = None) -> PrivacyBudget:
    return PrivacyBudget(state, DisclosurePolicy(epsilon_budget=1.0), metrics)


def keep(budget: PrivacyBudget, client: str, entries: Sequence[Upload]) -> None:
    """Record entries about a sum, as a host does before its reply."""
    ledger = budget.sums
    assert isinstance(ledger, SumLedger)
    ledger.keep(client, entries)
    budget.show(client)


def discloser(budget: PrivacyBudget) -> Discloser:
    return Discloser(
        policy=budget.policy,
        budget=budget,
        asker=Asker(federation="f", coordinator="c"),
        member_key=None,
    )


async def measure(_: Any) -> dict[str, Any]:
    return {"label_counts": [1, 2]}


@pytest.mark.parametrize("meanwhile", [False, True])
async def test_privacy_loss_of_secure_sums_reduces_the_budget_for_profiles(
    state: Path, meanwhile: bool
) -> None:
    budget = budget_of(state)

    async def amid_a_sum(_: Any) -> dict[str, Any]:
        keep(budget, "a", [upload(0.75)])
        return await measure(_)

    if not meanwhile:
        keep(budget, "a", [upload(0.75)])
    with pytest.raises(DisclosureRefusedError, match=r"ε = 0\.75 has been spent"):
        await discloser(budget).answer(asked(0.5), amid_a_sum if meanwhile else measure)
    assert budget.releases.of("a").releases == ()
    assert (await discloser(budget).answer(asked(0.25), measure)).payload_json


async def test_privacy_loss_of_profiles_reduces_the_budget_for_secure_sums(state: Path) -> None:
    budget = budget_of(state)
    keep(budget, "a", [upload(0.25), upload(None)])
    await discloser(budget).answer(asked(0.5), measure)
    left = budget.for_sums("a")
    assert Fraction(left) - budget.sums.spent("a") == Fraction(1, 4)
    assert budget_of(state).spent("a") == Fraction(3, 4)  # as a new process reads it
    assert budget.for_sums("b") == 1.0


async def test_metrics_show_the_privacy_loss_of_profiles_and_sums(state: Path) -> None:
    def shown(metrics: HostMetrics) -> list[str]:
        text = metrics.instruments.exposition().decode()
        return [line for line in text.splitlines() if line.startswith("potluck_host_privacy_spent")]

    metrics = HostMetrics()
    budget = budget_of(state, metrics)
    await discloser(budget).answer(asked(0.5), measure)
    keep(budget, "a", [upload(0.25)])
    keep(budget, "b", [upload(0.25)])
    assert shown(metrics) == ["potluck_host_privacy_spent_epsilon 0.75"]
    restarted = HostMetrics()
    again = budget_of(state, restarted)
    again.show(*again.clients())
    assert shown(restarted) == shown(metrics)
