"""A client's policy applied to a request, its budget and its ledger."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path
from secrets import SystemRandom
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.client.disclosure.disclosure_policy import (
    MOST_RELEASES,
    DisclosurePolicy,
    check_budget,
    check_held_out,
    check_pace,
    check_weighting,
    terms,
    without_data,
)
from potluck.client.disclosure.privacy_budget import PrivacyBudget
from potluck.client.disclosure.release_ledger import (
    Recipient,
    Release,
    ReleaseKey,
    ReleaseLedger,
)
from potluck.client.disclosure.releases import Asker, Discloser, ReleaseNoise, noised, randomness
from potluck.common.disclosure import (
    Mode,
    Parameters,
    Request,
    TaskReference,
    Weighting,
    parse_parameters,
)
from potluck.common.errors import (
    DataError,
    DisclosureRefusedError,
    NotFiniteError,
    ProtocolError,
    StorageError,
    TrainingError,
)
from potluck.common.signal import parse_request
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.rpc.v1.transfer_pb2 import ENCODING_MASKED_UINT32
from potluck.secagg.host.sum_membership import rules_of_counts, rules_of_updates

TASK = TaskReference(name="digits", options={"clients": 6})
AT = datetime(2026, 5, 4, 12, tzinfo=UTC)


def ask(policy: DisclosurePolicy, signal: Any, **wishes: Any) -> Parameters:
    return terms(policy, "a", signal, Request(**wishes), task=TASK, model=None)


def test_policy_fills_in_parameters_missing_from_a_request() -> None:
    policy = DisclosurePolicy(epsilon=0.5, adjacency="add-remove")
    assert ask(policy, "label_counts", mode=Mode.NOISY) == Parameters(
        mode=Mode.NOISY, task=TASK, epsilon=0.5, adjacency="add-remove"
    )
    asked = ask(policy, "label_counts", mode=Mode.NOISY, epsilon=0.1, adjacency="replace")
    # The coordinator may ask for more noise than the owner requires.
    assert (asked.epsilon, asked.adjacency) == (0.1, "replace")


@pytest.mark.parametrize(
    ("policy", "signal", "wishes", "names"),
    [
        ({"signals": ()}, "label_counts", {"mode": "noisy"}, "signals"),
        ({}, "interaction_matrix", {"mode": "exact"}, "signals"),
        ({}, "label_counts", {"mode": "exact"}, "exact_label_counts"),
        ({}, "triplet", {"mode": "plain"}, '"noisy"'),
        ({"epsilon": 0.5}, "label_counts", {"mode": "noisy", "epsilon": 0.51}, "`epsilon` is 0.5"),
        ({}, "label_counts", {"mode": "noisy", "adjacency": "add-remove"}, "adjacency"),
    ],
)
def test_request_for_more_than_the_policy_allows_is_refused(
    policy: dict[str, Any], signal: str, wishes: dict[str, Any], names: str
) -> None:
    with pytest.raises(DisclosureRefusedError, match=names) as refusal:
        ask(DisclosurePolicy(**policy), signal, **wishes)
    assert refusal.value.reason == "DISCLOSURE_REFUSED"
    assert "\n" not in refusal.value.message


@pytest.mark.parametrize(
    ("policy", "signal", "mode"),
    [
        ({"exact_label_counts": True}, "label_counts", Mode.EXACT),
        ({"triplet": "exact"}, "triplet", Mode.EXACT_TRIPLET),
        ({"signals": ("interaction_matrix",)}, "interaction_matrix", Mode.EXACT),
    ],
)
def test_disclosures_that_the_owner_allows_exactly_have_no_noise(
    policy: dict[str, Any], signal: str, mode: Mode
) -> None:
    found = ask(DisclosurePolicy(**policy), signal, mode=mode)
    assert (found.mode, found.epsilon) == (mode, None)
    assert noised([3, 0, 5], found, SystemRandom()) == [3, 0, 5]


def test_privacy_budget_is_exact_and_includes_its_limit() -> None:
    policy = DisclosurePolicy(epsilon=0.1, epsilon_budget=0.3)
    parameters = ask(policy, "label_counts", mode=Mode.NOISY)
    for spent in ("0", "0.1", "0.2"):  # in floating point, 0.1 + 0.2 is more than 0.3
        check_budget(policy, "a", "label_counts", parameters, spent=Fraction(spent), releases=0)
    with pytest.raises(DisclosureRefusedError, match="epsilon_budget"):
        check_budget(policy, "a", "label_counts", parameters, spent=Fraction("0.3"), releases=3)


def test_secure_sums_have_noise_unless_the_owner_allows_exact_ones() -> None:
    assert rules_of_counts(DisclosurePolicy()).noisy == {"total", "cells"}
    assert rules_of_counts(DisclosurePolicy(exact_sums=True)).noisy == set()
    masked = rules_of_updates(DisclosurePolicy())
    assert not masked.disclosures & masked.noisy


def test_number_of_disclosures_without_privacy_loss_is_limited() -> None:
    policy = DisclosurePolicy(exact_label_counts=True)
    parameters = ask(policy, "label_counts", mode=Mode.EXACT)
    with pytest.raises(DisclosureRefusedError, match="no more"):
        check_budget(
            policy, "a", "label_counts", parameters, spent=Fraction(0), releases=MOST_RELEASES
        )


@given(samples=st.integers(1, 1 << 40))
def test_reported_sample_count_is_as_exact_as_the_weighting_permits(samples: int) -> None:
    assert Weighting.EXACT.disclosed(samples) == samples
    assert Weighting.EQUAL.disclosed(samples) == 1
    told = Weighting.BUCKETED.disclosed(samples)
    assert told.bit_count() == 1
    assert told * told < 2 * samples * samples * 1.0000001  # within a factor of √2
    assert samples * samples <= 2 * told * told


def test_weighting_or_evaluation_that_the_policy_does_not_permit_is_refused() -> None:
    check_weighting(DisclosurePolicy(), "a", Weighting.EQUAL)
    check_weighting(DisclosurePolicy(weighting=Weighting.BUCKETED), "a", Weighting.BUCKETED)
    with pytest.raises(DisclosureRefusedError, match='weighting = "equal"'):
        check_weighting(DisclosurePolicy(weighting=Weighting.EQUAL), "a", Weighting.BUCKETED)
    check_held_out(DisclosurePolicy(held_out_counts=True), "a")
    with pytest.raises(DisclosureRefusedError, match=r"evaluation\.every"):
        check_held_out(DisclosurePolicy(), "a")


def test_virtual_clock_is_refused_if_its_seconds_would_reveal_sample_counts() -> None:
    check_pace(DisclosurePolicy(), "a", 0.5)
    check_pace(DisclosurePolicy(weighting=Weighting.EQUAL), "a", 0.0)
    with pytest.raises(DisclosureRefusedError, match="virtual_clock"):
        check_pace(DisclosurePolicy(weighting=Weighting.BUCKETED), "a", 0.5)


def test_sample_counts_weaken_add_remove_noise_unless_weights_are_equal() -> None:
    assert DisclosurePolicy(adjacency="add-remove").undermined
    assert not DisclosurePolicy(adjacency="add-remove", weighting=Weighting.EQUAL).undermined
    assert not DisclosurePolicy().undermined


@pytest.mark.parametrize(
    ("signal", "text"),
    [
        ("salaries", '{"mode": "noisy"}'),
        ("label_counts", '{"mode": "plain"}'),
        ("label_counts", '{"mode": "noisy", "epsilon": 0}'),
        ("label_counts", '{"mode": "noisy", "epsilon": 1e-9}'),
        ("label_counts", '{"mode": "noisy", "epsilon": NaN}'),
        ("label_counts", '{"mode": "noisy", "sigma": 1}'),
        ("label_counts", '{"mode": "noisy", "settings": {}}'),
        ("triplet", '{"mode": "ldp"}'),
        ("label_counts", "[]"),
        ("label_counts", ""),
    ],
)
def test_malformed_profile_requests_are_refused(signal: str, text: str) -> None:
    with pytest.raises(ProtocolError):
        parse_request(signal, text)


def test_parameters_are_accepted_only_in_canonical_json() -> None:
    parameters = Parameters(mode=Mode.NOISY, task=TASK, epsilon=0.5, adjacency="replace")
    text = parameters.canonical()
    assert parse_parameters(text) == parameters
    with pytest.raises(ProtocolError):
        parse_parameters(json.dumps(json.loads(text), indent=1))


# Noise -----------------------------------------------------------------------------------------


def test_release_must_draw_its_noise_exactly_once() -> None:
    noisy = ask(DisclosurePolicy(), "label_counts", mode=Mode.NOISY)
    noise = ReleaseNoise("label_counts", noisy, SystemRandom())
    with pytest.raises(TrainingError, match="did not add noise"):
        noise.check_drawn()
    with pytest.raises(TrainingError, match="twice"):
        [noise(np.array(counts)) for counts in ([1, 2], [3, 4])]
    with pytest.raises(TrainingError, match="float64; use int64"):
        ReleaseNoise("label_counts", noisy, SystemRandom())(np.array([0.5]))
    exact = ask(DisclosurePolicy(exact_label_counts=True), "label_counts", mode=Mode.EXACT)
    ReleaseNoise("label_counts", exact, SystemRandom()).check_drawn()


def test_noise_keeps_the_shape_of_counts() -> None:
    parameters = ask(DisclosurePolicy(epsilon=100), "label_counts", mode=Mode.NOISY)
    noise = ReleaseNoise("label_counts", parameters, SystemRandom())
    counts = np.arange(6).reshape(3, 2) * 1000
    found = noise(counts)
    assert found.shape == counts.shape
    assert abs(found - counts).max() < 10


# The ledger ------------------------------------------------------------------------------------


def release(epsilon: float | None = 0.5, **changes: Any) -> Release:
    values: dict[str, Any] = {
        "data_epoch": 1,
        "signal": "label_counts",
        "parameters_json": "{}",
        "payload_json": '{"label_counts": [1]}',
        "epsilon": epsilon,
        "at": AT,
    }
    return Release(**(values | changes))


def test_ledger_restores_releases_and_sums_their_privacy_loss(tmp_path: Path) -> None:
    ledger = ReleaseLedger(tmp_path)
    ledger.keep("a", release(0.1))
    ledger.keep("a", release(0.2, data_epoch=2))
    ledger.keep("a", release(None, signal="triplet"))
    recipient = Recipient(federation="f", coordinator="c:1", run="r", at=AT)
    # The same release again: only its recipient is recorded, and nothing is charged.
    ledger.keep("a", release(0.1, recipients=(recipient,)))
    again = ReleaseLedger(tmp_path)
    assert again.of("a").spent == Fraction(3, 10)
    assert again.clients() == ["a"]
    found = again.find("a", ReleaseKey(1, "label_counts", "{}"))
    assert found is not None
    assert found.recipients == (recipient,)
    assert again.find("a", ReleaseKey(3, "label_counts", "{}")) is None
    assert again.of("b").spent == 0


@pytest.mark.parametrize("content", ["", "{", '{"client": "b", "releases": []}'])
def test_damaged_release_ledger_stops_all_disclosures(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(StorageError, match="backup"):
        ReleaseLedger(tmp_path).of("a")


def test_release_that_can_not_be_stored_is_not_recorded_as_disclosed(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    ledger = ReleaseLedger(folder)  # the folder does not exist, so writing fails
    with pytest.raises(StorageError):
        ledger.keep("a", release())
    assert ledger.of("a").releases == ()


# Answering -------------------------------------------------------------------------------------

TRUTH = [50, 0, 7, 30]


def discloser(folder: Path, **policy: Any) -> Discloser:
    (folder / "disclosures").mkdir(exist_ok=True)
    chosen = DisclosurePolicy(**policy)
    return Discloser(
        policy=chosen,
        budget=PrivacyBudget(folder, chosen),
        asker=Asker(federation="f", coordinator="c:1"),
        member_key=None,
    )


async def test_noise_is_reproducible_only_in_a_simulation(tmp_path: Path) -> None:
    async def disclosed(name: str, seed: int | None) -> list[int]:
        (tmp_path / name).mkdir(exist_ok=True)
        teller = discloser(tmp_path / name, epsilon=0.01, simulation_seed=seed)
        return await counts_of(teller, 1)

    assert await disclosed("one", 7) == await disclosed("again", 7)
    assert await disclosed("yet another", 8) != await disclosed("one", 7)
    assert await disclosed("real", None) != await disclosed("real too", None)


async def counts_of(teller: Discloser, number: int, wishes: str = '{"mode":"noisy"}') -> list[int]:
    async def measure(parameters: Parameters) -> dict[str, Any]:
        generator = randomness(teller.policy, "a", parameters)
        return {"label_counts": noised(TRUTH, parameters, generator)}

    disclose = rpc.Disclose(
        signal="label_counts", parameters_json=wishes, task=rpc.Plugin(name="digits")
    )
    instruction = rpc.Instruction(
        id=str(number), client_id="a", run_id=f"run-{number}", disclose=disclose
    )
    profile = await teller.answer(instruction, measure)
    counts: list[int] = json.loads(profile.payload_json)["label_counts"]
    return counts


async def test_repeated_requests_return_the_same_noisy_answer(tmp_path: Path) -> None:
    teller = discloser(tmp_path, epsilon=0.5)
    first = await counts_of(teller, 0)
    answers = [await counts_of(teller, number % 5) for number in range(1000)]
    # The attacker's best estimate, the mean, equals the first answer.
    assert [sum(column) / len(answers) for column in zip(*answers, strict=True)] == first
    restarted = discloser(tmp_path, epsilon=0.5)
    assert await counts_of(restarted, 1001) == first
    assert restarted.budget.spent("a") == Fraction(1, 2)


async def test_requests_with_different_parameters_spend_at_most_the_budget(tmp_path: Path) -> None:
    teller = discloser(tmp_path, epsilon=0.5, epsilon_budget=2.0)
    seen, refused = [], 0
    for number in range(1000):
        epsilon = 0.5 - number / 10_000  # each release differs from all others
        wishes = json.dumps({"mode": "noisy", "epsilon": epsilon})
        try:
            seen.append(await counts_of(teller, number, wishes))
        except DisclosureRefusedError:
            refused += 1
    assert refused == 1000 - len(seen)
    assert len(seen) <= 5
    assert teller.budget.spent("a") <= 2


async def test_failed_measurement_costs_no_privacy_budget(tmp_path: Path) -> None:
    teller = discloser(tmp_path)

    async def fails(parameters: Parameters) -> dict[str, Any]:
        raise StorageError(f"no data for {parameters.mode}")

    instruction = rpc.Instruction(
        client_id="a",
        disclose=rpc.Disclose(
            signal="label_counts", parameters_json='{"mode":"noisy"}', task=rpc.Plugin(name="t")
        ),
    )
    with pytest.raises(StorageError):
        await teller.answer(instruction, fails)
    assert teller.budget.releases.of("a").releases == ()


@pytest.mark.parametrize(
    ("work", "updates", "withheld"),
    [
        ({"train": rpc.Train(encoding=ENCODING_MASKED_UINT32)}, "open", True),
        ({"disclose": rpc.Disclose()}, "open", True),
        ({"question": rpc.Question(kind="loss")}, "open", True),
        ({"secure": rpc.SecureStep()}, "open", True),
        ({"evaluate": rpc.Evaluate()}, "masked", True),
        ({"train": rpc.Train()}, "open", False),
        ({"evaluate": rpc.Evaluate()}, "open", False),
    ],
)
def test_failure_reason_that_depends_on_data_is_not_sent(
    work: dict[str, Any], updates: Any, withheld: bool
) -> None:
    instruction, policy = rpc.Instruction(**work), DisclosurePolicy(updates=updates)
    seen = {
        (found.reason, found.message)
        for error in (
            TrainingError("label 12 of 10"),
            DataError("sample 6 is NaN"),
            NotFiniteError("the loss of sample 6 is NaN"),
        )
        for found in [without_data(instruction, error, policy)]
    }
    assert (len(seen) == 1) == withheld
    assert any("sample 6" in message for _, message in seen) != withheld
    full = StorageError("the disk is full")
    assert without_data(instruction, full, policy) is full
