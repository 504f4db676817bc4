"""Requests for disclosures, from a run's settings. Pure."""

from __future__ import annotations

from potluck.common.disclosure import INTERACTION_MATRIX, LABEL_COUNTS, TRIPLET, Mode, Request
from potluck.common.run_file.runfile import RunFile


def request_for(signal: str, run_file: RunFile) -> Request:
    """The request for a signal, by the run's settings."""
    wishes = run_file.profiles
    if signal == INTERACTION_MATRIX:
        return Request(mode=Mode.EXACT)
    if signal == LABEL_COUNTS and wishes.disclosure == "exact":
        return Request(mode=Mode.EXACT)
    settings = None
    if signal == TRIPLET:
        # How the model came about is in its digest already.
        about_the_model = ("pretraining_rounds", "pretraining_participation", "pretraining_always")
        chosen = wishes.triplet.model_dump(exclude=set(about_the_model))
        settings = type(wishes.triplet).model_validate(chosen)
        if wishes.triplet_mode == "exact":
            return Request(mode=Mode.EXACT_TRIPLET, settings=settings)
    mode = Mode.NOISY_TRIPLET if signal == TRIPLET else Mode.NOISY
    return Request(mode=mode, epsilon=wishes.epsilon, adjacency=wishes.adjacency, settings=settings)
