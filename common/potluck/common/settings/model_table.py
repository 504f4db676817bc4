"""The table `[model]` of a run file."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

_PATTERN = Annotated[str, Field(min_length=1, max_length=200)]


class ModelTable(BaseModel):
    """The run's model, and the choice of its tensors that are trained, sent or kept.

    All other keys are options of the model in `name`.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    name: str | None = Field(
        default=None,
        description="One that is installed, or MODULE:NAME of anything that makes one; unset, the\n"
        "task's own.",
    )
    trainable: tuple[_PATTERN, ...] = Field(
        default=(),
        description="Tensors that are trained and travel, by patterns such as 'head.*'; the\n"
        "others are the base, which every machine has. Empty: all of them.",
    )
    keep: tuple[_PATTERN, ...] = Field(
        default=(),
        description="Tensors that stay with each client and are trained there, by patterns: a\n"
        "head, or 'norm*' for normalisation. They are never sent. Empty: none.",
    )
    keep_seed: int | None = Field(
        default=None,
        ge=0,
        lt=2**63,
        description="Seed of the first values of these; unset, the run's.",
    )
    base: str | None = Field(
        default=None,
        description="Weights of the base: a .safetensors file, or the folder of a model as\n"
        "transformers saves it, in the data directory of each machine; unset, those that the\n"
        "task's model has.",
    )
    base_blake3: str = Field(
        default="",
        pattern="^([0-9a-f]{64})?$",
        description="The base's digest, if it is to be that one; unset, the coordinator's is.",
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
        """Return the same table; if it has no seed for the tensors that clients keep, use the run's
        seed."""
        if not self.keep or self.keep_seed is not None:
            return self
        return self.model_copy(update={"keep_seed": seed})

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.name is None and self.options:
            raise ValueError(
                f"'{next(iter(self.options))}' is an option of a model, and no `name` says of which"
            )
        if not self.trainable and (self.base is not None or self.base_blake3):
            raise ValueError("`base` is of use only where `trainable` says what is not in it")
        if not self.keep and self.keep_seed is not None:
            raise ValueError("`keep_seed` is of use only where `keep` says what clients keep")
        return self
