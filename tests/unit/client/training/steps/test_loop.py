import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from potluck.client.objective import Batch, LocalContext, Objective
from potluck.client.training.objectives.cross_entropy import CrossEntropy
from potluck.client.training.steps.loop import TrainingContext, TrainingResult, train
from potluck.common.errors import ConfigurationError, LayoutError, RoundClosedError, TrainingError
from potluck.common.learning.training import training_for
from potluck.common.names import ClientId
from potluck.common.settings.configuration import validate
from potluck.common.settings.local_training import LocalTraining
from potluck.common.settings.plugins import create
from potluck.common.task import Examples
from potluck.common.tasks.digits import ColoredDigits, Digits
from potluck.common.tensors.model_arrays import load_arrays, state_arrays

CPU = torch.device("cpu")


def blobs(samples: int = 50) -> Examples:
    """Return two clouds of points, one per class."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(samples) % 2
    inputs = torch.randn(samples, 4, generator=generator) + 2.0 * labels[:, None]
    return Examples(inputs=inputs, labels=labels)


def network(*, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(dropout), nn.ReLU(), nn.Linear(8, 2))


def run(
    model: nn.Module,
    data: Examples | None = None,
    *,
    objective: Objective | None = None,
    seed: int = 3,
    round_number: int = 1,
    measures_losses: bool = False,
    progress: Callable[[float], None] = lambda _: None,
    cancelled: Callable[[], bool] = lambda: False,
    **settings: Any,
) -> TrainingResult:
    return train(
        model,
        blobs() if data is None else data,
        objective or CrossEntropy(),
        LocalTraining(**settings),
        TrainingContext(
            classes=2,
            seed=seed,
            round=round_number,
            device=CPU,
            progress=progress,
            cancelled=cancelled,
        ),
        measures_losses=measures_losses,
    )


def test_sample_losses_are_measured_in_the_first_pass_only() -> None:
    """With a learning rate near 0, the losses of the first pass are those of the received model."""
    data, sums = blobs(), []
    for epochs in (1, 3):
        model = network()
        with torch.no_grad():
            before = functional.cross_entropy(model(data.inputs), data.labels, reduction="none")
        result = run(
            model, data, measures_losses=True, epochs=epochs, learning_rate=1e-9, batch_size=7
        )
        assert result.root_mean_square_loss == pytest.approx(
            float(before.square().mean().sqrt()), rel=1e-4
        )
        sums.append(result.root_mean_square_loss)
    assert sums[0] == sums[1]
    measured = run(network(), data, measures_losses=True, epochs=3, learning_rate=0.5)
    unmeasured = run(network(), data, epochs=3, learning_rate=0.5)
    assert measured.loss == unmeasured.loss
    assert unmeasured.root_mean_square_loss is None
    assert measured.root_mean_square_loss is not None
    assert measured.root_mean_square_loss > measured.loss


def frozen(model: nn.Module) -> dict[str, NDArray[Any]]:
    return {name: array.copy() for name, array in state_arrays(model).items()}


def same(a: dict[str, NDArray[Any]], b: dict[str, NDArray[Any]]) -> bool:
    return all(np.array_equal(a[name], b[name]) for name in a)


def trained(*, dropout: float = 0.0, **changes: Any) -> dict[str, NDArray[Any]]:
    model = network(dropout=dropout)
    run(model, **changes)
    return frozen(model)


def bare_loop(
    model: nn.Module, data: Examples, optimizer: torch.optim.Optimizer, *, epochs: int, batch: int
) -> None:
    """Train locally in plain PyTorch: the reference for Potluck's own loop."""
    order = torch.Generator().manual_seed(3)
    for _ in range(epochs):
        permutation = torch.randperm(len(data), generator=order)
        for start in range(0, len(data), batch):
            indices = permutation[start : start + batch]
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(data.inputs[indices]), data.labels[indices])
            torch.autograd.backward(loss)
            optimizer.step()


def test_training_equals_a_plain_loop_bit_for_bit() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    bare_loop(model, blobs(), optimizer, epochs=3, batch=16)
    settings = {"learning_rate": 0.05, "momentum": 0.9, "weight_decay": 0.01}
    assert same(frozen(model), trained(**settings, epochs=3, batch_size=16))


