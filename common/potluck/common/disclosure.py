"""Disclosures of clients, as coordinator and hosts define them: modes, parameters, precision of
sample numbers.

A coordinator asks with a `Request`. The client's own configuration turns it into `Parameters`,
which are sent back with the disclosure. A client discloses something only once for each data epoch,
signal and parameters. Formats: docs/reference/disclosure.md.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from potluck.common.errors import ProtocolError
from potluck.common.learning.triplet import TripletSettings
from potluck.common.settings.old_spelling import old_spellings

LABEL_COUNTS: Final = "label_counts"
TRIPLET: Final = "triplet"
INTERACTION_MATRIX: Final = "interaction_matrix"
BUILT_IN_SIGNALS: Final = (LABEL_COUNTS, TRIPLET, INTERACTION_MATRIX)

Adjacency = Literal["add-remove", "replace"]

LEAST_EPSILON = 1e-6
"""Minimum of epsilon. A smaller value gives noise that exceeds any data set's counts."""

SMALLEST_CLIP: Final = 1e-6
"""Minimum bound on what one record or one client adds to a sum with noise. With a much smaller
bound, rounding to float32 would change the noise and what the bound cuts off."""
LARGEST_CLIP: Final = 1e6
"""Maximum bound on what one record or one client adds to a sum with noise."""

LEAST_HOSTS: Final = 5
SMALLEST_LEAST_HOSTS: Final = 3
"""Smallest minimum number of hosts that may be set for a secure sum. With two hosts, each could
compute the other's input."""
RUNS_PER_EPOCH: Final = 1
ROUNDS_PER_EPOCH: Final = 1000
"""Default maximum number of rounds, counted over all runs, for which a client sends masked updates
made from one data epoch (version of its data)."""

CLAIM: Final = (
    "masks hide each update in the sum of its round from a coordinator that keeps to the "
    "protocol; they do not protect against operators, against a coordinator that lies, or over "
    "several rounds and runs"
)
"""The only protection that Potluck claims for updates with masks and without noise."""


class SumKind(StrEnum):
    """The kinds of secure sums. The values are the names in messages and ledgers."""

    TOTAL = "total"
    """Label counts, summed over all clients of the federation."""
    CELLS = "cells"
    """Label counts, summed over a group (cell) of clients; each client draws the groups itself."""
    STEPWISE = "protocol"
    """Label counts, summed over the clients selected so far, at each step of a selection;
    `unsafe-stepwise` in settings."""
    UPDATE = "update"
    """Masked updates, summed over the clients of a round."""


class Mode(StrEnum):
    """The mode of a signal: with discrete Laplace noise, or exact.

    In messages and ledgers, the modes of triplets are spelled differently from those of other
    signals. The spelling is part of the key under which a client records what it has disclosed, so
    it must not change.
    """

    NOISY = "noisy"
    EXACT = "exact"
    NOISY_TRIPLET = "ldp"
    EXACT_TRIPLET = "plain"

    @property
    def adds_noise(self) -> bool:
        """True if a disclosure costs privacy budget."""
        return self in (Mode.NOISY, Mode.NOISY_TRIPLET)


NoisyOrExact = Annotated[
    Literal["noisy", "exact"], old_spellings({"ldp": "noisy", "plain": "exact"})
]
"""Value of settings that choose disclosure with noise or without."""


class Weighting(StrEnum):
    """Precision with which a client discloses its number of samples, from exact to none."""

    EXACT = "exact"
    BUCKETED = "bucketed"
    EQUAL = "equal"

    def permits(self, asked: Weighting) -> bool:
        """Return whether a client that is limited to this precision may disclose with the precision
        `asked`."""
        order = list(Weighting)
        return order.index(asked) >= order.index(self)

    def disclosed(self, samples: int) -> int:
        """Return the number that is disclosed in place of a number of samples (≥ 1): the number
        itself, the nearest power of two, or 1."""
        if self is Weighting.EXACT:
            return samples
        if self is Weighting.EQUAL:
            return 1
        below = 1 << (samples.bit_length() - 1)
        return below if samples * samples < 2 * below * below else 2 * below


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Request(_Message):
    """A coordinator's request. If a field is None, the client's configuration decides.

    settings: settings of the estimate, for a triplet.
    """

    mode: Mode
    epsilon: float | None = Field(default=None, ge=LEAST_EPSILON, allow_inf_nan=False)
    adjacency: Adjacency | None = None
    settings: TripletSettings | None = None

    def canonical(self) -> str:
        """Return the canonical JSON of this request."""
        return canonical_json(self.model_dump(mode="json", exclude_none=True))


class TaskReference(_Message):
    """The task whose data are disclosed."""

    name: str
    options: dict[str, Any] = Field(default_factory=dict)


class Parameters(_Message):
    """The parameters of a disclosure.

    epsilon, adjacency: only with noise. model: BLAKE3 digest of the model with which a triplet was
    estimated. settings: settings of that estimate.
    """

    mode: Mode
    task: TaskReference
    epsilon: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    adjacency: Adjacency | None = None
    model: str | None = None
    settings: TripletSettings | None = None

    def canonical(self) -> str:
        """Return the canonical JSON of these parameters."""
        return canonical_json(self.model_dump(mode="json", exclude_none=True))

    @property
    def noise_rate(self) -> float:
        """ε / Δ₁ of the discrete Laplace noise in the counts; infinite without noise."""
        if self.epsilon is None:
            return math.inf
        return self.epsilon / (1 if self.adjacency == "add-remove" else 2)

    def satisfies(self, request: Request) -> bool:
        """Return whether a disclosure with these parameters satisfies the request."""
        return (
            self.mode is request.mode
            and request.epsilon in (None, self.epsilon)
            and request.adjacency in (None, self.adjacency)
            and request.settings == self.settings
        )


def canonical_json(value: Mapping[str, Any]) -> str:
    """Return JSON with sorted keys, in ASCII, without spaces or NaN. Equal objects give equal
    texts."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def parse_parameters(text: str) -> Parameters:
    """Return the parameters in a received text. Raises ProtocolError unless the text is well-formed
    and canonical."""
    try:
        parameters = Parameters.model_validate_json(text)
        if parameters.canonical() == text:
            return parameters
        why = "not canonical JSON (sorted keys, no spaces)"
    except ValidationError as error:
        why = first_fault(error)
    except ValueError as error:  # the task's options contain NaN
        why = str(error)
    raise ProtocolError(f"parameters of a profile: {why}")


def first_fault(error: ValidationError) -> str:
    """Return the first error of a failed validation as text, with its place."""
    fault = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(str(part) for part in fault["loc"])
    return f"{place}: {fault['msg']}" if place else str(fault["msg"])
