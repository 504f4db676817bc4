"""Objectives compared with hand-computed values, and properties of all objectives."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn

from potluck.client.objective import Batch, LocalContext, Objective
from potluck.client.training.objective_sum import ObjectiveSum, composed
from potluck.client.training.objectives.balanced_softmax import BalancedSoftmax
from potluck.client.training.objectives.cross_entropy import CrossEntropy
from potluck.client.training.objectives.fedlc import FedLC
from potluck.client.training.objectives.fedntd import FedNTD
from potluck.client.training.objectives.fedprox import FedProx
from potluck.client.training.objectives.fedrs import FedRS
from potluck.client.training.objectives.focal import Focal
from potluck.client.training.objectives.noise_robust import (
    NoiseRobust,
    noise_robust_loss,
    reverse_cross_entropy,
)
from potluck.client.training.objectives.symmetric_cross_entropy import SymmetricCrossEntropy
from potluck.common.errors import ConfigurationError, PluginError
from potluck.common.settings.plugins import OBJECTIVES, create, installed

Floats = NDArray[np.float64]
Rows = NDArray[np.int64]


def loss_of(
    objective: Objective,
    logits: list[float],
    label: int,
    counts: list[int],
    *,
    parameters: tuple[Tensor, ...] = (),
    received: tuple[Tensor, ...] = (),
    predictions: Tensor | None = None,
) -> float:
    local = LocalContext(
        round=1,
        label_counts=torch.tensor(counts),
        parameters=parameters,
        received=received,
        predictions=predictions,
    )
    z = torch.tensor([logits])
    batch = Batch(inputs=z, labels=torch.tensor([label]), indices=torch.tensor([0]))
    return float(objective.loss(z, batch, local))


def test_fedrs_scales_logits_of_absent_classes() -> None:
    z, counts = [2.0, 1.0, 3.0], [6, 3, 0]
    assert loss_of(FedRS(alpha=1.0), z, 0, counts) == pytest.approx(1.4076, abs=5e-5)
    assert loss_of(FedRS(), z, 0, counts) == pytest.approx(0.6803, abs=5e-5)
    assert FedRS().scales(torch.tensor(counts)).tolist() == [1.0, 1.0, 0.5]
    assert FedRS(soft=True).scales(torch.tensor(counts)).tolist() == [1.0, 0.75, 0.5]


def test_fedlc_keeps_the_label_in_the_denominator_by_default() -> None:
    z, counts = [1.0, 1.0, 1.0], [16, 81, 0]
    assert loss_of(FedLC(), z, 0, counts) == pytest.approx(0.77995, abs=5e-6)
    assert loss_of(FedLC(denominator="others"), z, 0, counts) == pytest.approx(0.16667, abs=5e-6)
    for masked, expected in (
        (FedLC(denominator="all", absent="mask"), 0.77995),
        (FedLC(denominator="others", absent="mask"), 0.16667),
    ):
        assert loss_of(masked, z, 0, counts) == pytest.approx(expected, abs=5e-6)
    assert FedLC(tau=2.0).margins(torch.tensor(counts)).tolist() == pytest.approx(
        [1.0, 2 / 3, 200.0]
    )


def test_fedlc_loss_is_unbounded_below_only_with_the_denominator_of_the_paper() -> None:
    z, counts = [10.0, 1.0, 1.0], [16, 81, 0]
    assert loss_of(FedLC(denominator="others"), z, 0, counts) == pytest.approx(-8.83, abs=5e-3)
    assert loss_of(FedLC(), z, 0, counts) >= 0


def test_fedlc_does_not_overflow_for_large_logits() -> None:
    assert math.isfinite(loss_of(FedLC(), [1e4, -1e4, 3e3], 1, [16, 81, 0]))
    assert math.isfinite(loss_of(FedLC(denominator="others"), [1e4, -1e4, 3e3], 1, [16, 81, 0]))


def test_fedprox_gradient_is_proportional_to_the_distance_from_the_received_model() -> None:
    weight = nn.Parameter(torch.tensor([3.0, 4.0]))
    received = (torch.zeros(2),)
    local = LocalContext(
        round=1, label_counts=torch.tensor([1, 1]), parameters=(weight,), received=received
    )
    logits = torch.zeros(1, 2)
    batch = Batch(inputs=logits, labels=torch.tensor([0]), indices=torch.tensor([0]))
    loss = composed([FedProx(mu=0.1)]).loss(logits, batch, local)
    torch.autograd.backward(loss)
    assert weight.grad is not None
    assert weight.grad.tolist() == pytest.approx([0.3, 0.4])
    assert float(loss.detach()) == pytest.approx(math.log(2) + 0.05 * 25)


def test_fedprox_with_mu_0_equals_cross_entropy() -> None:
    far = (torch.tensor([1e3]),)
    alone = loss_of(create(Objective, "cross-entropy", {}), [1.0, 2.0], 0, [1, 1])
    near = loss_of(
        composed([FedProx(mu=0.0)]),
        [1.0, 2.0],
        0,
        [1, 1],
        parameters=far,
        received=(torch.zeros(1),),
    )
    assert near == alone


def test_reverse_cross_entropy_is_four_times_one_minus_the_probability() -> None:
    assert float(reverse_cross_entropy(torch.tensor(0.7))) == pytest.approx(1.2)


def test_noise_robust_loss_equals_the_sum_of_its_terms() -> None:
    p = torch.tensor([0.7, 0.2, 0.1])
    believed = torch.tensor([[0.5, 0.25, 0.25]])
    logits = p.log().tolist()
    labelled = -math.log(0.7)
    pseudo = -(0.5 * math.log(0.7) + 0.25 * math.log(0.2) + 0.25 * math.log(0.1))
    found = loss_of(NoiseRobust(alpha=5, beta=2), logits, 0, [1, 1, 1], predictions=believed)
    assert found == pytest.approx(labelled + 5 * pseudo + 2 * 1.2, rel=1e-6)
    assert not NoiseRobust(alpha=0).needs_predictions
    assert loss_of(NoiseRobust(alpha=0, beta=0), logits, 0, [1, 1, 1]) == pytest.approx(labelled)


def test_pseudo_labels_are_looked_up_by_sample_index() -> None:
    logits = torch.zeros(2, 2)
    believed = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]])
    batch = Batch(inputs=logits, labels=torch.tensor([0, 1]), indices=torch.tensor([2, 0]))
    local = LocalContext(
        round=1, label_counts=torch.tensor([1, 1]), parameters=(), predictions=believed
    )
    each = noise_robust_loss(logits, batch.labels, believed[[2, 0]], 1.0, 1.0)
    found = float(NoiseRobust().loss(logits, batch, local))
    assert found == pytest.approx(float(each.mean()))


# Against references in numpy ---------------------------------------------------------------------


def softmax(logits: Floats) -> Floats:
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    found: Floats = shifted / shifted.sum(axis=1, keepdims=True)
    return found


def focal(logits: Floats, labels: Rows, gamma: float) -> float:
    p = softmax(logits)[np.arange(len(labels)), labels]
    return float(np.mean(-((1 - p) ** gamma) * np.log(p)))


def symmetric(logits: Floats, labels: Rows, beta: float) -> float:
    """Return 0.1·CE + β·RCE, computed class by class, with log 0 := ln 1e-4 in the one-hot
    labels."""
    p, one_hot = softmax(logits), np.eye(logits.shape[1])[labels]
    straight = -(one_hot * np.log(p)).sum(axis=1)
    reverse = -(p * np.log(np.where(one_hot > 0, 1.0, 1e-4))).sum(axis=1)
    return float(np.mean(0.1 * straight + beta * reverse))


def balanced(logits: Floats, labels: Rows, counts: Floats, tau: float) -> float:
    """Return −log of the softmax weighted by frequencies: n_y^τ·e^{z_y} / Σ n_c^τ·e^{z_c}."""
    weighed = counts**tau * np.exp(logits)
    own = weighed[np.arange(len(labels)), labels]
    return float(np.mean(-np.log(own / weighed.sum(axis=1))))


def not_true_distillation(
    logits: Floats, labels: Rows, received: Floats, beta: float, tau: float
) -> float:
    """Return the loss, computed sample by sample: Σ q̃·log(q̃/p̃) over all classes except the
    label."""
    total = 0.0
    for z, y, told in zip(logits, labels, received, strict=True):
        others = np.arange(len(z)) != y
        q, p = (softmax(each[None, others] / tau)[0] for each in (told, z))
        total += float((q * np.log(q / p)).sum())
    return beta * tau**2 * total / len(labels)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), strength=st.floats(0.05, 5))
def test_losses_equal_the_formulas_of_their_papers(seed: int, strength: float) -> None:
    generator = np.random.default_rng(seed)
    logits, received = generator.normal(size=(2, 7, 4)) * 3
    labels = generator.integers(0, 4, 7)
    counts = np.array([1.0, 20.0, 3.0, 400.0])
    local = LocalContext(
        round=1,
        label_counts=torch.tensor(counts.astype(np.int64)),
        parameters=(),
        predictions=torch.tensor(softmax(received)),
    )
    batch = Batch(inputs=torch.zeros(7), labels=torch.tensor(labels), indices=torch.arange(7))
    z = torch.tensor(logits)
    for objective, expected in {
        Focal(gamma=strength): focal(logits, labels, strength),
        BalancedSoftmax(tau=strength): balanced(logits, labels, counts, strength),
        SymmetricCrossEntropy(beta=strength): symmetric(logits, labels, strength),
    }.items():
        assert float(objective.loss(z, batch, local)) == pytest.approx(expected, rel=1e-5)
    found = float(FedNTD(beta=0.5, tau=strength).loss(z, batch, local))
    expected = not_true_distillation(logits, labels, received, 0.5, strength)
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-9)


def test_focal_balanced_softmax_and_fedntd_with_weight_0_equal_cross_entropy() -> None:
    z, counts = [1.0, -2.0, 0.5], [5, 3, 0]
    alone = loss_of(CrossEntropy(), z, 1, counts)
    for objective in (Focal(gamma=0), BalancedSoftmax(tau=0), composed([FedNTD(beta=0)])):
        assert not objective.needs_predictions
        assert loss_of(objective, z, 1, counts) == alone


def test_balanced_softmax_ignores_classes_that_a_client_lacks() -> None:
    expected = loss_of(BalancedSoftmax(), [1.0, 2.0], 0, [5, 3])
    assert loss_of(BalancedSoftmax(), [1.0, 2.0, 50.0], 0, [5, 3, 0]) == pytest.approx(expected)
    assert BalancedSoftmax(tau=1e-9).adjustments(torch.tensor([1, 0])).tolist() == [0.0, -math.inf]


def test_symmetric_cross_entropy_without_its_reverse_term_equals_cross_entropy() -> None:
    z, counts = [1.0, -2.0, 0.5], [5, 3, 0]
    found = loss_of(SymmetricCrossEntropy(alpha=1.0, beta=0.0), z, 1, counts)
    assert found == pytest.approx(loss_of(CrossEntropy(), z, 1, counts), rel=1e-6)
    doubt = 1 - float(softmax(np.array([z]))[0, 1])
    reverse = loss_of(SymmetricCrossEntropy(alpha=0.0, zero=math.exp(-4)), z, 1, counts)
    assert reverse == pytest.approx(4 * doubt, rel=1e-6)


# Several together -------------------------------------------------------------------------------


def test_composed_objective_sums_the_losses_and_needs_of_its_terms() -> None:
    z, counts, believed = [1.0, -2.0, 0.5], [5, 3, 0], torch.tensor([[0.2, 0.3, 0.5]])
    weights = {"parameters": (torch.tensor([3.0, 4.0]),), "received": (torch.zeros(2),)}
    terms: list[Objective] = [NoiseRobust(), FedProx(mu=0.1)]
    both = composed(terms)
    assert (both.needs_received, both.needs_predictions, both.proximal) == (True, True, 0.1)
    alone = [loss_of(t, z, 1, counts, **weights, predictions=believed) for t in terms]
    assert loss_of(both, z, 1, counts, **weights, predictions=believed) == pytest.approx(sum(alone))
    assert alone[1] == pytest.approx(0.05 * 25)


def test_cross_entropy_is_added_only_if_no_term_uses_the_labels() -> None:
    focal_loss = Focal()
    assert composed([focal_loss]) is focal_loss
    for terms, expected in (
        ([FedProx()], ["CrossEntropy", "FedProx"]),
        ([FedProx(), FedNTD()], ["CrossEntropy", "FedProx", "FedNTD"]),
        ([FedProx(), Focal()], ["FedProx", "Focal"]),
    ):
        found = composed(terms)
        assert isinstance(found, ObjectiveSum)
        assert [type(term).__name__ for term in found.terms] == expected


NAMES = tuple(name for name in installed(OBJECTIVES) if name != "crash")


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_every_objective_is_finite_and_has_finite_gradients(name: str, data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    scale = data.draw(st.sampled_from([0.01, 1.0, 100.0]))
    logits = (torch.randn(5, 4, generator=generator) * scale).requires_grad_()
    labels = torch.randint(0, 3, (5,), generator=generator)  # class 3 is absent
    weight = nn.Parameter(torch.randn(3, generator=generator))
    local = LocalContext(
        round=1,
        label_counts=torch.bincount(labels, minlength=4),
        parameters=(weight,),
        received=(torch.randn(3, generator=generator),),
        predictions=torch.softmax(torch.randn(5, 4, generator=generator), dim=1),
    )
    batch = Batch(inputs=logits, labels=labels, indices=torch.arange(5))
    objective = composed([create(Objective, name, {})])
    loss = objective.loss(logits, batch, local)
    torch.autograd.backward(loss)
    assert loss.shape == ()
    assert loss.dtype == torch.float32
    assert math.isfinite(float(loss.detach()))
    assert logits.grad is not None
    assert bool(logits.grad.isfinite().all())


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "fedprox",
            {"mu": -0.1},
            "objective fedprox: option 'mu' is -0.1; it must be greater than or equal to 0",
        ),
        ("fedprox", {"mu": math.nan}, "'mu' is nan"),
        ("fedrs", {"alpha": 1.5}, "'alpha' is 1.5; it must be less than or equal to 1"),
        ("fedrs", {"soft": 1}, "'soft' is 1; it must be true or false"),
        ("fedlc", {"tau": "1"}, "'tau' is '1'"),
        ("fedlc", {"denominator": "paper"}, "it must be 'all' or 'others'"),
        ("fedlc", {"absent": "drop"}, "it must be 'margin' or 'mask'"),
        ("noise-robust", {"beta": -1}, "'beta' is -1; it must be greater than or equal to 0"),
        ("focal", {"gamma": -1}, "'gamma' is -1; it must be greater than or equal to 0"),
        ("balanced-softmax", {"tau": math.inf}, "'tau' is inf"),
        ("fedntd", {"tau": 0}, "'tau' is 0; it must be greater than 0"),
        ("generalized-cross-entropy", {"q": 0}, "'q' is 0; it must be greater than 0"),
    ],
)
def test_objective_options_out_of_range_are_refused(
    name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        create(Objective, name, options)


def test_error_about_an_unknown_objective_option_lists_the_valid_ones() -> None:
    with pytest.raises(PluginError, match="its options: alpha, soft"):
        create(Objective, "fedrs", {"beta": 1})
