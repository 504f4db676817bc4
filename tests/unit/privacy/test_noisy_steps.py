"""Noise in a trainer's own loop: gradients, noise, recorded steps, and what is refused."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from potluck.common.disclosure import LARGEST_CLIP, SMALLEST_CLIP
from potluck.common.errors import ConfigurationError, TrainingError
from potluck.common.names import ClientId
from potluck.common.settings.local_training import LocalTraining
from potluck.common.trainer import NoisySteps, PrivateTraining, TrainerSettings
from potluck.privacy.host.noisy_steps import (
    ClippingOptimizer,
    OuterProducts,
    noisy_steps,
    with_record_gradients,
)


def settings_of(**terms: Any) -> TrainerSettings:
    """Return the settings of a training with almost no noise. terms: settings to change."""
    chosen: dict[str, Any] = {
        "sampling_rate": 1.0,
        "noise_multiplier": 1e-9,
        "steps": 1,
        "clip": 0.5,
        "expected_batch": 20.0,
        "engine": noisy_steps,
    }
    return TrainerSettings(
        training=LocalTraining(),
        round=1,
        seed=1,
        client=ClientId("client-0"),
        privacy=PrivateTraining(**chosen | terms),
    )


def samples(count: int = 20) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(count, 4, generator=generator), torch.arange(count) % 3)


def network() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


def flat(model: nn.Module) -> Tensor:
    return torch.cat([each.detach().flatten() for each in model.parameters()])


def trained(
    settings: TrainerSettings,
    data: Any,
    *,
    model: nn.Module | None = None,
    backward_passes: int = 1,
    steps: int = 1,
) -> nn.Module:
    """Train a network in a plain loop and return it. backward_passes, steps: number of each per
    batch."""
    model = model or network()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    with settings.noisy_steps(model, optimizer, data) as (optimizer, loader):
        for inputs, labels in loader:
            optimizer.zero_grad()
            for _ in range(backward_passes):
                nn.functional.cross_entropy(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
            for _ in range(steps):
                optimizer.step()
    return model


def test_noisy_steps_without_privacy_return_the_given_optimizer_and_loader() -> None:
    settings = TrainerSettings(
        training=LocalTraining(), round=1, seed=1, client=ClientId("client-0")
    )
    loader = DataLoader(samples(), batch_size=8)
    optimizer = torch.optim.SGD(network().parameters(), lr=1.0)
    with settings.noisy_steps(network(), optimizer, loader) as found:
        assert found == (optimizer, loader)


def test_noisy_step_is_the_mean_of_clipped_per_record_gradients() -> None:
    model, (inputs, labels) = network(), samples().tensors
    total = torch.zeros_like(flat(model))
    for place in range(len(inputs)):
        model.zero_grad()
        one = slice(place, place + 1)
        nn.functional.cross_entropy(model(inputs[one]), labels[one]).backward()  # type: ignore[no-untyped-call]
        gradient = torch.cat([each.grad.flatten() for each in model.parameters()])  # type: ignore[union-attr]
        total += gradient * min(1.0, 0.5 / float(gradient.norm()))
    after = trained(settings_of(), samples())
    assert torch.allclose(flat(model) - flat(after), total / 20, atol=1e-5)


class Several(nn.Module):
    """A convolution, a layer on rows, a layer used twice, a frozen weight, a layer without bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rows, self.twice = nn.Conv2d(1, 2, 3), nn.Linear(4, 6), nn.Linear(6, 6)
        self.frozen, self.last = nn.Linear(6, 5), nn.Linear(5, 3, bias=False)
        self.frozen.weight.requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        rows = self.rows(self.first(inputs).flatten(1, 2).relu())
        found: Tensor = self.last(self.frozen(self.twice(self.twice(rows.sum(dim=1)).relu())))
        return found


