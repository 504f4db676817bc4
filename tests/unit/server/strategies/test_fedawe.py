"""FedAWE on client and coordinator against a second implementation, with clients that come and go.

The second implementation has the form of the authors' program: a list of the clients' models, and a
counter of rounds for each client.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save
from support.strategy_rounds import Rounds, Sent, vector
from torch import Tensor, nn

from potluck.client.objective import Batch, LocalContext, Objective
from potluck.client.training.auxiliary_files import sendable
from potluck.client.training.fedawe_correction import FedAweCorrection
from potluck.client.training.steps.loop import Corrected, TrainingContext, train
from potluck.common.errors import ConfigurationError
from potluck.common.settings.local_training import LocalTraining
from potluck.common.task import Examples
from potluck.common.tensors.layout import Layout
from potluck.common.tensors.model_arrays import load_arrays, state_arrays
from potluck.server.plan.plan import draw_up
from potluck.server.state import State
from potluck.server.strategies.fedawe import START, FedAwe

CLIENTS = 4
TARGETS = (-3.0, 0.5, 2.0, 8.0)
TRAINING = LocalTraining(learning_rate=0.1, steps=3)
LAYOUT = Layout.of(vector(0.0))


class Point(nn.Module):
    """Network of one weight, which is also its output."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.w.expand(len(inputs), 1)


class Parabola(Objective):
    """The loss ½(x − m)² + ½μ(x − received)² of output x and input m."""

    def __init__(self, mu: float = 0.0) -> None:
        self._mu = mu
        self.needs_received = True

    def loss(self, logits: Tensor, batch: Batch, local: LocalContext) -> Tensor:
        apart = (local.parameters[0] - local.received[0]).square().sum()
        return (logits - batch.inputs).square().mean() / 2 + self._mu * apart / 2


def trained(game: Rounds, client: int, *, mu: float = 0.0) -> Sent:
    """Return the update of a client, with the real training and correction."""
    strategy, name = game.strategy, f"k{client}"

    def tensors(auxiliaries: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
        return {n: {"w": torch.from_numpy(a["w"].copy())} for n, a in auxiliaries.items()}

    network = Point()
    load_arrays(network, game.model)
    result = train(
        network,
        Examples(inputs=torch.full((1, 1), TARGETS[client]), labels=torch.zeros(1).long()),
        Parabola(mu),
        TRAINING,
        TrainingContext(classes=1, seed=0, round=1, device=torch.device("cpu")),
        corrected=Corrected(
            correction=FedAweCorrection(),
            shared=tensors(strategy.broadcast(game.state)),
            personal=tensors(strategy.personal(game.state, name)),
            kept=None,
            layout=LAYOUT,
        ),
    )
    assert result.correction is not None
    weights = {n: a.copy() for n, a in state_arrays(network).items()}
    return Sent(weights=weights, auxiliaries=sendable(result.correction.send, [START], LAYOUT))


def played(
    strategy: FedAwe, cohorts: Sequence[Sequence[int]], folder: Path, *, mu: float = 0.0
) -> list[float]:
    """Return the model after each round of these cohorts."""
    found, game = [], Rounds(strategy, vector(1.0), folder)
    for cohort in cohorts:
        sent = {f"k{client}": trained(game, client, mu=mu) for client in cohort}
        found.append(float(game.play(sent, clients=CLIENTS)["w"][0]))
    return found


def descended(start: float, target: float, *, mu: float = 0.0) -> float:
    """Return the weight after the local steps of `TRAINING`."""
    w = start
    for _ in range(3):
        w -= 0.1 * (w - target + mu * (w - start))
    return w


def second(
    cohorts: Sequence[Sequence[int]], *, rate: float, clip: float | None, mu: float = 0.0
) -> tuple[list[float], list[float]]:
    """Return the cohorts' models, and the means of all clients' models, after each round."""
    local, missed = [1.0] * CLIENTS, [1] * CLIENTS
    models, means = [], []
    for cohort in cohorts:
        base = sum(local[k] for k in cohort) / len(cohort)
        step = 0.0
        for k in cohort:
            step += missed[k] * (descended(local[k], TARGETS[k], mu=mu) - local[k]) / len(cohort)
        if clip is not None and abs(step) > clip:
            step = clip if step > 0 else -clip
        w = base + rate * step
        for k in range(CLIENTS):
            missed[k] = 1 if k in cohort else missed[k] + 1
            local[k] = w if k in cohort else local[k]
        models.append(w)
        means.append(sum(local) / CLIENTS)
    return models, means


# The definition ----------------------------------------------------------------------------------


def change(start: float, value: float) -> Sent:
    """Return the update of a client that starts from `start` and changes by `value`."""
    return Sent(weights=vector(start + value), auxiliaries={START: vector(value)})


def test_fedawe_equals_values_computed_by_hand(tmp_path: Path) -> None:
    game = Rounds(FedAwe(), vector(0.0), tmp_path)
    # Round 1: both clients start from 0; (1·4 + 1·8)/2 = 6.
    assert game.play({"a": change(0, 4.0), "b": change(0, 8.0)}, clients=3)["w"] == [6.0]
    # Round 2: c starts from 0, absent for 2 rounds; a from 6: (0 + 6)/2 + (2·1 + 1·2)/2 = 5.
    assert game.play({"a": change(6, 2.0), "c": change(0, 1.0)}, clients=3)["w"] == [5.0]
    # Round 3: b starts from 6, after 2 rounds: 6 + 2·(−1) = 4.
    assert game.play({"b": change(6, -1.0)}, clients=3)["w"] == [4.0]
    # Round 4: a and c start from 5, after 2 rounds; b from 4: 14/3 + (2·3 + 2·0 + 1·0)/3 = 20/3.
    sent = {"a": change(5, 3.0), "b": change(4, 0.0), "c": change(5, 0.0)}
    assert game.play(sent, clients=3)["w"] == pytest.approx([20 / 3])


def test_fedawe_starts_each_client_from_the_model_after_its_last_round(tmp_path: Path) -> None:
    strategy = FedAwe()
    game = Rounds(strategy, vector(0.0), tmp_path)

    def start(client: str) -> float:
        own = strategy.personal(game.state, client) or strategy.broadcast(game.state)
        return float(own[START]["w"][0])

    assert [start(client) for client in "abc"] == [0.0, 0.0, 0.0]
    game.play({"a": change(0, 4.0), "b": change(0, 8.0)}, clients=3)
    game.play({"a": change(6, 2.0)}, clients=3)
    assert [start(client) for client in "abc"] == [8.0, 6.0, 0.0]
    game.play({"b": change(6, 1.0)}, clients=3)
    assert [start(client) for client in "abc"] == [8.0, 8.0, 0.0]
    stored = {name.split("/")[1] for name in game.state.arrays}
    assert stored == {"0", "2", "3"}, "no client's last round is round 1"


COHORTS = st.lists(
    st.lists(st.integers(0, CLIENTS - 1), min_size=1, max_size=CLIENTS, unique=True),
    min_size=1,
    max_size=8,
)


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    cohorts=COHORTS,
    rate=st.sampled_from([0.5, 1.0, 1.5]),
    clip=st.sampled_from([None, 0.5, 2.0]),
)
def test_fedawe_equals_a_second_implementation(
    tmp_path: Path, cohorts: list[list[int]], rate: float, clip: float | None
) -> None:
    models, means = second(cohorts, rate=rate, clip=clip)
    found = played(FedAwe(learning_rate=rate, clip=clip), cohorts, tmp_path)
    assert found == pytest.approx(models, rel=1e-4, abs=1e-4)
    of_all = FedAwe(learning_rate=rate, clip=clip, model="clients")
    assert played(of_all, cohorts, tmp_path) == pytest.approx(means, rel=1e-4, abs=1e-4)


