"""A client's estimate of its triplet: how imbalanced and spuriously correlated its data are.

Attributes (a background, a colour) are not labelled. FedDiverse infers them with a model that is
biased on purpose. Samples of a class that this model classifies correctly are assumed to have the
attribute that is usual in the class; all other samples are assumed to have the other attribute (§4,
Alg. 2–4). The result is an estimated interaction matrix Ñ (classes × 2), and its triplet.

An exact triplet discloses data: for two classes, triplet and number of samples determine the
client's matrix, except for the names of classes and attributes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from potluck.client.objective import Batch, LocalContext, Objective
from potluck.client.training.objective_sum import composed
from potluck.client.training.objectives.generalized_cross_entropy import (
    GeneralizedCrossEntropy,
    generalized_cross_entropy,
)
from potluck.client.training.steps.loop import TrainingContext, train
from potluck.common.errors import ConfigurationError, DataError, TrainingError
from potluck.common.learning.triplet import TripletSettings
from potluck.common.settings.local_training import LocalTraining
from potluck.common.task import Examples
from potluck.common.tensors.model_arrays import load_arrays

# Features of a model ------------------------------------------------------------------------------


def features_and_logits(
    model: nn.Module, inputs: Tensor, *, device: torch.device, batch_size: int = 1024
) -> tuple[Tensor, Tensor]:
    """Return features (n × d) and logits (n × C) of n samples, on the CPU.

    Sets the model to evaluation mode. The features are the result of the model's method
    `features(inputs)`, if it has one, else the inputs of the `nn.Linear` that is called last; they
    are flattened to n × d. A submodule named `features`, as in torchvision's models, is not used.

    Raises ConfigurationError if the model has neither, TrainingError if it fails.
    """
    model.to(device).eval()
    features_of = _features_method(model)
    pieces: list[tuple[Tensor, Tensor]] = []
    try:
        with torch.inference_mode():
            for batch in torch.split(inputs, batch_size):
                on_device = batch.to(device)
                if features_of is None:
                    features, logits = _by_last_linear(model, on_device)
                else:
                    features, logits = features_of(on_device), model(on_device)
                pieces.append((features.flatten(1).cpu(), logits.cpu()))
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        text = " ".join(str(error).split())
        raise TrainingError(
            f"the task's model failed: {text}; check that the task's model and inputs are "
            "compatible"
        ) from error
    features, logits = (torch.cat(parts).clone() for parts in zip(*pieces, strict=True))
    return features, logits


def _features_method(model: nn.Module) -> Callable[[Tensor], Tensor] | None:
    method: Any = getattr(model, "features", None)
    if isinstance(method, nn.Module) or not callable(method):
        return None
    return cast(Callable[[Tensor], Tensor], method)


def _by_last_linear(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
    seen: list[Tensor] = []

    def keep(_: nn.Module, arguments: tuple[Any, ...]) -> None:
        seen[:] = [arguments[0]]

    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    handles = [layer.register_forward_pre_hook(keep) for layer in layers]
    try:
        logits = model(batch)
    finally:
        for handle in handles:
            handle.remove()
    if not seen:
        raise ConfigurationError(
            f"the triplet estimate can't find features: the model {type(model).__name__} does "
            "not call an nn.Linear; give the task's model a method 'features(inputs)' that "
            "returns n × d"
        )
    return seen[0], logits


# The estimate -------------------------------------------------------------------------------------

_LEAST_PIVOT_SAMPLES = 2


@dataclass(frozen=True, kw_only=True)
class MatrixEstimate:
    """An estimated interaction matrix. It stays on the client.

    matrix: classes × 2, int64; rows sum to the label counts; the order of the two attributes has no
    meaning. attributes: n, int64, each sample's attribute, 0 or 1. degenerate: True if no class
    could be split; all samples then have one attribute. pivot: the class that the attribute was
    learned from; None if degenerate. head_accuracy: balanced accuracy, on the pivot class, of the
    head that predicts the attribute for the other classes. A head with a value near ½ has learned
    nothing, and needs more steps or a larger learning rate. None if there was nothing to learn.
    """

    matrix: NDArray[np.int64]
    attributes: NDArray[np.int64]
    degenerate: bool
    pivot: int | None
    head_accuracy: float | None


@dataclass(frozen=True, kw_only=True)
class EstimateTerms:
    """The settings, seed and device of an estimate, and the check for cancellation."""

    settings: TripletSettings
    seed: int
    device: torch.device
    cancelled: Callable[[], bool] = lambda: False

    def stage_seed(self, stage: int) -> int:
        """Return a training's seed. stage: 0 for the head, 1 + y for class y's biased model."""
        return int(np.random.SeedSequence((self.seed, stage)).generate_state(1, np.uint64)[0] >> 1)


def estimate_matrix(
    model: nn.Module,
    weights: Mapping[str, NDArray[Any]],
    data: Examples,
    *,
    classes: int,
    terms: EstimateTerms,
) -> MatrixEstimate:
    """Estimate the interaction matrix Ñ of a client's samples (FedDiverse Alg. 2–4).

    model: the task's; its weights are overwritten, first by `weights` (the pre-trained ones), then
    by training. data: n samples with labels in [0, classes); their groups are not used. The same
    weights, data, settings and seed give the same result. As with `train`, only one estimate at a
    time may run on a device.

    Raises TrainingError without samples, or if training fails; LayoutError if `weights` are not
    the model's; ConfigurationError if the model has no features; RoundClosedError if cancelled.
    """
    if len(data) == 0:
        raise DataError("the client has no training samples; remove the client from the federation")
    pivot: _Split | None = None
    splittable = False
    for split in _splits(model, weights, data, classes, terms):
        splittable = splittable or split.has_both
        if pivot is None or _unevenness(split, terms) < _unevenness(pivot, terms):
            pivot = split
    labels = data.labels.cpu()
    found = None if pivot is None or not splittable else pivot
    attributes, head_accuracy = torch.zeros_like(labels), None
    if found is not None:
        attributes, head_accuracy = _attributes(model, found, data, terms)
    cells = torch.bincount(labels * 2 + attributes, minlength=2 * classes)
    return MatrixEstimate(
        matrix=cells.numpy().reshape(classes, 2),
        attributes=attributes.numpy(),
        degenerate=found is None,
        pivot=None if found is None else found.label,
        head_accuracy=head_accuracy,
    )


@dataclass(frozen=True, kw_only=True)
class _Split:
    """A class's samples, split by a biased model.

    minority: n_y, bool, in the order of the class's samples: True if the model classified the
    sample wrongly (g̃_y). state: the model's parameters and buffers. The features of all samples are
    not kept: they take a pass over the client's data, and only the pivot class's are needed.
    """

    label: int
    minority: Tensor
    state: dict[str, Tensor]

    @property
    def gap(self) -> int:
        """||G̃_y| − |g̃_y||, the difference in size of the two parts."""
        return abs(len(self.minority) - 2 * int(self.minority.sum()))

    @property
    def has_both(self) -> bool:
        """True if neither part is empty."""
        return self.gap < len(self.minority)


def _unevenness(split: _Split, terms: EstimateTerms) -> float:
    """Return the difference between the two parts of a class, as the setting `pivot` counts it."""
    size = len(split.minority) if terms.settings.pivot == "relative" else 1
    return split.gap / size


def _train(
    model: nn.Module,
    data: Examples,
    objective: Objective,
    terms: EstimateTerms,
    *,
    steps: int,
    stage: int,
    learning_rate: float | None = None,
) -> None:
    """Run one training of the estimate. stage: see `EstimateTerms.stage_seed`."""
    settings = LocalTraining(
        learning_rate=learning_rate or terms.settings.learning_rate,
        batch_size=terms.settings.batch_size,
        steps=steps,
    )
    context = TrainingContext(
        classes=2,
        seed=terms.stage_seed(stage),
        round=1,
        device=terms.device,
        cancelled=terms.cancelled,
    )
    train(model, data, objective, settings, context)


class _OneVersusRest(Objective):
    """Generalized cross-entropy of one class against all others, with the model's own logits.

    The probability of the others is the sum of the softmax over them.
    """

    def __init__(self, label: int, q: float) -> None:
        self._label, self._q = label, q

    def loss(self, logits: Tensor, batch: Batch, local: LocalContext) -> Tensor:  # noqa: ARG002 - the interface requires it
        binary = _against_rest(logits, self._label)
        return generalized_cross_entropy(binary, (batch.labels == self._label).long(), self._q)


def _against_rest(logits: Tensor, label: int) -> Tensor:
    """Return b × 2 logits: of all other classes together, and of the class."""
    rest = torch.cat([logits[:, :label], logits[:, label + 1 :]], dim=1).logsumexp(dim=1)
    return torch.stack([rest, logits[:, label]], dim=1)


def _splits(
    model: nn.Module,
    weights: Mapping[str, NDArray[Any]],
    data: Examples,
    classes: int,
    terms: EstimateTerms,
) -> Iterator[_Split]:
    """Yield the splits of possible pivot classes, in class order; train one model at a time."""
    labels = data.labels.cpu()
    counts = torch.bincount(labels, minlength=classes).tolist()
    candidates = [label for label in range(classes) if counts[label] >= _LEAST_PIVOT_SAMPLES]
    steps, q = terms.settings.bias_steps, terms.settings.q
    if classes == 2:  # one model splits both classes
        load_arrays(model, weights)
        _train(model, data, GeneralizedCrossEntropy(q=q), terms, steps=steps, stage=1)
        _, logits = features_and_logits(model, data.inputs, device=terms.device)
        wrong = logits.argmax(dim=1) != labels
        state = _state(model)
        for label in candidates:
            yield _Split(label=label, minority=wrong[labels == label], state=state)
        return
    for label in candidates:
        if counts[label] == len(data):  # no samples of other classes
            continue
        load_arrays(model, weights)
        _train(model, data, _OneVersusRest(label, q), terms, steps=steps, stage=1 + label)
        _, logits = features_and_logits(
            model, data.inputs[data.labels == label], device=terms.device
        )
        minority = _against_rest(logits, label).argmax(dim=1) == 0
        yield _Split(label=label, minority=minority, state=_state(model))


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {name: values.clone() for name, values in model.state_dict().items()}


def _attributes(
    model: nn.Module, pivot: _Split, data: Examples, terms: EstimateTerms
) -> tuple[Tensor, float | None]:
    """Return the attributes (n, int64, 0 or 1) and the head's accuracy.

    The attributes are known in the pivot class. For the other classes, a head on the model's
    features predicts them. If the pivot class has one attribute only, no head is trained.
    """
    labels = data.labels.cpu()
    known = pivot.minority.long()
    members = labels == pivot.label
    if not pivot.has_both:
        return known[:1].expand(len(labels)).clone(), None
    model.load_state_dict(pivot.state)
    features, _ = features_and_logits(model, data.inputs, device=terms.device)
    head = _head(features.shape[1], terms)
    _train(
        head,
        Examples(inputs=features[members], labels=known),
        composed(()),  # cross-entropy alone
        terms,
        steps=terms.settings.attribute_steps,
        stage=0,
        learning_rate=terms.settings.attribute_learning_rate,
    )
    with torch.inference_mode():
        logits: Tensor = head.cpu()(features)
    attributes = logits.argmax(dim=1).clone()
    right = (attributes[members] == known).double()
    accuracy = float(right[known == 0].mean() + right[known == 1].mean()) / 2
    attributes[members] = known
    return attributes, accuracy


def _head(width: int, terms: EstimateTerms) -> nn.Linear:
    """Make a layer with 2 outputs, initialised like `nn.Linear`, but from its own generator."""
    # on "meta", the layer is not initialised from the global generator
    head = nn.Linear(width, 2, device="meta").to_empty(device="cpu")
    bound = 0.0 if terms.settings.head == "zero" else 1 / math.sqrt(width)
    generator = torch.Generator().manual_seed(terms.stage_seed(0))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.uniform_(-bound, bound, generator=generator)
    return head