def test_training_with_dropout_is_reproducible_for_the_same_seed() -> None:
    first = trained(dropout=0.5, epochs=2)
    torch.rand(5)  # other draws from the global generator don't matter
    assert same(first, trained(dropout=0.5, epochs=2))
    assert not same(first, trained(dropout=0.5, epochs=2, seed=4))


def test_training_does_not_change_the_global_generator_of_torch() -> None:
    model = network(dropout=0.5)
    before = torch.random.get_rng_state()
    run(model)
    assert torch.equal(before, torch.random.get_rng_state())


def test_training_on_digits_reduces_the_loss() -> None:
    task = Digits(clients=1)
    data = task.client_data(ClientId("client-0"), None).train
    torch.manual_seed(0)
    settings = LocalTraining(learning_rate=0.1, epochs=1)
    model = task.model()
    results = [
        train(
            model,
            data,
            CrossEntropy(),
            settings,
            TrainingContext(classes=10, seed=number, round=1, device=CPU),
        )
        for number in range(8)
    ]
    assert results[-1].loss < 0.3 < 1.0 < results[0].loss
    assert results[0].samples == 1397
    assert results[0].steps == 44


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"epochs": 2, "batch_size": 16}, 8),
        ({"epochs": 1, "batch_size": 1000}, 1),
        ({"steps": 9, "batch_size": 16}, 9),
        ({"steps": 3, "batch_size": 16, "epochs": 7}, 3),
    ],
)
def test_local_work_is_limited_by_epochs_or_steps(settings: dict[str, Any], steps: int) -> None:
    counted = CountingCrossEntropy()
    result = run(network(), objective=counted, **settings)
    assert result.steps == steps == len(counted.sizes)
    assert all(size <= settings["batch_size"] for size in counted.sizes)


@dataclass
class CountingCrossEntropy(Objective):
    """Cross-entropy that records its arguments."""

    needs_received: bool = True

    def __post_init__(self) -> None:
        self.sizes: list[int] = []
        self.seen: list[int] = []
        self.moved: list[float] = []
        self.contexts: list[LocalContext] = []

    def loss(self, logits: Tensor, batch: Batch, local: LocalContext) -> Tensor:
        self.sizes.append(len(batch.labels))
        self.seen += batch.indices.tolist()
        pairs = zip(local.parameters, local.received, strict=True)
        self.moved.append(sum(float((a - b).detach().norm()) for a, b in pairs))
        self.contexts.append(local)
        return functional.cross_entropy(logits, batch.labels)


def test_each_epoch_visits_every_sample_once_in_a_different_order() -> None:
    counted = CountingCrossEntropy()
    run(network(), objective=counted, epochs=2, batch_size=16)
    first, second = counted.seen[:50], counted.seen[50:]
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second


def test_objective_receives_the_original_and_the_current_weights() -> None:
    counted = CountingCrossEntropy()
    run(network(), objective=counted, round_number=7)
    assert counted.moved[0] == 0.0
    assert counted.moved[1] > 0.0
    assert counted.contexts[0].label_counts.tolist() == [25, 25]
    assert counted.contexts[0].round == 7


def test_training_loss_is_the_mean_over_samples_of_the_last_pass() -> None:
    class MeanLabel(Objective):
        def loss(self, logits: Tensor, batch: Batch, local: LocalContext) -> Tensor:
            return logits.sum() * 0 + batch.labels.double().mean()

    data = Examples(inputs=torch.zeros(50, 4), labels=torch.arange(50) % 2)
    result = run(network(), data, objective=MeanLabel(), epochs=3, batch_size=16)
    assert result.loss == pytest.approx(0.5, abs=1e-12)


def test_the_learning_rate_decays_by_round() -> None:
    settings = LocalTraining(learning_rate=0.1, learning_rate_decay=0.98)
    assert [settings.learning_rate_in(n) for n in (1, 2, 101)] == pytest.approx(
        [0.1, 0.098, 0.1 * 0.98**100]
    )
    decayed = trained(learning_rate=0.1, learning_rate_decay=0.5, round_number=2)
    assert same(decayed, trained(learning_rate=0.05))


