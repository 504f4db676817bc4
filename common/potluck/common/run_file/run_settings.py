"""The tables of a run file, each a class."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from potluck.common.disclosure import (
    LARGEST_CLIP,
    LEAST_EPSILON,
    LEAST_HOSTS,
    SMALLEST_CLIP,
    SMALLEST_LEAST_HOSTS,
    Adjacency,
    NoisyOrExact,
)
from potluck.common.learning.spread import LEAST_GROUP, SMALLEST_GROUP
from potluck.common.learning.triplet import TripletSettings
from potluck.common.names import Name, TagValue
from potluck.common.real_time import YEAR_SECONDS, Seconds
from potluck.common.settings.configuration import RECOMMENDED, Settings
from potluck.common.settings.old_spelling import old_spellings
from potluck.common.tensors.encoding import Encoding


class PluginTable(BaseModel):
    """A plug-in by name; every other key of the table is one of its options."""

    model_config = ConfigDict(frozen=True, extra="allow")

    name: str = Field(description="Name of the installed plug-in.")

    @property
    def options(self) -> dict[str, Any]:
        """The plug-in's options."""
        return dict(self.model_extra or {})


class LateJoiners(StrEnum):
    """Treatment of a client that first connects after round 1 began."""

    NEXT_ROUND = "next-round"
    REFUSE = "refuse"


class Leavers(StrEnum):
    """Treatment of a selected client whose host disconnects."""

    DROP = "drop"
    WAIT = "wait"


class LateUpdates(Settings):
    """Updates that arrive after their round was closed."""

    rounds: int = Field(
        default=0,
        ge=0,
        le=1000,
        description="Maximum number of rounds by which an update may be late and still be\n"
        "included in the current round. Late clients continue to train, and are selected\n"
        "meanwhile only if too few other clients are available. The coordinator keeps this\n"
        "number of additional models on disk. 0: late updates are refused.",
    )
    beta: float = Field(
        default=0.35,
        ge=0,
        le=1,
        description="Part of a late update's weight that depends on its difference from the mean\n"
        "of the fresh updates. A late update has (1 - beta)/(rounds late + 1) of the weight of a\n"
        "fresh update, and up to 0.632 beta in addition if it differs most. Larger: late updates\n"
        "that differ weigh more.",
    )
    exponential_divisor: float = Field(
        default=1.0,
        ge=1,
        description="Divides exp(-difference) in that part: 1 in REFL's paper, 10 in its authors'\n"
        "program. Larger: the difference matters less, and the part is nearer to beta.",
    )


class RoundPolicy(Settings):
    """Deadlines, quorum and attempts of rounds."""

    deadline_seconds: Seconds = Field(
        default=600.0,
        description="Seconds after its selection at which a client that has not sent its update\n"
        "is late. Larger: slow clients are included, but rounds can take longer.",
    )
    question_deadline_seconds: Seconds = Field(
        default=60.0,
        description="Seconds to wait for clients' answers if the selector asks clients before it\n"
        "selects. It then selects without the missing answers.",
    )
    quorum: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="Share of the cohort whose updates a round needs. With fewer updates at its\n"
        "deadline, the round is abandoned and repeated with a new cohort.",
    )
    attempts: int = Field(
        default=3,
        ge=1,
        description="Number of attempts at a round before the run fails because too few updates\n"
        "arrived. The pauses between attempts grow. Attempts that fail because hosts disconnect\n"
        "don't count.",
    )
    over_selection: int = Field(
        default=0,
        ge=0,
        description="Number of clients to select in addition to `clients_per_round`. The round\n"
        "closes once `clients_per_round` clients have sent their updates. The fastest clients\n"
        "are then included, so the run can't be reproduced.",
    )
    late_joiners: LateJoiners = Field(
        default=LateJoiners.NEXT_ROUND,
        description="Treatment of a client that first connects after round 1 has begun:\n"
        "next-round (the client may be selected from the next round on) or refuse (the run never\n"
        "selects it).",
    )
    leavers: Leavers = Field(
        default=Leavers.WAIT,
        description="Treatment of a selected client whose host disconnects: drop (the round\n"
        "continues without the client) or wait (the client continues if the host reconnects\n"
        "within grace_seconds; otherwise, as drop).",
    )
    grace_seconds: float = Field(
        default=5.0,
        ge=0,
        le=YEAR_SECONDS,
        description='Seconds to wait for a disconnected host with leavers = "wait", in a round\n'
        "and before a round.",
    )

    late_updates: LateUpdates = Field(
        default=LateUpdates(),
        description="Treatment of updates that arrive after the deadline, or after the round has\n"
        "closed.",
    )

    def needed(self, cohort: int) -> int:
        """Return the number of updates that a cohort of this size must deliver: ⌈quorum · cohort⌉,
        at least 1."""
        return max(1, math.ceil(self.quorum * cohort - 1e-9))


