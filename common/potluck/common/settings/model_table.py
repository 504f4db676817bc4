"""The table `[model]` of a run file."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

_PATTERN = Annotated[str, Field(min_length=1, max_length=200)]


class ModelTable(BaseModel):
    """The run's model, and which of its tensors are trained, sent or kept.

    All other keys are options of the model in `name`.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    name: str | None = Field(
        default=None,
        description="Name of an installed model, or MODULE:NAME of a function that creates one.\n"
        "Unset: the task's own model.",
    )
    trainable: tuple[_PATTERN, ...] = Field(
        default=(),
        description="Patterns of the tensors that are trained and sent, such as 'head.*'. All\n"
        "other tensors are the base, which every machine has. Empty: all tensors are\n"
        "sent.",
    )
    keep: tuple[_PATTERN, ...] = Field(
        default=(),
        description="Patterns of the tensors that each client trains and never sends, such as\n"
        "those of a head, or 'norm*' for normalisation. Empty: none.",
    )
    keep_seed: int | None = Field(
        default=None,
        ge=0,
        lt=2**63,
        description="Seed of the initial values of the tensors in `keep`. Unset: the run's seed.",
    )
    base: str | None = Field(
        default=None,
        description="Weights of the base: a .safetensors file, or the folder of a model as\n"
        "transformers saves it, in the data directory of each machine. Unset: the weights of the\n"
        "task's model.",
    )
    base_blake3: str = Field(
        default="",
        pattern="^([0-9a-f]{64})?$",
        description="BLAKE3 digest that the base must have. Unset: the digest of the\n"
        "coordinator's base.",
    )

    @property
    def options(self) -> dict[str, Any]:
        """Options of the model in `name`."""
        return dict(self.model_extra or {})

    @property
    def maker(self) -> dict[str, Any] | None:
        """The model's name and options; None if the task's own model is used."""
        return None if self.name is None else {"name": self.name, **self.options}

    @property
    def divides(self) -> bool:
        """True if not all tensors are sent."""
        return bool(self.trainable or self.keep)

    def with_seed(self, seed: int) -> ModelTable:
        """Return the same table. If it has no seed for the tensors that clients keep, it gets the
        run's seed."""
        if not self.keep or self.keep_seed is not None:
            return self
        return self.model_copy(update={"keep_seed": seed})

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.name is None and self.options:
            raise ValueError(
                f"'{next(iter(self.options))}' is an option of a model, but `name` is not set; set "
                "the model's name"
            )
        if not self.trainable and (self.base is not None or self.base_blake3):
            raise ValueError(
                "`base` is only used with `trainable`; set `trainable`, or remove `base`"
            )
        if not self.keep and self.keep_seed is not None:
            raise ValueError(
                "`keep_seed` is only used with `keep`; set `keep`, or remove `keep_seed`"
            )
        return self
