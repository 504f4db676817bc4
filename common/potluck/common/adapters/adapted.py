"""What all adapters have in common: measures declared by the object, and means turned into sums."""

from __future__ import annotations

from collections.abc import Mapping

from potluck.common.errors import TrainingError
from potluck.common.trainer import Measure, Measured, Measures, Trainer


class AdaptedTrainer(Trainer):
    """A trainer of which each object declares measures of its own."""

    def __init__(self, measures: Mapping[str, Measure]) -> None:
        self.measures = measures  # type: ignore[misc]  # other trainers' classes declare theirs

    def over_samples(self, found: Mapping[str, Measured | float], samples: int) -> Measures:
        """Measures, of which bare numbers are means over so many samples.

        Raises TrainingError for a bare number where the number of samples is not known: 0.
        """
        summed = {}
        for name, value in found.items():
            if not isinstance(value, Measured):
                if samples < 1:
                    raise TrainingError(
                        f"measure '{name}' is {value}, a mean over a number of samples that the "
                        "loader does not tell; return Measured(sum, count)"
                    )
                value = Measured(float(value) * samples, samples)
            summed[name] = value
        return summed
