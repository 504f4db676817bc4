"""Strategies against recorded updates and models, so that a change of their arithmetic is noticed.

`updates.json` in `tests/testdata/strategies` is a made-up run: the first model, and for each round
each client's difference from its start, with its samples and steps. Each other file is a strategy
with its options, and the models that follow. Second implementations, written from the papers, give
the same models. After an intended change,
`pytest tests/unit/server/strategies/test_recorded.py --rewrite` writes the current models; read the
difference before you commit it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.repository import TESTDATA
from support.strategy_rounds import Arrays, Rounds, Sent
from torch import nn

from potluck.common.settings.plugins import create
from potluck.common.tensors.model_arrays import load_arrays, state_arrays
from potluck.server.strategies.fedawe import START
from potluck.server.strategy import ServerTraining, Strategy, Weights

FOLDER = TESTDATA / "strategies"
RUN = json.loads((FOLDER / "updates.json").read_text())
FILES = sorted(path for path in FOLDER.glob("*.json") if path.stem != "updates")
Doubles = NDArray[np.float64]


@dataclass(frozen=True)
class Change:
    """One client's part in a round. difference: all numbers of the model, in the order of the
    tensors' names."""

    client: str
    difference: Doubles
    samples: int
    steps: int


ROUNDS = [
    [
        Change(c, np.array(each["difference"]), each["samples"], each["steps"])
        for c, each in r.items()
    ]
    for r in RUN["rounds"]
]
FIRST = np.array(RUN["model"])
CLIENTS: int = RUN["clients"]


def tensors(numbers: Doubles) -> dict[str, NDArray[Any]]:
    """Return the model with these numbers: a layer of three inputs and two outputs."""
    single = numbers.astype(np.float32)
    return {"bias": single[:2], "weight": single[2:].reshape(2, 3)}


def numbers(model: Arrays) -> list[float]:
    return [*model["bias"].tolist(), *model["weight"].reshape(-1).tolist()]


@dataclass(frozen=True)
class Update:
    """One client's update, for training on the coordinator."""

    client: str
    arrays: Arrays

    def tensor(self, name: str) -> NDArray[np.float32]:
        return self.arrays[name]

    def weights(self) -> Weights:
        return self.arrays

    def auxiliary(self, name: str) -> Weights:
        raise KeyError(name)


def models(path: Path, folder: Path) -> list[list[float]]:
    """Return the model after each recorded round, with the strategy of a file."""
    strategy = create(Strategy, path.stem, json.loads(path.read_text())["options"])
    game, found = Rounds(strategy, tensors(FIRST), folder), []
    for changes in ROUNDS:
        before, sent = game.model, {}
        for each in changes:
            start = before
            if START in strategy.auxiliary:
                own = strategy.personal(game.state, each.client) or strategy.broadcast(game.state)
                start = own[START]
            difference = tensors(each.difference)
            sent[each.client] = Sent(
                weights={name: start[name] + array for name, array in difference.items()},
                auxiliaries=dict.fromkeys(strategy.auxiliary, difference),
                samples=each.samples,
                steps=each.steps,
                normalizer=float(each.steps),
            )
        game.play(sent, clients=CLIENTS)
        if strategy.trains:
            updates = [Update(client, update.weights) for client, update in sent.items()]
            game.model = trained(strategy, game.model, updates, game.number)
        found.append(numbers(game.model))
    return found


def trained(
    strategy: Strategy, model: Arrays, updates: Sequence[Update], number: int
) -> dict[str, NDArray[Any]]:
    """Return the model after the strategy's training on the coordinator."""
    network = nn.Linear(3, 2)
    load_arrays(network, model)

    def copied() -> dict[str, NDArray[Any]]:
        return {name: array.copy() for name, array in state_arrays(network).items()}

    strategy.train(
        ServerTraining(
            network=network,
            weights=copied,
            load=lambda arrays: load_arrays(network, arrays),
            updates=updates,
            inputs=torch.tensor(RUN["inputs"]),
            seed=number,
            round=number,
            progress=lambda _: None,
            labels=torch.tensor(RUN["labels"]),
        )
    )
    return copied()


# The definitions, each from its paper -------------------------------------------------------------
#
# A definition takes the options and yields, for each round, the next model. All are in float64.

Definition = Callable[[Mapping[str, Any]], Iterator[Doubles]]


