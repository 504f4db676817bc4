"""The tables of a run file, each a class."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from potluck.common.disclosure import (
    LEAST_EPSILON,
    LEAST_HOSTS,
    SMALLEST_LEAST_HOSTS,
    Adjacency,
    NoisyOrExact,
)
from potluck.common.learning.spread import LEAST_GROUP, SMALLEST_GROUP
from potluck.common.learning.triplet import TripletSettings
from potluck.common.names import Name
from potluck.common.settings.configuration import RECOMMENDED, Settings
from potluck.common.settings.old_spelling import old_spellings
from potluck.common.tags import TagValue
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
    """Treatment of a client that first attends after round 1 began."""

    NEXT_ROUND = "next-round"
    REFUSE = "refuse"


class Leavers(StrEnum):
    """Treatment of a selected client whose host goes away."""

    DROP = "drop"
    WAIT = "wait"


class LateUpdates(Settings):
    """Updates that come after their round was closed."""

    rounds: int = Field(
        default=0,
        ge=0,
        le=1000,
        description="How many rounds an update may be late and still join the round under way\n"
        "then; 0: it is refused. Its client is left to train on, and meanwhile selected only\n"
        "where others don't suffice. So many more models are kept on the coordinator's disk.",
    )
    beta: float = Field(
        default=0.35,
        ge=0,
        le=1,
        description="A late update weighs (1 - beta)/(rounds late + 1) beside a fresh one, and up\n"
        "to 0.632 beta on top of that, the further it is from the mean of the fresh ones.",
    )


class RoundPolicy(Settings):
    """Deadlines, quorum and attempts of rounds."""

    deadline_seconds: float = Field(
        default=600.0,
        gt=0,
        description="A client that has not answered this long after selection is late.",
    )
    question_deadline_seconds: float = Field(
        default=60.0,
        gt=0,
        description="How long to wait for answers where the selector asks clients before it\n"
        "chooses; it then chooses without the others'.",
    )
    quorum: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="Share of the cohort whose updates a round needs; below it the round is\n"
        "abandoned at its deadline, and tried again with a new cohort.",
    )
    attempts: int = Field(
        default=3,
        ge=1,
        description="How often a round is tried, after ever longer pauses, before the run fails\n"
        "for want of a quorum. Attempts that failed because hosts went away don't count.",
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
        description="A client that first attends after round 1 began: next-round (it may be\n"
        "selected from the next round on) or refuse (this run never selects it).",
    )
    leavers: Leavers = Field(
        default=Leavers.WAIT,
        description="A selected client whose host goes away: drop (lost at once) or wait (lost\n"
        "unless the host is back within grace_seconds; it then goes on where it was).",
    )
    grace_seconds: float = Field(
        default=5.0,
        ge=0,
        description="How long `wait` waits for a host to come back, in a round and before one.",
    )

    late_updates: LateUpdates = Field(
        default=LateUpdates(),
        description="Updates that come after the deadline, or when the round has enough others.",
    )

    def needed(self, cohort: int) -> int:
        """Updates a cohort of that size must deliver: ⌈quorum · cohort⌉, at least 1."""
        return max(1, math.ceil(self.quorum * cohort - 1e-9))


class DirectionSettings(Settings):
    """Form of files in one direction."""

    encoding: Encoding = Field(
        default=Encoding.FLOAT32,
        description="float32 (exact), bfloat16 (half) or int8 (a quarter).",
    )
    delta: bool = Field(
        default=False,
        description="Send the difference from the model the other side has, not weights.",
    )
    compress: bool = Field(
        default=False, description="Compress with Zstandard; pays for int8 deltas."
    )


class Transport(Settings):
    """Form of models and updates on the wire."""

    down: DirectionSettings = Field(
        default=DirectionSettings(), description="From the coordinator to hosts."
    )
    up: DirectionSettings = Field(
        default=DirectionSettings(), description="From hosts to the coordinator."
    )


class Evaluation(Settings):
    """Schedule of evaluations, and what is measured in one."""

    every: int = Field(
        default=1,
        ge=0,
        description="Evaluate after every so many rounds and after the last; 0: never.",
    )
    spread: bool = Field(
        default=False,
        description="Whether all clients that attend measure the model on what they hold out, and\n"
        "their measures' spread is shown: quantiles, and the mean of the worst tenth.",
    )
    least_group: int = Field(
        default=LEAST_GROUP,
        ge=SMALLEST_GROUP,
        description="Fewest clients over which a spread is shown; one that demands more refuses.",
    )

    least_share: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Share of the clients asked that must measure a model. A metric over fewer is\n"
        "marked partial, and counts neither for the best model nor for [stop].",
    )

    fine_tune_epochs: int = Field(
        default=0,
        ge=0,
        le=1000,
        description="Epochs for which clients train the round's model on their data before they\n"
        "measure it (as tuned_…); what comes of it is then discarded. 0: not.",
    )

    @property
    def disclosed_group(self) -> int:
        """The fewest clients over which a spread is shown; 0 where none is."""
        return self.least_group if self.spread else 0


class PersonalModels(Settings):
    """Models of single clients beside the run's. They stay with the clients."""

    method: Literal["none", "ditto"] = Field(
        default="none",
        description="ditto: each client trains a model of its own as well, held near the round's,\n"
        "keeps it, and measures it in each evaluation (as personal_…).",
    )
    pull: float = Field(
        default=1.0,
        ge=0,
        allow_inf_nan=False,
        description="How hard it is held there: Ditto's lambda. 0 is training alone.",
    )
    epochs: int | None = Field(
        default=None,
        ge=1,
        description="Passes over the client's data in its training; unset, as the run's own.",
    )


