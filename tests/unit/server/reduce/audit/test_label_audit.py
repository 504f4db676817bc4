"""The audit of claimed label counts: what it concludes, and how often it is wrong."""

import math
import random
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from potluck.client.disclosure.laplace import noisy_counts
from potluck.client.training.objectives.cross_entropy import CrossEntropy
from potluck.client.training.steps.loop import TrainingContext, train
from potluck.common.errors import ConfigurationError
from potluck.common.learning.training import training_for
from potluck.common.names import ClientId
from potluck.common.tasks.digits import Digits
from potluck.common.tensors.model_arrays import load_arrays, state_arrays
from potluck.server.reduce.audit.label_audit import (
    AuditSettings,
    BiasUpdates,
    ClientAudit,
    Contradiction,
    LabelVerdict,
    LocalSteps,
    audit_labels,
    noise_at_most,
    output_bias,
)

Floats = NDArray[np.float64]
EXACT = np.array([math.inf])


def one_client(
    claimed: list[float],
    changes: list[list[float]],
    *,
    rate: float = math.inf,
    steps: LocalSteps | None = None,
    settings: AuditSettings | None = None,
) -> ClientAudit:
    """Return the audit of one client. changes: of its output bias, one row per round."""
    rounds = [
        BiasUpdates(
            changes=np.array([change]),
            fewest=None if steps is None else steps.fewest_samples(np.array([change])),
            spans=None if steps is None else np.array([steps.span]),
        )
        for change in changes
    ]
    [audit] = audit_labels(
        np.array([claimed]), rounds, noise_rates=np.array([rate]), settings=settings
    )
    return audit


def test_bias_that_rose_once_contradicts_a_claim_of_zero_samples() -> None:
    audit = one_client([40, 0, 60], [[0.1, -0.1, 0.1], [0.1, 0.02, 0.1], [0.1, -0.1, 0.1]])
    [suspicion] = audit.suspicions
    assert (audit.verdict, audit.rounds) == (LabelVerdict.SUSPICIOUS, 3)
    assert suspicion.contradiction is Contradiction.HIDDEN
    assert (suspicion.label, suspicion.claimed, suspicion.bound) == (1, 0.0, 1)
    assert (suspicion.rounds, suspicion.rises, suspicion.probability) == (3, 1, 0.0)


def test_bias_that_never_rose_contradicts_a_claim_of_many_samples() -> None:
    audit = one_client([50, 50, 0], [[0.1, -0.1, -0.1]] * 5)
    [suspicion] = audit.suspicions
    assert suspicion.contradiction is Contradiction.INVENTED
    assert (suspicion.label, suspicion.claimed, suspicion.bound) == (1, 50.0, 5)
    assert (suspicion.rounds, suspicion.rises, suspicion.probability) == (5, 0, 0.0)


def test_bias_that_never_rose_in_four_rounds_is_not_suspicious() -> None:
    assert one_client([50, 50], [[0.1, -0.1]] * 4).verdict is LabelVerdict.CONSISTENT


def test_claim_of_few_samples_is_consistent_with_a_bias_that_never_rose() -> None:
    """A client may claim three samples, or 5 % of all, of a class whose bias never rose."""
    assert one_client([27, 3], [[0.1, -0.1]] * 9).verdict is LabelVerdict.CONSISTENT
    assert one_client([26, 4], [[0.1, -0.1]] * 9).verdict is LabelVerdict.SUSPICIOUS
    assert one_client([950, 50], [[0.1, -0.1]] * 9).verdict is LabelVerdict.CONSISTENT
    strict = AuditSettings(unseen_samples=0, unseen_share=0.0)
    assert (
        one_client([27, 1], [[0.1, -0.1]] * 9, settings=strict).verdict is LabelVerdict.SUSPICIOUS
    )


def test_size_of_a_bias_rise_gives_the_minimum_number_of_samples() -> None:
    """A rise of 0.3 by ten steps of 0.1 needs three samples in ten: 30 of 100."""
    claim, changes = [95.0, 5.0], [[0.1, 0.1], [0.1, 0.31], [0.1, -0.4]]
    steps = ten_steps()
    [suspicion] = one_client(claim, changes, steps=steps).suspicions
    assert (suspicion.label, suspicion.bound) == (1, 31)
    assert one_client(claim, changes).verdict is LabelVerdict.CONSISTENT
    assert one_client([69, 31], changes, steps=steps).verdict is LabelVerdict.CONSISTENT