def test_clipped_gradients_limit_the_weight_change() -> None:
    before, after = frozen(network()), trained(learning_rate=1.0, gradient_clip=0.01, steps=1)
    moved = math.sqrt(sum(float(((after[k] - before[k]) ** 2).sum()) for k in before))
    assert moved == pytest.approx(0.01, rel=1e-3)


def test_training_progress_rises_to_1() -> None:
    shares: list[float] = []
    run(network(), progress=shares.append, epochs=300, batch_size=8)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert len(shares) <= 52


def test_a_cancelled_training_stops_at_the_next_step() -> None:
    stop, counted = threading.Event(), CountingCrossEntropy()

    def progress(share: float) -> None:
        stop.set()

    with pytest.raises(RoundClosedError, match="cancelled"):
        run(network(), objective=counted, progress=progress, cancelled=stop.is_set, steps=100)
    assert len(counted.sizes) == 2


def test_ended_training_keeps_no_gradients() -> None:
    model = network()
    run(model, epochs=1)
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(RoundClosedError):
        run(model, cancelled=iter([False, True]).__next__, batch_size=16)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_diverged_training_names_the_epoch_and_the_remedy() -> None:
    message = r"diverged in epoch 1: .* at learning rate 1e\+30; lower training.learning_rate"
    with pytest.raises(TrainingError, match=message):
        run(network(), learning_rate=1e30, epochs=3)


def test_weights_made_infinite_by_the_last_step_are_refused() -> None:
    with pytest.raises(TrainingError, match="loss or weights are NaN or infinite"):
        run(network(), learning_rate=1e38, weight_decay=1e6, steps=1)


def test_a_client_without_samples_can_not_train() -> None:
    empty = Examples(inputs=torch.zeros(0, 4), labels=torch.zeros(0, dtype=torch.int64))
    with pytest.raises(TrainingError, match="no training samples"):
        run(network(), empty)


@pytest.mark.parametrize(
    "data",
    [
        Examples(inputs=torch.zeros(5, 3), labels=torch.zeros(5, dtype=torch.int64)),
        Examples(inputs=torch.zeros(5, 4), labels=torch.full((5,), 2)),
    ],
)
def test_samples_incompatible_with_the_model_raise_a_training_error(data: Examples) -> None:
    with pytest.raises(TrainingError, match="are compatible") as caught:
        run(network(), data)
    assert "\n" not in caught.value.message


def test_a_device_without_memory_is_named_with_a_remedy() -> None:
    class Huge(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 2))

        def forward(self, inputs: Tensor) -> Tensor:
            raise torch.OutOfMemoryError("tried to allocate 1 PiB")

    with pytest.raises(TrainingError, match=r"cpu has too little memory .* lower training.batch"):
        run(Huge())


def test_training_settings_are_restored_from_json() -> None:
    settings = LocalTraining(learning_rate=0.1, steps=5, gradient_clip=1.0, momentum=0.9)
    assert LocalTraining.model_validate_json(settings.model_dump_json()) == settings


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"learningrate": 0.1},
            r"'learningrate' \(did you mean 'learning_rate'\?\); known keys: batch_size, batched",
        ),
        ({"learning_rate": 0}, "'learning_rate': must be greater than 0"),
        ({"learning_rate": math.inf}, "'learning_rate': must be a finite number"),
        ({"momentum": 1.0}, "'momentum': must be less than 1"),
        ({"optimizer": "magic"}, "'optimizer': must be 'sgd', 'adam' or 'adamw'"),
        ({"epochs": 0}, "'epochs': must be greater than or equal to 1"),
    ],
)
def test_invalid_training_settings_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        validate(LocalTraining, values, source="run.toml")


