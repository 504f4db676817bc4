"""FedLECC: selects the clients with the largest losses in each cluster (arXiv 2603.08911).

Clients are clustered by their label distributions. The clusters with the largest losses come first.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from potluck.common.settings.extras import require
from potluck.server.selection import (
    Answers,
    Ask,
    Floats,
    Population,
    RoundOutcome,
    Rows,
    Selection,
    SelectionContext,
    Selector,
    Signal,
)
from potluck.server.selectors.parts.choosing import (
    TIE_DECIMALS,
    Cohort,
    grown,
    profiles,
    with_labels,
)
from potluck.server.selectors.parts.parallel import passes
from potluck.server.selectors.parts.reported import column, plausible
from potluck.server.state import State

_FACTOR = 100.0
"""Maximum plausible loss, as a multiple of the clients' median; larger losses are limited to it."""
_MOST = 2_000
"""Maximum number of clients that are clustered by pairwise linkage. If there are more, only an
evenly spaced sample of them is linked."""


@dataclass(frozen=True, kw_only=True)
class FedLecc(Selector):
    """Clusters clients by labels; selects those with the largest losses per cluster.

    Clusters take turns, by falling mean loss; in its turn, a cluster adds its client with the
    largest remaining loss. clusters: number of clusters, found by average linkage of the Hellinger
    distances between label distributions. All available clients are asked for their loss in every
    round. For a client that does not answer, its last loss is used.

    The clusters change only when a client joins. With more than 2000 clients, 2000 of them are
    linked, and each other client joins the cluster with the nearest mean. Clients that disclosed no
    labels, or never reported a loss, come last. O(K + min(K, 2000)²).
    """

    clusters: Annotated[int, Field(ge=1, le=1000)] = 10

    needs_profiles = frozenset({Signal.LABEL_COUNTS})
    asks_questions = frozenset({"loss"})

    def __post_init__(self) -> None:
        require("scipy", "potluck[server]")

    def init(self, population: Population) -> State:
        """Return a state in which no loss is known."""
        return State(arrays={"losses": np.full(len(population), np.nan)})

    def select(self, state: State, context: SelectionContext) -> Generator[Ask, Answers, Selection]:
        """Return the cohort, in the order in which the clusters took turns."""
        generator = context.generator("fedlecc")
        cohort = Cohort(context, generator)
        if not cohort.size:
            return cohort.selection()
        answers = yield Ask(rows=context.available, kind="loss")
        clients = len(context.population)
        losses = _last_losses(state, clients, [answers])[context.available]
        cluster = _clusters(context.population, self.clusters)[context.available]
        known = ~np.isnan(losses) & (cluster >= 0)
        fit = np.flatnonzero(known)
        rounded = np.round(losses[fit], TIE_DECIMALS)
        chosen = fit[turns(rounded, cluster[fit], cohort.size, generator)]
        means = _mean_by_cluster(losses[fit], cluster[fit])
        cohort.extend(
            context.available[chosen].tolist(),
            [
                f"loss {losses[each]:.4g}, in cluster {int(cluster[each]) + 1}, "
                f"whose mean is {means[cluster[each]]:.4g}"
                for each in chosen
            ],
        )
        others = context.available[~known]
        cohort.draw(cohort.missing, "no labels or no loss known; drawn uniformly", others)
        return cohort.selection()

    def observe(self, state: State, outcome: RoundOutcome) -> State:
        """Return the state with the reported losses."""
        rows = [outcome.selected, *(answers.rows for answers in outcome.answers)]
        clients = 1 + max(int(each.max(initial=-1)) for each in rows)
        return State(arrays={"losses": _last_losses(state, clients, outcome.answers)})


def square_roots(label_counts: Floats) -> Floats:
    """Return the element-wise square roots of label distributions, n × C.

    The distance of two rows is √2 times their Hellinger distance. Negative counts, which noise may
    cause, are taken as 0; one count of each row must be above 0.
    """
    counts = np.clip(label_counts, 0.0, None)
    counts = counts / counts.max(axis=1, keepdims=True)  # first: a sum may overflow
    roots: Floats = np.sqrt(counts / counts.sum(axis=1, keepdims=True))
    return roots


