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
        description="Optimiser of the local steps: sgd (with momentum, if set), which the theory\n"
        "of strategies assumes; adam; or adamw, which applies weight decay outside the\n"
        "gradient.",
    )
    learning_rate: float = Field(
        default=0.05,
        gt=0,
        allow_inf_nan=False,
        description="Learning rate of the local steps in round 1.",
    )
    learning_rate_decay: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Factor by which the learning rate is multiplied after each round. With a\n"
        "factor below 1, clients' updates differ less in late rounds.",
    )
    learning_rate_decay_rounds: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(),
        description="Rounds after which learning_rate_decay is applied. Empty: after each round.\n"
        "Example for a learning rate that falls in a few large steps: decay 0.1 and\n"
        "rounds [50, 75].",
    )
    momentum: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Momentum of sgd: share of the last step that is added to the next step.\n"
        "Larger: faster, but clients with skewed data drift further apart. adam and adamw use\n"
        "`betas` instead.",
    )
    betas: tuple[Beta, Beta] = Field(
        default=(0.9, 0.999),
        description="Decay rates of the moving averages of gradients and of their squares, in\n"
        "adam and adamw.",
    )
    epsilon: float = Field(
        default=1e-8,
        gt=0,
        allow_inf_nan=False,
        description="Number added to the denominator in adam and adamw, so that steps stay small\n"
        "when gradients vanish.",
    )
    weight_decay: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="Factor of the L2 penalty on weights; with adamw, of the decay of weights.\n"
        "Larger: less overfitting on clients with few samples.",
    )
    batch_size: int = Field(
        default=32,
        ge=1,
        description="Number of samples per step. Larger: faster per epoch. Smaller: more progress\n"
        "per epoch.",
    )
    smallest_batch_size: int | None = Field(
        default=None,
        ge=1,
        description="Minimum batch size to which a client may halve its batches if its device\n"
        "lacks memory. Its steps then differ from those of other clients. Unset: the client's\n"
        "training fails instead.",
    )
    epochs: int = Field(
        default=1,
        ge=1,
        description="Number of passes over the client's samples. Larger: fewer rounds are\n"
        "needed, but clients' models drift further apart.",
    )
    steps: int | None = Field(
        default=None,
        ge=1,
        description="Number of training steps of each client, instead of `epochs`, so that\n"
        "clients with many samples don't train longer. Unset: `epochs` decides.",
    )
    kept_epochs: int = Field(
        default=0,
        ge=0,
        description="Number of passes at the start in which only the tensors that clients `keep`\n"
        "are trained. The remaining passes then train only the other tensors (FedRep).\n"
        "0: all tensors are trained together.",
    )
    gradient_clip: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="Maximum L2 norm of the gradient in a step; longer gradients are scaled down\n"
        "to it. Unset: no limit.",
    )
    validation_share: float = Field(
        default=0.0,
        ge=0,
        le=0.5,
        description="Share of its samples that each client holds out from training, for selectors\n"
        "that ask about a validation loss (flash).",
    )
    batched: bool | Literal["auto"] = Field(
        default=False,
        description="true: clients of a round on the same host are trained together, in batched\n"
        "steps, if their network allows it. This is much faster for small networks. Updates then\n"
        "differ by rounding from those of clients trained one by one. auto: each host measures\n"
        "once for each network which way is faster, and always uses that way.",
    )
    precision: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="Precision of matrix products: float32, or bfloat16 (only on GPUs, by\n"
        "torch's autocast; weights stay float32). bfloat16 is faster on recent GPUs, and a\n"
        "little less exact.",
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
