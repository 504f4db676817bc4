import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from potluck.common.errors import ConfigurationError
from potluck.common.names import ClientId
from potluck.common.settings.plugins import create
from potluck.common.task import Task
from potluck.common.tasks.digits import Digits
from potluck.common.tasks.label_noise import LabelNoise, noise_rates, with_wrong_labels


@pytest.mark.parametrize(("mean", "spread"), [(0.05, 0.0217), (0.15, 0.0355), (0.25, 0.0431)])
def test_label_noise_rates_are_beta_distributed(mean: float, spread: float) -> None:
    """A worked example: Beta(a, 100 − a) has mean a % and a deviation of 0.022 to 0.043."""
    rates = noise_rates(LabelNoise(label_noise=mean), 20_000, 0)
    assert rates.mean() == pytest.approx(mean, abs=0.001)
    assert rates.std() == pytest.approx(spread, abs=0.001)


def test_label_noise_affects_only_the_configured_share_of_clients() -> None:
    options = LabelNoise(label_noise=0.15, noisy_clients=0.4)
    rates = noise_rates(options, 50, 3)
    assert (rates > 0).sum() == 20
    assert np.array_equal(rates, noise_rates(options, 50, 3))
    assert not np.array_equal(rates, noise_rates(options, 50, 4))
    assert (noise_rates(LabelNoise(), 50, 3) == 0).all()


@given(
    labels=st.lists(st.integers(0, 4), max_size=50),
    rate=st.floats(0, 1),
    seed=st.integers(0, 2**32),
)
def test_wrong_labels_always_differ_from_the_true_class(
    labels: list[int], rate: float, seed: int
) -> None:
    true = np.array(labels, dtype=np.int64)
    found = with_wrong_labels(true, 5, rate, np.random.default_rng(seed))
    assert found.dtype == np.int64
    assert ((found >= 0) & (found < 5)).all()
    all_wrong = with_wrong_labels(true, 5, 1.0, np.random.default_rng(seed))
    assert (all_wrong != true).all()
    assert np.array_equal(with_wrong_labels(true, 5, 0.0, np.random.default_rng(seed)), true)


def test_label_noise_draws_all_other_classes_equally_often() -> None:
    """Each other class is drawn equally often among 90,000 wrong labels, within four standard
    deviations."""
    true = np.repeat(np.arange(10), 30_000)
    found = with_wrong_labels(true, 10, 0.3, np.random.default_rng(0))
    pairs = np.bincount(true * 10 + found, minlength=100).reshape(10, 10)
    wrong = pairs[~np.eye(10, dtype=bool)]
    assert wrong.sum() == pytest.approx(90_000, abs=4 * (300_000 * 0.3 * 0.7) ** 0.5)
    assert wrong == pytest.approx(np.full(90, 1000), abs=4 * 1000**0.5)


def test_label_noise_affects_only_training_samples() -> None:
    clean = Digits(clients=10, held_out=0.3)
    noisy = Digits(clients=10, held_out=0.3, label_noise=0.5, noisy_clients=0.4)
    rates, changed = noise_rates(noisy, 10, noisy.seed), []
    for number in range(10):
        before = clean.client_data(ClientId(f"client-{number}"), None)
        after = noisy.client_data(ClientId(f"client-{number}"), None)
        assert before.held_out is not None
        assert after.held_out is not None
        assert torch.equal(before.held_out.labels, after.held_out.labels)
        assert torch.equal(before.train.inputs, after.train.inputs)
        changed.append(float((before.train.labels != after.train.labels).float().mean()))
    assert changed == pytest.approx(rates, abs=0.15)
    assert [share > 0 for share in changed] == [rate > 0 for rate in rates]
    test, unchanged = noisy.evaluation_data(None), clean.evaluation_data(None)
    assert test is not None
    assert unchanged is not None
    assert torch.equal(test.labels, unchanged.labels)


@pytest.mark.parametrize(
    "options",
    [{"label_noise": 1.0}, {"label_noise": -0.1}, {"noisy_clients": 2}, {"label_noise": True}],
)
def test_invalid_label_noise_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        create(Task, "digits", options)
