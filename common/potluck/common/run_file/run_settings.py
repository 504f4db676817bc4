"""The tables of a run file, each a class."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from potluck.common.disclosure import (
    LEAST_EPSILON,
    LEAST_HOSTS,
    SMALLEST_LEAST_HOSTS,
    Adjacency,
    NoisyOrExact,
)
from potluck.common.learning.spread import LEAST_GROUP, SMALLEST_GROUP
from potluck.common.learning.triplet import TripletSettings
from potluck.common.names import Name, TagValue
from potluck.common.settings.configuration import RECOMMENDED, Settings
from potluck.common.settings.old_spelling import old_spellings
from potluck.common.tensors.encoding import Encoding


class PluginTable(BaseModel):
    """A plug-in by name; every other key of the table is one of its options."""

    model_config = ConfigDict(frozen=True, extra="allow")

    name: str = Field(description="Name under which it is installed.")

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
        description="Maximum number of rounds by which an update may be late and still join the\n"
        "current round. 0: late updates are refused. Their clients continue to train, and are\n"
        "selected meanwhile only if the others don't suffice. The coordinator's disk keeps this\n"
        "number of additional models.",
    )
    beta: float = Field(
        default=0.35,
        ge=0,
        le=1,
        description="A late update has (1 - beta)/(rounds late + 1) of the weight of a fresh one,\n"
        "and up to 0.632 beta in addition: the more, the more it differs from the fresh ones'\n"
        "mean.",
    )


class RoundPolicy(Settings):
    """Deadlines, quorum and attempts of rounds."""

    deadline_seconds: float = Field(
        default=600.0,
        gt=0,
        description="Seconds after its selection when a client that has not answered is late.",
    )
    question_deadline_seconds: float = Field(
        default=60.0,
        gt=0,
        description="How long to wait for answers if the selector asks clients before it chooses.\n"
        "It then chooses without the missing answers.",
    )
    quorum: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="Share of the cohort whose updates a round needs. With fewer, the round is\n"
        "abandoned at its deadline, and repeated with a new cohort.",
    )
    attempts: int = Field(
        default=3,
        ge=1,
        description="Number of attempts at a round before the run fails without a quorum. Each\n"
        "pause is longer than the one before. Attempts that fail because hosts disconnect don't\n"
        "count.",
    )
    over_selection: int = Field(
        default=0,
        ge=0,
        description="Clients to select beyond `clients_per_round`. The round closes once\n"
        "`clients_per_round` clients have answered. The fastest clients are then included, so the\n"
        "run can't be reproduced.",
    )
    late_joiners: LateJoiners = Field(
        default=LateJoiners.NEXT_ROUND,
        description="Treatment of a client that first connects after round 1 began: next-round\n"
        "(it may be selected from the next round on) or refuse (this run never selects it).",
    )
    leavers: Leavers = Field(
        default=Leavers.WAIT,
        description="Treatment of a selected client whose host disconnects: drop (lost at once)\n"
        "or wait (lost unless the host reconnects within grace_seconds; it then continues).",
    )
    grace_seconds: float = Field(
        default=5.0,
        ge=0,
        description="Seconds that `wait` waits for a host to reconnect, in a round and before one.",
    )

    late_updates: LateUpdates = Field(
        default=LateUpdates(),
        description="Updates that arrive after the deadline, or after the round has enough.",
    )

    def needed(self, cohort: int) -> int:
        """Return the number of updates that a cohort of this size must deliver: ⌈quorum · cohort⌉,
        at least 1."""
        return max(1, math.ceil(self.quorum * cohort - 1e-9))


class DirectionSettings(Settings):
    """Encoding and compression of files in one direction."""

    encoding: Encoding = Field(
        default=Encoding.FLOAT32,
        description="float32 (exact), bfloat16 (half) or int8 (a quarter).",
    )
    delta: bool = Field(
        default=False,
        description="Send the difference from the receiver's model instead of weights.",
    )
    compress: bool = Field(
        default=False, description="Compress with Zstandard; pays for int8 deltas."
    )


class Transport(Settings):
    """Encoding and compression of models and updates on the wire."""

    down: DirectionSettings = Field(
        default=DirectionSettings(), description="From the coordinator to hosts."
    )
    up: DirectionSettings = Field(
        default=DirectionSettings(), description="From hosts to the coordinator."
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
        description="Whether all connected clients evaluate the model on the samples they hold\n"
        "out. The spread of their metrics is shown: quantiles, and the mean of the worst tenth.",
    )
    least_group: int = Field(
        default=LEAST_GROUP,
        ge=SMALLEST_GROUP,
        description="Minimum number of clients over which a spread is shown. A client that\n"
        "requires more refuses.",
    )

    least_share: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Share of the clients asked that must evaluate a model. A metric over fewer\n"
        "is marked partial, and is ignored for the best model and for [stop].",
    )

    fine_tune_epochs: int = Field(
        default=0,
        ge=0,
        le=1000,
        description="Epochs for which clients train the round's model on their data before they\n"
        "evaluate it (as tuned_…). The trained model is then discarded. 0: no such evaluation.",
    )

    @property
    def disclosed_group(self) -> int:
        """Minimum number of clients over which a spread is shown; 0 if no spread is shown."""
        return self.least_group if self.spread else 0


class PersonalModels(Settings):
    """Personal models, in addition to the run's model. Each stays with its client."""

    method: Literal["none", "ditto"] = Field(
        default="none",
        description="ditto: each client also trains and keeps a model of its own, held near the\n"
        "round's, and evaluates it in each evaluation (as personal_…).",
    )
    pull: float = Field(
        default=1.0,
        ge=0,
        allow_inf_nan=False,
        description="Strength with which it is held there: Ditto's lambda. 0: training alone.",
    )
    epochs: int | None = Field(
        default=None,
        ge=1,
        description="Passes over the client's data in its training. Unset: as the run's own.",
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
        description="Who adds the noise with unit = client: clients (each a share, before its\n"
        "update is masked) or coordinator (to the sum of a round's updates, which it sees without\n"
        "noise). With records, it is each client for itself.",
    )
    noise_multiplier: float | None = Field(
        default=None,
        gt=0,
        le=1e4,
        description="Standard deviation of the noise of a step, or of a round's sum of updates,\n"
        "in units of `clip`. Larger: less privacy loss, less accurate. Give this or `epsilon`.",
    )
    epsilon: float | None = Field(
        default=None,
        gt=0,
        le=1000,
        description="Privacy loss of a client in the whole run; the noise follows from it. With\n"
        "unit = record, each host computes it from its number of samples. Smaller: more noise.",
    )
    delta: float = Field(
        default=1e-5,
        gt=0,
        le=0.01,
        description="Chance that the privacy loss is larger; well below 1 / number of records, or\n"
        "of clients.",
    )
    clip: float = Field(
        default=1.0,
        gt=0,
        le=1e6,
        description="Longest gradient of a record, or longest update of a client (L2 norm over\n"
        "all tensors); longer ones are scaled down. Larger: less is cut off, but more noise.",
    )
    trainings: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000,
        description="Trainings of a client that `epsilon` is for; further ones are refused.\n"
        "Fewer: less noise. Unset: one in each round.",
    )

    clip_quantile: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Share of updates that are not clipped; `clip` is then the first bound, and\n"
        "each round adapts it by a noisy count. Larger: a larger bound, and more noise. Only for\n"
        "unit = client. Unset: the bound stays.",
    )
    clip_quantile_share: float = Field(
        default=0.01,
        gt=0,
        le=0.5,
        description="Share of the privacy loss that the noisy count of `clip_quantile` takes.\n"
        "Larger: a steadier bound, and more noise in the sum.",
    )
    answers: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000,
        description="Answers of a client to the selector's questions about data that `epsilon` is\n"
        "also for; a client refuses more. Fewer: less noise. Unset: one in each round, if the\n"
        "selector asks about data.",
    )
    answer_noise_multiplier: float | None = Field(
        default=None,
        gt=0,
        le=1e4,
        description="Standard deviation of the noise of an answer, in units of what one record\n"
        "changes it by at most. Larger: less privacy loss, less accurate. Unset: a quarter of\n"
        "`epsilon` is for all answers.",
    )
    answer_clip: float = Field(
        default=4.0,
        gt=0,
        le=1e6,
        description="Bound on the loss or the gradient's length of a record in an answer; larger\n"
        "ones are scaled down. Larger: less is cut off, but more noise is added.",
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
        description="Treatment of a client that refuses what the selector needs, or sends invalid\n"
        "values: fail (the run fails; after round 1, as exclude), exclude (it is never selected)\n"
        "or include (the selector treats it as a client without a profile).",
    )
    deadline_seconds: float = Field(
        default=600.0,
        gt=0,
        description="How long to wait for an answer. A client that has not answered by then is\n"
        "not available in this round, and is asked again before the next.",
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
        description="Privacy loss of each noisy disclosure. Unset: each client's own choice.",
    )
    adjacency: Adjacency | None = Field(
        default=None,
        description="Difference in data that the noise hides: replace (one sample by another) or\n"
        "add-remove (one sample). Unset: each client's own choice.",
    )
    sum_hosts: int = Field(
        default=5,
        ge=3,
        description="Minimum number of distinct hosts in a secure sum. A client refuses fewer\n"
        "than its own minimum.",
    )
    sum_colluding_hosts: int | None = Field(
        default=None,
        ge=0,
        description="Number of hosts assumed to work with the coordinator. Unset: a third of them.",
    )
    sum_stage_seconds: float = Field(
        default=30.0,
        gt=0,
        le=3600,
        description="Seconds that each of the five stages of a secure sum waits for slow clients.",
    )
    sum_mode: Literal["noisy", "exact"] = Field(
        default="noisy",
        description="Totals and cells with noise that the clients make together, or exact ones:\n"
        "only of clients whose owner allows these (exact_sums), and once for their data. The sums\n"
        "of unsafe-stepwise are always exact.",
    )
    sum_epsilon: float = Field(
        default=0.5,
        ge=1e-3,
        allow_inf_nan=False,
        description="Privacy loss of each noisy sum, charged to the budget of every client that\n"
        "sends its masked counts, also if the sum then fails and is repeated.",
    )
    triplet_mode: NoisyOrExact = Field(
        default="noisy",
        description="Triplets from noisy counts, or exact ones. With two classes, an exact\n"
        "triplet discloses each client's counts, except the names of classes and attributes.",
    )
    triplet: TripletSettings = Field(
        default=TripletSettings(),
        json_schema_extra=RECOMMENDED,
        description="How clients estimate their triplet. Unset values are those that the task\n"
        "recommends, or else the paper's.",
    )


