"""No schedule of events, even an adaptive one, exceeds the owner's limit."""

import math
from collections import Counter
from fractions import Fraction

import pytest
from dp_accounting.rdp import RdpAccountant, compute_epsilon
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.privacy.accounting import ORDERS, GaussianSteps, epsilon_by_rdp, rdp_of
from potluck.privacy.rdp_filter import RdpFilter, solved_noise

DELTA = 1e-5
EVENTS = st.builds(
    GaussianSteps,
    sampling_rate=st.sampled_from([0.001, 0.02, 0.064, 0.3, 1.0]),
    noise_multiplier=st.sampled_from([0.4, 0.8, 1.1, 2.0, 8.0, 40.0]),
    steps=st.integers(1, 500),
)


def test_filter_conversion_equals_dp_accounting_with_delta_split_over_orders() -> None:
    event = GaussianSteps(sampling_rate=0.064, noise_multiplier=1.0, steps=480)
    spent = RdpFilter(epsilon=0, delta=DELTA).with_event(event).epsilon_spent
    expected, _ = compute_epsilon(ORDERS, rdp_of(event), DELTA / len(ORDERS))
    assert spent == pytest.approx(expected, abs=1e-12)


def test_filter_epsilon_is_at_most_1_25_times_that_of_a_fixed_schedule() -> None:
    event = GaussianSteps(sampling_rate=0.01, noise_multiplier=1.1, steps=1000)
    spent = RdpFilter(epsilon=0, delta=DELTA).with_event(event).epsilon_spent
    fixed = epsilon_by_rdp([event], DELTA)
    assert fixed <= spent <= 1.25 * fixed


def test_filter_refuses_an_event_beyond_the_limit_and_admits_a_smaller_one() -> None:
    training = GaussianSteps(sampling_rate=0.064, noise_multiplier=1.0, steps=80)
    found, admitted = RdpFilter(epsilon=6.0, delta=DELTA), 0
    while found.admits(training):
        found, admitted = found.with_event(training), admitted + 1
    assert 0 < admitted < 6
    assert found.epsilon_spent <= 6.0 < found.with_event(training).epsilon_spent
    assert found.admits(GaussianSteps(sampling_rate=0.001, noise_multiplier=8.0, steps=1))


def test_filter_with_limit_zero_admits_no_event() -> None:
    nothing = RdpFilter(epsilon=0.0, delta=DELTA)
    assert nothing.epsilon_spent == 0.0
    assert not nothing.admits(GaussianSteps(noise_multiplier=10_000.0))


@settings(deadline=None, max_examples=30)
@given(
    limit=st.floats(0.1, 20),
    delta=st.sampled_from([1e-7, 1e-5, 1e-3]),
    asked=st.lists(EVENTS, max_size=30),
)
def test_admitted_events_of_any_schedule_stay_within_the_limit(
    limit: float, delta: float, asked: list[GaussianSteps]
) -> None:
    found = RdpFilter(epsilon=limit, delta=delta)
    admitted: list[GaussianSteps] = []
    for event in asked:
        if found.admits(event):
            found, admitted = found.with_event(event), [*admitted, event]
    assert found.epsilon_spent <= limit
    independent = RdpAccountant()
    for event in admitted:
        independent.compose(event.dp_event())
    assert independent.get_epsilon(delta) <= limit + 1e-9


@settings(deadline=None, max_examples=20)
@given(limit=st.floats(0.2, 12), choices=st.data())
def test_admitted_events_of_an_adaptive_schedule_stay_within_the_limit(
    limit: float, choices: st.DataObject
) -> None:
    """An adaptive schedule: noise is halved after a grant and doubled after a refusal."""
    found = RdpFilter(epsilon=limit, delta=DELTA)
    admitted: Counter[tuple[float, float]] = Counter()
    noise, refusals = 4.0, 0
    while refusals < 6 and noise > 0.2:
        rate, steps = choices.draw(st.sampled_from([0.02, 1.0])), choices.draw(st.integers(1, 60))
        event = GaussianSteps(sampling_rate=rate, noise_multiplier=noise, steps=steps)
        if found.admits(event):
            found = found.with_event(event)
            admitted[rate, noise] += steps
            noise /= 2
        else:
            noise, refusals = noise * 2, refusals + 1
        assert found.epsilon_spent <= limit
    independent = RdpAccountant()
    for (rate, of), steps in admitted.items():
        event = GaussianSteps(sampling_rate=rate, noise_multiplier=of, steps=steps)
        independent.compose(event.dp_event())
    assert independent.get_epsilon(DELTA) <= limit + 1e-9


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 3.0, 8.0])
def test_computed_noise_spends_nearly_all_of_the_limit_and_never_more(epsilon: float) -> None:
    trainings, rate, steps = 30, 0.2, 5
    noise = solved_noise(epsilon=epsilon, delta=DELTA, sampling_rate=rate, steps=trainings * steps)
    one = GaussianSteps(sampling_rate=rate, noise_multiplier=noise, steps=steps)
    found = RdpFilter(epsilon=epsilon, delta=DELTA)
    for _ in range(trainings):
        assert found.admits(one)
        found = found.with_event(one)
    assert found.epsilon_spent > 0.995 * epsilon
    assert not found.admits(one)


@pytest.mark.parametrize("epsilon", [0.01, 0.5, 1.0, 4.0])
def test_divergence_of_a_pure_disclosure_bounds_randomized_response(
    epsilon: float,
) -> None:
    found = RdpFilter(epsilon=0, delta=DELTA).with_pure([Fraction(epsilon)]).spent
    p = 1 / (1 + math.exp(-epsilon))  # of all ε-private mechanisms, it has the largest divergence
    for order, bound in zip(ORDERS, found, strict=True):
        terms = [order * math.log(one) + (1 - order) * math.log(1 - one) for one in (p, 1 - p)]
        exact = (max(terms) + math.log(sum(math.exp(each - max(terms)) for each in terms))) / (
            order - 1
        )
        assert exact <= bound * (1 + 1e-9) + 1e-12


def test_pure_disclosures_alone_add_up_exactly() -> None:
    found = RdpFilter(epsilon=0.3, delta=DELTA)
    for _ in range(3):  # in floating point, 0.1 + 0.1 + 0.1 is more than 0.3
        assert found.pure_room >= Fraction("0.1")
        found = found.with_pure([Fraction("0.1")])
    assert found.epsilon_spent == 0.3
    assert found.pure_room == 0


@settings(deadline=None, max_examples=60)
@given(limit=st.floats(0.1, 20), events=st.lists(EVENTS, min_size=1, max_size=4))
def test_the_room_for_a_pure_disclosure_fills_the_limit(
    limit: float, events: list[GaussianSteps]
) -> None:
    found = RdpFilter(epsilon=limit, delta=DELTA).with_events(events)
    room = found.pure_room
    if found.epsilon_spent < limit:
        assert found.with_pure([room]).epsilon_spent == pytest.approx(limit)
        assert found.with_pure([room]).epsilon_spent <= limit + 1e-9
        assert room >= limit - found.epsilon_spent - 1e-9
    else:
        assert room == 0
