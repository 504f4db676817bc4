"""Handwritten digits, classified by a linear model of scikit-learn. Needs no torch."""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# scikit-learn has no types.

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.linear_model import SGDClassifier
from sklearn.metrics import log_loss

from potluck.common.names import ClientId
from potluck.common.task import ClientData, Task
from potluck.common.trainer import (
    SHARE,
    Capability,
    Contribution,
    EvaluationSettings,
    Measure,
    Measured,
    Trainer,
    TrainerSettings,
    TrainingProgress,
)

Model = dict[str, NDArray[np.float32]]
Samples = tuple[NDArray[np.float64], NDArray[np.int64]]

DIGITS = np.arange(10)


class PartialFit(Trainer):
    """Trains with `SGDClassifier.partial_fit`."""

    measures = {
        "accuracy": Measure(label="accuracy", unit=SHARE, higher_is_better=True),
        "loss": Measure(label="log loss", lowest=0),
    }
    capabilities = frozenset({Capability.LABEL_COUNTS, Capability.LOSS})

    def train(
        self, model: Any, data: Any, settings: TrainerSettings, report: TrainingProgress
    ) -> Contribution:
        inputs, labels = data
        classifier = classifier_of(model, settings.learning_rate, settings.seed)
        epochs = settings.training.epochs
        for epoch in range(epochs):
            report(epoch / epochs)
            classifier.partial_fit(inputs, labels, classes=DIGITS)
        model["coef"] = classifier.coef_.astype(np.float32)
        model["intercept"] = classifier.intercept_.astype(np.float32)
        return Contribution(samples=len(labels), steps=epochs * len(labels))

    def evaluate(self, model: Any, data: Any, settings: EvaluationSettings) -> dict[str, Measured]:
        inputs, labels = data
        classifier = classifier_of(model)
        right = int((classifier.predict(inputs) == labels).sum())
        loss = log_loss(labels, classifier.predict_proba(inputs), labels=DIGITS)
        count = len(labels)
        return {"accuracy": Measured(right, count), "loss": Measured(loss * count, count)}

    def label_counts(self, data: Samples) -> list[int]:
        return np.bincount(data[1], minlength=len(DIGITS)).tolist()

    def samples(self, data: Samples) -> int:
        return len(data[1])


def classifier_of(model: Model, learning_rate: float = 0.01, seed: int = 0) -> Any:
    """Return a classifier with the weights of a model; `partial_fit` continues from them."""
    classifier: Any = SGDClassifier(
        loss="log_loss",
        learning_rate="constant",
        eta0=learning_rate,
        random_state=np.random.RandomState(seed % 2**32),
    )
    classifier.coef_ = model["coef"].astype(np.float64)
    classifier.intercept_ = model["intercept"].astype(np.float64)
    classifier.classes_ = DIGITS
    classifier.t_ = 1.0
    return classifier


@dataclass(frozen=True, kw_only=True)
class DigitsLinear(Task):
    """The 1797 digits that come with scikit-learn; every fifth is held out.

    clients: number of clients. favourite: share of a client's samples that are of its two favourite
    digits, as long as there are enough of these.
    """

    clients: int = 4
    favourite: float = 0.8

    classes = 10
    training = {"learning_rate": 0.05, "epochs": 2}

    def model(self) -> Model:
        return {"coef": np.zeros((10, 64), np.float32), "intercept": np.zeros(10, np.float32)}

    def trainer(self) -> Trainer:
        return PartialFit()

    def client_data(self, client: ClientId, data: Path | None) -> ClientData[Samples]:
        number = int(client.rpartition("-")[2])
        inputs, labels = digits(held_out=False)
        generator = np.random.default_rng(number)
        shuffled = generator.permutation(len(labels))
        liked = np.isin(labels[shuffled], [2 * number % 10, (2 * number + 1) % 10])
        size = len(labels) // self.clients
        most = int(self.favourite * size)
        chosen = np.concatenate([shuffled[liked][:most], shuffled[~liked][: size - most]])
        return ClientData(train=(inputs[chosen], labels[chosen]), held_out=digits(held_out=True))

    def evaluation_data(self, data: Path | None) -> Samples:
        return digits(held_out=True)


def digits(*, held_out: bool) -> Samples:
    """Return inputs, n × 64 in [0, 1], and labels, n."""
    inputs, labels = load_digits(return_X_y=True)
    chosen = (np.arange(len(labels)) % 5 == 4) == held_out
    return inputs[chosen] / 16, labels[chosen]
