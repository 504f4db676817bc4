"""Noise on whole updates: the norm bound on the grid, and the charge of an upload."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.client.disclosure.disclosure_policy import DisclosurePolicy
from potluck.client.private_training import SumGrid, UpdateNoise
from potluck.common.errors import (
    ConfigurationError,
    DisclosureRefusedError,
    PotluckError,
    ProtocolError,
    ProtocolVersionError,
    StorageError,
)
from potluck.common.records.privacy_loss import BUDGET_SPENT
from potluck.common.settings.local_training import LocalTraining
from potluck.privacy.accounting import ORDERS, GaussianSteps, epsilon_by_rdp
from potluck.privacy.host.client_noise import (
    ClientNoise,
    check_grid,
    noise_on_grid,
    share_variance,
)
from potluck.privacy.host.host_guard import HostGuard, spent_in_epoch
from potluck.privacy.host.ledger_report import PrivacyReport
from potluck.privacy.host.privacy_ledger import PrivacyLedger
from potluck.privacy.planned_training import noise_multiplier_for
from potluck.privacy.rdp_filter import epsilon_spent
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.rpc.v1 import transfer_pb2

GRID = SumGrid(scale=1e6, values=1000, clients=10, contributors=4, largest=2**31 - 1)


def noise(clip: float = 1.0) -> ClientNoise:
    return ClientNoise(clip=clip, noise_multiplier=1.0, charge=lambda _: None)


# The grid ----------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    values=st.integers(1, 3000),
    length=st.floats(1e-3, 1e6),
    clip=st.floats(1e-3, 1e3),
    steps=st.integers(2, 10**6),
)
def test_norm_of_a_rounded_update_never_exceeds_the_charged_bound(
    seed: int, values: int, length: float, clip: float, steps: int
) -> None:
    """steps: number of grid steps that the clip has."""
    vector = np.random.default_rng(seed).standard_normal(values)
    update = (vector * (length / np.linalg.norm(vector))).astype(np.float32)
    assert noise(clip).bound(update) is not None
    scale = steps / clip
    words = np.rint(update.astype(np.float64) * scale)
    grid = SumGrid(scale=scale, values=values, clients=3, contributors=1, largest=2**62)
    longest = np.linalg.norm(words)
    assert longest <= scale * clip + math.sqrt(values) / 2
    assert noise_on_grid(1.0, clip, grid) * longest <= scale * clip


def test_update_within_the_clip_is_unchanged_and_a_non_finite_one_is_reported() -> None:
    update = np.array([0.3, -0.4], np.float32)
    assert noise().bound(update) is not None
    assert update.tolist() == np.array([0.3, -0.4], np.float32).tolist()
    for value in (math.nan, math.inf):
        assert noise().bound(np.array([0.0, value], np.float32)) is None


@pytest.mark.parametrize("length", [0.5, 0.99, 7.0])
def test_norm_of_an_update_with_its_count_is_at_most_the_clip(length: float) -> None:
    share, clip = 0.1, 1.0
    made = ClientNoise(clip=clip, noise_multiplier=1.0, charge=lambda _: None, counted_share=share)
    update = np.full(100, length / 10, np.float32)
    counted = made.bound(update)
    assert counted is not None
    assert (counted > 0) == (length <= clip)
    assert math.hypot(float(np.linalg.norm(update)), counted) <= clip / math.sqrt(1 - share)
    # Andrew et al. split the privacy loss such that the count alone has the noise multiplier σ /
    # √share.
    assert abs(counted) == pytest.approx(math.sqrt(share) * clip / math.sqrt(1 - share), rel=1e-5)


def test_noise_shares_of_the_guaranteed_clients_sum_to_the_full_noise() -> None:
    one = share_variance(2.0, 0.5, GRID)
    assert one * GRID.contributors >= (2.0 * 0.5 * GRID.scale) ** 2
    assert one == pytest.approx(2.5e11)


def test_each_charge_draws_noise_of_its_own() -> None:
    upload = noise()
    first, second = upload.charge(GRID), upload.charge(GRID)
    drawn = [each(1000).tobytes() for each in (first, first, second)]
    assert len(set(drawn)) == 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"largest": 10**7}, "could overflow"),
        ({"values": 10**8, "scale": 1e5}, "too coarse"),
        ({"scale": 100.0}, "too coarse"),
        ({"scale": 1e16, "largest": 2**80}, "too coarse"),
    ],
)
def test_unsuitable_sum_grid_is_refused_before_the_charge(
    changes: dict[str, Any], words: str
) -> None:
    charged: list[float] = []
    grid = replace(GRID, **changes)
    made = ClientNoise(clip=1.0, noise_multiplier=1.0, charge=charged.append)
    with pytest.raises(ConfigurationError, match=words):
        made.charge(grid)
    assert charged == []


def test_sum_grid_with_room_for_twelve_standard_deviations_is_accepted() -> None:
    deviations = 12 * math.sqrt(GRID.clients / GRID.contributors)
    needed = GRID.scale * (GRID.clients + deviations) + 20
    just = SumGrid(scale=1e6, values=1000, clients=10, contributors=4, largest=int(needed))
    check_grid(1.0, 1.0, just)


# The ledger --------------------------------------------------------------------------------------


def guard(state: Path, **policy: Any) -> HostGuard:
    return HostGuard(
        state, DisclosurePolicy(**policy), federation="demo", coordinator="127.0.0.1:7443"
    )


def instruction(number: int = 1, **privacy: Any) -> rpc.Instruction:
    asked: dict[str, Any] = {
        "unit": "client",
        "noise": "clients",
        "noise_multiplier": 4.0,
        "delta": 1e-5,
        "clip": 1.0,
        "trainings": 30,
    }
    work = rpc.Train(
        training_json=LocalTraining(batch_size=16, epochs=1).as_json(),
        encoding=transfer_pb2.ENCODING_MASKED_UINT32,
        privacy=rpc.Privacy(**asked | privacy),
    )
    return rpc.Instruction(
        id=f"run-{number}", client_id="client-0", run_id="run", round=number, train=work
    )


def lines(state: Path) -> list[dict[str, Any]]:
    path = state / "privacy" / "client-0.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()[1:]] if path.exists() else []


def test_each_upload_is_charged_with_its_noise_on_the_grid(tmp_path: Path) -> None:
    found = guard(tmp_path, training_epsilon=100).hide_update(instruction())
    assert lines(tmp_path) == [], "nothing was uploaded yet"
    found.charge(GRID)
    [line] = lines(tmp_path)
    assert (line["unit"], line["steps"], line["sampling_rate"]) == ("client", 1, 1.0)
    rounding = math.sqrt(GRID.values) / (2 * GRID.scale)
    assert line["noise_multiplier"] == pytest.approx(4.0 / (1 + rounding), rel=1e-6)
    assert line["noise_multiplier"] < 4.0 / (1 + rounding)
    found.charge(GRID)
    assert len(lines(tmp_path)) == 2


def test_privacy_loss_of_a_record_uses_half_the_noise_multiplier(tmp_path: Path) -> None:
    policy = DisclosurePolicy(training_epsilon=100)
    made = guard(tmp_path, training_epsilon=100)
    for number in range(3):
        made.hide_update(instruction(number)).charge(GRID)
    trainings = PrivacyLedger(tmp_path / "privacy").of("client-0")
    for unit, multiplier in (("client", 4.0), ("record", 2.0)):
        spent = spent_in_epoch(trainings, policy, unit).epsilon_spent  # type: ignore[arg-type]
        known = epsilon_by_rdp([GaussianSteps(noise_multiplier=multiplier, steps=3)], 1e-5)
        assert known < spent < 1.5 * known


@pytest.mark.parametrize("limit", [4.0, 6.0])
def test_privacy_limit_of_the_owner_holds_for_records_and_clients(
    tmp_path: Path, limit: float
) -> None:
    made = guard(tmp_path, training_epsilon=limit)

    def charge_all() -> None:
        for number in range(100):
            made.hide_update(instruction(number)).charge(GRID)

    with pytest.raises(DisclosureRefusedError, match=BUDGET_SPENT):
        charge_all()
    policy = DisclosurePolicy(training_epsilon=limit)
    trainings = PrivacyLedger(tmp_path / "privacy").of("client-0")
    assert trainings
    spent = spent_in_epoch(trainings, policy, "record").epsilon_spent
    assert spent_in_epoch(trainings, policy, "client").epsilon_spent < spent <= limit


def test_granted_noise_is_refused_if_others_have_spent_the_limit(tmp_path: Path) -> None:
    made = guard(tmp_path, training_epsilon=3.0)
    one, other = (made.hide_update(instruction(number)) for number in (1, 2))
    one.charge(GRID)
    with pytest.raises(DisclosureRefusedError, match=BUDGET_SPENT):
        other.charge(GRID)
    assert len(lines(tmp_path)) == 1


def test_update_is_not_released_if_the_ledger_can_not_be_written(tmp_path: Path) -> None:
    made = guard(tmp_path, training_epsilon=100)
    made.hide_update(instruction()).charge(GRID)
    path = tmp_path / "privacy" / "client-0.jsonl"
    path.unlink()
    path.mkdir()
    with pytest.raises(StorageError):
        made.hide_update(instruction(2)).charge(GRID)


def test_planned_number_of_trainings_stays_within_the_epsilon(tmp_path: Path) -> None:
    multiplier = noise_multiplier_for(epsilon=2.0, delta=1e-5, trainings=5)
    made = guard(tmp_path, training_epsilon=10.0)
    asked = {"noise_multiplier": multiplier, "epsilon": 2.0, "trainings": 5}
    for number in range(5):
        made.hide_update(instruction(number, **asked)).charge(GRID)
    with pytest.raises(DisclosureRefusedError, match=BUDGET_SPENT):
        made.hide_update(instruction(6, **asked))
    trainings = PrivacyLedger(tmp_path / "privacy").of("client-0")
    spent = spent_in_epoch(trainings, DisclosurePolicy(), "client").epsilon_spent
    assert 1.98 < spent <= 2.0


def test_epsilon_of_gaussian_steps_equals_dp_accounting() -> None:
    """σ = 4, 30 times: ε = 6.813318 at δ = 1e-5, by dp-accounting 0.6."""
    steps = GaussianSteps(noise_multiplier=4.0, steps=30)
    assert epsilon_by_rdp([steps], 1e-5) == pytest.approx(6.813318, abs=1e-6)
    multiplier = noise_multiplier_for(epsilon=6.0, delta=1e-5, trainings=30)
    divergences = tuple(30 * a / (2 * multiplier**2) for a in ORDERS)
    assert epsilon_spent(divergences, 1e-5) <= 6.0


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"noise": ""}, ProtocolVersionError),
        ({"noise": "passers-by"}, ProtocolVersionError),
        ({"unit": "household"}, ProtocolVersionError),
        ({"clip": 0.0}, ProtocolError),
        ({"noise_multiplier": math.inf}, ProtocolError),
        ({"noise_multiplier": 0.0, "epsilon": 1.0}, ProtocolError),
    ],
)
def test_invalid_client_noise_is_refused(
    tmp_path: Path, changes: dict[str, Any], error: type[PotluckError]
) -> None:
    with pytest.raises(error):
        guard(tmp_path).hide_update(instruction(**changes))
    assert lines(tmp_path) == []


@pytest.mark.parametrize("missing", ["masks", "plain mean"])
def test_client_noise_for_unmasked_or_normalised_updates_is_refused(
    tmp_path: Path, missing: str
) -> None:
    asked = instruction()
    if missing == "masks":
        asked.train.encoding = transfer_pb2.ENCODING_FLOAT32
    else:
        asked.train.normalized = True
    with pytest.raises(ProtocolError, match=r"masked|normalised"):
        guard(tmp_path).hide_update(asked)


def test_privacy_report_shows_records_and_clients(tmp_path: Path) -> None:
    policy = DisclosurePolicy(training_epsilon=6.0)
    made: UpdateNoise = guard(tmp_path, training_epsilon=6.0).hide_update(instruction())
    made.charge(GRID)
    text = "\n".join(PrivacyReport(tmp_path, policy).lines())
    assert "per record" in text
    assert "per client" in text
    [found] = json.loads(PrivacyReport(tmp_path, policy).values())["clients"]
    assert found["updates"]["unit"] == "client"
    assert 0 < found["updates"]["epsilon_spent"] < found["training"]["epsilon_spent"]
