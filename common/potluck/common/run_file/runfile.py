"""The run file, in which an operator declares a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Self

from pydantic import Field, field_validator, model_validator

from potluck.common.disclosure import Weighting
from potluck.common.learning.virtual_clock import VirtualClock
from potluck.common.real_time import Seconds
from potluck.common.run_file.run_settings import (
    Evaluation,
    MaskingSettings,
    PersonalModels,
    PluginTable,
    PrivateUpdates,
    ProfileSettings,
    Retention,
    RoundPolicy,
    SampleLimits,
    SelectionProof,
    SelectorLimits,
    Transport,
)
from potluck.common.settings.configuration import (
    Settings,
    annotated_example,
    parse,
    parse_toml,
)
from potluck.common.settings.configuration_errors import RUN, ReadLater
from potluck.common.settings.local_training import LocalTraining
from potluck.common.settings.model_table import ModelTable
from potluck.common.updates.fixed_point import HostSumSettings

# The table `[stop]` -------------------------------------------------------------------------------


class Stopping(Settings):
    """Conditions that end a run before all its rounds are committed. The run's best model is
    kept."""

    measure: str = Field(
        min_length=1,
        description="Metric of the round's model that decides when the run ends: accuracy, loss\n"
        "or another metric of the task's trainer; also tuned_…, personal_… and training_….",
    )
    patience: int | None = Field(
        default=None,
        ge=1,
        description="Number of evaluations in a row without an improvement after which the run\n"
        "ends. An evaluation without the metric counts as no improvement; an evaluation with a\n"
        "partial metric is ignored. Unset: the run ends only at the target.",
    )
    minimum_delta: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="The metric counts as improved, for `patience`, only if it gains more than\n"
        "this.",
    )
    target: float | None = Field(
        default=None,
        allow_inf_nan=False,
        description="Value of the metric at which the run ends, at the first evaluation that\n"
        "reaches it. Unset: no target.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.patience is None and self.target is None:
            raise ValueError(
                "neither `patience` nor `target` is set; set one, or set retention.keep_best to "
                "keep only the best model"
            )
        if self.minimum_delta and self.patience is None:
            raise ValueError("`minimum_delta` needs `patience`; set it, or remove minimum_delta")
        return self


# The run file -------------------------------------------------------------------------------------

_EXAMPLES = {
    "task.name": '"digits"  # an example that needs no files; replace it with your own task'
}

OLD_KEYS: Final = {
    "count": "clients_per_round",
    "roster": "expected_clients",
    "roster_timeout_seconds": "start_timeout_seconds",
}
"""Old → new name of each run-file key that was renamed before 0.1."""


class RunFile(Settings):
    """One training job: a task, a selector, a strategy and a number of rounds."""

    kind = RUN
    old_keys: ClassVar[Mapping[str, str]] = OLD_KEYS

    name: Annotated[str, Field(max_length=80)] = Field(
        default="run",
        description="Name of the run, for people. Several runs may have the same name.",
    )
    rounds: int = Field(
        default=30, ge=1, le=1_000_000, description="Number of rounds after which the run ends."
    )
    clients_per_round: int = Field(
        default=9, ge=1, description="Number of clients to select in each round."
    )
    expected_clients: int = Field(
        default=0,
        ge=0,
        description="Number of clients that must be connected before round 1. 0: the run starts\n"
        "as soon as `clients_per_round` clients are connected.",
    )
    start_timeout_seconds: Seconds = Field(
        default=300.0,
        description="Seconds to wait before round 1 for enough clients; then the run fails.\n"
        "After its first selection, a run waits without limit if too few clients are connected.",
    )
    seed: int = Field(
        default=0,
        ge=0,
        lt=2**63,
        description="Seed of all random choices. The same seed gives the same result.",
    )
    task: PluginTable = Field(description="Task to learn; other keys are the task's options.")
    model: ModelTable | None = Field(
        default=None,
        description="Model to use instead of the task's own: the name of an installed model, or\n"
        "MODULE:NAME of a function that creates one; other keys are its options.\n"
        "`trainable` lists patterns of the tensors that are trained and sent; `base`\n"
        "names a file with all other tensors. `keep` lists patterns of the tensors\n"
        "that each client trains for itself and never sends.",
    )
    initial_model: str | None = Field(
        default=None,
        description="Weights to start from: a .safetensors file in the coordinator's data\n"
        "directory, as `potluck pretrained` creates it, or the folder of a model in\n"
        "shards. Unset: new weights, drawn with the seed.",
    )
    selector: PluginTable = Field(
        default=PluginTable(name="uniform"),
        description="Selector, which chooses the clients of each round; other keys are its\n"
        "options.",
    )
    strategy: PluginTable = Field(
        default=PluginTable(name="fedavg"),
        description="Strategy, which combines the clients' updates into the next model; other\n"
        "keys are its options.",
    )
    objective: Annotated[tuple[PluginTable, ...], Field(min_length=1, max_length=16)] = Field(
        default=(PluginTable(name="cross-entropy"),),
        description="Loss that each client minimises in its training; other keys are the\n"
        "objective's options. Several objectives are added up; [objective] is short for one. An\n"
        "objective that does not use labels, such as fedprox, is added to cross-entropy if no\n"
        "other is listed.",
    )
    training: Annotated[dict[str, Any], ReadLater(LocalTraining)] = Field(
        default_factory=dict,
        description="Settings of the clients' training. Unset values are those that the task\n"
        "recommends.",
    )
    round: RoundPolicy = Field(
        default=RoundPolicy(),
        description="How long a round waits for clients, and how many updates it needs.",
    )
    transport: Transport = Field(
        default=Transport(), description="Encoding of the models and updates that are sent."
    )
    evaluation: Evaluation = Field(
        default=Evaluation(), description="When and how the model is evaluated."
    )
    personal: PersonalModels = Field(
        default=PersonalModels(),
        description="Models that single clients train for themselves,\n"
        "in addition to the run's model.",
    )
    weighting: Weighting = Field(
        default=Weighting.EXACT,
        description="Precision with which clients report their number of samples, by which\n"
        "updates are weighted: exact, bucketed (a power of two) or equal (all have the same\n"
        "weight).",
    )
    privacy: PrivateUpdates | None = Field(
        default=None,
        description="Noise in updates that hides single records or clients. Without this table,\n"
        "updates have no noise.",
    )
    secure_aggregation: bool = Field(
        default=False,
        description="True: updates are masked, so that the coordinator learns only their sum\n"
        "over a round's cohort. Needs a federation root and a strategy that averages.",
    )
    masking: MaskingSettings = Field(
        default=MaskingSettings(),
        description="How updates are masked; used only with secure_aggregation.",
    )
    host_sums: HostSumSettings = Field(
        default=HostSumSettings(),
        description="Sums of updates that hosts compute: each host adds up its clients' updates\n"
        "and sends only the sum.",
    )
    profiles: ProfileSettings = Field(
        default=ProfileSettings(),
        description="Profiles that clients are asked to disclose, if the selector needs them.",
    )
    selector_limits: SelectorLimits = Field(
        default=SelectorLimits(),
        description="Limits on which clients are selected, and how often.",
    )
    selection: SelectionProof = Field(
        default=SelectionProof(), description="How hosts and auditors can check the selections."
    )
    sample_limits: SampleLimits = Field(
        default=SampleLimits(),
        description="Limits on the number of samples by which a client is weighted.",
    )
    virtual_clock: VirtualClock = Field(
        default=VirtualClock(),
        description="Simulated durations of trainings, to test selectors on clients of unequal\n"
        "speed.",
    )
    stop: Stopping | None = Field(
        default=None,
        description="Conditions for an early end of the run. Unset: the run ends after `rounds`.",
    )
    retention: Retention = Field(
        default=Retention(), description="Model versions that the coordinator keeps."
    )

    @property
    def followed(self) -> str | None:
        """Measure that decides which model is the best; None if the best model is not kept."""
        return self.retention.keep_best if self.stop is None else self.stop.measure

    @property
    def kept_models(self) -> Retention:
        """Retention of the run's models: `retention`, plus the models from which late updates
        start."""
        least = self.round.late_updates.rounds + 1
        keep_last = max(self.retention.keep_last, least)
        return self.retention.model_copy(update={"keep_last": keep_last})

    @field_validator("objective", mode="before")
    @classmethod
    def _listed(cls, objective: object) -> object:
        """Accept a single table in place of a list with one table."""
        return [objective] if isinstance(objective, Mapping) else objective

    @field_validator("name")
    @classmethod
    def _printable(cls, name: str) -> str:
        if not name.isprintable():
            raise ValueError("must contain only printable characters")
        return name

    @model_validator(mode="after")
    def _follow_one(self) -> Self:
        best = self.retention.keep_best
        if self.stop is not None and best not in (None, self.stop.measure):
            raise ValueError(
                f"stop.measure is {self.stop.measure!r} and retention.keep_best is {best!r}; a run "
                "can follow only one measure: remove retention.keep_best"
            )
        return self


def parse_run_file(text: str, *, source: str) -> RunFile:
    """Return a run file from TOML text. Raises ConfigurationError."""
    return parse(RunFile, text, source=source)


def stored_values(run_file: str) -> dict[str, Any]:
    """Return the values of a stored run file, without the checks of `parse_run_file`.

    A stored run file was valid when its run started, but perhaps in another release. Keys that have
    been renamed or removed since would be refused, and yet the run must still be shown.
    """
    return parse_toml(run_file, source="stored run file")


def example_run_file() -> str:
    """Return the annotated example that `potluck config` prints."""
    return annotated_example(RunFile, _EXAMPLES, {"training": LocalTraining})
