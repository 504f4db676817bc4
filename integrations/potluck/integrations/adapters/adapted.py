"""Base of all adapters: calls a script's functions and converts the returned means to sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from potluck.common.errors import TrainingError
from potluck.common.settings.option_checks import signature_of
from potluck.common.trainer import (
    Capability,
    EvaluationSettings,
    Measure,
    Measured,
    Measures,
    Trainer,
    TrainerSettings,
)
from potluck.integrations.adapters.watched_loaders import dataset_size

_OF_THE_RUN: Final = (
    "batch_size",
    "epochs",
    "gradient_clip",
    "momentum",
    "optimizer",
    "steps",
    "weight_decay",
)
"""Keys of the run's `[training]` table that a function may take as parameters.

The round's learning rate is also available, as `learning_rate`.
"""
_ALWAYS: Final = ("client", "device", "seed")


class AdaptedTrainer(Trainer):
    """Base class: a trainer that gets its metrics and capabilities as constructor arguments."""

    def __init__(self, measures: Mapping[str, Measure], *, private: bool = False) -> None:
        """private: True declares the capability `privacy`."""
        self.measures = measures  # type: ignore[misc]  # a class variable in other trainers
        if private:
            self.capabilities = frozenset({Capability.PRIVACY})  # type: ignore[misc]

    def samples(self, data: Any) -> int:
        """Return the length of the loader's data set; 0 if it has no length."""
        return dataset_size(data)

    def over_samples(
        self, found: Mapping[str, Measured | float], samples: int, *, by: str
    ) -> Measures:
        """Turn bare numbers, which are means over the samples, into `Measured`; keep the others.

        samples: number of samples; 0 if unknown. by: name of the function that returned the
        numbers, for messages. Raises TrainingError for values that are not numbers, and for a bare
        number if the number of samples is unknown.
        """
        summed = {}
        for name, value in found.items():
            if isinstance(value, Measured):
                summed[name] = value
                continue
            try:
                mean = float(value)
            except (TypeError, ValueError, RuntimeError):  # tensors raise RuntimeError
                raise TrainingError(
                    f"{by} returned a {type(value).__name__} for metric '{name}'; return a "
                    "number, or Measured(sum, count)"
                ) from None
            if samples < 1:
                raise TrainingError(
                    f"{by} returned {mean} for metric '{name}', but the loader has no length, so "
                    "the number of samples is unknown; return Measured(sum, count)"
                )
            summed[name] = Measured(mean * samples, samples)
        return summed


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a script's function, for messages."""
    return str(getattr(function, "__qualname__", None) or type(function).__name__)


def called(
    function: Callable[..., Any], *given: Any, settings: TrainerSettings | EvaluationSettings
) -> Any:
    """Call a script's function with the given first arguments and return its result.

    The function's other parameters are filled by name, even if they have defaults: `settings`,
    `client`, `seed`, `device`; in a training also `round`, `learning_rate` and the keys of
    `[training]`.
    """
    offered = {"settings": settings, **{name: getattr(settings, name) for name in _ALWAYS}}
    if isinstance(settings, TrainerSettings):
        offered |= {name: getattr(settings.training, name) for name in _OF_THE_RUN}
        offered |= {"round": settings.round, "learning_rate": settings.learning_rate}
    parameters = list(signature_of(function).parameters.values())[len(given) :]
    named = {each.name: offered[each.name] for each in parameters if each.name in offered}
    missing = [
        each.name
        for each in parameters
        if each.name not in named
        and each.default is each.empty
        and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    if missing:
        raise TrainingError(
            f"`{name_of(function)}` has a parameter '{missing[0]}', for which Potluck has no "
            "value; give the parameter a default, or one of these names: "
            f"{', '.join(sorted(offered))}"
        )
    return function(*given, **named)
