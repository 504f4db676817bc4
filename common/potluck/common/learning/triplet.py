"""Settings of the triplet estimate, which the coordinator sends to clients.

The estimate is FedDiverse's (§4, Alg. 2–4). Values marked "ours" were chosen for Potluck, since the
paper does not specify them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from potluck.common.settings.configuration import Settings, validate
from potluck.common.task import Task


class TripletSettings(Settings):
    """Settings of the estimate; the same for all clients of a run. Travels as JSON."""

    pretraining_rounds: int = Field(
        default=1,
        ge=0,
        description="Rounds of FedAvg before the estimate (T0): enough to pick up what is easy to\n"
        "learn, which is what the estimate looks for.",
    )
    pretraining_participation: Literal["cohort", "all"] = Field(
        default="cohort",
        description="Who trains in these rounds: as many random clients as in any round (Alg. 1),\n"
        "or all (App. C).",
    )
    pretraining_always: bool = Field(
        default=False,
        description="Whether a run starts from a model that was pre-trained so also where its\n"
        "selector needs no triplets: for comparing selectors from the same start.",
    )
    bias_steps: int = Field(
        default=50,
        ge=1,
        description="Steps of the biased model: more fit samples that go against the bias too.",
    )
    attribute_steps: int = Field(
        default=10,
        ge=1,
        description="Steps of the head that tells the attribute apart.",
    )
    q: float = Field(
        default=0.3,
        gt=0,
        le=1,
        description="Of the generalized cross-entropy: near 0 it is cross-entropy, towards 1 it\n"
        "ignores samples that the model finds hard.",
    )
    learning_rate: float = Field(
        default=1e-3,
        gt=0,
        allow_inf_nan=False,
        description="Length of a step of both trainings; small, since the paper starts from a\n"
        "network pre-trained on ImageNet. The optimiser is ours: SGD without momentum.",
    )
    attribute_learning_rate: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="Length of a step of the attribute head, where it is to be another; ours. A\n"
        "head that starts from nothing hardly learns in 10 steps of 0.001\n"
        "(docs/research/triplet-estimate.md).",
    )
    batch_size: int = Field(default=28, ge=1, description="Samples per step of both trainings.")
    head: Literal["random", "zero"] = Field(
        default="random",
        description="Where the attribute head starts; ours: random, as layers usually do.",
    )


def triplet_settings_for(
    task: Task, chosen: Mapping[str, object], *, source: str
) -> TripletSettings:
    """Return the run's settings: the chosen value, else the task's recommendation, else the
    paper's.

    A task's recommendations are its attribute `triplet`, a mapping. `source` names `chosen` in
    errors. Raises ConfigurationError for an unknown setting or a value out of range.
    """
    name = f"'triplet' of {type(task).__name__}"
    return validate(
        TripletSettings,
        validate(TripletSettings, task.triplet, source=name).model_dump(exclude_unset=True)
        | validate(TripletSettings, chosen, source=source).model_dump(exclude_unset=True),
        source=source,
    )