class MissingProfiles(StrEnum):
    """Treatment of a client that does not disclose what the selector needs."""

    FAIL = "fail"
    EXCLUDE = "exclude"
    INCLUDE = "include"


class ProfileSettings(Settings):
    """Disclosures that clients are asked for, once, before the first round that needs them."""

    missing: MissingProfiles = Field(
        default=MissingProfiles.FAIL,
        description="A client that refuses what the selector needs, or sends nonsense: fail (the\n"
        "run fails; once round 1 is committed, only exclude), exclude (it is never selected) or\n"
        "include (the selector does as it states for a client without a profile).",
    )
    deadline_seconds: float = Field(
        default=600.0,
        gt=0,
        description="How long to wait for an answer; who has not answered by then is not\n"
        "available in this round, and asked again before the next.",
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
        description="Privacy loss of each noisy disclosure; unset, each client's own choice.",
    )
    adjacency: Adjacency | None = Field(
        default=None,
        description="What the noise hides: replace or add-remove; unset, each client's own choice.",
    )
    sum_hosts: int = Field(
        default=5,
        ge=3,
        description="Fewest distinct hosts in a secure sum; clients refuse less than their own.",
    )
    sum_colluding_hosts: int | None = Field(
        default=None,
        ge=0,
        description="Hosts assumed to work with the coordinator; unset: a third of them.",
    )
    sum_stage_seconds: float = Field(
        default=30.0,
        gt=0,
        le=3600,
        description="How long each of the five stages of a secure sum waits for slow clients.",
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
        "sends its masked counts, also where the sum then fails and is tried again.",
    )
    triplet_mode: NoisyOrExact = Field(
        default="noisy",
        description="Triplets from noisy counts, or exact ones: with two classes an exact triplet\n"
        "discloses each client's counts but for the names of classes and attributes.",
    )
    triplet: TripletSettings = Field(
        default=TripletSettings(),
        json_schema_extra=RECOMMENDED,
        description="How clients estimate their triplet; what is not set here is what the task\n"
        "recommends, else the paper's.",
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
        description="A client with more samples than this counts as one with so many. Set it a\n"
        "little above the largest number of samples: the smaller, the finer steps.",
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
        description="Hosts assumed to work with the coordinator; unset: a third of them.",
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
        """The number of hosts that a round's clients must be on: at least one does not collude."""
        return max(self.hosts, (self.colluding_hosts or 0) + 1)


class SelectorLimits(Settings):
    """Bounds on selection, whatever a selector or a flattering profile says."""

    maximum_share: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="No client is in more than this share of a run's cohorts so far, rounded up;\n"
        "where too few others are available, those selected least are.",
    )
    eligible: dict[Name, Annotated[tuple[TagValue, ...], Field(min_length=1)]] = Field(
        default_factory=dict,
        description="Only clients of hosts with one of these values of each of these tags take\n"
        'part, e.g. eligible = {site = ["north", "south"]}.',
    )
    at_most_per: dict[Name, Annotated[int, Field(ge=1)]] = Field(
        default_factory=dict,
        description="A cohort holds at most so many clients of hosts with the same value of a\n"
        "tag, e.g. at_most_per = {site = 2}; hosts without the tag share a value.",
    )


class SampleLimits(Settings):
    """Bounds on what a client's number of samples counts, whatever it says."""

    maximum: int | None = Field(
        default=None,
        ge=1,
        description="The most samples that a client of this federation can have; one that says\n"
        "more counts with so many. Unset: only the bound below holds.",
    )
    maximum_multiple: float = Field(
        default=100.0,
        ge=1,
        description="Nobody counts with more than so many times the median of the others' samples.",
    )


class Retention(Settings):
    """Model versions that stay on the coordinator's disk."""

    keep_last: int = Field(default=2, ge=1, description="The newest so many models are kept.")
    keep_every: int = Field(
        default=0, ge=0, description="Besides, every so many rounds' model is kept; 0: none."
    )
    keep_best: str | None = Field(
        default=None,
        min_length=1,
        description="Besides, the model is kept for which this measure was best, the first of\n"
        "equals: `potluck model --best`. Unset: that of stop.measure, if the run has one.",
    )