def summed(
    wrapped: GradSampleModule, optimizer: Callable[..., Any], inputs: Tensor
) -> list[Tensor]:
    """Return the sum of the clipped gradients of single records, for each parameter."""
    nn.functional.cross_entropy(wrapped(inputs), torch.arange(len(inputs)) % 3).backward()  # type: ignore[no-untyped-call]
    trainable = [each for each in wrapped.parameters() if each.requires_grad]
    clipping = optimizer(torch.optim.SGD(trainable, lr=1.0), noise_multiplier=0.0)
    clipping.clip_and_accumulate()
    return [each.summed_grad for each in clipping.params]


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("records", [1, 7])
def test_sum_of_clipped_gradients_equals_that_of_opacus(seed: int, records: int) -> None:
    torch.manual_seed(seed)
    model, inputs = Several(), 10 ** torch.randn(records, 1, 1, 1) * torch.randn(records, 1, 5, 6)
    opacus = partial(DPOptimizer, max_grad_norm=0.5, expected_batch_size=1)
    expected = summed(GradSampleModule(copy.deepcopy(model)), opacus, inputs)
    ours = partial(ClippingOptimizer, clip=0.5, expected_batch=1.0, generator=None)
    with with_record_gradients(model) as network:
        found = summed(network, ours, inputs)
    assert len(found) == 8
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_gradient_with_a_tiny_and_a_huge_factor_is_clipped() -> None:
    """In float32, the squares of the tiny factor are zero and those of the huge one infinite."""
    gradients = OuterProducts(torch.full((1, 3), 1e-25), torch.full((1, 4), 1e26))
    assert float(gradients.norms()) == pytest.approx(10 * math.sqrt(12), rel=1e-5)


@pytest.mark.parametrize("clip", [SMALLEST_CLIP, 1.0, LARGEST_CLIP])
@pytest.mark.parametrize("left", [1e-45, 1e-40, 1e-30, 1.0, 1e20, 1e38])
@pytest.mark.parametrize("right", [1e-45, 1e-25, 1.0, 1e27, 1e30, 1e38])
def test_no_record_adds_more_than_the_clip(clip: float, left: float, right: float) -> None:
    """Also if one factor of its gradient is near the smallest, and one near the largest float32."""
    layer = nn.Linear(3, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    clipping = ClippingOptimizer(
        optimizer, noise_multiplier=0.0, clip=clip, expected_batch=1.0, generator=None
    )
    backprops = torch.tensor([[left, 0.0, -left, left]])
    layer.weight.grad_sample = OuterProducts(backprops, torch.tensor([[right, right, 0.0]]))  # type: ignore[attr-defined]  # of Opacus
    layer.bias.grad_sample = backprops  # type: ignore[attr-defined]  # of Opacus
    clipping.clip_and_accumulate()
    added = torch.cat([each.summed_grad.double().flatten() for each in clipping.trained])
    assert float(added.norm()) <= clip * (1 + 1e-5)


def test_the_smallest_clip_has_noise_of_its_deviation() -> None:
    layer = nn.Linear(300, 300)
    clipping = ClippingOptimizer(
        torch.optim.SGD(layer.parameters(), lr=1.0),
        noise_multiplier=2.0,
        clip=SMALLEST_CLIP,
        expected_batch=1.0,
        generator=torch.Generator().manual_seed(1),
    )
    for each in clipping.trained:
        each.grad_sample, each.summed_grad = None, torch.zeros_like(each)
    clipping.add_noise()
    assert float(layer.weight.grad.double().std()) == pytest.approx(2e-6, rel=0.02)  # type: ignore[union-attr]


def test_step_on_an_empty_batch_is_noise_of_the_granted_deviation() -> None:
    found = []
    for _ in range(100):
        settings = settings_of(
            sampling_rate=0.5, noise_multiplier=4.0, steps=2, expected_batch=10.0
        )
        no_records = TensorDataset(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64))
        found.append(flat(trained(settings, no_records)) - flat(network()))
        assert settings.privacy is not None
        assert sum(each.steps for each in settings.privacy.taken) == 2
    # Each of 51 weights is a sum of 2 draws with standard deviation 4.0 · 0.5 / 10. The tolerance
    # is five standard errors.
    deviation = 0.2 * math.sqrt(2)
    assert float(torch.stack(found).std()) == pytest.approx(deviation, rel=5 / math.sqrt(2 * 5100))