def test_objective_measures_its_distance_from_the_clients_own_start(tmp_path: Path) -> None:
    cohorts = [[0, 1], [2], [0, 3], [1, 2]]
    models, _ = second(cohorts, rate=1.0, clip=None, mu=3.0)
    assert played(FedAwe(), cohorts, tmp_path, mu=3.0) == pytest.approx(models, rel=1e-4)


def test_clip_is_the_length_over_all_parameters(tmp_path: Path) -> None:
    model = {"a": np.zeros(2, np.float32), "b": np.zeros(1, np.float32)}
    moved = {"a": np.array([2, 3], np.float32), "b": np.array([6], np.float32)}
    game = Rounds(FedAwe(clip=3.5, learning_rate=2.0), model, tmp_path)
    found = game.play({"k": Sent(weights=moved, auxiliaries={START: moved})})
    assert [*found["a"], *found["b"]] == pytest.approx([2.0, 3.0, 6.0])  # length 7, halved, twice


# Kills and settings ------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["cohort", "clients"])
def test_fedawe_gives_the_same_models_after_restarts(tmp_path: Path, model: Any) -> None:
    cohorts, results = [[0, 1], [2], [1, 3], [0, 2], [0, 1, 2, 3]], []
    for kill in (False, True):
        game, found = Rounds(FedAwe(model=model), vector(1.0), tmp_path), []
        for cohort in cohorts:
            sent = {f"k{client}": trained(game, client) for client in cohort}
            found.append(game.play(sent, clients=CLIENTS)["w"].tobytes())
            if kill:
                scalars = json.loads(json.dumps(dict(game.state.scalars)))
                arrays = {n: np.ascontiguousarray(a) for n, a in game.state.arrays.items()}
                game.state = State(scalars=scalars, arrays=load(save(arrays)))
        results.append(found)
    assert results[0] == results[1]


def test_fedawe_with_kept_epochs_is_refused() -> None:
    text = (
        '[task]\nname = "digits"\n[strategy]\nname = "fedawe"\n[model]\nkeep = ["3.*"]\n'
        "[training]\nkept_epochs = 1\n"
    )
    with pytest.raises(ConfigurationError, match=r"fedawe and training\.kept_epochs are not"):
        draw_up(text, source="run file")


def test_fedawe_with_host_sums_or_late_updates_is_refused() -> None:
    run = '[task]\nname = "colored-digits"\n[strategy]\nname = "fedawe"\n'
    with pytest.raises(ConfigurationError, match="fedawe and host_sums are not compatible"):
        draw_up(f"host_sums.enabled = true\n{run}", source="run file")
    with pytest.raises(ConfigurationError, match="late_updates is not compatible with strategy"):
        draw_up(f"{run}[round.late_updates]\nrounds = 1\n", source="run file")
