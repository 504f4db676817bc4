"""ε of events, compared with published values and with dp-accounting."""

import dp_accounting as dp
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

from potluck.common.errors import ConfigurationError
from potluck.privacy.accounting import (
    ORDERS,
    GaussianSteps,
    epsilon_by_pld,
    epsilon_by_rdp,
    noise_for,
    rdp_of,
)

DELTA = 1e-5
VECTORS = [
    (GaussianSteps(noise_multiplier=1), 4.728507, 4.377178),
    (GaussianSteps(noise_multiplier=1, steps=10), 19.053598, 17.856587),
    (GaussianSteps(noise_multiplier=4, steps=30), 6.813318, 6.325715),
    (GaussianSteps(noise_multiplier=8, steps=100), 6.122758, 5.679587),
    (GaussianSteps(sampling_rate=0.01, noise_multiplier=1.1, steps=1000), 1.711770, 1.515370),
    (GaussianSteps(sampling_rate=0.064, noise_multiplier=1, steps=480), 10.673144, 9.704305),
]


@pytest.mark.parametrize(("event", "by_rdp", "by_pld"), VECTORS, ids=lambda value: str(value))
def test_epsilon_equals_the_published_values_to_all_digits(
    event: GaussianSteps, by_rdp: float, by_pld: float
) -> None:
    assert round(epsilon_by_rdp([event], DELTA), 6) == by_rdp
    assert round(epsilon_by_pld([event], DELTA), 6) == by_pld


def test_epsilon_of_a_mixed_schedule_equals_dp_accounting() -> None:
    schedule = [
        GaussianSteps(sampling_rate=0.02, noise_multiplier=1.3, steps=50),
        GaussianSteps(sampling_rate=0.5, noise_multiplier=6, steps=4),
        GaussianSteps(sampling_rate=0.02, noise_multiplier=1.3, steps=50),
    ]
    rdp, pld = RdpAccountant(), PLDAccountant()
    for accountant in (rdp, pld):
        for rate, noise, steps in [(0.02, 1.3, 100), (0.5, 6.0, 4)]:
            one = dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(noise))
            accountant.compose(dp.SelfComposedDpEvent(one, steps))
    assert epsilon_by_rdp(schedule, DELTA) == pytest.approx(rdp.get_epsilon(DELTA), abs=1e-6)
    assert epsilon_by_pld(schedule, DELTA) == pytest.approx(pld.get_epsilon(DELTA), abs=1e-6)


def test_divergence_of_gaussian_noise_equals_the_closed_form() -> None:
    event = GaussianSteps(noise_multiplier=2.5, steps=7)
    expected = [7 * order / (2 * 2.5**2) for order in ORDERS]
    assert rdp_of(event) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "wrong",
    [
        {"sampling_rate": 0.0},
        {"sampling_rate": 1.5},
        {"noise_multiplier": 0.0},
        {"noise_multiplier": float("nan")},
        {"steps": 0},
    ],
)
def test_invalid_privacy_event_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="not a valid event of the privacy accounting"):
        GaussianSteps(**{"noise_multiplier": 1.0, **wrong})  # type: ignore[arg-type]


def test_unreachable_epsilon_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigurationError, match="raise epsilon"):
        noise_for(0.5, lambda _: 1.0)
