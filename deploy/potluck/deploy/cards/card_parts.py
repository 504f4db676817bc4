"""The parts of a model card, as plain records. Pure."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class CardPart(BaseModel):
    """A part of a card. Numbers that are not finite become null in JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="null")


class CardCoverage(CardPart):
    """Number of clients and samples behind a metric's value."""

    clients: int = Field(
        description="Clients that sent the metric; 0 if the coordinator measured it."
    )
    asked: int = Field(description="Clients with samples that were asked for the metric.")
    samples: int = Field(description="Samples; 0 if masked updates hide the number.")
    partial: bool = Field(description="True if fewer clients than the run requires measured it.")


class CardRound(CardPart):
    """One of the rounds from which the model resulted."""

    round: int = Field(description="Number of the round, from 1.")
    model_blake3: str = Field(description="Digest of the model after the round.")
    committed_at: str = Field(description="Time in ISO 8601; empty if not recorded.")
    selected: list[str] = Field(description="The cohort, in selection order.")
    included: list[str] = Field(description="Clients of the cohort whose updates are in the model.")
    late: list[str] = Field(description="Clients whose late updates of earlier rounds are in it.")
    measures: dict[str, float]
    coverage: dict[str, CardCoverage] = Field(
        default={}, description="Number of clients and samples that each metric covers, by name."
    )


class CardClient(CardPart):
    """A client that was selected. Facts that its host reports about itself are not verified."""

    client: str
    hosts: list[str]
    selected: int = Field(description="Number of rounds with the client in the cohort.")
    included: int = Field(
        description="Number of these rounds whose update is in the model, in time or late."
    )
    first_round: int
    last_round: int
    samples: int | None = Field(description="Samples in its last update; null if unknown.")
    data_epochs: list[int] = Field(description="Versions of its data used in training.")
    software: list[str] = Field(description="Releases of Potluck that its hosts ran.")
    epsilon: float = Field(description="Total privacy loss ε of its noisy disclosures.")
    update_epsilon: float | None = Field(
        default=None, description="Privacy loss ε of the client's updates; null if unknown."
    )


class CardNoise(CardPart):
    """Privacy loss of a run with `[privacy]`, as the coordinator knows it."""

    unit: str = Field(description='Unit that the noise hides: "record" or "client".')
    delta: float = Field(description="Chance that the loss is larger.")
    largest: float | None = Field(description="Largest ε of a client; null if unknown.")
    median: float | None = Field(description="Median ε over clients; null if unknown.")
    near_limit: int | None = Field(
        description="Clients that have used 80 % of the run's trainings; null without a limit."
    )
    refused: int = Field(description="Clients excluded: their limit is used up.")


class CardPrivacy(CardPart):
    """Data that clients disclosed in addition to updates, up to the time the card was written."""

    masked_updates: bool = Field(description="True if the coordinator saw only sums of updates.")
    largest_epsilon: float = Field(description="Largest privacy loss ε of a client; 0 for none.")
    profiles: list[dict[str, Any]] = Field(
        description="Values that clients disclosed outside sums."
    )
    sums: list[dict[str, Any]] = Field(description="Secure sums that include the clients.")
    sums_hold_against: str = Field(description="Parties from which the sums hide single values.")
    claim: str = Field(default="", description="Protection of updates; empty if none is claimed.")
    noise: CardNoise | None = Field(
        default=None, description="Privacy loss of updates with noise; null without noise."
    )


class CardSoftware(CardPart):
    """Software that ran the training, according to the rounds' records."""

    coordinator: dict[str, list[str]] = Field(description="Versions by package, in order of use.")
    hosts: dict[str, int] = Field(description="Number of hosts, by release of Potluck.")
    card: str = Field(description="Release of Potluck that wrote this card.")


class CardFacts(CardPart):
    """Facts about a model that its card lists."""

    card_version: int = 1
    run: str
    name: str
    round: int = Field(description="Round of the model; 0: before round 1.")
    blake3: str = Field(description="Digest of the model file without its metadata.")
    best_of: str | None = Field(description="Metric in which it is the run's best model.")
    created_at: str = Field(description="Start of the run, ISO 8601.")
    state: str = Field(description="State of the run, with the reason.")
    planned_rounds: int
    seed: int
    tables: dict[str, Any] = Field(
        description="Task, model, selector, strategy, objective and training of the run file."
    )
    measures: dict[str, float] = Field(description="Metrics of this model, by name.")
    coverage: dict[str, CardCoverage] = Field(
        default={}, description="Clients and samples behind these metrics, by name."
    )
    units: dict[str, str] = Field(description="Units of the metrics that have one, by name.")
    initial_model_blake3: str = Field(description="Digest of the model before round 1.")
    coordinator_trains: bool | None = Field(
        description="True if the coordinator also trained the model in each round, on public "
        "samples; null if the strategy is not installed where the card was written."
    )
    kept_by_clients: list[str] = Field(description="Patterns of tensors that are not in the file.")
    rounds: list[CardRound]
    clients: list[CardClient]
    privacy: CardPrivacy
    software: CardSoftware
    run_file: str = Field(description="Run file at the start, TOML.")