class DirectionSettings(Settings):
    """Encoding and compression of files in one direction."""

    encoding: Encoding = Field(
        default=Encoding.FLOAT32,
        description="Encoding of each number: float32 (exact), bfloat16 (half the bytes) or int8\n"
        "(a quarter of the bytes).",
    )
    delta: bool = Field(
        default=False,
        description="Send the difference from a model that the receiver has, instead of the\n"
        "weights.",
    )
    compress: bool = Field(
        default=False,
        description="Compress files with Zstandard. Useful for differences (`delta`) in int8.",
    )


class Transport(Settings):
    """Encoding and compression of models and updates on the wire."""

    down: DirectionSettings = Field(
        default=DirectionSettings(), description="Models that the coordinator sends to hosts."
    )
    up: DirectionSettings = Field(
        default=DirectionSettings(), description="Updates that hosts send to the coordinator."
    )


class Evaluation(Settings):
    """Schedule and contents of evaluations."""

    every: int = Field(
        default=1,
        ge=0,
        description="Number of rounds between evaluations; the last round is always evaluated.\n"
        "0: never.",
    )
    spread: bool = Field(
        default=False,
        description="True: all connected clients evaluate the model on the samples that they\n"
        "hold out. The run then shows the spread of their metrics: quantiles, and the mean of\n"
        "the worst tenth.",
    )
    least_group: int = Field(
        default=LEAST_GROUP,
        ge=SMALLEST_GROUP,
        description="Minimum number of clients over which a spread is shown. A client whose\n"
        "owner requires a larger number refuses to evaluate.",
    )

    least_share: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Minimum share of the asked clients that must evaluate a model. With fewer\n"
        "clients, a metric is marked as partial, and is ignored for the best model and for\n"
        "[stop].",
    )

    fine_tune_epochs: int = Field(
        default=0,
        ge=0,
        le=1000,
        description="Number of epochs for which clients train the round's model on their own\n"
        "data before an additional evaluation, whose metrics are named tuned_…. The trained\n"
        "model is then discarded. 0: no such evaluation.",
    )

    @property
    def disclosed_group(self) -> int:
        """Minimum number of clients over which a spread is shown; 0 if no spread is shown."""
        return self.least_group if self.spread else 0


class PersonalModels(Settings):
    """Personal models, in addition to the run's model. Each stays with its client."""

    method: Literal["none", "ditto"] = Field(
        default="none",
        description="ditto: each client also trains and keeps a model of its own, which stays\n"
        "close to the round's model. Its metrics in each evaluation are named personal_…. none:\n"
        "no such models.",
    )
    pull: float = Field(
        default=1.0,
        ge=0,
        allow_inf_nan=False,
        description="Strength with which a client's own model is pulled towards the round's\n"
        "model: Ditto's lambda. Larger: closer to the round's model. 0: each client trains\n"
        "alone.",
    )
    epochs: int | None = Field(
        default=None,
        ge=1,
        description="Number of passes over the client's data in the training of its own model.\n"
        "Unset: the same as for the run's model.",
    )


