"""FedAvg weights updates by the samples received."""

from __future__ import annotations

import numpy as np

from potluck.server.state import State
from potluck.server.strategies.fedavg import FedAvg
from potluck.server.strategy import (
    Combine,
    Reduction,
    RoundContext,
    Strategy,
    UpdateStatistics,
)


def statistics(samples: list[int]) -> UpdateStatistics:
    return UpdateStatistics(
        clients=[f"k{index}" for index in range(len(samples))],
        samples=np.array(samples, np.int64),
        steps=np.ones(len(samples), np.int64),
        normalizers=np.ones(len(samples)),
        losses=np.zeros(len(samples)),
    )


def weigh(strategy: Strategy, samples: list[int]) -> Combine:
    return strategy.weigh(statistics(samples))


def test_fedavg_weights_are_shares_of_the_samples_received() -> None:
    combine = weigh(FedAvg(), [30, 10, 60])
    assert combine.reduction is Reduction.MEAN
    assert combine.weights.tolist() == [0.3, 0.1, 0.6]


def test_fedavg_weights_of_nine_of_24_clients_sum_to_1() -> None:
    combine = weigh(FedAvg(), [500] * 9)
    assert abs(combine.weights.sum() - 1) < 1e-15


def test_fedavg_weights_of_samples_beyond_2_to_the_53_sum_to_1() -> None:
    combine = weigh(FedAvg(), [2**62, 2**62, 2**62, 1])
    assert abs(combine.weights.sum() - 1) < 1e-15


def test_fedavg_takes_the_mean_as_next_model_and_keeps_no_state() -> None:
    strategy: Strategy = FedAvg()
    assert strategy.needs == frozenset()
    assert not strategy.individual
    assert strategy.auxiliary == frozenset()
    state = strategy.init({"w": np.zeros(2, np.float32)})
    assert state == State()
    combined = {"w": np.ones(2, np.float32)}
    context = RoundContext(round=1, clients=1, included=["k0"])
    model, after = strategy.apply(state, {"w": np.zeros(2, np.float32)}, combined, context)
    assert model is combined
    assert after == state