class MaskingSettings(Settings):
    """Settings of masked updates and their sums."""

    clip: float = Field(
        default=4.0,
        gt=0,
        le=1e6,
        allow_inf_nan=False,
        description="The most a single parameter may change in a round; larger changes are cut\n"
        "off there, and the run says how many were. Smaller: finer steps.",
    )
    weight_cap: int = Field(
        default=10_000,
        ge=1,
        le=2**31,
        description="Maximum weight of a client; more samples count as this number. Set it a\n"
        "little above the largest number of samples: a smaller value gives finer steps.",
    )
    bits: Literal[32, 64] = Field(
        default=32,
        description="Of each masked parameter; 64 doubles uploads, and only proves that 32 do.",
    )
    hosts: int = Field(
        default=LEAST_HOSTS,
        ge=SMALLEST_LEAST_HOSTS,
        description="Fewest distinct hosts in a round's sum; clients refuse less than their own.",
    )
    colluding_hosts: int | None = Field(
        default=None,
        ge=0,
        description="Number of hosts assumed to work with the coordinator. Unset: a third of them.",
    )
    stage_seconds: float = Field(
        default=30.0,
        gt=0,
        le=3600,
        description="How long to wait for slow clients in each short exchange of messages; for\n"
        "their keys, before which they fetch the model, they have half of\n"
        "round.deadline_seconds.",
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
        description="Maximum share of a run's cohorts so far that a client may be in, rounded up.\n"
        "If too few others are available, those selected least often are used.",
    )
    eligible: dict[Name, Annotated[tuple[TagValue, ...], Field(min_length=1)]] = Field(
        default_factory=dict,
        description="Values of host tags. Only clients of hosts that have one of the values of\n"
        'each tag take part, e.g. eligible = {site = ["north", "south"]}.',
    )
    at_most_per: dict[Name, Annotated[int, Field(ge=1)]] = Field(
        default_factory=dict,
        description="Maximum number of clients in a cohort whose hosts have the same value of a\n"
        "tag, e.g. at_most_per = {site = 2}. Hosts without the tag share one value.",
    )


