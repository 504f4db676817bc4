"""Trains the tensors that a client keeps, then the others (FedRep, Collins et al. 2021, Alg. 1).

In each part, the tensors of the other part are frozen. Running statistics, kept or not, are updated
in both parts.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import nn

from potluck.client.objective import Objective
from potluck.client.training.steps.loop import Corrected, TrainingContext, TrainingResult, train
from potluck.common.errors import ConfigurationError
from potluck.common.settings.local_training import LocalTraining
from potluck.common.task import Examples


def train_in_turn(
    model: nn.Module,
    kept: Container[str],
    data: Examples,
    objective: Objective,
    settings: LocalTraining,
    context: TrainingContext,
    *,
    corrected: Corrected | None = None,
    measures_losses: bool = False,
) -> TrainingResult:
    """Train the tensors named `kept` for `settings.kept_epochs`, then the others as `train` does.

    Return the result of the second part, with the seconds of both parts added. Raises
    ConfigurationError if one of the two parts has no parameter to train, and what `train` raises.
    """
    first = settings.model_copy(update={"epochs": settings.kept_epochs, "steps": None})
    planned = [each.planned_steps(len(data)) for each in (first, settings)]
    share = planned[0] / sum(planned)
    with _only(model, lambda name: name in kept):
        begun = train(
            model,
            data,
            objective,
            first,
            replace(
                context,
                seed=(context.seed + 1) % 2**63,
                progress=lambda done: context.progress(done * share),
            ),
        )
    with _only(model, lambda name: name not in kept):
        result = train(
            model,
            data,
            objective,
            settings,
            replace(context, progress=lambda done: context.progress(share + done * (1 - share))),
            corrected=corrected,
            measures_losses=measures_losses,
        )
    return replace(result, seconds=begun.seconds + result.seconds)


@contextmanager
def _only(model: nn.Module, wanted: Callable[[str], bool]) -> Iterator[None]:
    """Freeze the parameters for which `wanted` returns False, within the block."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    others = [parameter for name, parameter in trained if not wanted(name)]
    if len(others) == len(trained):
        raise ConfigurationError(
            "training.kept_epochs needs parameters that clients keep and parameters that they "
            "send; set kept_epochs to 0, or change `keep` of [model]"
        )
    for parameter in others:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in others:
            parameter.requires_grad_(True)
