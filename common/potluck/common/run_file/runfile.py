"""The run file, in which an operator declares a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Self

from pydantic import Field, field_validator, model_validator

from potluck.common.disclosure import Weighting
from potluck.common.learning.virtual_clock import VirtualClock
from potluck.common.run_file.run_settings import (
    Evaluation,
    MaskingSettings,
    PersonalModels,
    PluginTable,
    ProfileSettings,
    Retention,
    RoundPolicy,
    SampleLimits,
    SelectorLimits,
    Transport,
)
from potluck.common.run_file.stopping import Stopping
from potluck.common.settings.configuration import Settings, annotated_example, parse
from potluck.common.settings.configuration_errors import RUN, ReadLater
from potluck.common.settings.local_training import LocalTraining
from potluck.common.settings.model_table import ModelTable
from potluck.common.updates.lanes import HostSumSettings

_EXAMPLES = {"task.name": '"colored-digits"'}

OLD_KEYS: Final = {
    "count": "clients_per_round",
    "roster": "expected_clients",
    "roster_timeout_seconds": "start_timeout_seconds",
}
"""The new name of each key of run files that was renamed before 0.1."""


class RunFile(Settings):
    """One training job: a task, a selector, a strategy, a number of rounds."""

    kind = RUN
    old_keys: ClassVar[Mapping[str, str]] = OLD_KEYS

    name: Annotated[str, Field(max_length=80)] = Field(
        default="run", description="A name for people."
    )
    rounds: int = Field(default=30, ge=1, le=1_000_000, description="Rounds to commit.")
    clients_per_round: int = Field(
        default=9, ge=1, description="Number of clients to select in each round."
    )
    expected_clients: int = Field(
        default=0,
        ge=0,
        description="Number of clients to wait for before round 1. 0: the run starts as soon as\n"
        "`clients_per_round` clients are connected.",
    )
    start_timeout_seconds: float = Field(
        default=300.0,
        gt=0,
        description="How long to wait for these clients before the run fails. After its first\n"
        "selection, a run waits without limit if too few clients are connected.",
    )
    seed: int = Field(
        default=0, ge=0, lt=2**63, description="Seed of everything random; same seed, same result."
    )
    task: PluginTable = Field(description="What is learned; other keys are the task's options.")
    model: ModelTable | None = Field(
        default=None,
        description="A model in place of the task's own: one that is installed, or MODULE:NAME of\n"
        "anything that makes one; other keys are its options. `trainable` says which tensors of a\n"
        "model are trained and travel, by patterns; `base` names a file with the others. `keep`\n"
        "says which each client trains for itself and never sends.",
    )
    initial_model: str | None = Field(
        default=None,
        description="Weights to start from: in the coordinator's data directory a .safetensors\n"
        "file, as `potluck pretrained` makes it, or the folder of a model in shards; unset, new\n"
        "ones that follow from the seed.",
    )
    selector: PluginTable = Field(
        default=PluginTable(name="uniform"),
        description="Who trains; other keys are the selector's options.",
    )
    strategy: PluginTable = Field(
        default=PluginTable(name="fedavg"),
        description="How updates combine; other keys are the strategy's options.",
    )
    objective: Annotated[tuple[PluginTable, ...], Field(min_length=1, max_length=16)] = Field(
        default=(PluginTable(name="cross-entropy"),),
        description="The clients' local loss; other keys are the objective's options. Several add\n"
        "up, and [objective] stands for one. Those that say nothing of labels, as fedprox, are\n"
        "added to cross-entropy where there is no other.",
    )
    training: Annotated[dict[str, Any], ReadLater(LocalTraining)] = Field(
        default_factory=dict,
        description="Local training; what is not set here is what the task recommends.",
    )
    round: RoundPolicy = Field(
        default=RoundPolicy(), description="How long a round waits, and for whom."
    )
    transport: Transport = Field(default=Transport(), description="How models and updates travel.")
    evaluation: Evaluation = Field(default=Evaluation(), description="When the model is evaluated.")
    personal: PersonalModels = Field(
        default=PersonalModels(), description="Models of single clients, beside the run's."
    )
    weighting: Weighting = Field(
        default=Weighting.EXACT,
        description="How exactly clients tell their number of samples, by which updates are\n"
        "weighted: exact, bucketed (a power of two) or equal (all count the same).",
    )
    secure_aggregation: bool = Field(
        default=False,
        description="Whether updates are masked, so that the coordinator learns their sum over a\n"
        "round's cohort and nothing else. Needs a federation root and a strategy that averages.",
    )
    masking: MaskingSettings = Field(
        default=MaskingSettings(), description="How updates are masked, with secure_aggregation."
    )
    host_sums: HostSumSettings = Field(
        default=HostSumSettings(), description="Whether hosts add up their clients' updates."
    )
    profiles: ProfileSettings = Field(
        default=ProfileSettings(),
        description="What clients are asked to disclose, if the selector needs it.",
    )
    selector_limits: SelectorLimits = Field(
        default=SelectorLimits(), description="Bounds on who is selected, and how often."
    )
    sample_limits: SampleLimits = Field(
        default=SampleLimits(),
        description="Bounds on how much a client counts by the number of samples it tells.",
    )
    virtual_clock: VirtualClock = Field(
        default=VirtualClock(),
        description="Simulated durations, to try selectors on clients of unequal speed.",
    )
    stop: Stopping | None = Field(
        default=None, description="When the run ends early; without this table it does not."
    )
    retention: Retention = Field(default=Retention(), description="Which model versions are kept.")

    @property
    def followed(self) -> str | None:
        """Measure that decides which model is the best; None if the best model is not kept."""
        return self.retention.keep_best if self.stop is None else self.stop.measure

    @property
    def kept_models(self) -> Retention:
        """Retention of the run's models: `retention`, and the models that late updates start
        from."""
        least = self.round.late_updates.rounds + 1
        keep_last = max(self.retention.keep_last, least)
        return self.retention.model_copy(update={"keep_last": keep_last})

    @field_validator("objective", mode="before")
    @classmethod
    def _listed(cls, objective: object) -> object:
        """Accept one table in place of a list of one."""
        return [objective] if isinstance(objective, Mapping) else objective

    @field_validator("name")
    @classmethod
    def _printable(cls, name: str) -> str:
        if not name.isprintable():
            raise ValueError("must be printable")
        return name

    @model_validator(mode="after")
    def _follow_one(self) -> Self:
        best = self.retention.keep_best
        if self.stop is not None and best not in (None, self.stop.measure):
            raise ValueError(
                f"stop.measure is {self.stop.measure!r} and retention.keep_best is {best!r}; a run "
                "follows one measure: leave out retention.keep_best"
            )
        return self


def parse_run_file(text: str, *, source: str) -> RunFile:
    """Return a run file from TOML text. Raises ConfigurationError."""
    return parse(RunFile, text, source=source)


def example_run_file() -> str:
    """Return the annotated example that `potluck config` prints."""
    return annotated_example(RunFile, _EXAMPLES, {"training": LocalTraining})
