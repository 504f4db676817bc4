import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from potluck.client.training.samples import positions_within
from potluck.common.errors import ProtocolError, TrainingError
from potluck.common.task import Examples


def within_quotas(data: Examples, quotas: list[float], *, classes: int, seed: int) -> Examples:
    positions = positions_within(data, quotas, classes=classes, seed=seed)
    return data if positions is None else data.subset(positions)


def examples(labels: list[int]) -> Examples:
    """Return samples with these labels; each input is the sample's position."""
    return Examples(
        inputs=torch.arange(float(len(labels)))[:, None],
        labels=torch.tensor(labels, dtype=torch.int64),
    )


@given(
    labels=st.lists(st.integers(0, 2), min_size=1, max_size=40),
    quotas=st.lists(st.one_of(st.floats(0, 50), st.just(math.inf)), min_size=3, max_size=3),
    seed=st.integers(0, 2**62),
)
def test_quotas_limit_the_samples_of_each_class(
    labels: list[int], quotas: list[float], seed: int
) -> None:
    data = examples(labels)
    wanted = [min(labels.count(label), math.floor(min(quotas[label], 99))) for label in range(3)]
    if not sum(wanted):
        with pytest.raises(TrainingError, match="exclude all samples"):
            within_quotas(data, quotas, classes=3, seed=seed)
        return
    some = within_quotas(data, quotas, classes=3, seed=seed)
    assert torch.bincount(some.labels, minlength=3).tolist() == wanted
    positions = some.inputs[:, 0].long()
    assert positions.tolist() == sorted(set(positions.tolist()))
    assert torch.equal(data.labels[positions], some.labels)
    again = within_quotas(data, quotas, classes=3, seed=seed)
    assert torch.equal(again.inputs, some.inputs)


def test_seed_determines_which_samples_a_quota_selects() -> None:
    data = examples([0] * 50)
    chosen = {
        tuple(within_quotas(data, [5.0], classes=1, seed=seed).inputs[:, 0].tolist())
        for seed in range(20)
    }
    assert len(chosen) > 15
    everything = {position for some in chosen for position in some}
    assert len(everything) > 35


def test_samples_are_unchanged_without_effective_quotas() -> None:
    data = examples([0, 1])
    assert within_quotas(data, [], classes=2, seed=0) is data
    assert within_quotas(data, [math.inf, 1.0], classes=2, seed=0) is data


@pytest.mark.parametrize("quotas", [[1.0], [1.0, math.nan], [1.0, -1.0], [1.0, 1.0, 1.0]])
def test_invalid_quotas_are_refused(quotas: list[float]) -> None:
    with pytest.raises(ProtocolError, match="2 numbers"):
        within_quotas(examples([0, 1]), quotas, classes=2, seed=0)
