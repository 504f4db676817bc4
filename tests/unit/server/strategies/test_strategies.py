"""Strategies compared with hand-computed values, and properties of all strategies."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save
from support.strategy_rounds import Arrays, Rounds, Sent, vector

from potluck.common.disclosure import Weighting
from potluck.common.errors import ConfigurationError, PluginError
from potluck.common.settings.local_training import LocalTraining
from potluck.common.settings.plugins import STRATEGIES, create, installed
from potluck.server.state import State
from potluck.server.strategies.fedatt import attention
from potluck.server.strategy import Strategy

OTHERS = ("crash", "fedconcat", "fltrust", "rhfl-logits")
NAMES = tuple(name for name in installed(STRATEGIES) if name not in OTHERS)
"""The strategies that work with any model; the others have tests of their own."""
every = pytest.mark.parametrize("name", NAMES)
with_files = settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def strategy(name: str, **options: Any) -> Strategy:
    return create(Strategy, name, options)


def sent(strategy: Strategy, weights: Arrays, **others: Any) -> Sent:
    """Return an update, with zeros for the auxiliaries that the strategy needs."""
    zeros = {n: np.zeros_like(a) for n, a in weights.items() if a.dtype.kind == "f"}
    return Sent(weights=weights, auxiliaries=dict.fromkeys(strategy.auxiliary, zeros), **others)


def after(
    name: str, start: Arrays, rounds: Sequence[Sequence[Arrays]], folder: Path, **options: Any
) -> list[float]:
    """Return tensor `w` after rounds in which all clients weigh the same."""
    played = Rounds(strategy(name, **options), start, folder)
    for weights in rounds:
        played.play({f"k{i}": sent(played.strategy, each) for i, each in enumerate(weights)})
    found: list[float] = played.model["w"].tolist()
    return found


# FedAvgM -----------------------------------------------------------------------------------------


def test_fedavgm_momentum_accumulates_as_computed_by_hand(tmp_path: Path) -> None:
    """Three rounds of Δ = 1 give w = 1, 2.95, 5.8025."""
    played = Rounds(strategy("fedavgm"), vector(0.0), tmp_path)
    models = []
    for _ in range(3):
        w = float(played.model["w"][0])
        models.append(played.play({"k": Sent(weights=vector(w + 1.0))})["w"][0])
    assert models == pytest.approx([1.0, 2.95, 5.8025], rel=1e-6)


def test_fedavgm_step_converges_to_twenty_times_a_constant_difference(tmp_path: Path) -> None:
    played = Rounds(strategy("fedavgm"), vector(0.0), tmp_path)
    before = 0.0
    for _ in range(400):
        before = float(played.model["w"][0])
        played.play({"k": Sent(weights=vector(before + 0.5))})
    assert float(played.model["w"][0]) - before == pytest.approx(20 * 0.5, rel=1e-5)


def test_nesterov_momentum_equals_values_computed_by_hand(tmp_path: Path) -> None:
    played = Rounds(strategy("fedavgm", momentum=0.5, nesterov=True), vector(0.0), tmp_path)
    first = float(played.play({"k": Sent(weights=vector(1.0))})["w"][0])
    assert first == pytest.approx(1.5)  # 0.5·1 + 1
    second = float(played.play({"k": Sent(weights=vector(first + 1.0))})["w"][0])
    assert second - first == pytest.approx(0.5 * 1.5 + 1.0)


def test_fedavgm_and_fednova_without_momentum_equal_fedavg(tmp_path: Path) -> None:
    rounds = [[vector(1.0, 2.0), vector(3.0, -2.0)]] * 2
    plain = after("fedavg", vector(0.0, 0.0), rounds, tmp_path)
    for name in ("fedavgm", "fednova"):
        assert after(name, vector(0.0, 0.0), rounds, tmp_path, momentum=0.0) == plain


# Adaptive ----------------------------------------------------------------------------------------


def test_adaptive_strategies_equal_steps_computed_by_hand(tmp_path: Path) -> None:
    """Δ = 0.5, then Δ = −0.2, by Algorithm 2 of the paper with τ = 0.1 and η = 0.1."""
    tau, rate = 0.1, 0.1

    def expected(name: str) -> list[float]:
        m, v, w, models = 0.0, tau**2, 1.0, []
        beta1 = 0.0 if name == "fedadagrad" else 0.9
        for delta in (0.5, -0.2):
            m = beta1 * m + (1 - beta1) * delta
            if name == "fedadagrad":
                v += delta**2
            elif name == "fedadam":
                v = 0.99 * v + 0.01 * delta**2
            else:
                v -= 0.01 * delta**2 * math.copysign(1, v - delta**2)
            w += rate * m / (math.sqrt(v) + tau)
            models.append(w)
        return models

    for name in ("fedadagrad", "fedadam", "fedyogi"):
        played = Rounds(strategy(name, tau=tau, learning_rate=rate), vector(1.0), tmp_path)
        found = []
        for delta in (0.5, -0.2):
            w = float(played.model["w"][0])
            found.append(float(played.play({"k": Sent(weights=vector(w + delta))})["w"][0]))
        assert found == pytest.approx(expected(name), rel=1e-5)


def test_first_fedadagrad_step_is_independent_of_the_size_of_the_difference(tmp_path: Path) -> None:
    [small] = after("fedadagrad", vector(0.0), [[vector(1.0)]], tmp_path, tau=1e-6)
    [large] = after("fedadagrad", vector(0.0), [[vector(100.0)]], tmp_path, tau=1e-6)
    assert small == pytest.approx(large, rel=1e-4) == 0.01


# FedNova -----------------------------------------------------------------------------------------


def test_fednova_weights_clients_independently_of_their_steps(tmp_path: Path) -> None:
    """w − w_k = 2, 2 after τ = 2, 6 steps, p = ½: FedNova steps by 2.6667, FedAvg by 2."""
    played = Rounds(strategy("fednova"), vector(10.0), tmp_path)
    model = played.play(
        {
            "a": Sent(weights=vector(8.0), normalizer=2.0, steps=2),
            "b": Sent(weights=vector(8.0), normalizer=6.0, steps=6),
        }
    )
    assert 10 - float(model["w"][0]) == pytest.approx(8 / 3)


@with_files
@given(
    values=st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=6),
    samples=st.integers(1, 10**6),
    a=st.floats(0.5, 1e3),
)
def test_fednova_with_equal_normalizers_equals_fedavg(
    tmp_path: Path, values: list[float], samples: int, a: float
) -> None:
    updates = {
        f"k{i}": Sent(weights=vector(value), samples=samples + i, normalizer=a)
        for i, value in enumerate(values)
    }
    nova = Rounds(strategy("fednova"), vector(1.0), tmp_path).play(updates)
    average = Rounds(strategy("fedavg"), vector(1.0), tmp_path).play(updates)
    np.testing.assert_allclose(nova["w"], average["w"], rtol=1e-5, atol=1e-4)


def test_fednova_normalises_updates_without_a_normalizer_by_steps(tmp_path: Path) -> None:
    updates = {
        "a": Sent(weights=vector(8.0), steps=2),
        "b": Sent(weights=vector(8.0), steps=6),
    }
    model = Rounds(strategy("fednova"), vector(10.0), tmp_path).play(updates)
    assert 10 - float(model["w"][0]) == pytest.approx(8 / 3)


# FedAtt ------------------------------------------------------------------------------------------


def test_fedatt_gives_distant_updates_more_attention(tmp_path: Path) -> None:
    assert attention(np.array([1.0, 3.0])) == pytest.approx([0.1192, 0.8808], abs=5e-5)
    clients = [vector(1.0, 0.0), vector(0.0, 3.0)]
    found = after("fedatt", vector(0.0, 0.0), [clients], tmp_path)
    assert found == pytest.approx([0.1430, 3.1709], abs=5e-5)


def test_fedatt_step_above_1_exceeds_the_updates(tmp_path: Path) -> None:
    found = after("fedatt", vector(0.0, 0.0), [[vector(1.0, 1.0)] * 3], tmp_path)
    assert found == pytest.approx([1.2, 1.2])


def test_fedatt_distances_are_per_tensor_for_any_shape(tmp_path: Path) -> None:
    model = {"kernel": np.zeros((2, 1, 3, 3), np.float32), "bias": np.zeros(2, np.float32)}
    near = {"kernel": np.full((2, 1, 3, 3), 0.1, np.float32), "bias": np.full(2, 5, np.float32)}
    far = {"kernel": np.full((2, 1, 3, 3), 1.0, np.float32), "bias": np.zeros(2, np.float32)}
    played = Rounds(strategy("fedatt", step_size=1.0), model, tmp_path)
    result = played.play({"near": Sent(weights=near), "far": Sent(weights=far)})
    of_kernel = attention(np.array([0.1, 1.0]) * math.sqrt(18))
    of_bias = attention(np.array([5 * math.sqrt(2), 0.0]))
    np.testing.assert_allclose(result["kernel"], of_kernel @ [0.1, 1.0], rtol=1e-5)
    np.testing.assert_allclose(result["bias"], of_bias[0] * 5, rtol=1e-5)


def test_fedatt_attention_does_not_overflow_for_large_distances(tmp_path: Path) -> None:
    assert attention(np.array([1e6, 1e6 - 1])) == pytest.approx([0.7311, 0.2689], abs=5e-5)


# Robust ------------------------------------------------------------------------------------------


def test_robust_strategies_limit_the_influence_of_one_outlier(tmp_path: Path) -> None:
    honest = [vector(1.0), vector(2.0), vector(3.0), vector(2.0)]
    wild = [*honest, vector(1e6)]
    assert after("median", vector(0.0), [wild], tmp_path) == [2.0]
    assert after("trimmed-mean", vector(0.0), [wild], tmp_path, trim=0.2) == pytest.approx([7 / 3])
    clipped = after("clipped-mean", vector(0.0), [wild], tmp_path, clip=4.0)
    assert clipped == pytest.approx([(1 + 2 + 3 + 2 + 4) / 5])


# What holds for all ------------------------------------------------------------------------------


@every
@with_files
@given(data=st.data())
def test_strategy_result_is_independent_of_client_order_up_to_rounding(
    name: str, tmp_path: Path, data: st.DataObject
) -> None:
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    order = data.draw(st.permutations(range(5)))
    found = strategy(name)
    updates = {
        f"k{i}": sent(found, vector(*generator.normal(size=4)), samples=i + 1, normalizer=i + 1.0)
        for i in range(5)
    }
    straight = Rounds(strategy(name), vector(0, 0, 0, 0), tmp_path).play(updates)
    shuffled = Rounds(strategy(name), vector(0, 0, 0, 0), tmp_path).play(
        {f"k{i}": updates[f"k{i}"] for i in order}
    )
    np.testing.assert_allclose(straight["w"], shuffled["w"], rtol=1e-5, atol=1e-6)


@every
def test_unchanged_client_models_leave_the_model_unchanged(name: str, tmp_path: Path) -> None:
    start = vector(0.25, -3.0, 1e-3)
    played = Rounds(strategy(name), start, tmp_path)
    for _ in range(3):
        played.play({f"k{i}": sent(played.strategy, start, samples=i + 1) for i in range(4)})
    assert played.model["w"].tobytes() == start["w"].tobytes()


def wide(value: float, steps: int, running: float) -> Arrays:
    return {
        "weight": np.full((2, 3), value, np.float32),
        "running_var": np.full(3, running, np.float32),
        "num_batches": np.array(steps, np.int64),
    }


@every
def test_strategies_copy_integers_and_average_running_statistics(name: str, tmp_path: Path) -> None:
    played = Rounds(strategy(name), wide(0, 0, 1.0), tmp_path, buffers=["running_var"])
    for number in range(1, 4):
        updates = [wide(0.1, 7 * number, 2.0), wide(0.3, 9 * number, 4.0)]
        played.play(
            {
                f"k{i}": sent(played.strategy, each, normalizer=1.0 + 4 * i, steps=5)
                for i, each in enumerate(updates)
            }
        )
        assert int(played.model["num_batches"]) == 7 * number
        assert played.model["num_batches"].shape == ()
        if name not in ("clipped-mean", "krum"):
            np.testing.assert_allclose(played.model["running_var"], 3.0, rtol=1e-5)
    assert {n: (a.dtype, a.shape) for n, a in played.model.items()} == {
        n: (a.dtype, a.shape) for n, a in wide(0, 0, 0).items()
    }


def through_the_store(state: State) -> State:
    """Return the state as read after a kill: scalars from JSON, arrays from a file."""
    scalars = json.loads(json.dumps(dict(state.scalars)))
    arrays = {name: np.ascontiguousarray(array) for name, array in state.arrays.items()}
    return State(scalars=scalars, arrays=load(save(arrays)))


@every
def test_strategy_gives_the_same_model_after_a_restart_in_any_round(
    name: str, tmp_path: Path
) -> None:
    models = []
    for kill in (False, True):
        generator = np.random.default_rng(3)
        played = Rounds(strategy(name), vector(0.5, -0.5), tmp_path)
        for _ in range(4):
            played.play(
                {
                    f"k{i}": sent(played.strategy, vector(*generator.normal(size=2)))
                    for i in range(3)
                },
                clients=7,
            )
            if kill:
                played.state = through_the_store(played.state)
        models.append(played.model["w"].tobytes())
    assert models[0] == models[1]


@every
def test_strategies_do_not_modify_their_arguments(name: str, tmp_path: Path) -> None:
    played = Rounds(strategy(name), vector(1.0, 2.0), tmp_path)
    updates = {"k0": sent(played.strategy, vector(0.0, 5.0))}
    played.play(updates)
    state = {n: a.copy() for n, a in played.state.arrays.items()}
    before = played.state
    for array in before.arrays.values():
        array.flags.writeable = False
    played.play(updates)
    assert all(np.array_equal(state[n], before.arrays[n]) for n in state)


def test_strategies_that_need_single_updates_are_declared_individual() -> None:
    individual = {name for name in NAMES if strategy(name).individual}
    assert individual == {
        "fedatt",
        "median",
        "trimmed-mean",
        "clipped-mean",
        "krum",
        "multi-krum",
        "bulyan",
        "mifa",
        "fedawe",
        "lora-stacking",
        "feddf",
        "rhfl",
    }
    assert strategy("scaffold", step="median").individual
    assert strategy("scaffold", keeper="coordinator").individual


# Options -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "fedavgm",
            {"momentum": 1.0},
            "strategy fedavgm: option 'momentum' is 1.0; it must be less than 1",
        ),
        ("fedavgm", {"momentum": -0.1}, "'momentum' is -0.1"),
        ("fedavgm", {"momentum": "0.9"}, "'momentum' is '0.9'"),
        ("fedavgm", {"momentum": True}, "'momentum' is True; it must be a number"),
        ("fedavgm", {"learning_rate": 0}, "'learning_rate' is 0; it must be greater than 0"),
        ("fedavgm", {"nesterov": "yes"}, "'nesterov' is 'yes'; it must be true or false"),
        ("fednova", {"momentum": 2}, "'momentum' is 2"),
        ("fedadam", {"beta2": 1}, "'beta2' is 1; it must be less than 1"),
        ("fedadam", {"tau": 0.0}, "'tau' is 0.0"),
        ("fedyogi", {"learning_rate": math.inf}, "'learning_rate' is inf"),
        ("fedadagrad", {"tau": math.nan}, "'tau' is nan"),
        ("fedatt", {"step_size": -1.2}, "'step_size' is -1.2"),
        ("trimmed-mean", {"trim": 0.5}, "'trim' is 0.5; it must be less than 0.5"),
        ("clipped-mean", {"clip": 0}, "'clip' is 0"),
        ("scaffold", {"keeper": "unknown"}, "it must be 'clients' or 'coordinator'"),
        ("scaffold", {"weights": "n_k"}, "it must be 'equal' or 'samples'"),
        ("scaffold", {"step": 3}, "'step' is 3; it must be a text or a table"),
        ("scaffold", {"step": {"beta": 1}}, "a strategy's name, or a table"),
        ("scaffold", {"step": "scaffold"}, "can't be its own step"),
        ("scaffold", {"step": {"name": "fedavgm", "momentum": 1}}, "'momentum' is 1"),
    ],
)
def test_strategy_options_out_of_range_are_refused(
    name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        strategy(name, **options)


@every
def test_error_about_an_unknown_strategy_option_lists_the_valid_ones(name: str) -> None:
    with pytest.raises(PluginError, match="its options: "):
        strategy(name, colour="green")


# What goes together ------------------------------------------------------------------------------


def test_scaffold_with_fednova_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigurationError, match="scaffold and fednova are not compatible"):
        strategy("scaffold", step="fednova")
    with pytest.raises(PluginError, match="'unknown' is not installed; installed: bulyan"):
        strategy("scaffold", step="unknown")


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_adam_gives_a_remark_with_fednova_and_is_refused_with_scaffold(optimizer: str) -> None:
    training = LocalTraining.model_validate({"optimizer": optimizer})
    [remark] = strategy("fednova").review(training, Weighting.EXACT)
    assert remark.startswith(f"strategy fednova with optimizer {optimizer}: ")
    with pytest.raises(
        ConfigurationError, match=f"scaffold and optimizer {optimizer} are not compatible"
    ):
        strategy("scaffold").review(training, Weighting.EXACT)
    keeping = training.model_copy(update={"validation_share": 0.2})
    for name in set(NAMES) - {"fednova", "scaffold"}:
        assert not strategy(name).review(keeping, Weighting.EQUAL)


def test_fedbio_without_validation_samples_is_refused() -> None:
    assert strategy("fedbio").training == {"validation_share": 0.2}
    with pytest.raises(ConfigurationError, match=r"training\.validation_share is 0; set it"):
        strategy("fedbio").review(LocalTraining(), Weighting.EXACT)


def test_fedbio_averages_model_and_direction_weighted_by_samples(tmp_path: Path) -> None:
    played = Rounds(strategy("fedbio"), vector(0.0), tmp_path)
    down = played.strategy.broadcast(played.state)
    assert {name: tensors["w"].tolist() for name, tensors in down.items()} == {"direction": [0.0]}
    played.play(
        {
            f"k{i}": Sent(
                weights=vector(float(i)), auxiliaries={"direction": vector(2.0 * i)}, samples=n
            )
            for i, n in enumerate((1, 3))
        }
    )
    assert played.model["w"].tolist() == [0.75]
    assert played.strategy.broadcast(played.state)["direction"]["w"].tolist() == [1.5]


def test_fednova_remarks_that_reported_samples_replace_steps() -> None:
    by_epochs, by_steps = LocalTraining(), LocalTraining(steps=3)
    nova = strategy("fednova")
    assert not nova.review(by_epochs, Weighting.EXACT)
    assert len(nova.review(by_epochs, Weighting.BUCKETED)) == 1
    assert not nova.review(by_steps, Weighting.BUCKETED)
    assert not nova.review(by_steps, Weighting.EQUAL)
    with pytest.raises(ConfigurationError, match=r"set training\.steps, another weighting"):
        nova.review(by_epochs, Weighting.EQUAL)