class SelectionProof(Settings):
    """Commitments with which hosts and auditors can check the selections of a run."""

    verifiable: bool = Field(
        default=False,
        description="Whether the coordinator commits to the seed and the inputs of each selection\n"
        "before it selects, in a hash chain that hosts receive, and keeps all inputs. `potluck\n"
        "audit-selection` repeats the selections. Costs three short messages per host and round.",
    )
    hosts_verify: bool = Field(
        default=False,
        description="Whether hosts also help to make each seed, recompute each cohort, and refuse\n"
        "to train in another one. Cohorts then differ between runs with the same seed. Only for\n"
        "the selectors uniform and round-robin. Needs verifiable = true.",
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
        "client that reports more is weighted by this number. Unset: only the bound below holds.",
    )
    maximum_multiple: float = Field(
        default=100.0,
        ge=1,
        description="Maximum weight of a client, as a multiple of the median of the others'\n"
        "samples.",
    )


class Retention(Settings):
    """Model versions that stay on the coordinator's disk."""

    keep_last: int = Field(default=2, ge=1, description="Number of newest models to keep.")
    keep_every: int = Field(
        default=0,
        ge=0,
        description="Number of rounds between models that are kept in addition; 0: none.",
    )
    keep_best: str | None = Field(
        default=None,
        min_length=1,
        description="Metric whose best model is kept in addition, the first of equals; `potluck\n"
        "model --best` fetches it. Unset: that of stop.measure, if the run has one.",
    )
