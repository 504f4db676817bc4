"""DP-SGD of single records in the built-in loop: the gradients, the noise, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from potluck.client.objective import Batch, LocalContext, Objective
from potluck.client.private_training import GrantedTraining
from potluck.client.training.fedawe_correction import START, FedAweCorrection
from potluck.client.training.fedbio_correction import FedBiOCorrection
from potluck.client.training.objective_sum import composed
from potluck.client.training.objectives.cross_entropy import CrossEntropy
from potluck.client.training.objectives.fedlc import FedLC
from potluck.client.training.objectives.fedprox import FedProx
from potluck.client.training.scaffold_correction import CONTROL, ScaffoldCorrection
from potluck.client.training.steps.loop import Corrected, TrainingContext
from potluck.common.errors import ConfigurationError, TrainingError
from potluck.common.models.concatenation import Concatenation
from potluck.common.settings.local_training import LocalTraining
from potluck.common.settings.plugins import find, installed
from potluck.common.task import Examples
from potluck.common.tensors.layout import Layout
from potluck.common.tensors.model_arrays import state_arrays
from potluck.privacy.host.record_training import RecordTraining

CONTEXT = TrainingContext(classes=3, seed=1, round=1, device=torch.device("cpu"))
SETTINGS = LocalTraining(learning_rate=1.0, batch_size=8)
ALL = GrantedTraining(
    sampling_rate=1.0, noise_multiplier=1e-9, steps=1, clip=0.5, expected_batch=20.0
)


def examples(count: int = 20) -> Examples:
    generator = torch.Generator().manual_seed(3)
    return Examples(
        inputs=torch.randn(count, 4, generator=generator),
        labels=torch.arange(count) % 3,
    )


def network() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


def trained(
    model: nn.Module,
    granted: GrantedTraining = ALL,
    *,
    data: Examples | None = None,
    objective: Objective | None = None,
    settings: LocalTraining = SETTINGS,
) -> None:
    found = objective or CrossEntropy()
    RecordTraining().train(model, data or examples(), found, settings, CONTEXT, granted)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([each.detach().flatten() for each in model.parameters()])


def check_a_step(model: nn.Module) -> None:
    """Check that a step is the mean of the clipped gradients of single records."""
    data, total = examples(), torch.zeros_like(flat(model))
    for place in range(len(data)):
        model.zero_grad(set_to_none=False)
        one = slice(place, place + 1)
        nn.functional.cross_entropy(model(data.inputs[one]), data.labels[one]).backward()  # type: ignore[no-untyped-call]
        parameters = list(model.parameters())
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        gradient = torch.cat([each.flatten() for each in gradients])
        total += gradient * min(1.0, ALL.clip / float(gradient.norm()))
    before = flat(model)
    trained(model)
    assert torch.allclose(before - flat(model), total / 20, atol=1e-5)
    assert bool(total.any())


def test_private_step_is_the_mean_of_clipped_per_record_gradients() -> None:
    check_a_step(network())


class Unusual(nn.Module):
    """Uses a layer twice, and a layer on two rows of each record."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.rows = nn.Linear(4, 4), nn.Linear(2, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.rows(self.twice(self.twice(inputs).relu()).unflatten(1, (2, 2)))
        return found.sum(dim=1)


def test_private_step_of_a_model_with_reused_layers_is_correct() -> None:
    torch.manual_seed(4)
    check_a_step(Unusual())


@pytest.mark.parametrize("part", [0, 1, 2])
def test_private_step_trains_only_the_part_in_use(part: int) -> None:
    model = Concatenation([network(), network()])
    model.use_part(part)
    before = {name: each.clone() for name, each in model.named_parameters()}
    check_a_step(model)
    moved = {n for n, each in model.named_parameters() if not torch.equal(each, before[n])}
    own = ("head.",) if part == 2 else (f"encoders.{part}.", f"heads.{part}.")
    assert moved == {name for name in before if name.startswith(own)}


def test_private_step_leaves_frozen_tensors_unchanged() -> None:
    model = network()
    for each in model[0].parameters():
        each.requires_grad_(False)
    check_a_step(model)


