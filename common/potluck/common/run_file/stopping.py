"""The table `[stop]` of a run file."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from potluck.common.settings.configuration import Settings


class Stopping(Settings):
    """Conditions that end a run before all its rounds are committed. The run's best model is
    kept."""

    measure: str = Field(
        min_length=1,
        description="Metric of the round's model that decides: accuracy, loss or one that the\n"
        "task's trainer declares; also tuned_…, personal_… and training_….",
    )
    patience: int | None = Field(
        default=None,
        ge=1,
        description="Number of evaluations in a row without an improvement after which the run\n"
        "ends. An evaluation without the metric has none; one in which it is partial is ignored.\n"
        "Unset: the run ends at the target only.",
    )
    minimum_delta: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="With patience: the gain of the metric must be larger than this to be an\n"
        "improvement.",
    )
    target: float | None = Field(
        default=None,
        allow_inf_nan=False,
        description="Value of the metric at which the run ends, at the first evaluation that\n"
        "reaches it. Unset: no target.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.patience is None and self.target is None:
            raise ValueError(
                "neither `patience` nor `target` is set; set one, or set retention.keep_best to "
                "keep only the best model"
            )
        if self.minimum_delta and self.patience is None:
            raise ValueError("`minimum_delta` needs `patience`; set it, or remove minimum_delta")
        return self