class PrivateUpdates(Settings):
    """Noise in trainings, on updates or on their sum; it hides single records or whole clients."""

    unit: Literal["record", "client"] = Field(
        default="record",
        description="What noise hides: record (whether a single record was among a client's\n"
        "samples; DP-SGD in the built-in loop) or client (a client's whole update; needs\n"
        "secure_aggregation, or noise = coordinator). Hosts that add noise need the extra\n"
        "`privacy`.",
    )
    noise: Literal["clients", "coordinator"] = Field(
        default="clients",
        description="With unit = client, the party that adds the noise: clients (each adds a\n"
        "share, before its update is masked) or coordinator (it adds noise to the sum of a\n"
        "round's updates, and sees the updates without noise). With unit = record, always\n"
        "clients: each adds its own noise.",
    )
    noise_multiplier: float | None = Field(
        default=None,
        gt=0,
        le=1e4,
        description="Standard deviation of the noise, in units of `clip`: of the noise in each\n"
        "step of training (unit = record), or in a round's sum of updates (unit = client).\n"
        "Larger: less privacy loss, less accurate. Set this or `epsilon`.",
    )
    epsilon: float | None = Field(
        default=None,
        gt=0,
        le=1000,
        description="Maximum privacy loss ε of a client in the whole run; the noise is computed\n"
        "from it. With unit = record, each host computes the noise from its number of samples.\n"
        "Smaller: more noise.",
    )
    delta: float = Field(
        default=1e-5,
        gt=0,
        le=0.01,
        description="Probability that the privacy loss is larger than `epsilon`. Choose it well\n"
        "below 1 / number of records, or 1 / number of clients with unit = client.",
    )
    clip: float = Field(
        default=1.0,
        ge=SMALLEST_CLIP,
        le=LARGEST_CLIP,
        description="Maximum length of a record's gradient, or of a client's update (L2 norm\n"
        "over all tensors); longer vectors are scaled down. Larger: less is cut off, but more\n"
        "noise.",
    )
    trainings: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000,
        description="Number of trainings of a client for which `epsilon` must suffice; the\n"
        "client refuses further trainings. Smaller: less noise. Unset: one training in each\n"
        "round.",
    )

    clip_quantile: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Target share of updates that are shorter than the bound, and so are not\n"
        "clipped. `clip` is then the first bound, and each round adapts the bound by a noisy\n"
        "count. Larger: a larger bound, and more noise. Only for unit = client. Unset: the bound\n"
        "stays the same.",
    )
    clip_quantile_share: float = Field(
        default=0.01,
        gt=0,
        le=0.5,
        description="Share of the privacy loss that is spent on the noisy count of\n"
        "`clip_quantile`. Larger: a steadier bound, but more noise in the sum of updates.",
    )
    answers: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000,
        description="Number of a client's answers to the selector's questions about data for\n"
        "which `epsilon` must also suffice; the client refuses further answers. Smaller: less\n"
        "noise. Unset: one answer in each round, if the selector asks about data.",
    )
    answer_noise_multiplier: float | None = Field(
        default=None,
        gt=0,
        le=1e4,
        description="Standard deviation of the noise of an answer, divided by the largest change\n"
        "that one record can cause. Larger: less privacy loss, less accurate. Unset: all answers\n"
        "together may spend a quarter of `epsilon`.",
    )
    answer_clip: float = Field(
        default=4.0,
        ge=SMALLEST_CLIP,
        le=LARGEST_CLIP,
        description="Maximum loss, or length of the gradient, of a record in an answer; larger\n"
        "values are scaled down. Larger: less is cut off, but more noise is added.",
    )

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.noise_multiplier is None) == (self.epsilon is None):
            raise ValueError("set either `noise_multiplier` or `epsilon`, but not both")
        if self.trainings is not None and self.epsilon is None:
            raise ValueError("`trainings` needs `epsilon`; set `epsilon`, or remove `trainings`")
        if self.answers is not None and self.epsilon is None:
            raise ValueError("`answers` needs `epsilon`; set `epsilon`, or remove `answers`")
        return self

    @model_validator(mode="after")
    def _fitting_noise(self) -> Self:
        if self.at_coordinator and self.unit != "client":
            raise ValueError(
                'noise = "coordinator" can only protect whole clients; set unit = "client"'
            )
        if self.clip_quantile is not None and self.unit != "client":
            raise ValueError(
                '`clip_quantile` needs unit = "client"; set this unit, or remove `clip_quantile`'
            )
        return self

    @property
    def at_coordinator(self) -> bool:
        """True if the coordinator adds the noise to the sum of a round's updates."""
        return self.noise == "coordinator"