def ten_steps(**changes: Any) -> LocalSteps:
    """Return ten steps at learning rate 0.1 on all 100 samples; `changes` replaces these values."""
    values = {
        "samples": 100,
        "steps": 10,
        "batch_size": 100,
        "learning_rate": 0.1,
        "momentum": 0.0,
    }
    return LocalSteps(**values | changes)


def test_bias_rise_from_a_small_last_batch_needs_few_samples() -> None:
    """A pass has a batch of 99 samples and a batch of 1, which alone moves its class by 0.1."""
    steps = ten_steps(batch_size=99)
    assert steps.fewest_samples(np.array([0.5, 0.0, -0.1])).tolist() == [1.0, 0.0, 0.0]
    assert steps.fewest_samples(np.array([0.75])).tolist() == pytest.approx([1 + 0.5 * 99])
    assert one_client([99, 1], [[0.1, 0.45]], steps=steps).verdict is LabelVerdict.CONSISTENT


def test_bias_that_never_rose_is_not_suspicious_when_steps_are_too_short() -> None:
    never, many = [[0.1, -0.1]] * 9, [50.0, 50.0]
    assert ten_steps().span == pytest.approx(1.0)
    assert ten_steps(momentum=0.5).span == pytest.approx(0.2 * (10 - 0.5 * (1 - 0.5**10) / 0.5))
    assert one_client(many, never, steps=ten_steps()).verdict is LabelVerdict.CONSISTENT
    far = ten_steps(learning_rate=0.25)
    assert one_client(many, never, steps=far).verdict is LabelVerdict.SUSPICIOUS