def test_run_file_overrides_the_task_which_overrides_the_default_training_settings() -> None:
    task = ColoredDigits()
    settings = training_for(task, {"epochs": 2}, source="run.toml")
    assert settings.epochs == 2
    assert settings.momentum == task.training["momentum"] != LocalTraining().momentum
    assert settings.weight_decay == LocalTraining().weight_decay
    assert training_for(task, settings.model_dump(), source="run.toml") == settings


def test_task_with_invalid_recommended_settings_is_named_in_the_error() -> None:
    class Sloppy(ColoredDigits):
        training = {"speed": 1}  # noqa: RUF012 - as a user would write it

    with pytest.raises(ConfigurationError, match="'training' of Sloppy: unknown key 'speed'"):
        training_for(Sloppy(), {}, source="run.toml")


def test_model_state_is_exported_and_loaded_unchanged() -> None:
    source, target = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    source.train()(torch.randn(5, 3))
    arrays = frozen(source)
    assert arrays["num_batches_tracked"].dtype == np.int64
    assert arrays["num_batches_tracked"].shape == ()
    for array in arrays.values():
        array.flags.writeable = False
    load_arrays(target, arrays)
    assert same(frozen(target), arrays)
    assert list(arrays) == list(source.state_dict())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bias": None}, "received lacks tensor 'bias' of the task's model"),
        ({"bias": np.zeros(3, np.float32)}, r"tensor 'bias' has shape .*3.*has .*2"),
        (
            {"bias": np.zeros(2)},
            "tensor 'bias' has type F64, but the task's model's tensor has type F32",
        ),
        ({"extra": np.zeros(2, np.float32)}, "tensor 'extra' is not in the task's model"),
    ],
)
def test_tensors_that_do_not_match_the_model_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    model = nn.Linear(4, 2)
    before = frozen(model)
    arrays = {name: np.ones_like(array) for name, array in before.items()} | changes
    with pytest.raises(LayoutError, match=message):
        load_arrays(model, {name: array for name, array in arrays.items() if array is not None})
    assert same(before, frozen(model))


def test_tensor_of_an_unsupported_type_is_named_in_the_error() -> None:
    with pytest.raises(LayoutError, match=r"'weight' is torch.bfloat16, which can't be sent"):
        state_arrays(nn.Linear(2, 2).bfloat16())


def test_cross_entropy_objective_is_installed() -> None:
    objective = create(Objective, "cross-entropy", {})
    assert isinstance(objective, CrossEntropy)
    logits, labels = torch.tensor([[2.0, 1.0, 3.0]]), torch.tensor([0])
    local = LocalContext(round=1, label_counts=torch.tensor([1, 0, 0]), parameters=())
    batch = Batch(inputs=logits, labels=labels, indices=torch.tensor([0]))
    assert float(objective.loss(logits, batch, local)) == pytest.approx(1.4076, abs=5e-5)


def test_noise_robust_training_uses_predictions_of_the_received_model() -> None:
    """Pseudo-labels are fixed before the first step, without dropout, and change nothing else."""
    model, data = network(dropout=0.5), blobs()
    with torch.inference_mode():
        model.eval()
        expected = torch.softmax(model(data.inputs), dim=1)
    seen: list[Tensor] = []

    class Believing(Objective):
        needs_predictions = True

        def loss(self, logits: Tensor, batch: Batch, local: LocalContext) -> Tensor:
            assert local.predictions is not None
            seen.append(local.predictions.clone())
            return functional.cross_entropy(logits, local.predictions[batch.indices])

    run(model, data, objective=Believing(), epochs=2, batch_size=16)
    assert model.training
    assert all(torch.equal(each, seen[0]) for each in seen)
    torch.testing.assert_close(seen[0], expected)
    assert same(trained(dropout=0.5), trained(dropout=0.5, objective=CrossEntropy()))


def test_bfloat16_has_no_effect_without_a_gpu() -> None:
    assert same(trained(precision="bfloat16"), trained())


def test_training_with_adam_is_reproducible() -> None:
    first = trained(optimizer="adam", learning_rate=0.01, epochs=2)
    assert same(first, trained(optimizer="adam", learning_rate=0.01, epochs=2))
    assert not same(first, trained(optimizer="adamw", weight_decay=0.5, epochs=2))
