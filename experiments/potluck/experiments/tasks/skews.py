"""Partitions with the kinds of skew of papers: pure functions of labels and a generator.

The module `partition` has the Dirichlet rule and shared functions.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from potluck.common.errors import ConfigurationError
from potluck.common.tasks.partition import Indices


def few_labels(
    labels: NDArray[np.int64], clients: int, per_client: int, generator: np.random.Generator
) -> list[Indices]:
    """Return a partition in which every client holds `per_client` classes.

    As in NIID-Bench, client i holds class i mod C and others at random; a class's samples are
    shared out evenly among the clients that hold it. Classes that no client drew are omitted; this
    can happen if there are fewer clients than classes. Disjoint; the indices of each client are
    sorted. Raises ConfigurationError if there are fewer than `per_client` classes.
    """
    classes = np.unique(labels)
    if not 1 <= per_client <= len(classes):
        raise ConfigurationError(
            f"a client can't hold {per_client} of {len(classes)} classes; choose 1 to "
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

    All hold n // clients samples; the remainder is omitted. ⌊skewed · clients + ½⌋ random clients
    are skewed: a share `main` of their samples is of one class. Their classes follow each other in
    a random order. The rest of their samples is from other classes at random, or from their own
    class if no other is left. The other clients hold the remaining samples, shuffled. So these are
    uniform if the classes have equal sizes, except for the samples that the skewed clients hold.
    Disjoint; the indices of each client are sorted. Raises ConfigurationError if a class has too
    few samples.
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
                f"class {label} has too few samples for the clients that hold mostly this class: "
                f"{wanted} more are needed, {len(pools[label])} are left; use more clients, or a "
                "smaller share of skewed ones"
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

    Every client gets `minimum` samples first, and the draw splits the others, so no draw needs
    repeating. Disjoint, complete; the indices are sorted. Raises ConfigurationError if there are
    too few samples.
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
    """Return the samples that remain after a global imbalance: each class loses a share.

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
