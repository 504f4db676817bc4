"""A cheap audit of claimed label counts: compares them with changes of the output bias.

With softmax and cross-entropy, a step changes the output bias of class c by learning rate × (share
of c in the batch − the model's mean probability of c). So without samples of c the bias can only
fall. If a client's bias of c has risen, the client holds samples of c; the rise gives their minimum
number (`LocalSteps.fewest_samples`). If its bias of c never rises, the client holds few samples of
c, provided that its steps were long enough to change the model noticeably (`LocalSteps.span`).
Measurements of honest clients agree with these bounds (docs/research/label-audit.md). Claims
outside these bounds are tested against the noise that the client is known to have added.

The audit needs unmasked updates, so it does not work with secure aggregation. It is valid for steps
of plain SGD, with or without momentum; `audit_records.why_not_audited` lists the settings that
break its assumptions. The audit raises suspicion; it proves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from potluck.common.errors import ConfigurationError
from potluck.common.learning.output_layer import Form

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class LocalSteps:
    """The local steps of one client in one round: SGD with momentum on batches of its samples.

    samples, steps: number of samples and of steps, each at least 1. batch_size: size of all batches
    except the last of a pass.
    """

    samples: int
    steps: int
    batch_size: int
    learning_rate: float
    momentum: float

    @property
    def span(self) -> float:
        """The maximum change of the output bias, reached if the gradient is 1 in every step."""
        lost = self.momentum * (1 - self.momentum**self.steps) / (1 - self.momentum)
        return self.learning_rate / (1 - self.momentum) * (self.steps - lost)

    def fewest_samples(self, changes: Floats) -> Floats:
        """Return, for each class, the minimum number of samples that explains how the class's bias
        rose.

        It is 0 for a class whose bias fell.

        A sample has the largest effect in the last batch of a pass, which may be small.
        """
        batches = -(-self.samples // self.batch_size)
        last = self.samples - (batches - 1) * self.batch_size
        passes = -(-self.steps // batches)
        length = self.learning_rate / (1 - self.momentum)
        # The class's share in each batch of a pass, summed over the batches. The true
        # sum is at least as large.
        shares = changes.clip(min=0.0) / (length * passes)
        beyond = (shares - 1).clip(min=0.0)
        fewest: Floats = shares.clip(max=1.0) * last + beyond * self.batch_size
        return fewest


@dataclass(frozen=True, kw_only=True)
class BiasUpdates:
    """The changes of the output bias in one round.

    changes: K × C, float64, output bias after local training minus before; a row of NaN for a
    client that took no part. fewest: K × C, float64, minimum number of samples of the class that
    explains the client's change; None if unknown: a rise then proves at least one sample. spans: K,
    float64, `LocalSteps.span` of each client; None if every span is at least
    `AuditSettings.least_span`.
    """

    changes: Floats
    fewest: Floats | None = None
    spans: Floats | None = None


@dataclass(frozen=True, kw_only=True)
class AuditSettings:
    """Settings of the audit.

    significance: probability of suspecting an honest client, per audit. least_rounds: number of
    rounds without a rise after which few samples of the class are assumed. least_span: minimum
    `LocalSteps.span` of a round; rounds with a smaller span are not counted in `least_rounds`.
    unseen_samples, unseen_share: maximum number of samples that a client may hold of a class whose
    bias never rose, absolute or as a share of all samples that it claims; the larger applies.
    """

    significance: float = 0.01
    least_rounds: int = 5
    least_span: float = 2.5
    unseen_samples: int = 3
    unseen_share: float = 0.05

    def __post_init__(self) -> None:
        if not 0 < self.significance < 1:
            raise ConfigurationError(
                f"the audit's significance is {self.significance}; it must be a probability in "
                "(0, 1)"
            )
        sound = self.least_rounds >= 1 and self.least_span >= 0 and self.unseen_samples >= 0
        if not sound or not 0 <= self.unseen_share < 1:
            raise ConfigurationError(
                "the audit's least_rounds must be ≥ 1, least_span and unseen_samples ≥ 0, "
                "unseen_share in [0, 1)"
            )


class Contradiction(StrEnum):
    """Ways in which the updates can contradict claimed label counts."""

    HIDDEN = "holds more of the class than claimed"
    INVENTED = "holds less of the class than claimed"


@dataclass(frozen=True, kw_only=True)
class Suspicion:
    """A class for which a client's claim is suspicious.

    bound: minimum (HIDDEN) or maximum (INVENTED) number of its samples, according to the updates.
    rounds: number of rounds in which the client took part. rises: number of those in which its bias
    rose. probability: probability of this claim or a more extreme one if the client held `bound`
    samples and added its noise; 0 without noise.
    """

    label: int
    contradiction: Contradiction
    claimed: float
    bound: int
    rounds: int
    rises: int
    probability: float


class LabelVerdict(StrEnum):
    """Result of the audit for one client. CONSISTENT includes clients with little evidence.
    UNKNOWN: no evidence or no claim."""

    CONSISTENT = "consistent"
    SUSPICIOUS = "suspicious"
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class ClientAudit:
    """The audit of a client. row: the client's row in the table. rounds: number of rounds with an
    update of the client. suspicions: its suspicious classes, least probable first."""

    row: int
    verdict: LabelVerdict
    rounds: int
    suspicions: tuple[Suspicion, ...]


def audit_labels(
    claimed: Floats,
    rounds: Sequence[BiasUpdates],
    *,
    noise_rates: Floats,
    settings: AuditSettings | None = None,
) -> list[ClientAudit]:
    """Return an audit of every client, in the order of rows.

    claimed: K × C, float64, label counts as disclosed; a row of NaN if a client disclosed nothing.
    noise_rates: K, float64, ε / Δ₁ of each client's discrete Laplace noise; infinite if its counts
    are exact. A class is suspicious if its probability, times the number of classes with evidence
    (Bonferroni), is below `settings.significance`.

    Raises ConfigurationError if shapes don't match, or a rate is not positive.
    """
    chosen = settings or AuditSettings()
    _check(claimed, rounds, noise_rates)
    return [
        _audit(
            row,
            claimed[row],
            _evidence(row, rounds, chosen.least_span),
            float(noise_rates[row]),
            chosen,
        )
        for row in range(len(claimed))
    ]


@dataclass(frozen=True, kw_only=True)
class _Evidence:
    """Evidence about one client's labels from the changes of its output bias.

    rounds: number of rounds in which the client's update is known. long_rounds: number of those
    with a span of at least `least_span`. rises: for each class, the number of rounds in which the
    bias rose. fewest: for each class, the minimum number of samples that explains these rises.
    """

    rounds: int
    long_rounds: int
    rises: NDArray[np.int64]
    fewest: Floats


def _evidence(row: int, rounds: Sequence[BiasUpdates], least_span: float) -> _Evidence:
    classes = rounds[0].changes.shape[1] if rounds else 0
    rises = np.zeros(classes, dtype=np.int64)
    fewest = np.zeros(classes)
    taken = long_rounds = 0
    for updates in rounds:
        change = updates.changes[row]
        if np.isnan(change).any():
            continue
        taken += 1
        long_rounds += updates.spans is None or bool(updates.spans[row] >= least_span)
        rises += change > 0
        if updates.fewest is not None:
            fewest = np.maximum(fewest, updates.fewest[row])
    return _Evidence(rounds=taken, long_rounds=long_rounds, rises=rises, fewest=fewest)


def _audit(
    row: int, claims: Floats, evidence: _Evidence, rate: float, settings: AuditSettings
) -> ClientAudit:
    if evidence.rounds == 0 or np.isnan(claims).any():
        return ClientAudit(
            row=row, verdict=LabelVerdict.UNKNOWN, rounds=evidence.rounds, suspicions=()
        )
    tested = list(_tests(claims, evidence, rate, settings))
    threshold = settings.significance / max(1, len(tested))
    suspicions = tuple(
        sorted(
            (suspicion for suspicion in tested if suspicion.probability < threshold),
            key=lambda suspicion: (suspicion.probability, suspicion.label),
        )
    )
    verdict = LabelVerdict.SUSPICIOUS if suspicions else LabelVerdict.CONSISTENT
    return ClientAudit(row=row, verdict=verdict, rounds=evidence.rounds, suspicions=suspicions)


def _tests(
    claims: Floats, evidence: _Evidence, rate: float, settings: AuditSettings
) -> Iterator[Suspicion]:
    """Yield the test of one class's claim, for each class about which the updates give evidence."""
    # noisy counts may be negative; clipping each would bias the sum
    samples = max(0.0, float(claims.sum()))
    unseen = max(settings.unseen_samples, math.floor(settings.unseen_share * samples))
    for label, claim in enumerate(claims.tolist()):
        rises = int(evidence.rises[label])
        if rises:
            least = max(1, math.floor(evidence.fewest[label]))
            contradiction, bound = Contradiction.HIDDEN, least
            probability = noise_at_most(math.floor(claim) - least, rate)
        elif evidence.long_rounds >= settings.least_rounds:
            contradiction, bound = Contradiction.INVENTED, unseen
            probability = noise_at_most(unseen - math.ceil(claim), rate)
        else:
            continue
        yield Suspicion(
            label=label,
            contradiction=contradiction,
            claimed=claim,
            bound=bound,
            rounds=evidence.rounds,
            rises=rises,
            probability=probability,
        )


