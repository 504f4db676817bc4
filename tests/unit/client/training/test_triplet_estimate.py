"""The triplet estimate: objective, features, matrices, and unused attribute labels."""

import math
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn

from potluck.client.disclosure.laplace import noisy_counts
from potluck.client.disclosure.releases import ReleaseNoise
from potluck.client.objective import Batch, LocalContext, Objective
from potluck.client.training.objectives.generalized_cross_entropy import (
    generalized_cross_entropy,
)
from potluck.client.training.triplet_estimate import (
    EstimateTerms,
    MatrixEstimate,
    estimate_matrix,
    features_and_logits,
)
from potluck.common.built_in_signals import released_triplet
from potluck.common.disclosure import Mode, Parameters, TaskReference
from potluck.common.errors import (
    ConfigurationError,
    LayoutError,
    RoundClosedError,
    TrainingError,
)
from potluck.common.learning.heterogeneity import triplet
from potluck.common.learning.triplet import TripletSettings, triplet_settings_for
from potluck.common.names import ClientId
from potluck.common.settings import plugins
from potluck.common.settings.configuration import validate
from potluck.common.task import Examples
from potluck.common.tasks.digits import ColoredDigits
from potluck.common.tensors.model_arrays import state_arrays

CPU = torch.device("cpu")
WELL_TRAINED = TripletSettings(learning_rate=0.05, bias_steps=5, attribute_steps=200)


# The objective


def with_probability(probability: float) -> Tensor:
    """Return logits of two classes; the second has this probability in their softmax."""
    return torch.tensor([[0.0, math.log(probability / (1 - probability))]], dtype=torch.float64)


@pytest.mark.parametrize(("probability", "expected"), [(0.5, 0.6258), (0.9, 0.1037)])
def test_generalized_cross_entropy_equals_hand_computed_values(
    probability: float, expected: float
) -> None:
    loss = generalized_cross_entropy(with_probability(probability), torch.tensor([1]), 0.3)
    assert float(loss) == pytest.approx(expected, abs=5e-5)


def test_generalized_cross_entropy_lies_between_cross_entropy_and_absolute_error() -> None:
    logits, label = with_probability(0.2), torch.tensor([1])
    assert float(generalized_cross_entropy(logits, label, 1e-9)) == pytest.approx(-math.log(0.2))
    assert float(generalized_cross_entropy(logits, label, 1.0)) == pytest.approx(0.8)


def test_gradient_of_a_sample_with_probability_zero_is_zero() -> None:
    logits = torch.tensor([[1000.0, 0.0]], requires_grad=True)
    torch.autograd.backward(generalized_cross_entropy(logits, torch.tensor([1]), 0.3))
    assert logits.grad is not None
    assert logits.grad.tolist() == [[0.0, 0.0]]


def test_generalized_cross_entropy_objective_is_installed_with_its_option() -> None:
    objective = plugins.create(Objective, "generalized-cross-entropy", {"q": 1.0})
    labels = torch.tensor([1])
    batch = Batch(inputs=torch.zeros(1, 2), labels=labels, indices=torch.tensor([0]))
    local = LocalContext(round=1, label_counts=torch.tensor([0, 1]), parameters=())
    assert not objective.needs_received
    assert float(objective.loss(with_probability(0.9), batch, local)) == pytest.approx(0.1)


@pytest.mark.parametrize("q", [0, -0.3, 1.1, math.nan, "0.3"])
def test_generalized_cross_entropy_with_q_out_of_range_is_refused(q: Any) -> None:
    with pytest.raises(ConfigurationError, match="option 'q' is "):
        plugins.create(Objective, "generalized-cross-entropy", {"q": q})


# Features