class MissingProfiles(StrEnum):
    """Treatment of a client that does not disclose what the selector needs."""

    FAIL = "fail"
    EXCLUDE = "exclude"
    INCLUDE = "include"


class ProfileSettings(Settings):
    """Disclosures that the coordinator requests from clients once, before the first round that
    needs them."""

    missing: MissingProfiles = Field(
        default=MissingProfiles.FAIL,
        description="Treatment of a client that refuses to disclose what the selector needs, or\n"
        "discloses invalid values: fail (the run fails; after round 1, as exclude), exclude (the\n"
        "client is never selected) or include (the selector treats it as a client without a\n"
        "profile).",
    )
    deadline_seconds: Seconds = Field(
        default=600.0,
        description="Seconds to wait for a client's profile. A client that has not answered by\n"
        "then is not available in this round, and is asked again before the next round.",
    )
    disclosure: Annotated[
        Literal["noisy", "cells", "unsafe-stepwise", "exact"],
        old_spellings({"dp-once": "noisy", "protocol": "unsafe-stepwise"}),
    ] = Field(
        default="noisy",
        description="How clients disclose label counts: noisy (with noise, drawn once), cells (as\n"
        "secure sums over groups of at least sum_hosts hosts), unsafe-stepwise (sums and\n"
        "distances at each step of dc-real or dc-balanced, as in their paper; these reveal each\n"
        "client's exact counts) or exact (the counts themselves). A client's owner must allow\n"
        "unsafe-stepwise and exact.",
    )
    epsilon: float | None = Field(
        default=None,
        ge=LEAST_EPSILON,
        allow_inf_nan=False,
        description="Privacy loss ε of each noisy disclosure. Smaller: more noise. Unset: the\n"
        "value of each client's owner.",
    )
    adjacency: Adjacency | None = Field(
        default=None,
        description="Change in a client's data that the noise hides: replace (one sample is\n"
        "replaced by another) or add-remove (one sample is added or removed). Unset: the value\n"
        "of each client's owner.",
    )
    sum_hosts: int = Field(
        default=5,
        ge=3,
        description="Minimum number of distinct hosts in a secure sum. A client refuses sums\n"
        "over fewer hosts than its owner's minimum.",
    )
    sum_colluding_hosts: int | None = Field(
        default=None,
        ge=0,
        description="Number of hosts assumed to collude with the coordinator. Larger: more\n"
        "clients must answer in each sum. Unset: a third of the hosts.",
    )
    sum_stage_seconds: float = Field(
        default=30.0,
        gt=0,
        le=3600,
        description="Seconds to wait for slow clients in each of the five stages of a secure sum.",
    )
    sum_mode: Literal["noisy", "exact"] = Field(
        default="noisy",
        description="noisy: secure sums of label counts have noise that the clients make\n"
        "together. exact: no noise; only for clients whose owner allows this (exact_sums), and\n"
        "only once for the same data. The sums of unsafe-stepwise are always exact.",
    )
    sum_epsilon: float = Field(
        default=0.5,
        ge=1e-3,
        allow_inf_nan=False,
        description="Privacy loss ε of each noisy sum. Smaller: more noise. It is charged to the\n"
        "budget of every client that sends its masked counts, even if the sum then fails and is\n"
        "repeated.",
    )
    triplet_mode: NoisyOrExact = Field(
        default="noisy",
        description="noisy: triplets from noisy counts. exact: triplets without noise. With two\n"
        "classes, an exact triplet discloses each client's counts, except the names of classes\n"
        "and attributes.",
    )
    triplet: TripletSettings = Field(
        default=TripletSettings(),
        json_schema_extra=RECOMMENDED,
        description="How clients estimate their triplet (class imbalance, attribute imbalance,\n"
        "spurious correlation). Unset values are those that the task recommends, or else the\n"
        "paper's.",
    )


