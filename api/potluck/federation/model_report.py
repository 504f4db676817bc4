"""Metrics of a classifier, computed from its class probabilities for every sample."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from potluck.common.errors import ConfigurationError, TrainingError
from potluck.common.run_file.runfile import RunFile
from potluck.common.settings.extras import extra_named
from potluck.common.task import Examples
from potluck.federation.session_plugins import SessionPlugins
from potluck.federation.trained_model import trained_model

with extra_named():
    import pandas as pd
    from sklearn.metrics import (
        confusion_matrix,
        precision_recall_fscore_support,
        roc_auc_score,
    )

if TYPE_CHECKING:
    from torch import nn

_BATCH = 1024


@dataclass(frozen=True, kw_only=True)
class ModelReport:
    """Metrics of a model on labelled samples.

    samples: number of samples. accuracy: share of samples classified correctly. auroc: area under
    the ROC curve, each class against the rest, averaged over the classes for which it is defined;
    None if it is defined for none. classes: one row per class with `precision`, `recall`, `f1`,
    `auroc` (NaN if all samples or no samples are of the class) and `samples`. confusion: samples by
    true class (rows) and predicted class (columns).
    """

    samples: int
    accuracy: float
    auroc: float | None
    classes: pd.DataFrame
    confusion: pd.DataFrame

    def values(self) -> dict[str, object]:
        """Return all metrics as plain values, for JSON."""
        return {
            "samples": self.samples,
            "accuracy": self.accuracy,
            "auroc": self.auroc,
            "classes": self.classes.reset_index().to_dict("records"),
            "confusion": self.confusion.to_numpy().tolist(),
        }

    def _repr_html_(self) -> str:
        auroc = "" if self.auroc is None else f", AUROC {self.auroc:.3f}"
        head = f"<p>accuracy {self.accuracy:.1%}{auroc}, {self.samples} samples</p>"
        return head + self.classes.to_html(float_format="{:.3f}".format)


def evaluated_model(
    path: Path, run: RunFile, session: SessionPlugins, data: Path | None
) -> ModelReport:
    """Return the metrics of a downloaded model on its task's evaluation data.

    Raises ConfigurationError if the task has its own trainer or has no evaluation data on this
    machine, and the errors of `trained_model`.
    """
    model = trained_model(path, run, session, data)
    name = run.task.name
    if model.task.trainer() is not None:
        raise ConfigurationError(
            f"task '{name}' measures models with its own trainer; `potluck export` has the "
            "metrics of the run's rounds"
        )
    examples = model.task.evaluation_data(data)
    if examples is None:
        raise ConfigurationError(
            f"task '{name}' has no evaluation data on this machine; name the folder of its data "
            "with --data (data= in Python), or use `potluck export`, which has the metrics that "
            "clients measured"
        )
    return report_of(model.network, examples, model.task.classes)


def report_of(network: nn.Module, examples: Examples, classes: int) -> ModelReport:
    """Return the metrics of a network on samples, computed on the CPU.

    Raises TrainingError if there are no samples, or the network's output is not n × `classes`.
    """
    labels = examples.labels.cpu().numpy()
    if not len(labels):
        raise TrainingError("the model can't be evaluated, because there are no samples")
    probabilities = _probabilities(network, examples, classes)
    predicted = probabilities.argmax(axis=1)
    every = list(range(classes))
    precision, recall, f1, support = precision_recall_fscore_support(
        labels,
        predicted,
        labels=every,
        zero_division=0.0,  # pyright: ignore[reportArgumentType]  # inferred from its default
    )
    curves = [_auroc(labels == each, probabilities[:, each]) for each in every]
    index = pd.RangeIndex(classes, name="class")
    table = {"precision": precision, "recall": recall, "f1": f1, "auroc": curves}
    defined = [each for each in curves if not np.isnan(each)]
    counts = confusion_matrix(labels, predicted, labels=every)
    return ModelReport(
        samples=len(labels),
        accuracy=float((predicted == labels).mean()),
        auroc=float(np.mean(defined)) if defined else None,
        classes=pd.DataFrame({**table, "samples": support}, index=index),
        confusion=pd.DataFrame(
            counts, index=index.rename("true"), columns=index.rename("predicted")
        ),
    )


def _auroc(positive: NDArray[np.bool_], score: NDArray[np.float64]) -> float:
    return float(roc_auc_score(positive, score)) if 0 < positive.sum() < len(positive) else np.nan


def _probabilities(network: nn.Module, examples: Examples, classes: int) -> NDArray[np.float64]:
    """Return the softmax of the network's outputs, n × classes."""
    import torch

    found: list[NDArray[np.float64]] = []
    network.cpu().eval()
    with torch.inference_mode():
        for start in range(0, len(examples), _BATCH):
            end = min(start + _BATCH, len(examples))
            logits = network(examples.inputs_at(torch.arange(start, end)))
            if logits.shape != (end - start, classes):
                raise TrainingError(
                    f"the model's output has shape {tuple(logits.shape)}, but "
                    f"{(end - start, classes)} is expected"
                )
            found.append(logits.double().softmax(dim=1).numpy())
    return np.concatenate(found)
