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
        description="Number of clients that sent the metric; 0 if the coordinator measured it."
    )
    asked: int = Field(description="Number of clients with samples that were asked for the metric.")
    samples: int = Field(
        description="Number of samples behind the metric; 0 if masked updates hide it."
    )
    partial: bool = Field(
        description="True if fewer clients than the run requires sent the metric."
    )


class CardRound(CardPart):
    """One of the rounds from which the model resulted."""

    round: int = Field(description="Number of the round, from 1.")
    model_blake3: str = Field(description="Digest of the model after the round.")
    committed_at: str = Field(description="Time of the commit, ISO 8601; empty if not recorded.")
    selected: list[str] = Field(description="Clients of the cohort, in selection order.")
    included: list[str] = Field(description="Clients of the cohort whose updates are in the model.")
    late: list[str] = Field(
        description="Clients whose late updates of earlier rounds are in the model."
    )
    measures: dict[str, float]
    coverage: dict[str, CardCoverage] = Field(
        default={},
        description="For each metric: number of clients that sent it, and of their samples.",
    )


class CardClient(CardPart):
    """A client that was selected. Facts that its host reports about itself are not verified."""

    client: str
    hosts: list[str]
    selected: int = Field(description="Number of rounds with the client in the cohort.")
    included: int = Field(
        description="Number of rounds whose model includes an update of the client, in time or "
        "late."
    )
    first_round: int
    last_round: int
    samples: int | None = Field(
        description="Number of samples in the client's last update; null if unknown."
    )
    data_epochs: list[int] = Field(description="Versions of the client's data used in training.")
    software: list[str] = Field(description="Releases of Potluck that the client's hosts ran.")
    epsilon: float = Field(description="Total privacy loss ε of the client's noisy disclosures.")
    update_epsilon: float | None = Field(
        default=None, description="Privacy loss ε of the client's updates; null if unknown."
    )


class CardNoise(CardPart):
    """Privacy loss of a run with `[privacy]`, as the coordinator knows it."""

    unit: str = Field(description='Unit that the noise hides: "record" or "client".')
    delta: float = Field(description="Probability that a client's privacy loss is larger.")
    largest: float | None = Field(
        description="Largest privacy loss ε of a client; null if unknown."
    )
    median: float | None = Field(description="Median privacy loss ε over clients; null if unknown.")
    near_limit: int | None = Field(
        description="Number of clients that have done at least 80 % of the trainings that the run "
        "allows each client; null if it sets no limit."
    )
    refused: int = Field(description="Number of clients excluded because their limit is used up.")


class CardPrivacy(CardPart):
    """Data that clients disclosed in addition to updates, up to the time the card was written."""

    masked_updates: bool = Field(description="True if the coordinator saw only sums of updates.")
    largest_epsilon: float = Field(description="Largest privacy loss ε of a client; 0 for none.")
    profiles: list[dict[str, Any]] = Field(
        description="Values that clients disclosed, other than in secure sums."
    )
    sums: list[dict[str, Any]] = Field(description="Secure sums that include the clients.")
    sums_hold_against: str = Field(description="Parties from which the sums hide single values.")
    claim: str = Field(default="", description="Protection of updates; empty if none is claimed.")
    noise: CardNoise | None = Field(
        default=None, description="Privacy loss of updates with noise; null without noise."
    )


class CardSoftware(CardPart):
    """Software that ran the training, according to the rounds' records."""

    coordinator: dict[str, list[str]] = Field(
        description="Versions of each package, in the order in which they were used."
    )
    hosts: dict[str, int] = Field(description="Number of hosts that ran each release of Potluck.")
    card: str = Field(description="Release of Potluck that wrote this card.")


class CardFacts(CardPart):
    """Facts about a model that its card lists."""

    card_version: int = 1
    run: str
    name: str
    round: int = Field(description="Round of the model; 0: before round 1.")
    blake3: str = Field(description="Digest of the model file without its metadata.")
    best_of: str | None = Field(
        description="Metric by which this model is the run's best; null if it is not."
    )
    created_at: str = Field(description="Start of the run, ISO 8601.")
    state: str = Field(description="State of the run, with the reason.")
    planned_rounds: int
    seed: int
    tables: dict[str, Any] = Field(
        description="Task, model, selector, strategy, objective and training of the run file."
    )
    measures: dict[str, float] = Field(description="Metrics of this model, by name.")
    coverage: dict[str, CardCoverage] = Field(
        default={},
        description="For each of these metrics: number of clients that sent it, and "
        "of their samples.",
    )
    units: dict[str, str] = Field(description="Units of the metrics that have one, by name.")
    initial_model_blake3: str = Field(description="Digest of the model before round 1.")
    coordinator_trains: bool | None = Field(
        description="True if the coordinator also trained the model in each round, on public "
        "samples; null if the strategy is not installed where the card was written."
    )
    kept_by_clients: list[str] = Field(
        description="Patterns of the tensors that clients keep; the model file lacks these tensors."
    )
    rounds: list[CardRound]
    clients: list[CardClient]
    privacy: CardPrivacy
    software: CardSoftware
    run_file: str = Field(description="Text of the run file at the start, TOML.")
