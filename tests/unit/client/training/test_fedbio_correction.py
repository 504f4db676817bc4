"""FedBiO's steps on problems whose second derivatives are known."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from potluck.client.correction import CorrectionContext, CorrectionOutcome, RunningDescent
from potluck.client.objective import Batch
from potluck.client.training.auxiliary_files import (
    ReceivedAuxiliaries,
    corrected,
    write_kept,
)
from potluck.client.training.fedbio_correction import (
    DIRECTION,
    WEIGHTS,
    FedBiOCorrection,
    next_directions,
    second_derivatives,
)
from potluck.client.training.objectives.cross_entropy import CrossEntropy
from potluck.client.training.steps.loop import Corrected, TrainingContext, train
from potluck.common.errors import DataError
from potluck.common.settings.local_training import LocalTraining
from potluck.common.task import Examples
from potluck.common.tensors.auxiliary import auxiliaries_layout, joined, zero_auxiliary
from potluck.common.tensors.layout import Layout
from potluck.common.tensors.model_arrays import state_arrays
from potluck.common.tensors.tensor_files import write_tensors


def test_fedbio_direction_converges_to_the_inverse_hessian_times_the_gradient() -> None:
    """A worked example: A = diag(2, 4), ∇f = (1, 1), τ = .25."""
    y = torch.tensor([3.0, -1.0], requires_grad=True)
    matrix, wanted = torch.tensor([2.0, 4.0]), [torch.ones(2)]
    directions, found = [torch.zeros(2)], []
    for _ in range(60):
        lower = (matrix * y.square()).sum() / 2
        gradients = torch.autograd.grad(lower, [y], create_graph=True)
        products = second_derivatives(gradients, directions, [y])
        directions = next_directions(directions, products, wanted, 0.25, 10.0)
        found.append(directions[0].tolist())
    assert found[:3] == [[0.25, 0.25], [0.375, 0.25], [0.4375, 0.25]]
    assert found[-1] == pytest.approx([0.5, 0.25])


def test_fedbio_direction_is_clipped_to_a_maximum_norm() -> None:
    start = [torch.tensor([3.0]), torch.tensor([4.0])]
    still = [torch.zeros(1), torch.zeros(1)]
    assert next_directions(start, still, still, 1.0, 10.0) == start
    assert [float(u) for u in next_directions(start, still, still, 1.0, 1.0)] == pytest.approx(
        [0.6, 0.8]
    )


def linear() -> nn.Linear:
    network = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        network.weight.copy_(torch.tensor([[0.5, -0.2], [0.1, 0.4]]))
    return network


def data(samples: int, *, wrong: int = 0, seed: int = 0) -> Examples:
    """Return samples whose label is the index of the larger input; for the first `wrong` samples,
    of the smaller one."""
    inputs = torch.randn(samples, 2, generator=torch.Generator().manual_seed(seed)) * 2
    labels = inputs.argmax(dim=1)
    labels[:wrong] = 1 - labels[:wrong]
    return Examples(inputs=inputs, labels=labels)


def context(
    network: nn.Module,
    samples: int,
    *,
    kept: Tensor | None = None,
    direction: Tensor | None = None,
    positions: Tensor | None = None,
    validation: Examples | None = None,
) -> CorrectionContext:
    return CorrectionContext(
        parameters=dict(network.named_parameters()),
        shared={DIRECTION: {"weight": torch.zeros(2, 2) if direction is None else direction}},
        personal={},
        kept=None if kept is None else {WEIGHTS: {WEIGHTS: kept}},
        settings=LocalTraining(batch_size=8),
        round=1,
        samples=samples,
        positions=positions,
        validation=data(6, seed=1) if validation is None else validation,
    )


def descended(
    given: CorrectionContext, network: nn.Module, samples: Examples, rows: Sequence[int]
) -> CorrectionOutcome:
    running = FedBiOCorrection(tau=0.5, eta=2.0).begin(given)
    assert isinstance(running, RunningDescent)
    indices = torch.tensor(rows)
    inputs, labels = samples.inputs_at(indices), samples.labels[indices]
    running.descend(network, Batch(inputs=inputs, labels=labels, indices=indices))
    return running.finish(1.0)


def test_fedbio_step_equals_finite_differences() -> None:
    network, samples = linear().double(), data(5)
    samples = Examples(inputs=samples.inputs.double(), labels=samples.labels)
    validation = Examples(inputs=data(6, seed=1).inputs.double(), labels=data(6, seed=1).labels)
    weights = torch.tensor([0.3, -1.0, 0.0, 2.0, 0.5], dtype=torch.float64)
    direction = torch.tensor([[0.2, -0.1], [0.3, 0.4]], dtype=torch.float64)
    start = network.weight.detach().clone()

    def gradient(y: Tensor, own: Tensor) -> Tensor:
        y = y.clone().requires_grad_()
        losses = functional.cross_entropy(samples.inputs @ y.T, samples.labels, reduction="none")
        return torch.autograd.grad((torch.sigmoid(own) * losses).mean(), y)[0]

    step = 1e-5
    product = (
        gradient(start + step * direction, weights) - gradient(start - step * direction, weights)
    ) / (2 * step)
    plain = start.clone().requires_grad_()
    upper = functional.cross_entropy(validation.inputs @ plain.T, validation.labels)
    u = direction - 0.5 * (product - torch.autograd.grad(upper, plain)[0])
    moved = weights.clone()
    for row in range(5):
        nudge = torch.zeros(5, dtype=torch.float64)
        nudge[row] = step
        change = (gradient(start, weights + nudge) - gradient(start, weights - nudge)) / (2 * step)
        moved[row] += 2.0 * float((change * direction).sum())
    given = context(network, 5, kept=weights.clone(), direction=direction, validation=validation)
    outcome = descended(given, network, samples, range(5))
    assert outcome.keep is not None
    np.testing.assert_allclose(outcome.send[DIRECTION]["weight"], u, rtol=1e-6)
    np.testing.assert_allclose(outcome.keep[WEIGHTS][WEIGHTS], moved, rtol=1e-6)
    expected = gradient(start, weights)
    assert network.weight.grad is not None
    np.testing.assert_allclose(network.weight.grad, expected, rtol=1e-9)


def test_fedbio_sample_weights_follow_the_samples_selected_by_quotas() -> None:
    network, samples = linear(), data(5)
    given = context(network, 9, direction=torch.eye(2), positions=torch.tensor([1, 3, 4, 7, 8]))
    keep = descended(given, network, samples, [0, 2]).keep
    assert keep is not None
    assert keep[WEIGHTS][WEIGHTS].nonzero()[:, 0].tolist() == [1, 4]


def test_fedbio_sample_weights_of_different_data_are_discarded() -> None:
    network = linear()
    keep = descended(context(network, 5, kept=torch.ones(4)), network, data(5), [0]).keep
    assert keep is not None
    assert keep[WEIGHTS][WEIGHTS].tolist() == [0.0] * 5


def test_fedbio_without_validation_samples_names_the_setting_to_change() -> None:
    with pytest.raises(
        DataError, match=r"the client has none; set training\.validation_share, and give"
    ):
        FedBiOCorrection().begin(context(linear(), 5, validation=data(0)))


def test_fedbio_reduces_the_stored_weights_of_samples_with_wrong_labels(tmp_path: Path) -> None:
    """Several trainings pass the stored weights through files, as on a host."""
    network, wrong = linear(), 10
    layout = Layout.of(state_arrays(network))
    zeros = {DIRECTION: zero_auxiliary(layout)}
    shared, kept = tmp_path / "shared", tmp_path / "kept"
    write_tensors(shared, joined(zeros), layout=auxiliaries_layout(layout, zeros))
    samples, settings = data(40, wrong=wrong), LocalTraining(learning_rate=0.1, steps=40)
    means: list[tuple[float, float]] = []
    for number in range(1, 4):
        received = ReceivedAuxiliaries(
            names=[DIRECTION], shared=shared, personal=None, kept=kept if number > 1 else None
        )
        found = corrected(FedBiOCorrection(tau=0.1, eta=5.0), received, layout)
        result = train(
            network,
            samples,
            CrossEntropy(),
            settings,
            TrainingContext(classes=2, seed=number, round=number, device=torch.device("cpu")),
            corrected=Corrected(
                correction=found.correction,
                shared=found.shared,
                personal={},
                kept=found.kept,
                layout=layout,
                samples=40,
                validation=data(20, seed=1),
            ),
        )
        assert result.correction is not None
        assert result.correction.keep is not None
        write_kept(result.correction.keep, kept)
        send = {
            name: {tensor: values.numpy() for tensor, values in tensors.items()}
            for name, tensors in result.correction.send.items()
        }
        write_tensors(shared, joined(send), layout=auxiliaries_layout(layout, send))
        weights = torch.sigmoid(result.correction.keep[WEIGHTS][WEIGHTS])
        means.append((float(weights[:wrong].mean()), float(weights[wrong:].mean())))
    assert all(of_wrong < of_right for of_wrong, of_right in means)
    assert means[-1][0] < 0.4 < 0.5 < means[-1][1]