def test_training_noise_has_the_charged_standard_deviation() -> None:
    granted = GrantedTraining(
        sampling_rate=1e-9, noise_multiplier=4.0, steps=1, clip=0.5, expected_batch=10.0
    )
    steps = []
    for _ in range(200):
        model = network()
        before = flat(model)
        trained(model, granted)
        steps.append(before - flat(model))
    found = torch.stack(steps)
    # 51 weights in 200 trainings. No record is drawn, so all changes are noise. The tolerance is
    # five standard errors.
    assert float(found.std()) == pytest.approx(4.0 * 0.5 / 10.0, rel=5 / (2 * 10_200) ** 0.5)
    assert float(found.mean().abs()) < 5 * 0.2 / 10_200**0.5


def test_two_trainings_with_the_same_seed_draw_different_noise() -> None:
    granted = replace(ALL, noise_multiplier=1.0)
    one, two = network(), network()
    trained(one, granted)
    trained(two, granted)
    assert not torch.equal(flat(one), flat(two))


class Failing(nn.Module):
    """A network that fails, or gives NaN, if a record has a large first number."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault, self.inside = fault, network()

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.inside(inputs)
        bad = inputs[:, :1] > 50
        if self.fault == "raise" and bool(bad.any()):
            raise RuntimeError("this record is among the data")
        return found + torch.where(bad, torch.nan, 0.0)


@pytest.mark.parametrize("fault", ["raise", "nan"])
def test_record_with_a_failing_model_output_changes_no_other_contribution(fault: str) -> None:
    data = examples(21)
    inputs = data.inputs.clone()
    inputs[20, 0] = 100.0
    spoilt, sound = Failing(fault), network()
    trained(spoilt, data=Examples(inputs=inputs, labels=data.labels))
    trained(sound, data=Examples(inputs=data.inputs[:20], labels=data.labels[:20]))
    assert torch.allclose(flat(spoilt), flat(sound), atol=1e-5)


def test_the_proximal_term_is_added_after_the_noise() -> None:
    pulled, free = network(), network()
    two = replace(ALL, steps=2)
    begin = flat(pulled)
    prox = composed([FedProx(mu=0.5)])
    trained(pulled, two, objective=prox)
    trained(free, two)
    once = network()
    trained(once)
    # In its second step, the model with the proximal term moves back by half of its first step.
    assert torch.allclose(flat(pulled), flat(free) - 0.5 * (flat(once) - begin), atol=1e-5)


def corrected(
    model: nn.Module, control: Literal["way", "gradients"], common: float, own: float
) -> Corrected:
    """Return SCAFFOLD's correction; every element of a control variate has the same value."""
    layout = Layout.of(state_arrays(model))

    def filled(value: float) -> dict[str, dict[str, Tensor]]:
        values = {n: torch.full_like(each, value) for n, each in model.named_parameters()}
        return {CONTROL: values}

    return Corrected(
        correction=ScaffoldCorrection(control=control),
        shared=filled(common),
        personal={},
        kept=filled(own),
        layout=layout,
    )


@pytest.mark.parametrize("control", ["way", "gradients"])
def test_scaffold_corrects_noisy_steps_and_its_variate_is_their_mean(
    control: Literal["way", "gradients"],
) -> None:
    granted = GrantedTraining(
        sampling_rate=1e-9, noise_multiplier=4.0, steps=4, clip=0.5, expected_batch=10.0
    )
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 900), nn.ReLU(), nn.Linear(900, 3))
    before, correction = flat(model), corrected(model, control, common=0.7, own=0.2)
    result = RecordTraining().train(
        model, examples(), CrossEntropy(), SETTINGS, CONTEXT, granted, correction
    )
    assert result.correction is not None
    assert result.correction.keep is not None
    sent, kept = result.correction.send[CONTROL], result.correction.keep[CONTROL]
    mean = (before - flat(model)) / 4 - (0.7 - 0.2)  # mean noisy gradient, at a rate of 1
    variate = torch.cat([kept[name].flatten() for name, _ in model.named_parameters()])
    change = torch.cat([sent[name].flatten() for name, _ in model.named_parameters()])
    assert torch.allclose(variate, mean, atol=1e-4)
    assert torch.allclose(change, mean - 0.2, atol=1e-4)
    # 7,203 weights. No record is drawn, so all is noise, with standard deviation 4.0 · 0.5 / 10 /
    # √4. The tolerance is five standard errors.
    assert float(variate.std()) == pytest.approx(0.1, rel=5 / (2 * 7203) ** 0.5)


