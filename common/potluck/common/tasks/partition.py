"""Splits samples over clients: pure functions of the labels and a generator."""

from __future__ import annotations

import re
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from potluck.common.errors import ConfigurationError
from potluck.common.names import ClientId

Indices = NDArray[np.int64]
"""Positions of samples in the complete data set."""

Share = Annotated[float, Field(ge=0, le=1)]
HeldOut = Annotated[float, Field(ge=0, le=0.5)]
"""Share of a client's samples that are held out for evaluation."""

_DRAWS = 100


def part_number(client: ClientId, parts: int, *, task: str) -> int:
    """Return the number of a client's part, in [0, parts): the number at the end of its id.

    Raises ConfigurationError if the id does not end with a number, or if the number is too large.
    """
    found = re.search(r"\d+$", client)
    if found is None or int(found[0]) >= parts:
        raise ConfigurationError(
            f"task {task} has parts for client-0 … client-{parts - 1}, not for '{client}'; "
            "rename the client, or set the task's option 'clients' in the run file",
            task=task,
            client=client,
        )
    return int(found[0])


def put_aside(samples: Indices, wanted: int, seed: int, *, clients: int) -> tuple[Indices, Indices]:
    """Return (samples left for the clients, `wanted` random samples), both in the given order.

    The draw has its own generator, so that no other draw depends on it. Raises ConfigurationError
    if less than one sample per client would remain.
    """
    if wanted and wanted > len(samples) - clients:
        raise ConfigurationError(
            f"the option 'public' is {wanted}, but the {len(samples)} samples must also suffice "
            f"for {clients} clients; lower public",
            public=wanted,
        )
    chosen = np.zeros(len(samples), dtype=bool)
    generator = np.random.default_rng((seed, 0x9B))
    chosen[generator.permutation(len(samples))[:wanted]] = True
    return samples[~chosen], samples[chosen]


def dirichlet(
    labels: NDArray[np.int64],
    clients: int,
    alpha: float,
    generator: np.random.Generator,
    *,
    minimum: int = 10,
) -> list[Indices]:
    """Return a partition with label skew: each class is divided by a draw from Dirichlet(alpha).

    As in NIID-Bench, a client that already has its equal share of the samples gets no more, and the
    whole draw is repeated until every client has at least `minimum` samples. After 100 failed draws
    (many clients, small alpha), clients with too few samples take random ones from the largest
    client. Parts are disjoint and cover all samples; the indices of each client are sorted. Raises
    ConfigurationError if there are too few samples.
    """
    if clients * minimum > len(labels):
        raise ConfigurationError(
            f"{len(labels)} samples are too few for {clients} clients with at least {minimum} "
            "each; use fewer clients",
            clients=clients,
        )
    draws = 1
    parts = _draw(labels, clients, alpha, generator)
    while min(len(part) for part in parts) < minimum and draws < _DRAWS:
        parts = _draw(labels, clients, alpha, generator)
        draws += 1
    _fill_up(parts, minimum, generator)
    return [np.sort(part) for part in parts]


def _fill_up(parts: list[Indices], minimum: int, generator: np.random.Generator) -> None:
    for short in range(len(parts)):
        while len(parts[short]) < minimum:
            largest = max(range(len(parts)), key=lambda client: len(parts[client]))
            shuffled = generator.permutation(parts[largest])
            spare = min(minimum - len(parts[short]), len(shuffled) - minimum)
            parts[largest] = shuffled[spare:]
            parts[short] = np.concatenate([parts[short], shuffled[:spare]])


def _draw(
    labels: NDArray[np.int64], clients: int, alpha: float, generator: np.random.Generator
) -> list[Indices]:
    parts: list[list[Indices]] = [[] for _ in range(clients)]
    sizes = np.zeros(clients, dtype=np.int64)
    for label in np.unique(labels):
        members = generator.permutation(np.flatnonzero(labels == label)).astype(np.int64)
        shares = generator.dirichlet(np.full(clients, alpha)) * (sizes < len(labels) / clients)
        if shares.sum() == 0:
            # With a tiny alpha, only clients that are already full got a share: divide equally.
            shares = np.ones(clients)
        cuts = (np.cumsum(shares / shares.sum())[:-1] * len(members)).astype(np.int64)
        for client, piece in enumerate(np.split(members, cuts)):
            parts[client].append(piece)
            sizes[client] += len(piece)
    return [np.concatenate(pieces) for pieces in parts]


def scaled(matrix: NDArray[np.int64], total: int) -> NDArray[np.int64]:
    """Return a matrix of counts scaled so that it sums to `total`, by largest remainder; ties go to
    the first cell."""
    exact = matrix.astype(np.float64).ravel() * total / matrix.sum()
    counts = np.floor(exact).astype(np.int64)
    order = np.argsort(-(exact - counts).round(9), kind="stable")
    counts[order[: total - int(counts.sum())]] += 1
    matching: NDArray[np.int64] = counts.reshape(matrix.shape)
    return matching


def by_counts(
    values: NDArray[np.int64], counts: NDArray[np.int64], generator: np.random.Generator
) -> list[Indices]:
    """Return a partition in which client k has `counts[k, v]` random samples of value v.

    values: n, int64, in [0, V): the label, or label × attributes + attribute. counts: K × V. Parts
    are disjoint; each client's indices are sorted by value, and random within a value. Raises
    ConfigurationError if there are too few samples of a value.
    """
    cells: list[list[Indices]] = [[] for _ in counts]
    for value in range(counts.shape[1]):
        members = generator.permutation(np.flatnonzero(values == value)).astype(np.int64)
        wanted = counts[:, value]
        if wanted.sum() > len(members):
            raise ConfigurationError(
                f"the clients need {wanted.sum()} samples of value {value}, but there are only "
                f"{len(members)}; scale the counts down",
                value=value,
            )
        pieces = np.split(members[: wanted.sum()], np.cumsum(wanted)[:-1])
        for client, piece in enumerate(pieces):
            cells[client].append(piece)
    return [np.concatenate(pieces) for pieces in cells]


def stratified(
    labels: NDArray[np.int64], per_class: int, generator: np.random.Generator
) -> tuple[Indices, Indices]:
    """Return (rest, chosen). `per_class` random samples of every class are chosen; both are
    sorted."""
    chosen = np.concatenate(
        [
            generator.permutation(np.flatnonzero(labels == label))[:per_class]
            for label in np.unique(labels)
        ]
    ).astype(np.int64)
    rest = np.setdiff1d(np.arange(len(labels), dtype=np.int64), chosen)
    return rest, np.sort(chosen)


def held_out_split(
    part: Indices, share: float, generator: np.random.Generator
) -> tuple[Indices, Indices]:
    """Return (training samples, held-out samples) of one client: ⌊share · n⌋ random samples are
    held out. Both are sorted."""
    shuffled = generator.permutation(part)
    cut = len(part) - int(share * len(part))
    return np.sort(shuffled[:cut]), np.sort(shuffled[cut:])