def mean_by_samples(changes: Sequence[Change]) -> Doubles:
    total = sum(each.samples for each in changes)
    summed: Doubles = np.sum([each.samples * each.difference for each in changes], axis=0)
    return summed / total


def fedavg(_: Mapping[str, Any]) -> Iterator[Doubles]:
    w = FIRST
    for changes in ROUNDS:
        w = w + mean_by_samples(changes)
        yield w


def fedavgm(options: Mapping[str, Any]) -> Iterator[Doubles]:
    w, v = FIRST, np.zeros_like(FIRST)
    for changes in ROUNDS:
        v = options["momentum"] * v + mean_by_samples(changes)
        w = w + options["learning_rate"] * v
        yield w


def adaptive(second_moment: Callable[[Doubles, Doubles], Doubles], beta1: float) -> Definition:
    def definition(options: Mapping[str, Any]) -> Iterator[Doubles]:
        tau, rate = options["tau"], options["learning_rate"]
        w, m, v = FIRST, np.zeros_like(FIRST), np.full_like(FIRST, tau**2)
        for changes in ROUNDS:
            delta = mean_by_samples(changes)
            m = beta1 * m + (1 - beta1) * delta
            v = second_moment(v, delta**2)
            w = w + rate * m / (np.sqrt(v) + tau)
            yield w

    return definition


def fednova(_: Mapping[str, Any]) -> Iterator[Doubles]:
    w = FIRST
    for changes in ROUNDS:
        shares = np.array([each.samples for each in changes], float)
        shares /= shares.sum()
        effective = sum(p * each.steps for p, each in zip(shares, changes, strict=True))
        normalised = sum(
            p * each.difference / each.steps for p, each in zip(shares, changes, strict=True)
        )
        w = w + effective * normalised
        yield w


def by_coordinate(combine: Callable[[Doubles, Mapping[str, Any]], Doubles]) -> Definition:
    def definition(options: Mapping[str, Any]) -> Iterator[Doubles]:
        w = FIRST
        for changes in ROUNDS:
            ordered = np.sort([each.difference for each in changes], axis=0)
            w = w + combine(ordered, options)
            yield w

    return definition


def without_ends(ordered: Doubles, options: Mapping[str, Any]) -> Doubles:
    cut = int(options["trim"] * len(ordered))
    mean: Doubles = np.mean(ordered[cut : len(ordered) - cut], axis=0)
    return mean


def clipped_mean(options: Mapping[str, Any]) -> Iterator[Doubles]:
    w = FIRST
    for changes in ROUNDS:
        short = [
            Change(
                e.client,
                e.difference * min(1.0, options["clip"] / np.linalg.norm(e.difference)),
                e.samples,
                e.steps,
            )
            for e in changes
        ]
        w = w + mean_by_samples(short)
        yield w


def nearest_first(points: Mapping[str, Doubles], hostile: int) -> list[str]:
    """Return the clients by Krum's score, smallest first."""

    def score(client: str) -> float:
        others = [p for name, p in points.items() if name != client]
        apart = sorted(float(((points[client] - p) ** 2).sum()) for p in others)
        return sum(apart[: max(1, len(points) - hostile - 2)])

    return sorted(points, key=lambda client: (score(client), client))


def krum(options: Mapping[str, Any], *, several: bool = False) -> Iterator[Doubles]:
    w = FIRST
    for changes in ROUNDS:
        points = {each.client: each.difference for each in changes}
        hostile = int(options["hostile"] * len(points))
        kept = len(points) - hostile if several else 1
        best = nearest_first(points, hostile)[:kept]
        w = w + np.mean([points[client] for client in best], axis=0)
        yield w


