"""The parts of a model card, as plain records. Pure."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class CardPart(BaseModel):
    """A part of a card. Numbers that are not finite become null in JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="null")


class CardCoverage(CardPart):
    """Number of clients and samples behind a metric's value."""

    clients: int = Field(description="That measured it; 0 on the coordinator's own data.")
    asked: int = Field(description="That were asked for it and hold samples for it.")
    samples: int = Field(description="0 where masked updates hide it.")
    partial: bool = Field(description="Whether fewer measured it than the run demands.")


class CardRound(CardPart):
    """A round in the model's history."""

    round: int = Field(description="Its number, from 1.")
    model_blake3: str = Field(description="Digest of the model that came of it.")
    committed_at: str = Field(description="ISO 8601; empty where it was not recorded.")
    selected: list[str] = Field(description="The cohort, in the order chosen.")
    included: list[str] = Field(description="Those of it whose updates are in the model.")
    late: list[str] = Field(description="Clients whose updates for earlier rounds joined it.")
    measures: dict[str, float]
    coverage: dict[str, CardCoverage] = Field(
        default={}, description="Clients and samples behind measures, by name."
    )


class CardClient(CardPart):
    """A client that was selected. Facts that its host reports about itself are not verified."""

    client: str
    hosts: list[str]
    selected: int = Field(description="In how many rounds.")
    included: int = Field(
        description="Of how many of these its update is part of the model, in time or late."
    )
    first_round: int
    last_round: int
    samples: int | None = Field(description="As disclosed last; null where they are not.")
    data_epochs: list[int] = Field(description="Versions of its data that it trained on.")
    software: list[str] = Field(description="Releases of Potluck that its hosts ran.")
    epsilon: float = Field(description="Privacy loss of its noisy disclosures, added up.")


class CardPrivacy(CardPart):
    """Data that clients disclosed in addition to updates, up to the time the card was written."""

    masked_updates: bool = Field(description="Whether only sums of updates were seen.")
    largest_epsilon: float = Field(description="The most that a client has spent; 0 for nothing.")
    profiles: list[dict[str, Any]] = Field(description="What clients disclosed by themselves.")
    sums: list[dict[str, Any]] = Field(description="Secure sums that its clients are in.")
    sums_hold_against: str = Field(description="From whom they hide what is in them.")


class CardSoftware(CardPart):
    """Software that ran the training, as the rounds' records name it."""

    coordinator: dict[str, list[str]] = Field(description="Versions by name; several in turn.")
    hosts: dict[str, int] = Field(description="Hosts by their release of Potluck.")
    card: str = Field(description="The release that wrote this card.")


class CardFacts(CardPart):
    """Facts about a model that its card lists."""

    card_version: int = 1
    run: str
    name: str
    round: int = Field(description="Whose model it is; 0 for the one before round 1.")
    blake3: str = Field(description="Digest of the file without metadata.")
    best_of: str | None = Field(description="The measure for which it is the run's best model.")
    created_at: str = Field(description="When the run was started, ISO 8601.")
    state: str = Field(description="Of the run, and why.")
    planned_rounds: int
    seed: int
    tables: dict[str, Any] = Field(
        description="Task, model, selector, strategy, objective and training of the run file."
    )
    measures: dict[str, float] = Field(description="Of this model, by name.")
    coverage: dict[str, CardCoverage] = Field(
        default={}, description="Clients and samples behind these measures, by name."
    )
    units: dict[str, str] = Field(description="Of these measures, where they have one.")
    initial_model_blake3: str = Field(description="Of the model before round 1.")
    coordinator_trains: bool | None = Field(
        description="Whether the coordinator trained it further in each round, on public samples "
        "of its own; null where the strategy is not installed where the card was written."
    )
    kept_by_clients: list[str] = Field(description="Patterns of tensors that are not in the file.")
    rounds: list[CardRound]
    clients: list[CardClient]
    privacy: CardPrivacy
    software: CardSoftware
    run_file: str = Field(description="As it was started, TOML.")
