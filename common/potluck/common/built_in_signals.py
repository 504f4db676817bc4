"""Potluck's built-in signals: label counts, interaction matrix, heterogeneity triplet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from potluck.common.disclosure import INTERACTION_MATRIX, LABEL_COUNTS, TRIPLET, Mode, Request
from potluck.common.learning.heterogeneity import triplet
from potluck.common.run_file.run_settings import ProfileSettings
from potluck.common.signal import (
    Count,
    Counts,
    EstimatedMatrix,
    Payload,
    ProfileSignal,
    Share,
    SignalContext,
)

_OF_PRETRAINING = {"pretraining_rounds", "pretraining_participation", "pretraining_always"}
"""Pretraining settings that a triplet request omits, because they are reflected in the digest of
the pretrained model."""


class _LabelCountsPayload(Payload):
    label_counts: tuple[Count, ...]


class LabelCounts(ProfileSignal):
    """Number of training samples of each class."""

    title = "label counts"
    payload = _LabelCountsPayload

    def shape(self, classes: int) -> tuple[int, ...]:
        """Return the shape of the numbers: one count per class."""
        return (classes,)

    def measure(self, context: SignalContext) -> Mapping[str, Any]:
        """Count the training samples of each class, then add the disclosure's noise."""
        counts = np.array(context.label_counts(), dtype=np.int64)
        return {LABEL_COUNTS: context.noisy(counts).tolist()}


class _InteractionMatrixPayload(Payload):
    interaction_matrix: tuple[tuple[Count, Count], ...]


class InteractionMatrix(ProfileSignal):
    """Number of training samples by class and binary attribute. Exact only: it has no noisy
    mode."""

    title = "interaction matrix"
    payload = _InteractionMatrixPayload
    modes = (Mode.EXACT,)
    hides_records = False

    def shape(self, classes: int) -> tuple[int, ...]:
        """Return the shape of the numbers: two counts per class."""
        return (classes, 2)

    def measure(self, context: SignalContext) -> Mapping[str, Any]:
        """Count the training samples by class and attribute, given by the task's groups."""
        from potluck.common.learning.sample_counts import interaction_matrix  # imports torch

        examples = context.examples(self.title)
        return {INTERACTION_MATRIX: interaction_matrix(examples, context.classes, context.groups)}


class _TripletPayload(Payload):
    triplet: tuple[Share, Share, Share]
    degenerate: bool | None = None


class Triplet(ProfileSignal):
    """Class imbalance, attribute imbalance and spurious correlation of a client's data: (CI, AI,
    SC)."""

    title = "heterogeneity triplet"
    payload = _TripletPayload
    modes = (Mode.NOISY_TRIPLET, Mode.EXACT_TRIPLET)
    needs_model = True
    hides_records = False  # one record can change the estimated attribute of other records

    def shape(self, classes: int) -> tuple[int, ...]:  # noqa: ARG002  the same for all
        """Return the shape of the numbers: (3,), for CI, AI and SC."""
        return (3,)

    def measure(self, context: SignalContext) -> Mapping[str, Any]:
        """Estimate the interaction matrix, add noise, and compute the triplet."""
        context.examples("triplets")
        noisy = context.noisy if context.parameters.mode.adds_noise else None
        return released_triplet(context.estimated_matrix(), noisy)

    def request(self, wishes: ProfileSettings) -> Request:
        """Return the request, with the settings of the estimate."""
        settings = type(wishes.triplet).model_validate(
            wishes.triplet.model_dump(exclude=_OF_PRETRAINING)
        )
        if wishes.triplet_mode == "exact":
            return Request(mode=Mode.EXACT_TRIPLET, settings=settings)
        return Request(
            mode=Mode.NOISY_TRIPLET,
            epsilon=wishes.epsilon,
            adjacency=wishes.adjacency,
            settings=settings,
        )


def released_triplet(
    found: EstimatedMatrix, noisy: Callable[[Counts], Counts] | None
) -> dict[str, Any]:
    """Return the payload for an estimated matrix. noisy: function that adds noise; None for an
    exact payload.

    With `noisy`, every number of the matrix gets noise and is clipped at 0. The triplet is computed
    from the result, and `degenerate` is not disclosed. ε then holds for the counts, if the
    estimated attributes are fixed. But these were estimated by models trained on the same samples:
    adding or removing one sample can change the estimated attribute of other samples, which ε does
    not cover. docs/research/triplet-estimate.md has measurements.
    """
    if noisy is None:
        return {TRIPLET: list(triplet(found.matrix)), "degenerate": found.degenerate}
    matrix = noisy(found.matrix).astype(np.float64).clip(min=0.0)
    return {TRIPLET: list(triplet(matrix)), "degenerate": None}
