"""Options for splitting a task's training samples over clients, and the resulting partition."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from potluck.common.errors import ConfigurationError
from potluck.common.tasks.partition import (
    HeldOut,
    Indices,
    Share,
    dirichlet,
    put_aside,
    stratified,
)
from potluck.experiments.tasks.skews import few_labels, mostly_one_class, uneven_sizes, without_drop

_LEAST = 10


@dataclass(frozen=True, kw_only=True)
class Splitting:
    """Options of a task whose samples are split over clients by label.

    clients: number of parts, for client-0, client-1 … seed: seed of the partition.
    partition: uniform (equal clients), dirichlet (each class split by a Dirichlet(alpha) draw),
    labels (every client holds `labels` classes), one-class (for a share `skewed` of the clients,
    a share `main` of the samples is of one class) or quantity (equal except in number of samples,
    by a Dirichlet(alpha) draw).
    global_alpha: alpha of a Dirichlet draw of the share of samples that each class loses before
    the split; 0 for no loss.
    samples: number of training samples used, evenly from all classes; 0 for all.
    test_samples: number of the coordinator's test samples, in the same way.
    held_out: share of its samples that each client evaluates on.
    public: number of training samples that only the coordinator has, without labels.
    """

    clients: PositiveInt = 100
    seed: NonNegativeInt = 0
    partition: Literal["uniform", "dirichlet", "labels", "one-class", "quantity"] = "dirichlet"
    alpha: PositiveFloat = 0.5
    labels: PositiveInt = 2
    skewed: Share = 0.3
    main: Share = 0.8
    global_alpha: NonNegativeFloat = 0.0
    samples: NonNegativeInt = 0
    test_samples: NonNegativeInt = 0
    held_out: HeldOut = 0.0
    public: NonNegativeInt = 0


def split_by(options: Splitting, labels: NDArray[np.int64]) -> list[Indices]:
    """Return the clients' samples as indices of `labels` (n, int64). Pure.

    Raises ConfigurationError if there are too few samples for the options.
    """
    generator = np.random.default_rng(options.seed)
    kept, _ = _with_public(options, labels, generator)
    if options.global_alpha:
        kept = kept[without_drop(labels[kept], options.global_alpha, generator)]
    chosen = labels[kept]
    clients = options.clients
    minimum = max(1, min(_LEAST, len(kept) // (2 * clients)))
    match options.partition:
        case "uniform":
            parts = [np.sort(p) for p in np.array_split(generator.permutation(len(kept)), clients)]
        case "dirichlet":
            parts = dirichlet(chosen, clients, options.alpha, generator, minimum=minimum)
        case "labels":
            parts = few_labels(chosen, clients, options.labels, generator)
        case "one-class":
            parts = mostly_one_class(chosen, clients, options.skewed, generator, main=options.main)
        case _:
            parts = uneven_sizes(len(kept), clients, options.alpha, generator, minimum=minimum)
    if not all(len(part) for part in parts):
        raise ConfigurationError(
            f"{len(kept)} samples are too few for {clients} clients; use fewer clients",
            clients=clients,
        )
    return [kept[part] for part in parts]


def public_of(options: Splitting, labels: NDArray[np.int64]) -> Indices:
    """Return the public samples, as indices of `labels`. Raises ConfigurationError."""
    return _with_public(options, labels, np.random.default_rng(options.seed))[1]


def _with_public(
    options: Splitting, labels: NDArray[np.int64], generator: np.random.Generator
) -> tuple[Indices, Indices]:
    """Return (the clients' samples, the public samples), as indices."""
    chosen = used(labels, options.samples, generator)
    return put_aside(chosen, options.public, options.seed, clients=options.clients)


def used(labels: NDArray[np.int64], wanted: int, generator: np.random.Generator) -> Indices:
    """Return the sorted indices of `wanted` random samples (0: all), evenly from all classes."""
    if wanted == 0 or wanted >= len(labels):
        return np.arange(len(labels), dtype=np.int64)
    per_class = -(-wanted // len(np.unique(labels)))
    _, chosen = stratified(labels, per_class, generator)
    return np.sort(generator.permutation(chosen)[:wanted])


def splitting_of(options: Splitting) -> Splitting:
    """Return only the options that affect the split, as a cache key that different tasks share."""
    return Splitting(**{field.name: getattr(options, field.name) for field in fields(Splitting)})