@given(
    st.integers(1, 40),
    st.integers(1, 45),
    st.integers(1, 9),
    st.sampled_from([0.0, 0.5, 0.9]),
    st.integers(0, 40),
    st.integers(0, 2**32 - 1),
)
def test_bias_rise_never_exceeds_the_bound_by_the_samples_of_its_class(
    samples: int, batch_size: int, passes: int, momentum: float, held: int, seed: int
) -> None:
    """The bound holds even if the model never predicts the class and training ends within a
    pass."""
    held = min(held, samples)
    generator = np.random.default_rng(seed)
    of_class = np.arange(samples) < held
    bias = velocity = 0.0
    taken, planned = 0, int(generator.integers(1, passes * -(-samples // batch_size) + 1))
    while taken < planned:
        order = generator.permutation(samples)
        for begin in range(0, samples, batch_size):
            if taken < planned:
                velocity = momentum * velocity + of_class[order[begin : begin + batch_size]].mean()
                bias += 0.1 * velocity
                taken += 1
    steps = LocalSteps(
        samples=samples, steps=taken, batch_size=batch_size, learning_rate=0.1, momentum=momentum
    )
    assert steps.fewest_samples(np.array([bias]))[0] <= held + 1e-9
    assert bias <= steps.span + 1e-9


def test_claim_is_suspicious_only_if_noise_makes_it_improbable() -> None:
    """At ε = 0.5 a claim of −2 for one sample has probability e^−1.5 / (1 + e^−0.5) = 0.139."""
    changes = [[0.1, 0.1]]
    assert one_client([100, 0], changes).verdict is LabelVerdict.SUSPICIOUS
    assert one_client([100, -2], changes, rate=0.5).verdict is LabelVerdict.CONSISTENT
    [suspicion] = one_client([100, -12], changes, rate=0.5).suspicions
    expected = math.exp(-6.5) / (1 + math.exp(-0.5))
    assert suspicion.probability == pytest.approx(expected)
    [suspicion] = one_client([100, 20], [[0.1, -0.1]] * 5, rate=0.5).suspicions
    assert suspicion.probability == pytest.approx(math.exp(-7) / (1 + math.exp(-0.5)))


def test_suspicions_are_sorted_with_the_least_probable_first() -> None:
    audit = one_client([-15, 500, -20, -15], [[0.1] * 4], rate=0.5)
    assert [suspicion.label for suspicion in audit.suspicions] == [2, 0, 3]


def test_client_without_updates_or_claims_has_the_verdict_unknown() -> None:
    nothing = math.nan
    claimed = np.array([[5.0, 5.0], [nothing, nothing], [5.0, 5.0]])
    changes = np.array([[nothing, nothing], [0.1, -0.1], [0.1, 0.1]])
    audits = audit_labels(claimed, [BiasUpdates(changes=changes)], noise_rates=np.full(3, 1.0))
    assert [audit.row for audit in audits] == [0, 1, 2]
    assert [audit.verdict for audit in audits] == [
        LabelVerdict.UNKNOWN,
        LabelVerdict.UNKNOWN,
        LabelVerdict.CONSISTENT,
    ]
    assert [audit.rounds for audit in audits] == [0, 1, 1]
    assert audit_labels(claimed, [], noise_rates=np.full(3, 1.0))[2].verdict is LabelVerdict.UNKNOWN


@given(st.integers(-60, 60), st.floats(0.05, 5))
def test_noise_distribution_function_equals_that_of_scipy(value: int, rate: float) -> None:
    assert noise_at_most(value, rate) == pytest.approx(float(stats.dlaplace(rate).cdf(value)))


def test_noise_of_an_exact_claim_is_zero() -> None:
    assert [noise_at_most(value, math.inf) for value in (-1, 0, 1)] == [0.0, 1.0, 1.0]


def test_output_bias_is_the_last_parameter_with_one_value_per_class() -> None:
    model = {"a.bias": np.zeros(3), "b.weight": np.zeros((3, 3)), "b.bias": np.zeros(3)}
    assert output_bias(model, 3) == "b.bias"
    with pytest.raises(ConfigurationError, match="no bias of 4 classes"):
        output_bias(model, 4)


def test_audit_refuses_claims_changes_and_rates_of_wrong_shape_or_value() -> None:
    claimed, changes = np.zeros((2, 3)), np.zeros((2, 3))
    rates = np.ones(2)
    with pytest.raises(ConfigurationError, match="clients × classes"):
        audit_labels(np.zeros(3), [], noise_rates=rates)
    with pytest.raises(ConfigurationError, match="do not match arrays"):
        audit_labels(claimed, [BiasUpdates(changes=np.zeros((2, 4)))], noise_rates=rates)
    with pytest.raises(ConfigurationError, match="do not match arrays"):
        audit_labels(claimed, [BiasUpdates(changes=changes, fewest=rates)], noise_rates=rates)
    with pytest.raises(ConfigurationError, match="do not match arrays"):
        audit_labels(claimed, [BiasUpdates(changes=changes, spans=np.ones(3))], noise_rates=rates)
    with pytest.raises(ConfigurationError, match="do not match arrays"):
        audit_labels(claimed, [], noise_rates=np.ones(3))
    with pytest.raises(ConfigurationError, match="not positive"):
        audit_labels(claimed, [], noise_rates=np.array([1.0, 0.0]))


@pytest.mark.parametrize(
    "values",
    [
        {"significance": 0.0},
        {"significance": 1.0},
        {"least_rounds": 0},
        {"least_span": -0.1},
        {"unseen_samples": -1},
        {"unseen_share": 1.0},
    ],
)
def test_audit_settings_out_of_range_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError):
        AuditSettings(**values)  # type: ignore[arg-type]  # counts are int, shares float


# Measured on a federation that trains


CLIENTS, CLASSES, ROUNDS = 12, 10, 8


@cache
def federation(**training: object) -> tuple[NDArray[np.int64], tuple[BiasUpdates, ...]]:
    """Return true label counts, and bias updates of eight FedAvg rounds in which all clients
    train."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for steps this small, several threads are slower
    try:
        return _played(training)
    finally:
        torch.set_num_threads(threads)


def _played(
    training: Mapping[str, object],
) -> tuple[NDArray[np.int64], tuple[BiasUpdates, ...]]:
    task = Digits(clients=CLIENTS, alpha=0.3)
    torch.manual_seed(0)
    model = task.model()
    settings = training_for(task, training, source="test")
    data = [task.client_data(ClientId(f"client-{row}"), None).train for row in range(CLIENTS)]
    counts = np.stack([np.bincount(one.labels.numpy(), minlength=CLASSES) for one in data])
    shares = counts.sum(axis=1) / counts.sum()
    weights = {name: array.copy() for name, array in state_arrays(model).items()}
    bias = output_bias(weights, CLASSES)
    seen = []
    for number in range(1, ROUNDS + 1):
        changes, fewest = np.zeros(counts.shape), np.zeros(counts.shape)
        spans = np.zeros(CLIENTS)
        average = {name: np.zeros(array.shape) for name, array in weights.items()}
        for row, samples in enumerate(data):
            load_arrays(model, weights)
            result = train(
                model,
                samples,
                CrossEntropy(),
                settings,
                TrainingContext(
                    classes=CLASSES,
                    seed=number * 100 + row,
                    round=number,
                    device=torch.device("cpu"),
                ),
            )
            trained = state_arrays(model)
            changes[row] = trained[bias].astype(np.float64) - weights[bias]
            steps = LocalSteps(
                samples=len(samples),
                steps=result.steps,
                batch_size=settings.batch_size,
                learning_rate=settings.learning_rate_in(number),
                momentum=settings.momentum,
            )
            fewest[row], spans[row] = steps.fewest_samples(changes[row]), steps.span
            for name, array in trained.items():
                average[name] += shares[row] * array
        weights = {name: array.astype(np.float32) for name, array in average.items()}
        seen.append(BiasUpdates(changes=changes, fewest=fewest, spans=spans))
    return counts, tuple(seen)


def suspicious(claimed: Floats, epsilon: float) -> float:
    """Return the share of clients that the audit calls suspicious."""
    audits = audit_labels(claimed, federation()[1], noise_rates=np.full(CLIENTS, epsilon))
    return float(np.mean([audit.verdict is LabelVerdict.SUSPICIOUS for audit in audits]))


def noised(counts: NDArray[np.int64], epsilon: float, seed: int) -> Floats:
    noisy = noisy_counts(
        counts.ravel().tolist(),
        epsilon=epsilon,
        adjacency="add-remove",
        randomness=random.Random(seed),
    )
    return np.array(noisy, dtype=np.float64).reshape(counts.shape)


def test_the_bias_of_a_class_without_samples_never_rises() -> None:
    counts, seen = federation()
    assert (counts == 0).sum() > 10
    for updates in seen:
        assert (updates.changes[counts == 0] < 0).all()


def test_minimum_samples_derived_from_a_bias_never_exceed_the_true_count() -> None:
    counts, seen = federation()
    for updates in seen:
        assert updates.fewest is not None
        assert (updates.fewest <= counts).all()


def test_honest_exact_claims_are_never_suspicious() -> None:
    assert suspicious(federation()[0].astype(np.float64), math.inf) == 0


SLOW_OR_ODD_STEPS: list[dict[str, object]] = [
    {"learning_rate": 0.003},
    {"learning_rate_decay": 0.5},
    {"momentum": 0.0, "learning_rate": 0.5},
    {"epochs": 1},
    {"batch_size": 57},
    {"steps": 1, "batch_size": 1},
]


def test_honest_exact_claims_are_rarely_suspicious_with_slow_or_odd_steps() -> None:
    """An earlier audit counted all rounds and compared a rise with the class's share of all
    samples: up to half of the clients were suspicious. That a class rises in the end is an
    observation, not a theorem."""
    found = list[ClientAudit]()
    for training in SLOW_OR_ODD_STEPS:
        counts, seen = federation(**training)
        rates = np.full(CLIENTS, math.inf)
        found += audit_labels(counts.astype(np.float64), seen, noise_rates=rates)
    suspicions = [each for audit in found for each in audit.suspicions]
    assert [each for each in suspicions if each.contradiction is Contradiction.HIDDEN] == []
    assert np.mean([audit.verdict is LabelVerdict.SUSPICIOUS for audit in found]) <= 0.02


@pytest.mark.parametrize("epsilon", [1.0, 0.5, 0.1, 0.01])
def test_honest_noisy_claims_are_suspicious_at_most_at_the_significance_level(
    epsilon: float,
) -> None:
    """At most 1 % of 480 audits, the significance level, call a client suspicious."""
    rates = [suspicious(noised(federation()[0], epsilon, seed), epsilon) for seed in range(40)]
    assert np.mean(rates) <= 0.01 + 3 * math.sqrt(0.01 * 0.99 / (40 * CLIENTS))


def test_exact_claims_of_uniform_labels_are_suspicious() -> None:
    counts = federation()[0]
    flattering = np.repeat(counts.sum(axis=1, keepdims=True) / CLASSES, CLASSES, axis=1)
    lacking = (counts == 0).any(axis=1)
    assert suspicious(flattering, math.inf) >= 0.8 * lacking.mean()


def test_claim_that_hides_the_largest_class_is_always_suspicious() -> None:
    claimed = federation()[0].copy()
    rows = np.arange(CLIENTS)
    most = claimed.argmax(axis=1)
    claimed[rows, most] = 0
    assert suspicious(claimed.astype(np.float64), math.inf) == 1
