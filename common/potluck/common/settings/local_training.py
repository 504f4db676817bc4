"""Settings of local training, which the coordinator sends to clients."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from potluck.common.settings.configuration import Settings

Beta = Annotated[float, Field(ge=0, lt=1)]


class LocalTraining(Settings):
    """Settings of a client's training in one round, sent as JSON.

    Each round starts with a new optimiser.
    """

    optimizer: Literal["sgd", "adam", "adamw"] = Field(
        default="sgd",
        description="Rule of the local steps: sgd (with momentum, if set), which the theory of\n"
        "strategies assumes; adam, or adamw, which applies weight decay outside the gradient.",
    )
    learning_rate: float = Field(
        default=0.05, gt=0, allow_inf_nan=False, description="Length of a local step in round 1."
    )
    learning_rate_decay: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="The learning rate is multiplied by this after each round; below 1\n"
        "late rounds disagree less.",
    )
    learning_rate_decay_rounds: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(),
        description="The rounds after which it is; empty: after each. For rates that fall in a\n"
        "few large steps: decay 0.1 and rounds [50, 75].",
    )
    momentum: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Share of the last step that the next one repeats; speeds up, but skewed\n"
        "clients drift further apart. For sgd; adam and adamw have betas.",
    )
    betas: tuple[Beta, Beta] = Field(
        default=(0.9, 0.999),
        description="Adam's memory of gradients and of their squares.",
    )
    epsilon: float = Field(
        default=1e-8,
        gt=0,
        allow_inf_nan=False,
        description="Keeps Adam's steps small where gradients vanish.",
    )
    weight_decay: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="L2 penalty (adamw: decay of the weights); against overfitting few samples.",
    )
    batch_size: int = Field(
        default=32,
        ge=1,
        description="Samples per step; larger is faster per epoch, smaller learns more.",
    )
    smallest_batch_size: int | None = Field(
        default=None,
        ge=1,
        description="A client whose device has too little memory halves its batches down to this;\n"
        "unset, its training fails. Its steps are then other ones than those of the rest.",
    )
    epochs: int = Field(
        default=1,
        ge=1,
        description="Passes over the client's samples; more saves rounds, but drifts more.",
    )
    steps: int | None = Field(
        default=None,
        ge=1,
        description="Steps instead of epochs, so that clients with many samples don't do more.",
    )
    kept_epochs: int = Field(
        default=0,
        ge=0,
        description="First passes, in which only tensors that clients `keep` are trained. The\n"
        "others then train only the rest (FedRep). 0: all are trained together.",
    )
    gradient_clip: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="Longest gradient (L2 norm) of a step; keeps single batches from blowing up.",
    )
    validation_share: float = Field(
        default=0.0,
        ge=0,
        le=0.5,
        description="Share of its samples that each client keeps back from training, for the\n"
        "questions of selectors that validate (flash).",
    )
    batched: bool | Literal["auto"] = Field(
        default=False,
        description="Clients of a round that are on the same host are trained in one batched\n"
        "step, where their network allows it: much faster where it is small. Updates then differ\n"
        "by the rounding of floats from those of clients that are trained one by one. auto: each\n"
        "host measures once for each network which is faster, and keeps to it.",
    )
    precision: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="bfloat16: where the device is a GPU, products are computed in bfloat16\n"
        "(torch's autocast); weights stay float32. Faster on recent GPUs, a little less exact.",
    )

    @field_validator("batched", mode="before")
    @classmethod
    def _no_number(cls, batched: object) -> object:
        if type(batched) in (int, float):
            raise ValueError("must be true, false or auto")
        return batched

    def as_json(self) -> str:
        """Return the JSON that is sent to hosts. It omits `batched` if that is false: hosts with
        older software don't know this setting."""
        return self.model_dump_json(exclude=None if self.batched else {"batched"})

    @property
    def adaptive(self) -> bool:
        """True if the optimiser rescales each weight's gradient."""
        return self.optimizer in ("adam", "adamw")

    @property
    def unfit_for_noise(self) -> str:
        """Message about a setting that is incompatible with `[privacy]`, with its remedy; empty if
        none."""
        if self.validation_share:
            return "training.validation_share is not compatible with [privacy]; leave it out"
        if self.kept_epochs:
            return "training.kept_epochs is not compatible with [privacy]; leave it out"
        if self.precision != "float32":
            return 'training.precision must be "float32" with [privacy]; leave it out'
        return ""

    def learning_rate_in(self, round_number: int) -> float:
        """Return the learning rate of a round, counted from 1."""
        rounds = self.learning_rate_decay_rounds
        times = sum(each < round_number for each in rounds) if rounds else round_number - 1
        return float(self.learning_rate * self.learning_rate_decay**times)

    def planned_steps(self, samples: int) -> int:
        """Return the number of optimiser steps that a client with `samples` samples takes in a
        round."""
        return self.steps or self.epochs * -(-samples // self.batch_size)
