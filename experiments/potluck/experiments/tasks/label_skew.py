"""Tasks with samples in a data directory, split over clients by label."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn

from potluck.common.errors import ConfigurationError
from potluck.common.names import ClientId
from potluck.common.task import ClientData, Examples, Task
from potluck.common.tasks.label_noise import LabelNoise, mislabelled
from potluck.common.tasks.partition import (
    HeldOut,
    Indices,
    Share,
    dirichlet,
    held_out_split,
    part_number,
    put_aside,
    stratified,
)
from potluck.common.tasks.stored import Prepare, Stored, StoredExamples
from potluck.experiments.tasks.arrays import Arrays, DataFormat, open_arrays
from potluck.experiments.tasks.networks import Networks

# Kinds of skew ------------------------------------------------------------------------------------
# The module `partition` has the Dirichlet rule and shared functions.


def few_labels(
    labels: NDArray[np.int64], clients: int, per_client: int, generator: np.random.Generator
) -> list[Indices]:
    """Return a partition in which every client holds `per_client` classes.

    As in NIID-Bench, client i holds class i mod C and other random classes; a class's samples are
    divided evenly among the clients that hold it. Classes that no client drew are omitted; this can
    happen if there are fewer clients than classes. The parts are disjoint; the indices of each
    client are sorted. Raises ConfigurationError if there are fewer than `per_client` classes.
    """
    classes = np.unique(labels)
    if not 1 <= per_client <= len(classes):
        raise ConfigurationError(
            f"a client can't have {per_client} of {len(classes)} classes; choose 1 to "
            f"{len(classes)} labels",
            labels=per_client,
        )
    held = np.zeros((clients, len(classes)), dtype=bool)
    for client in range(clients):
        first = client % len(classes)
        others = np.delete(np.arange(len(classes)), first)
        held[client, first] = True
        held[client, generator.choice(others, per_client - 1, replace=False)] = True
    parts: list[list[Indices]] = [[] for _ in range(clients)]
    for column, label in enumerate(classes):
        owners = np.flatnonzero(held[:, column])
        if len(owners) == 0:
            continue
        members = generator.permutation(np.flatnonzero(labels == label)).astype(np.int64)
        for owner, piece in zip(owners, np.array_split(members, len(owners)), strict=True):
            parts[owner].append(piece)
    return [np.sort(np.concatenate(pieces)) for pieces in parts]


def mostly_one_class(
    labels: NDArray[np.int64],
    clients: int,
    skewed: float,
    generator: np.random.Generator,
    *,
    main: float = 0.8,
) -> list[Indices]:
    """Return a partition in which a share of the clients hold mostly one class (FLASH).

    All clients hold n // clients samples; the remainder is omitted. ⌊skewed · clients + ½⌋ random
    clients are skewed: a share `main` of their samples is of one class. Their classes follow each
    other in a random order. The rest of their samples is from other classes at random, or from
    their own class if no other is left. The other clients hold the remaining samples, shuffled. So
    these are uniform if the classes have equal sizes, except for the samples that the skewed
    clients hold. The parts are disjoint; the indices of each client are sorted. Raises
    ConfigurationError if a class has too few samples.
    """
    size = len(labels) // clients
    classes = generator.permutation(np.unique(labels))
    chosen = generator.permutation(clients)[: int(skewed * clients + 0.5)]
    pools = {int(c): list(generator.permutation(np.flatnonzero(labels == c))) for c in classes}
    parts: dict[int, list[int]] = {}
    mains: dict[int, int] = {}
    for turn, client in enumerate(chosen.tolist()):
        label = int(classes[turn % len(classes)])
        wanted = int(main * size + 0.5)
        if len(pools[label]) < wanted:
            raise ConfigurationError(
                f"class {label} has too few samples for the clients that have mostly this class: "
                f"{wanted} more samples are needed, {len(pools[label])} are left; use more "
                "clients, or a smaller share of skewed clients"
            )
        mains[client] = label
        parts[client] = [pools[label].pop() for _ in range(wanted)]
    left = generator.permutation([index for pool in pools.values() for index in pool])
    taken = np.zeros(len(left), dtype=bool)
    for client, label in mains.items():
        suitable = np.flatnonzero(~taken & (labels[left] != label))[: size - len(parts[client])]
        taken[suitable] = True
        parts[client] += left[suitable].tolist()
    for client in mains:  # the last clients may find only samples of their own class
        spare = np.flatnonzero(~taken)[: size - len(parts[client])]
        taken[spare] = True
        parts[client] += left[spare].tolist()
    rest = left[~taken]
    for position, client in enumerate(sorted(set(range(clients)) - set(mains))):
        parts[client] = rest[position * size : (position + 1) * size].tolist()
    return [np.sort(np.array(parts[client], dtype=np.int64)) for client in range(clients)]


def uneven_sizes(
    samples: int,
    clients: int,
    alpha: float,
    generator: np.random.Generator,
    *,
    minimum: int = 10,
) -> list[Indices]:
    """Return a partition with quantity skew: sizes by a Dirichlet(alpha) draw, samples at random.

    Every client gets `minimum` samples first, and the draw splits the other samples, so no draw
    needs repeating. The parts are disjoint and complete; their indices are sorted. Raises
    ConfigurationError if there are too few samples.
    """
    if clients * minimum > samples:
        raise ConfigurationError(
            f"{samples} samples are too few for {clients} clients with at least {minimum} each; "
            "use fewer clients",
            clients=clients,
        )
    shares = generator.dirichlet(np.full(clients, alpha))
    cuts = (np.cumsum(shares)[:-1] * (samples - clients * minimum)).astype(np.int64)
    cuts += minimum * np.arange(1, clients)
    return [np.sort(part) for part in np.split(generator.permutation(samples), cuts)]


def without_drop(
    labels: NDArray[np.int64], alpha: float, generator: np.random.Generator
) -> Indices:
    """Return the samples that remain if each class loses a share, as a global imbalance.

    The shares are one Dirichlet(alpha) draw over classes, so they sum to 1 (distribution-controlled
    selection §4); small alpha makes one class rare or absent. The indices are sorted.
    """
    classes = np.unique(labels)
    shares = generator.dirichlet(np.full(len(classes), alpha))
    kept: list[Indices] = []
    for label, share in zip(classes, shares, strict=True):
        members = generator.permutation(np.flatnonzero(labels == label)).astype(np.int64)
        kept.append(members[int(share * len(members) + 0.5) :])
    return np.sort(np.concatenate(kept))


# Options of a split -------------------------------------------------------------------------------

_LEAST = 10


@dataclass(frozen=True, kw_only=True)
class Splitting:
    """Options of a task whose samples are split over clients by label.

    clients: number of parts, for client-0, client-1 … seed: seed of the partition.
    partition: uniform (random parts of equal size), dirichlet (each class split by a
    Dirichlet(alpha) draw), labels (every client holds `labels` classes), one-class (for a share
    `skewed` of the clients, a share `main` of the samples is of one class) or quantity (random
    parts whose sizes are a Dirichlet(alpha) draw).
    global_alpha: alpha of a Dirichlet draw of the share of samples that each class loses before
    the split; 0 for no loss.
    samples: number of training samples used, evenly from all classes; 0 for all.
    test_samples: number of the coordinator's test samples, chosen in the same way.
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