def test_fedawe_trains_privately_from_the_clients_own_start() -> None:
    model, expected = network(), network()
    own = {name: torch.full_like(p, 0.25) for name, p in model.named_parameters()}
    expected.load_state_dict(own)
    objective, granted = composed((CrossEntropy(), FedProx(mu=0.5))), replace(ALL, steps=3)
    trained(expected, granted, objective=objective)
    start = Corrected(
        correction=FedAweCorrection(),
        shared={},
        personal={START: own},
        kept=None,
        layout=Layout.of(state_arrays(model)),
    )
    result = RecordTraining().train(model, examples(), objective, SETTINGS, CONTEXT, granted, start)
    assert torch.allclose(flat(model), flat(expected), atol=1e-6)
    assert result.correction is not None
    sent = torch.cat([result.correction.send[START][name].flatten() for name in own])
    assert torch.allclose(sent, flat(model) - 0.25, atol=1e-6)


def test_gradient_correction_that_reads_records_is_refused_in_private_training() -> None:
    with pytest.raises(ConfigurationError, match="FedBiOCorrection is not compatible"):
        RecordTraining().check(network(), CrossEntropy(), SETTINGS, FedBiOCorrection())


def test_model_after_private_training_has_no_per_record_gradients() -> None:
    model = network()
    trained(model)
    trained(model)
    nn.functional.cross_entropy(model(examples().inputs), examples().labels).backward()  # type: ignore[no-untyped-call]
    assert all(getattr(each, "grad_sample", None) is None for each in model.parameters())


def test_private_training_reports_no_loss_and_the_charged_steps() -> None:
    found = RecordTraining().train(
        network(), examples(), CrossEntropy(), SETTINGS, CONTEXT, replace(ALL, steps=3)
    )
    assert found.steps == 3
    assert found.samples == 20
    assert found.loss != found.loss  # NaN


def test_diverged_private_training_names_the_learning_rate() -> None:
    wild = LocalTraining(learning_rate=1e38, batch_size=8)
    with pytest.raises(TrainingError, match="diverged"):
        trained(network(), replace(ALL, steps=9, noise_multiplier=1e3), settings=wild)


def test_batch_normalisation_is_refused_in_private_training_with_a_remedy() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    with pytest.raises(ConfigurationError, match="group normalisation"):
        RecordTraining().check(model, CrossEntropy(), SETTINGS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_fewer_than_32_bits_are_refused_in_private_training(dtype: torch.dtype) -> None:
    with pytest.raises(ConfigurationError, match=r"'0.weight' is torch.b?float16; use float32"):
        RecordTraining().check(network().to(dtype), CrossEntropy(), SETTINGS)


@pytest.mark.parametrize(
    "settings",
    [
        LocalTraining(validation_share=0.1),
        LocalTraining(kept_epochs=1),
        LocalTraining(precision="bfloat16"),
    ],
)
def test_settings_incompatible_with_record_noise_are_refused(settings: LocalTraining) -> None:
    with pytest.raises(ConfigurationError, match="privacy"):
        RecordTraining().check(network(), CrossEntropy(), settings)


def test_objective_that_depends_on_other_records_is_refused_in_private_training() -> None:
    with pytest.raises(ConfigurationError, match="cross-entropy"):
        RecordTraining().check(network(), composed([FedLC()]), SETTINGS)


@pytest.mark.parametrize(
    "name", [n for n in installed("potluck.objectives") if find("potluck.objectives", n).per_sample]
)
def test_per_record_objective_equals_the_mean_over_single_records(name: str) -> None:
    objective: Any = composed([find("potluck.objectives", name)()])
    data, model = examples(), network()
    parameters = tuple(model.parameters())
    local = LocalContext(
        round=1,
        label_counts=torch.zeros(3, dtype=torch.int64),
        parameters=parameters,
        received=parameters,
    )

    def loss(places: Tensor) -> Tensor:
        batch = Batch(inputs=data.inputs[places], labels=data.labels[places], indices=places)
        found: Tensor = objective.loss(model(batch.inputs), batch, local)
        return found

    single = torch.stack([loss(torch.tensor([place])) for place in range(len(data))])
    assert torch.allclose(loss(torch.arange(len(data))), single.mean(), atol=1e-5)
