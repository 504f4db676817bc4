"""ε of a run's clients, computed by the coordinator from the updates that have arrived.

Sampling rate and steps of a training follow from the number of samples that the client reports. So
hosts don't send their ledgers, and don't disclose what their clients have spent in other runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from potluck.common.disclosure import Weighting
from potluck.common.errors import ConfigurationError
from potluck.common.records.privacy_loss import TrainingsSent
from potluck.common.settings.extras import require
from potluck.common.settings.local_training import LocalTraining
from potluck.privacy.planned_training import CLIENT, planned_event, rdp_of_answers
from potluck.privacy.rdp_filter import RdpFilter
from potluck.rpc.v1 import coordinator_pb2 as rpc

_MANY = 64
"""Number of different training lengths above which numbers of samples are rounded."""


def spent_in_run(
    asked: rpc.Privacy,
    training: LocalTraining,
    weighting: Weighting,
    sent: Sequence[TrainingsSent],
) -> dict[str, float]:
    """Return ε of each client's updates at δ = `asked.delta`, by client.

    asked: privacy terms of the run's trainings. training: settings of the run. weighting: precision
    of the reported numbers of samples. If they are not exact, ε is an upper estimate, for the
    smallest number of samples that gives the reported number. Omits clients whose number of samples
    is hidden.

    The search for the noise of an ε takes about 0.2 s for each number of samples. With many
    different numbers, all are rounded down to two digits. If the run asks clients about their data,
    ε includes all answers that the run plans. Raises MissingLibraryError.
    """
    require("dp_accounting", "potluck[privacy]")
    many = len({(each.samples, each.epochs) for each in sent}) > _MANY
    answered = RdpFilter(epsilon=math.inf, delta=asked.delta, spent=rdp_of_answers(asked))
    spent: dict[str, RdpFilter] = {}
    unknown = set[str]()
    for each in sent:
        # Any number: the privacy loss of a whole update does not depend on the samples.
        samples = 1 if asked.unit == CLIENT else _fewest(each.samples, weighting)
        if many:
            samples = _rounded_down(samples)
        terms = rpc.Privacy()
        terms.CopyFrom(asked)
        terms.trainings = each.planned
        settings = training
        if each.epochs is not None:
            settings = training.model_copy(update={"epochs": each.epochs})
        try:
            one = planned_event(terms, settings, samples) if samples else None
        except ConfigurationError:  # no noise suffices; a host refuses such a training
            one = None
        if one is None:
            unknown.add(each.client)
            continue
        before = spent.get(each.client, answered)
        spent[each.client] = before.with_event(replace(one, steps=one.steps * each.count))
    return {
        client: found.epsilon_spent
        for client, found in sorted(spent.items())
        if client not in unknown
    }


def _fewest(reported: int, weighting: Weighting) -> int:
    """Return the smallest number of samples that is reported as `reported`; 0 if it is hidden.

    With masked updates, 0 is reported."""
    if weighting is Weighting.EXACT:
        return reported
    return 0 if weighting is Weighting.EQUAL else math.ceil(reported / math.sqrt(2))


def _rounded_down(samples: int) -> int:
    """Return a number rounded down to two digits."""
    unit = int(10 ** max(0, len(str(samples)) - 2))
    return samples // unit * unit