def noise_at_most(value: int, rate: float) -> float:
    """Return P(X ≤ value) of discrete Laplace noise, P(X = x) ∝ exp(−rate · |x|); rate in (0,
    ∞]."""
    decay = math.exp(-rate)
    if value < 0:
        return decay**-value / (1 + decay)
    return 1 - decay ** (value + 1) / (1 + decay)


def output_bias(model: Mapping[str, Form], classes: int) -> str:
    """Return the name of the output layer's bias: the model's last tensor with `classes`
    numbers."""
    names = [name for name, array in model.items() if array.shape == (classes,)]
    if not names:
        raise ConfigurationError(
            f"the model has no bias of {classes} classes, so claimed label counts can't be "
            "audited; give its last layer a bias",
            classes=classes,
        )
    return names[-1]


def _check(claimed: Floats, rounds: Sequence[BiasUpdates], noise_rates: Floats) -> None:
    if claimed.ndim != 2:
        raise ConfigurationError(
            f"claimed label counts have shape {claimed.shape}; the shape must be clients × classes"
        )
    shapes = {"noise rates": noise_rates.shape}
    fitting = noise_rates.shape == claimed.shape[:1]
    for updates in rounds:
        fitting &= updates.changes.shape == claimed.shape
        fitting &= updates.fewest is None or updates.fewest.shape == claimed.shape
        fitting &= updates.spans is None or updates.spans.shape == claimed.shape[:1]
        shapes["bias updates"] = updates.changes.shape
    if not fitting:
        raise ConfigurationError(
            f"claimed label counts of shape {claimed.shape} do not match arrays of the shapes "
            f"{shapes}; each array needs one row per client"
        )
    if not (noise_rates > 0).all():
        raise ConfigurationError(
            "a noise rate is not positive; it must be ε / Δ₁, or inf without noise"
        )