# Tasks --------------------------------------------------------------------------------------------

_TEST_SEED = 1
"""Seed for the choice of test samples, which must not depend on the partition's seed."""


@dataclass(frozen=True, kw_only=True)
class LabelSkewTask(Splitting, LabelNoise, Task):
    """Base class of tasks split by label; subclasses set the format, networks and preparation.

    network: the model, by name. Other options are described at `Splitting` and `LabelNoise`.
    """

    network: str = ""

    name: ClassVar[str]
    form: ClassVar[DataFormat]
    networks: ClassVar[Networks]

    @property
    def classes(self) -> int:  # type: ignore[override]  # follows from the options
        """Number of classes in the data."""
        return self._form().classes

    def model(self) -> nn.Module:
        """Return the network."""
        return self.networks[self.network]()

    def client_data(self, client: ClientId, data: Path | None) -> ClientData:
        """Return the part of the data whose index is the number at the end of the client's id."""
        part = part_number(client, self.clients, task=self.name)
        arrays = open_arrays(self._form(), data)
        mine = _split(arrays, splitting_of(self))[part]
        train, rest = held_out_split(mine, self.held_out, np.random.default_rng((self.seed, part)))
        make = self._prepare(arrays)
        examples = stored_examples(arrays.x_train, arrays.y_train, train, make)
        labels = mislabelled(
            examples.labels,
            self,
            classes=self.classes,
            part=part,
            clients=self.clients,
            seed=self.seed,
        )
        return ClientData(
            train=examples.with_labels(labels),
            held_out=stored_examples(arrays.x_train, arrays.y_train, rest, make)
            if len(rest)
            else None,
        )

    def evaluation_data(self, data: Path | None) -> Examples | None:
        """Return the test samples."""
        arrays = open_arrays(self._form(), data)
        chosen = used(arrays.y_test, self.test_samples, np.random.default_rng(_TEST_SEED))
        return stored_examples(arrays.x_test, arrays.y_test, chosen, self._prepare(arrays))

    def public_data(self, data: Path | None) -> Tensor | None:
        """Return the training samples that were reserved as public data."""
        if not self.public:
            return None
        arrays = open_arrays(self._form(), data)
        rows = public_of(splitting_of(self), arrays.y_train)
        return stored_examples(arrays.x_train, arrays.y_train, rows, self._prepare(arrays)).inputs

    def data_files(self) -> tuple[str, ...]:
        """Return the name of the data set's file."""
        return (self._form().file_name,)

    def _form(self) -> DataFormat:
        return self.form

    def _prepare(self, arrays: Arrays) -> Prepare:
        raise NotImplementedError


@lru_cache(maxsize=4)
def _split(arrays: Arrays, options: Splitting) -> list[Indices]:
    return split_by(options, arrays.y_train)


def stored_examples(
    samples: NDArray[Any],
    labels: NDArray[np.int64],
    rows: Indices,
    prepare: Prepare,
    groups: NDArray[np.int64] | None = None,
) -> StoredExamples:
    """Return the samples of a mapped array with the indices `rows`. groups: group of each,
    int64."""
    return StoredExamples(
        inputs=Stored(
            array=torch.from_numpy(samples), rows=torch.from_numpy(rows), prepare=prepare
        ),
        labels=torch.from_numpy(labels[rows]),
        groups=None if groups is None else torch.from_numpy(groups),
    )