def test_batches_are_poisson_samples_until_the_granted_steps_are_used_up() -> None:
    settings = settings_of(sampling_rate=0.25, steps=10)
    sizes = []
    model = network()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.0)
    data = DataLoader(samples(4000), batch_size=1000, shuffle=True)
    with settings.noisy_steps(model, optimizer, data) as (optimizer, loader):
        assert len(loader) == 4
        for _ in range(5):
            for inputs, labels in loader:
                nn.functional.cross_entropy(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                sizes.append(len(inputs))
    assert len(sizes) == 10
    assert len(set(sizes)) > 1
    # Each size has mean 1000 and standard deviation √750. The tolerance is six standard errors.
    assert abs(sum(sizes) / 10 - 1000) < 6 * math.sqrt(75)
    assert settings.privacy is not None
    one = NoisySteps(sampling_rate=0.25, noise_multiplier=1e-9, steps=1)
    assert settings.privacy.taken == [one] * 10
    assert settings.privacy.within_terms


def test_batches_of_a_subset_contain_only_its_samples() -> None:
    data = Subset(samples(), range(7))
    model = network()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    with settings_of().noisy_steps(model, optimizer, data) as (_, loader):
        assert [len(inputs) for inputs, _ in loader] == [7]


def test_a_record_with_an_infinite_gradient_changes_no_other_contribution() -> None:
    inputs, labels = samples(21).tensors
    spoilt = inputs.clone()
    spoilt[20] = torch.nan
    after = trained(settings_of(), TensorDataset(spoilt, labels))
    sound = trained(settings_of(), TensorDataset(inputs[:20], labels[:20]))
    assert torch.allclose(flat(after), flat(sound), atol=1e-5)


def test_model_after_noisy_steps_has_no_per_record_gradients() -> None:
    settings = settings_of(steps=1)
    model = trained(settings, samples())
    inputs, labels = samples().tensors
    nn.functional.cross_entropy(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
    assert all(getattr(each, "grad_sample", None) is None for each in model.parameters())


def test_noisy_step_without_a_batch_is_refused() -> None:
    with pytest.raises(TrainingError, match="got no batch"):
        trained(settings_of(steps=9), samples(), steps=2)


def test_gradient_accumulation_is_refused_with_noise() -> None:
    with pytest.raises(ValueError, match="not compatible with grad accumulation"):
        trained(settings_of(), samples(), backward_passes=2)


def test_noisy_step_without_a_backward_pass_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="gave no gradients of single records"):
        trained(settings_of(), samples(), backward_passes=0)


class Joined(nn.Module):
    """Joins records with positions: a layer sees more rows than there are records."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(2, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.inside(inputs.reshape(-1, 2)).reshape(len(inputs), 2, 3).mean(dim=1)
        return found


def test_gradients_that_are_not_one_per_record_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="one gradient per record"):
        trained(settings_of(), samples(), model=Joined())


def test_optimizer_without_all_trainable_parameters_is_refused() -> None:
    model = network()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=1.0)
    with (
        pytest.raises(ConfigurationError, match="lacks trainable parameters"),
        settings_of().noisy_steps(model, optimizer, samples()),
    ):
        pass
    for each in model[2].parameters():
        each.requires_grad_(False)
    with settings_of().noisy_steps(model, optimizer, samples()):
        pass


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        yield torch.zeros(4)


def test_stream_of_samples_is_refused_with_noise() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with (
        pytest.raises(ConfigurationError, match="can't be sampled"),
        settings_of().noisy_steps(model, optimizer, DataLoader(Stream())),
    ):
        pass


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": 11},
        {"sampling_rate": 0.3},
        {"noise_multiplier": 1.0},
        {"noise_multiplier": math.nan},
        {"sampling_rate": -0.1},
        {"steps": 0},
    ],
)
def test_recorded_steps_beyond_the_granted_terms_are_detected(wrong: dict[str, Any]) -> None:
    terms = PrivateTraining(
        sampling_rate=0.2, noise_multiplier=1.1, steps=10, clip=1.0, expected_batch=8.0
    )
    assert not terms.within_terms, "nothing is recorded"
    terms.record(steps=5)
    terms.record(steps=5, sampling_rate=0.1, noise_multiplier=2.0)
    assert terms.within_terms
    terms.taken.clear()
    terms.record(**{"steps": 5, **wrong})
    assert not terms.within_terms
