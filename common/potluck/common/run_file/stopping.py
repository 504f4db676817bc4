"""The table `[stop]` of a run file."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from potluck.common.settings.configuration import Settings


class Stopping(Settings):
    """When a run ends before all its rounds are committed. Its best model is kept."""

    measure: str = Field(
        min_length=1,
        description="What is followed: a measure of the round's model, such as accuracy, loss or\n"
        "one that the task's trainer declares; tuned_…, personal_… and training_… as well.",
    )
    patience: int | None = Field(
        default=None,
        ge=1,
        description="The run ends after so many evaluations in a row that bring no improvement;\n"
        "one without the measure brings none; one in which it is partial does not count.\n"
        "Unset: it ends at the target only.",
    )
    minimum_delta: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="With patience: what betters the measure by no more than this is no\n"
        "improvement.",
    )
    target: float | None = Field(
        default=None,
        allow_inf_nan=False,
        description="The run ends with the first evaluation that reaches this; unset, with none.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.patience is None and self.target is None:
            raise ValueError(
                "says neither `patience` nor `target`; give one, or set retention.keep_best where "
                "only the best model is to be kept"
            )
        if self.minimum_delta and self.patience is None:
            raise ValueError("`minimum_delta` is of use only with `patience`")
        return self