def bulyan(options: Mapping[str, Any]) -> Iterator[Doubles]:
    w = FIRST
    for changes in ROUNDS:
        left = {each.client: each.difference for each in changes}
        count, hostile = len(left), int(options["hostile"] * len(left))
        chosen = np.array(
            [left.pop(nearest_first(left, hostile)[0]) for _ in range(count - 2 * hostile)]
        )
        middle = np.sort(chosen, axis=0)[(len(chosen) - 1) // 2]
        order = np.argsort(np.abs(chosen - middle), axis=0)[: count - 4 * hostile]
        w = w + np.take_along_axis(chosen, order, axis=0).mean(axis=0)
        yield w


def fltrust(options: Mapping[str, Any]) -> Iterator[Doubles]:
    w, inputs = FIRST, np.array(RUN["inputs"])
    wanted = np.eye(2)[RUN["labels"]]
    for changes in ROUNDS:
        bias, weight = w[:2].copy(), w[2:].reshape(2, 3).copy()
        for _ in range(options["epochs"]):  # one batch holds all samples, so their order is equal
            output = np.exp(inputs @ weight.T + bias)
            wrong = (output / output.sum(axis=1, keepdims=True) - wanted) / len(inputs)
            bias -= options["learning_rate"] * wrong.sum(axis=0)
            weight -= options["learning_rate"] * wrong.T @ inputs
        own = np.concatenate([bias, weight.reshape(-1)]) - w
        total, trust = np.zeros_like(w), 0.0
        for each in changes:
            length = np.linalg.norm(each.difference)
            cosine = max(0.0, float(own @ each.difference / np.linalg.norm(own) / length))
            total += cosine * np.linalg.norm(own) / length * each.difference
            trust += cosine
        w = w + total / trust
        yield w


def mifa(options: Mapping[str, Any]) -> Iterator[Doubles]:
    w, table = FIRST, {f"k{client}": np.zeros_like(FIRST) for client in range(CLIENTS)}
    for changes in ROUNDS:
        table |= {each.client: each.difference for each in changes}
        w = w + options["learning_rate"] * np.mean(list(table.values()), axis=0)
        yield w


def fedawe(options: Mapping[str, Any]) -> Iterator[Doubles]:
    local = {f"k{client}": FIRST for client in range(CLIENTS)}
    missed = dict.fromkeys(local, 1)
    for changes in ROUNDS:
        base = np.mean([local[each.client] for each in changes], axis=0)
        step = np.mean([missed[each.client] * each.difference for each in changes], axis=0)
        step *= min(1.0, options["clip"] / np.linalg.norm(step))
        w = base + options["learning_rate"] * step
        missed = {client: rounds + 1 for client, rounds in missed.items()}
        missed |= {each.client: 1 for each in changes}
        local |= {each.client: w for each in changes}
        yield w


def scaffold(options: Mapping[str, Any]) -> Iterator[Doubles]:
    w = FIRST
    for changes in ROUNDS:
        w = w + options["learning_rate"] * np.mean([e.difference for e in changes], axis=0)
        yield w


DEFINITIONS: Mapping[str, Definition] = {
    "bulyan": bulyan,
    "clipped-mean": clipped_mean,
    "fedadagrad": adaptive(lambda v, square: v + square, 0.0),
    "fedadam": adaptive(lambda v, square: 0.99 * v + 0.01 * square, 0.9),
    "fedavg": fedavg,
    "fedavgm": fedavgm,
    "fedawe": fedawe,
    "fednova": fednova,
    "fedyogi": adaptive(lambda v, square: v - 0.01 * square * np.sign(v - square), 0.9),
    "fltrust": fltrust,
    "krum": krum,
    "median": by_coordinate(lambda ordered, _: np.median(ordered, axis=0)),
    "mifa": mifa,
    "multi-krum": lambda options: krum(options, several=True),
    "scaffold": scaffold,
    "trimmed-mean": by_coordinate(without_ends),
}


def test_every_recorded_strategy_has_a_definition() -> None:
    assert [path.stem for path in FILES] == list(DEFINITIONS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_recorded_updates_give_the_recorded_models(
    path: Path, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    found, recorded = models(path, tmp_path), json.loads(path.read_text())
    if pytestconfig.getoption("rewrite"):
        path.write_text(compact({**recorded, "models": found}))
        return
    np.testing.assert_allclose(found, recorded["models"], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_definition_from_the_paper_gives_the_recorded_models(path: Path) -> None:
    recorded = json.loads(path.read_text())
    found = list(DEFINITIONS[path.stem](recorded["options"]))
    np.testing.assert_allclose(found, recorded["models"], rtol=1e-5, atol=1e-5)


def compact(content: Mapping[str, Any]) -> str:
    """Return JSON with one line per round."""
    lines = ",\n".join(f"    {json.dumps(each)}" for each in content["models"])
    return f'{{\n  "options": {json.dumps(content["options"])},\n  "models": [\n{lines}\n  ]\n}}\n'