class MaskingSettings(Settings):
    """Settings of masked updates and their sums."""

    clip: float = Field(
        default=4.0,
        gt=0,
        le=1e6,
        allow_inf_nan=False,
        description="Maximum change of a single parameter in a round; larger changes are cut\n"
        "off, and the run reports their number. Smaller: numbers are rounded more finely.",
    )
    weight_cap: int = Field(
        default=10_000,
        ge=1,
        le=2**31,
        description="Maximum weight of a client; a client with more samples has this weight. Set\n"
        "it a little above the largest number of samples: smaller values round more finely.",
    )
    bits: Literal[32, 64] = Field(
        default=32,
        description="Number of bits of each masked parameter. 64 doubles the size of uploads,\n"
        "and serves only to check that 32 bits suffice.",
    )
    hosts: int = Field(
        default=LEAST_HOSTS,
        ge=SMALLEST_LEAST_HOSTS,
        description="Minimum number of distinct hosts in a round's sum. Clients refuse a smaller\n"
        "number than their owner's minimum.",
    )
    colluding_hosts: int | None = Field(
        default=None,
        ge=0,
        description="Number of hosts assumed to collude with the coordinator. Larger: more\n"
        "clients must answer in each sum. Unset: a third of the hosts.",
    )
    stage_seconds: float = Field(
        default=30.0,
        gt=0,
        le=3600,
        description="Seconds to wait for slow clients in each short exchange of messages.\n"
        "Exception: for the exchange of keys, before which clients fetch the model, the wait is\n"
        "half of round.deadline_seconds.",
    )

    @property
    def fewest_hosts(self) -> int:
        """Minimum number of hosts that a round's clients must be on, so that at least one does not
        collude."""
        return max(self.hosts, (self.colluding_hosts or 0) + 1)


class SelectorLimits(Settings):
    """Limits on selection that apply to every selector, with any client profiles."""

    maximum_share: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Maximum share of the run's cohorts so far in which a client may be, rounded\n"
        "up. If too few other clients are available, the clients selected least often are used.",
    )
    eligible: dict[Name, Annotated[tuple[TagValue, ...], Field(min_length=1)]] = Field(
        default_factory=dict,
        description="Required values of host tags. Only clients of hosts that have one of the\n"
        'listed values of each tag take part, such as eligible = {site = ["north", "south"]}.',
    )
    at_most_per: dict[Name, Annotated[int, Field(ge=1)]] = Field(
        default_factory=dict,
        description="Maximum number of clients in a cohort whose hosts have the same value of a\n"
        "tag, such as at_most_per = {site = 2}. Hosts without the tag count as one value.",
    )


class SelectionProof(Settings):
    """Commitments with which hosts and auditors can check the selections of a run."""

    verifiable: bool = Field(
        default=False,
        description="True: before each selection, the coordinator commits to its seed and inputs\n"
        "in a hash chain that hosts receive, and keeps all inputs. `potluck audit-selection` can\n"
        "then repeat the selections. Costs three short messages per host and round.",
    )
    hosts_verify: bool = Field(
        default=False,
        description="True: hosts help to make each seed, recompute each cohort, and refuse to\n"
        "train in any other cohort. Cohorts then differ between runs with the same seed. Only\n"
        "for the selectors uniform and round-robin. Needs verifiable = true.",
    )

    @model_validator(mode="after")
    def _verifiable_first(self) -> Self:
        if self.hosts_verify and not self.verifiable:
            raise ValueError(
                "`hosts_verify` needs `verifiable = true`; set it, or remove `hosts_verify`"
            )
        return self


class SampleLimits(Settings):
    """Bounds on the number of samples by which a client's update is weighted."""

    maximum: int | None = Field(
        default=None,
        ge=1,
        description="Maximum number of samples that a client of this federation can have. A\n"
        "client that reports more samples is weighted by this number. Unset: only\n"
        "maximum_multiple limits weights.",
    )
    maximum_multiple: float = Field(
        default=100.0,
        ge=1,
        description="Maximum weight of a client, as a multiple of the median number of samples\n"
        "of the other clients.",
    )


class Retention(Settings):
    """Model versions that stay on the coordinator's disk."""

    keep_last: int = Field(default=2, ge=1, description="Number of newest model versions to keep.")
    keep_every: int = Field(
        default=0,
        ge=0,
        description="Number N: the model of every N-th round is also kept. 0: none.",
    )
    keep_best: str | None = Field(
        default=None,
        min_length=1,
        description="Metric whose best model is also kept; of equally good models, the first.\n"
        "`potluck model --best` fetches it. Unset: the metric of stop.measure, if the run has\n"
        "one.",
    )
