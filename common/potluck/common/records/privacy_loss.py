"""The privacy loss of runs with `[privacy]`, as the coordinator knows it.

The coordinator counts the updates that have arrived, and the extension point `ACCOUNT` computes ε
from these counts. Hosts' ledgers also contain other runs, and trainings whose update never arrived.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

ACCOUNT: Final = "run-privacy"
"""Name of the function, in the group `potluck.integrations`, that returns ε by client.

Its arguments are the terms of a training (`rpc.Privacy`), the run's `LocalTraining`, its
`Weighting`, and a sequence of `TrainingsSent`. It omits clients whose loss can't be known."""
BUDGET_SPENT: Final = "the privacy budget of its data does not allow this training"
"""Reason with which a host refuses a training.

It has no numbers, which would disclose facts about other runs.
"""
NO_ANSWER: Final = "the privacy budget of its data does not allow this answer"
"""Reason with which a host refuses to answer a question; it has no numbers, which would disclose
facts about other runs."""
RUN_BUDGET_SPENT: Final = "the run's privacy budget allows this client no further training"
"""Reason with which a coordinator that adds the noise itself excludes a client."""
ALL_RUNS_BUDGET_SPENT: Final = "the coordinator's privacy budget allows this client no training"
"""Reason with which a coordinator that adds the noise itself excludes a client whose losses in all
runs reach the coordinator's limit."""
NEAR_LIMIT: Final = 0.8
"""A client that has used this share of the run's trainings is near its limit."""


@dataclass(frozen=True, kw_only=True)
class TrainingsSent:
    """Trainings of a client that have the same privacy loss, and whose updates have arrived.

    samples: number of samples reported with the updates; 0 if masks hide it. epochs: passes over
    the samples; None for the run's number. count: number of trainings, at least 1. planned: number
    of trainings of a client that the run's `epsilon` covers.
    """

    client: str
    samples: int
    epochs: int | None
    count: int
    planned: int


@dataclass(frozen=True, kw_only=True)
class RoundPrivacy:
    """The privacy loss of a run after a round.

    delta: probability that the loss is larger, in (0, 1). largest, median: ε over the clients whose
    loss is known; None if no loss is known. near_limit: number of clients that have used at least
    80 % of the run's trainings; None if the run has no limit. refused: number of clients that are
    excluded because the owner's limit, or the run's trainings, are used up. clients: ε by client,
    for the clients whose loss has changed since the round before.
    """

    delta: float
    largest: float | None = None
    median: float | None = None
    near_limit: int | None = None
    refused: int = 0
    clients: Mapping[str, float] = field(default_factory=dict)