class WithMethod(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decide = nn.Linear(4, 3)

    def features(self, inputs: Tensor) -> Tensor:
        return inputs.reshape(-1, 2, 2) * 2

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.decide(self.features(inputs).flatten(1))
        return logits


class Pooling(nn.Module):
    """A model like torchvision's: it has a submodule `features` that does not pool, and layers out
    of order."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(3, 2)
        self.first = nn.Linear(4, 3)
        self.features = nn.Conv2d(1, 1, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.last(self.first(self.features(inputs[:, None, :, None]).flatten(1)))
        return logits


def test_features_come_from_the_features_method_of_the_model() -> None:
    inputs = torch.arange(20.0).reshape(5, 4)
    features, logits = features_and_logits(WithMethod(), inputs, device=CPU, batch_size=2)
    assert torch.equal(features, inputs * 2)
    assert logits.shape == (5, 3)


def test_features_are_the_inputs_of_the_last_linear_layer() -> None:
    torch.manual_seed(0)
    model, inputs = Pooling(), torch.randn(5, 4)
    features, logits = features_and_logits(model, inputs, device=CPU, batch_size=2)
    assert features.shape == (5, 3)
    assert torch.allclose(model.last(features), logits)
    assert not model.last._forward_pre_hooks
    assert not model.training


def test_model_without_features_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigurationError, match=r"give the task's model a method 'features"):
        features_and_logits(nn.Flatten(), torch.zeros(2, 4), device=CPU)


def test_inputs_incompatible_with_the_model_raise_a_training_error() -> None:
    with pytest.raises(TrainingError, match="the task's model failed"):
        features_and_logits(Pooling(), torch.zeros(2, 7), device=CPU)


# The matrix


def biased_model(classes: int) -> nn.Module:
    """Return a model that predicts, with certainty, the class that the attribute's one-hot (the
    last `classes` inputs) shows."""
    identity, decide = nn.Linear(2 * classes, 2 * classes), nn.Linear(2 * classes, classes)
    model = nn.Sequential(identity, decide)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        identity.weight.copy_(torch.eye(2 * classes))
        decide.weight[:, classes:] = 100 * torch.eye(classes)
    return model


def weights_of(model: nn.Module) -> Mapping[str, NDArray[Any]]:
    return {name: array.copy() for name, array in state_arrays(model).items()}


def samples(cells: Mapping[tuple[int, int], int], classes: int) -> Examples:
    """Return samples by counts of (class, class that the attribute suggests), both as one-hots."""
    pairs = [pair for pair, count in cells.items() for _ in range(count)]
    labels = torch.tensor([label for label, _ in pairs], dtype=torch.int64)
    suggested = torch.tensor([attribute for _, attribute in pairs], dtype=torch.int64)
    one_hot = nn.functional.one_hot
    inputs = torch.cat([one_hot(labels, classes), one_hot(suggested, classes)], dim=1).float()
    return Examples(inputs=inputs, labels=labels)


def estimate(
    cells: Mapping[tuple[int, int], int],
    classes: int = 2,
    *,
    seed: int = 0,
    settings: TripletSettings = WELL_TRAINED,
) -> MatrixEstimate:
    model = biased_model(classes)
    return estimate_matrix(
        model,
        weights_of(model),
        samples(cells, classes),
        classes=classes,
        terms=EstimateTerms(settings=settings, seed=seed, device=CPU),
    )


def test_interaction_matrix_of_two_classes_is_estimated() -> None:
    """The attribute matches the class for 40 and for 25 samples; the pivot is the more evenly split
    class."""
    found = estimate({(0, 0): 40, (0, 1): 5, (1, 1): 25, (1, 0): 12})
    assert found.matrix.tolist() == [[5, 40], [25, 12]]
    assert (found.pivot, found.degenerate, found.head_accuracy) == (1, False, 1.0)
    assert found.attributes.tolist() == [1] * 40 + [0] * 5 + [0] * 25 + [1] * 12


def test_lowest_class_is_the_pivot_in_a_tie() -> None:
    found = estimate({(0, 0): 20, (0, 1): 5, (1, 1): 20, (1, 0): 5})
    assert found.pivot == 0
    assert found.matrix.tolist() == [[20, 5], [5, 20]]


def test_each_of_three_classes_is_contrasted_with_the_other_two() -> None:
    found = estimate({(0, 0): 20, (0, 2): 10, (1, 1): 9, (1, 2): 1, (2, 2): 30, (2, 0): 4}, 3)
    assert found.pivot == 1
    assert found.matrix[1].tolist() == [9, 1]
    assert found.matrix.sum(axis=1).tolist() == [30, 10, 34]


def test_relative_pivot_is_the_most_evenly_split_class_for_its_size() -> None:
    """The parts of class 1 differ by fewer samples, 8, but those of class 0 by 10 of 30."""
    relative = WELL_TRAINED.model_copy(update={"pivot": "relative"})
    cells = {(0, 0): 20, (0, 2): 10, (1, 1): 9, (1, 2): 1, (2, 2): 30, (2, 0): 4}
    assert (estimate(cells, 3).pivot, estimate(cells, 3, settings=relative).pivot) == (1, 0)


def test_attribute_of_the_pivot_is_applied_to_three_classes() -> None:
    found = estimate({(0, 0): 20, (0, 2): 16, (1, 0): 30, (1, 2): 2, (2, 2): 30, (2, 0): 9}, 3)
    assert (found.pivot, found.degenerate) == (0, False)
    assert found.matrix.tolist() == [[20, 16], [30, 2], [9, 30]]


def test_class_without_samples_is_not_the_pivot() -> None:
    found = estimate({(0, 0): 20, (0, 2): 6, (2, 2): 15, (2, 0): 5}, 3)
    assert found.pivot == 2
    assert found.matrix.tolist() == [[6, 20], [0, 0], [15, 5]]


def test_class_with_one_sample_is_not_the_pivot() -> None:
    """The gap of this class would be 1, the smallest of all."""
    found = estimate({(0, 0): 20, (0, 1): 5, (1, 1): 1})
    assert (found.pivot, found.matrix.tolist()) == (0, [[20, 5], [0, 1]])


def test_pivot_that_can_not_be_split_gives_all_samples_one_attribute() -> None:
    """Class 0 has the smallest gap, 3, although only class 1 can be split (Algorithm 2)."""
    found = estimate({(0, 0): 3, (1, 1): 30, (1, 0): 5})
    assert (found.pivot, found.head_accuracy, found.degenerate) == (0, None, False)
    assert found.matrix.tolist() == [[3, 0], [35, 0]]
    assert triplet(found.matrix)[1:] == (1.0, 0.0)


def test_estimate_is_degenerate_if_no_class_can_be_split() -> None:
    found = estimate({(0, 0): 30, (1, 1): 10})
    assert (found.degenerate, found.pivot, found.head_accuracy) == (True, None, None)
    assert found.matrix.tolist() == [[30, 0], [10, 0]]


@pytest.mark.parametrize("classes", [2, 3])
def test_estimate_of_a_client_with_one_class_has_no_correlation(classes: int) -> None:
    """With one class, there are no samples of other classes to distinguish it from."""
    found = estimate({(1, 1): 30, (1, 0): 10}, classes)
    class_imbalance, attribute_imbalance, correlation = triplet(found.matrix)
    assert (class_imbalance, correlation) == (1.0, 0.0)
    assert found.degenerate == (classes == 3)
    assert attribute_imbalance == pytest.approx(1.0 if classes == 3 else 0.1887, abs=1e-4)


def test_estimate_of_a_single_sample_is_degenerate() -> None:
    assert estimate({(0, 1): 1}).matrix.tolist() == [[1, 0], [0, 0]]


cells_of = st.dictionaries(
    st.tuples(st.integers(0, 2), st.integers(0, 2)), st.integers(1, 6), min_size=1
)


@settings(max_examples=25, deadline=None)
@given(cells_of)
def test_matrix_rows_always_sum_to_the_label_counts(cells: Mapping[tuple[int, int], int]) -> None:
    data = samples(cells, 3)
    model = biased_model(3)
    found = estimate_matrix(
        model,
        weights_of(model),
        data,
        classes=3,
        terms=EstimateTerms(
            settings=TripletSettings(bias_steps=1, attribute_steps=1), seed=0, device=CPU
        ),
    )
    assert found.matrix.sum(axis=1).tolist() == torch.bincount(data.labels, minlength=3).tolist()
    assert set(found.attributes.tolist()) <= {0, 1}
    assert all(0 <= component <= 1 for component in triplet(found.matrix))


# On a real task


def of_client(number: int, *, groups: bool = True) -> Examples:
    data = ColoredDigits().client_data(ClientId(f"client-{number}"), None).train
    return Examples(inputs=data.inputs, labels=data.labels, groups=data.groups if groups else None)


def of_digits(
    data: Examples, *, seed: int = 1, noise: ReleaseNoise | None = None
) -> dict[str, Any]:
    torch.manual_seed(0)
    model = ColoredDigits().model()
    chosen = TripletSettings(bias_steps=5, attribute_steps=50, learning_rate=0.1)
    terms = EstimateTerms(settings=chosen, seed=seed, device=CPU)
    found = estimate_matrix(model, weights_of(model), data, classes=2, terms=terms)
    return released_triplet(found, noise)


def test_triplet_depends_only_on_the_seed() -> None:
    first = of_digits(of_client(2))
    torch.randn(17)
    of_digits(of_client(3))
    assert of_digits(of_client(2)) == first


def test_triplet_estimate_does_not_use_attribute_labels() -> None:
    assert of_digits(of_client(2, groups=False)) == of_digits(of_client(2))


def test_triplet_estimate_does_not_change_the_global_generator() -> None:
    model = ColoredDigits().model()
    before = torch.default_generator.get_state()
    estimate_matrix(
        model,
        weights_of(model),
        of_client(2),
        classes=2,
        terms=EstimateTerms(settings=WELL_TRAINED, seed=0, device=CPU),
    )
    assert torch.equal(torch.default_generator.get_state(), before)


# Privacy


def noise(epsilon: float, seed: int) -> ReleaseNoise:
    """Return the noise of a release, drawn from a seed."""
    parameters = Parameters(
        mode=Mode.NOISY_TRIPLET,
        task=TaskReference(name="t"),
        epsilon=epsilon,
        adjacency="replace",
    )
    return ReleaseNoise("triplet", parameters, random.Random(seed))


def test_released_triplet_is_computed_from_the_noisy_matrix() -> None:
    cells = {(0, 0): 40, (0, 1): 5, (1, 1): 25, (1, 0): 12}
    matrix = estimate(cells).matrix
    model = biased_model(2)
    terms = EstimateTerms(settings=WELL_TRAINED, seed=0, device=CPU)
    found = estimate_matrix(model, weights_of(model), samples(cells, 2), classes=2, terms=terms)
    released = released_triplet(found, noise(0.2, 3))
    noisy = noisy_counts(
        matrix.ravel().tolist(), epsilon=0.2, adjacency="replace", randomness=random.Random(3)
    )
    assert noisy != matrix.ravel().tolist()
    expected = triplet(np.maximum(noisy, 0).reshape(2, 2))
    assert released == {"triplet": list(expected), "degenerate": None}


@pytest.mark.parametrize("seed", range(10))
def test_triplet_of_a_very_noisy_matrix_is_valid(seed: int) -> None:
    found = of_digits(of_client(0), noise=noise(0.01, seed))
    assert all(0 <= component <= 1 for component in found["triplet"])


def test_triplet_is_unchanged_with_very_little_noise() -> None:
    private = of_digits(of_client(2), noise=noise(100.0, 0))
    assert private["triplet"] == of_digits(of_client(2))["triplet"]


# Errors


def failing(data: Examples, **changes: Any) -> None:
    model = biased_model(2)
    weights = changes.pop("weights", None) or weights_of(model)
    terms = EstimateTerms(settings=WELL_TRAINED, seed=0, device=CPU, **changes)
    estimate_matrix(model, weights, data, classes=2, terms=terms)


def test_triplet_estimate_without_samples_is_refused() -> None:
    empty = Examples(inputs=torch.zeros(0, 4), labels=torch.zeros(0, dtype=torch.int64))
    with pytest.raises(TrainingError, match="no training samples"):
        failing(empty)


def test_triplet_estimate_can_be_cancelled() -> None:
    with pytest.raises(RoundClosedError):
        failing(samples({(0, 0): 5, (1, 0): 5}, 2), cancelled=lambda: True)


def test_triplet_estimate_with_weights_of_another_model_is_refused() -> None:
    with pytest.raises(LayoutError):
        failing(samples({(0, 0): 5, (1, 0): 5}, 2), weights=weights_of(biased_model(3)))


def test_default_triplet_settings_are_those_of_the_paper() -> None:
    paper = TripletSettings()
    assert (paper.pretraining_rounds, paper.bias_steps, paper.attribute_steps) == (1, 50, 10)
    assert (paper.q, paper.learning_rate, paper.batch_size) == (0.3, 1e-3, 28)
    with pytest.raises(ConfigurationError, match="unknown key 'tau'"):
        validate(TripletSettings, {"tau": 3}, source="profile.triplet")


def test_run_overrides_the_triplet_settings_recommended_by_a_task() -> None:
    task = ColoredDigits()
    recommended = triplet_settings_for(task, {}, source="the run file")
    assert recommended == TripletSettings(attribute_learning_rate=0.1, attribute_steps=100)
    chosen = triplet_settings_for(task, {"attribute_steps": 10, "q": 0.5}, source="the run file")
    assert (chosen.attribute_learning_rate, chosen.attribute_steps, chosen.q) == (0.1, 10, 0.5)
    with pytest.raises(ConfigurationError, match="the run file: 'q'"):
        triplet_settings_for(task, {"q": 2}, source="the run file")


def test_attribute_head_of_the_triplet_estimate_has_its_own_learning_rate() -> None:
    """From zero weights, ten steps with a rate of 0.001 learn only the larger part; with a rate of
    1.0 they separate both parts."""
    cells = {(0, 0): 40, (0, 1): 5, (1, 1): 25, (1, 0): 12}
    accuracies = []
    for rate in (None, 1.0):
        model = biased_model(2)
        found = estimate_matrix(
            model,
            weights_of(model),
            samples(cells, 2),
            classes=2,
            terms=EstimateTerms(
                settings=TripletSettings(attribute_learning_rate=rate, head="zero"),
                seed=0,
                device=CPU,
            ),
        )
        accuracies.append(found.head_accuracy)
    assert accuracies == [0.5, 1.0]
