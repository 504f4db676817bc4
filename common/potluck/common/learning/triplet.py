"""Settings of the triplet estimate, which the coordinator sends to clients.

The estimate is that of the FedDiverse paper (§4, Alg. 2–4). The descriptions of the settings name
the values that the paper does not specify.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from potluck.common.settings.configuration import Settings, validate
from potluck.common.task import Task


class TripletSettings(Settings):
    """Settings of the estimate; the same for all clients of a run. Sent as JSON."""

    pretraining_rounds: int = Field(
        default=1,
        ge=0,
        description="Number of FedAvg rounds before the estimate (T0). A few suffice: the model\n"
        "then has learned only what is easy to learn, which the estimate needs.",
    )
    pretraining_participation: Literal["cohort", "all"] = Field(
        default="cohort",
        description="Clients that train in the pretraining_rounds. cohort: as many random\n"
        "clients as in any round (the paper's Alg. 1). all: all clients (the paper's App. C).",
    )
    pretraining_always: bool = Field(
        default=False,
        description="True: the run starts with the pretraining_rounds even if the selector needs\n"
        "no triplets, so that selectors can be compared from the same start.",
    )
    bias_steps: int = Field(
        default=50,
        ge=1,
        description="Number of training steps of the biased model, which learns only what is\n"
        "easy to learn. With more steps, it also fits samples that contradict the bias.",
    )
    attribute_steps: int = Field(
        default=10,
        ge=1,
        description="Number of training steps of the attribute head: the layer that predicts a\n"
        "sample's attribute.",
    )
    q: float = Field(
        default=0.3,
        gt=0,
        le=1,
        description="Exponent q of the generalized cross-entropy. Near 0, it is cross-entropy;\n"
        "towards 1, it ignores samples that the model finds hard.",
    )
    learning_rate: float = Field(
        default=1e-3,
        gt=0,
        allow_inf_nan=False,
        description="Learning rate of the biased model and of the attribute head. It is small\n"
        "because the paper starts from a network pre-trained on ImageNet. The paper names no\n"
        "optimiser; Potluck uses SGD without momentum.",
    )
    attribute_learning_rate: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="Learning rate of the attribute head. Not in the paper, but a randomly\n"
        "initialised head hardly learns in 10 steps with a learning rate of 0.001\n"
        "(docs/research/triplet-estimate.md). Unset: learning_rate.",
    )
    batch_size: int = Field(
        default=28,
        ge=1,
        description="Number of samples in each step of training the biased\n"
        "model and the attribute head.",
    )
    head: Literal["random", "zero"] = Field(
        default="random",
        description="Initial weights of the attribute head. The paper does not specify them;\n"
        "random is usual for layers.",
    )
    pivot: Literal["absolute", "relative"] = Field(
        default="absolute",
        description="Class from which the attribute is learned. absolute: the class whose two\n"
        "parts differ by the fewest samples (the paper's Alg. 3), often a rare one if there are\n"
        "many classes. relative: the same per sample of the class.",
    )


def triplet_settings_for(
    task: Task, chosen: Mapping[str, object], *, source: str
) -> TripletSettings:
    """Return the run's settings: for each, the chosen value, else the task's recommendation, else
    the value in the FedDiverse paper.

    A task's recommendations are its attribute `triplet`, a mapping. source: name of `chosen` in
    errors. Raises ConfigurationError for an unknown setting or a value out of range.
    """
    name = f"'triplet' of {type(task).__name__}"
    return validate(
        TripletSettings,
        validate(TripletSettings, task.triplet, source=name).model_dump(exclude_unset=True)
        | validate(TripletSettings, chosen, source=source).model_dump(exclude_unset=True),
        source=source,
    )