def linkage_clusters(roots: Floats, clusters: int) -> NDArray[np.int64]:
    """Return the cluster of each row, numbered from 0. Average linkage gives at most `clusters`
    clusters."""
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import pdist

    if len(roots) == 1:
        return np.zeros(1, dtype=np.int64)
    tree = linkage(pdist(roots), method="average")
    found: NDArray[np.int64] = fcluster(tree, clusters, criterion="maxclust").astype(np.int64) - 1
    return np.unique(found, return_inverse=True)[1].astype(np.int64)


def turns(
    losses: Floats, cluster: NDArray[np.int64], count: int, generator: np.random.Generator
) -> Rows:
    """Return up to `count` positions. Clusters take turns by falling mean loss; each adds its
    position with the largest remaining loss.

    losses: finite. cluster: number of each position's cluster, ≥ 0. Ties are broken by the
    generator.
    """
    if not len(losses) or not count:
        return np.zeros(0, dtype=np.int64)
    # int16 is faster: numpy sorts it by counting
    grouped = np.argsort(cluster.astype(np.int16), kind="stable")
    edges = np.flatnonzero(np.diff(cluster[grouped], prepend=-1))[1:]
    means = np.round(_mean_by_cluster(losses, cluster), TIE_DECIMALS)
    groups = np.split(grouped, edges)
    ranked = np.lexsort((generator.random(len(groups)), [-means[cluster[g[0]]] for g in groups]))
    best = [_largest(losses, groups[each], count, generator) for each in ranked]
    turn = np.concatenate([np.arange(len(each)) for each in best])
    chosen: Rows = np.concatenate(best)[np.argsort(turn, kind="stable")][:count]
    return chosen


def _largest(losses: Floats, group: Rows, count: int, generator: np.random.Generator) -> Rows:
    """Return up to `count` members of a group, by falling loss."""
    if len(group) > count:
        of_group = losses[group]
        group = group[of_group >= np.partition(of_group, -count)[-count]]
    order = np.lexsort((generator.random(len(group)), -losses[group]))
    largest: Rows = group[order[:count]]
    return largest


def _mean_by_cluster(losses: Floats, cluster: NDArray[np.int64]) -> Floats:
    sizes = np.bincount(cluster)
    means: Floats = np.bincount(cluster, weights=losses) / np.maximum(sizes, 1)
    return means


def _last_losses(state: State, clients: int, heard: Sequence[Answers]) -> Floats:
    """Return the last plausible loss of each client; NaN if the client reported none."""
    losses = grown(state.arrays["losses"], clients, np.nan)
    for answers in heard:
        told = plausible(column(answers, "loss", len(losses)), factor=_FACTOR)
        losses = np.where(np.isnan(told), losses, told)
    return losses


def _clusters(population: Population, clusters: int) -> NDArray[np.int64]:
    """Return each client's cluster, from 0; −1 if its labels are unknown.

    Clusters change only with the labels.
    """
    found = np.full(len(population), -1, dtype=np.int64)
    rows = with_labels(population.label_counts, np.arange(len(population)))
    if population.label_counts is None or not len(rows):
        return found
    counts = profiles(population.label_counts, rows)
    linked = np.linspace(0, len(rows) - 1, min(len(rows), _MOST)).astype(np.int64)
    roots = square_roots(counts[linked])
    labels = linkage_clusters(roots, clusters)
    if len(linked) < len(rows):
        means = np.stack([roots[labels == each].mean(axis=0) for each in np.unique(labels)])
        near = (means**2).sum(axis=1) / 2
        joined = np.empty(len(rows), dtype=np.int64)

        def join(start: int, stop: int) -> None:
            likeness = square_roots(counts[start:stop]) @ means.T
            joined[start:stop] = (likeness - near).argmax(axis=1)

        with passes(len(rows)) as run:
            run(join)
        found[rows] = joined
    found[rows[linked]] = labels
    return found
