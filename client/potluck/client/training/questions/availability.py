"""The question `availability`: the chance that a client will be available."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import NonNegativeFloat

from potluck.client.question import Question, QuestionContext
from potluck.common.errors import TrainingError

AVAILABILITY = "availability"


@dataclass(frozen=True, kw_only=True)
class Availability(Question):
    """Answers `availability`: the probability that the client is available in an interval.

    The selector `refl` asks this question. The answer depends only on the owner's plan and
    discloses nothing about the data. begin, end: the interval, in seconds from now.
    """

    begin: NonNegativeFloat = 0.0
    end: NonNegativeFloat = 0.0

    def answer(self, context: QuestionContext) -> Mapping[str, float]:
        """Return the chance from the plan in the host's configuration."""
        chance = context.available(self.begin, max(self.begin, self.end))
        if not (math.isfinite(chance) and 0 <= chance <= 1):
            raise TrainingError(
                f"the availability plan of client '{context.client}' gives the probability "
                f"{chance}; it must be from 0 to 1"
            )
        return {AVAILABILITY: chance}
