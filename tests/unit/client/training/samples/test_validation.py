import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from potluck.client.training.samples import mean_loss, mean_robust_loss, validation_split
from potluck.client.training.steps.loop import SquaredLosses, utility
from potluck.common.names import ClientId
from potluck.common.task import Examples
from potluck.common.tasks.stored import Stored, StoredExamples

CPU = torch.device("cpu")


def examples(size: int) -> Examples:
    return Examples(
        inputs=torch.arange(float(size))[:, None],
        labels=torch.arange(size) % 2,
        groups=torch.arange(size) % 3,
    )


def logits_of(*probabilities: float) -> torch.Tensor:
    return torch.tensor([[math.log(p), math.log(1 - p)] for p in probabilities])


class Table(nn.Module):
    """A model that returns row k of a table for sample k, whose input is k."""

    def __init__(self, rows: torch.Tensor) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.rows[inputs[:, 0].long()]


@given(size=st.integers(0, 60), share=st.floats(0, 0.5))
def test_validation_split_is_a_partition(size: int, share: float) -> None:
    training, validation = validation_split(examples(size), share, ClientId("a"))
    both = torch.cat([training.inputs, validation.inputs])[:, 0]
    assert sorted(both.tolist()) == list(range(size))
    if share > 0 and size >= 2:
        assert len(validation) == max(1, int(share * size))
        assert len(training) >= 1
    assert validation.groups is not None
    assert torch.equal(validation.groups, validation.inputs[:, 0].long() % 3)


def test_validation_split_is_fixed_for_a_client_and_differs_between_clients() -> None:
    def kept_back(client: str) -> list[float]:
        rest: list[float] = (
            validation_split(examples(50), 0.1, ClientId(client))[1].inputs[:, 0].tolist()
        )
        return rest

    assert kept_back("a") == kept_back("a")
    assert kept_back("a") != kept_back("b")


def test_validation_split_of_stored_samples_equals_that_in_memory() -> None:
    plain = examples(20)
    stored = StoredExamples(
        inputs=Stored(
            array=torch.arange(100.0)[:, None],
            rows=torch.arange(20) * 3,
            prepare=lambda samples, _: samples,
        ),
        labels=plain.labels,
        groups=plain.groups,
    )
    parts = [validation_split(each, 0.2, ClientId("a")) for each in (plain, stored)]
    for expected, found in zip(*parts, strict=True):
        assert torch.equal(3 * expected.inputs, found.inputs)
        assert torch.equal(expected.labels, found.labels)


def test_mean_losses_of_known_probabilities_equal_hand_computed_values() -> None:
    """The probabilities p of the labels are 0.7 and 0.9, so the reverse cross-entropies 4 (1 − p)
    are 1.2 and 0.4."""
    data = Examples(inputs=torch.tensor([[0.0], [1.0]]), labels=torch.tensor([0, 0]))
    model = Table(logits_of(0.7, 0.9))
    cross_entropy = (-math.log(0.7) - math.log(0.9)) / 2
    entropy = sum(-p * math.log(p) - (1 - p) * math.log(1 - p) for p in (0.7, 0.9)) / 2
    assert mean_loss(model, data, device=CPU) == pytest.approx(cross_entropy)
    robust = mean_robust_loss(model, data, alpha=2.0, beta=3.0, device=CPU)
    assert robust == pytest.approx(cross_entropy + 2 * entropy + 3 * 0.8)


def test_mean_loss_is_nan_without_samples_or_with_nan_outputs() -> None:
    assert math.isnan(mean_loss(Table(logits_of(0.5)), examples(0), device=CPU))
    broken = Table(torch.full((4, 2), torch.nan))
    assert math.isnan(mean_loss(broken, examples(4), device=CPU))


def test_root_mean_square_loss_equals_the_worked_example_for_any_batches() -> None:
    """A worked example: losses 1, 2, 3 → 6.48074, in whatever batches."""
    logits = logits_of(*(math.exp(-loss) for loss in (1.0, 2.0, 3.0)))
    for sizes in ([3], [1, 2], [1, 1, 1]):
        losses = SquaredLosses(CPU)
        for batch in torch.split(logits, sizes):
            losses.add(batch, torch.zeros(len(batch), dtype=torch.int64))
        assert utility(3, losses.root_mean_square()) == pytest.approx(6.48074, abs=1e-4)
    assert math.isnan(SquaredLosses(CPU).root_mean_square())
