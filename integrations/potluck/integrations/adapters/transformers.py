"""Adapter for Hugging Face transformers: a script's `transformers.Trainer` trains and measures."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from tempfile import TemporaryDirectory
from typing import Any

from potluck.common.errors import TrainingError
from potluck.common.settings.extras import extra_named
from potluck.common.trainer import (
    Contribution,
    EvaluationSettings,
    Measure,
    Measured,
    Measures,
    TrainerSettings,
    TrainingProgress,
)
from potluck.integrations.adapters.adapted import AdaptedTrainer

with extra_named():
    import transformers
    from transformers.trainer_callback import PrinterCallback, ProgressCallback

_MAKE = Callable[[Any, Any, Any, Any], Any]


class TransformersTrainer(AdaptedTrainer):
    """Trains and measures with the `transformers.Trainer` that a function makes.

    Data are data sets with a length. Metrics are the values that `Trainer.evaluate` returns,
    without the prefix `eval_`, as means over the samples. `loss`, if declared, is also measured in
    training.

    Not for runs with `[privacy]`: `transformers.Trainer` divides a batch's loss by its number of
    tokens, so a record changes the length of the others' gradients before they are clipped.
    """

    def __init__(self, make: _MAKE, measures: Mapping[str, Measure], **arguments: Any) -> None:
        """make: function that returns a `Trainer`; arguments: options of `TrainingArguments`.

        `make` takes the model, `TrainingArguments`, the training data and the evaluation data, one
        of which is None. `epochs`, `steps`, `batch_size`, `weight_decay` and the round's learning
        rate of the run's `[training]` table are used unless `arguments` has them. The table's
        `optimizer` is ignored: optimizer and schedule are chosen by `TrainingArguments`.
        """
        super().__init__(measures)
        self._make, self._arguments = make, arguments

    def train(
        self, model: Any, data: Any, settings: TrainerSettings, report: TrainingProgress
    ) -> Contribution:
        """Make a `Trainer` and train with it."""
        training = settings.training
        chosen = {
            "num_train_epochs": training.epochs,
            "max_steps": training.steps or -1,
            "per_device_train_batch_size": training.batch_size,
            "learning_rate": settings.learning_rate,
            "weight_decay": training.weight_decay,
            "seed": settings.seed % 2**32,
            **self._arguments,
        }
        with self._trainer(model, settings.device, chosen, train=data) as trainer:
            watching = _WatchedSteps(report)
            trainer.add_callback(watching)
            output = trainer.train()
        samples = len(data)
        seen = max(samples, round(watching.epochs * samples))
        measures: dict[str, Measured] = {}
        if "loss" in self.measures and math.isfinite(output.training_loss):
            measures["loss"] = Measured(output.training_loss * seen, seen)
        return Contribution(samples=samples, steps=output.global_step, measures=measures)

    def evaluate(self, model: Any, data: Any, settings: EvaluationSettings) -> Measures:
        """Make a `Trainer` and evaluate with it."""
        chosen = {"seed": settings.seed % 2**32, **self._arguments}
        with self._trainer(model, settings.device, chosen, held_out=data) as trainer:
            found = trainer.evaluate(data)
        named = {name.removeprefix("eval_"): value for name, value in found.items()}
        means = {name: float(named[name]) for name in self.measures if name in named}
        return self.over_samples(means, len(data), by="`evaluate`")

    @contextlib.contextmanager
    def _trainer(
        self,
        model: Any,
        device: str,
        chosen: Mapping[str, Any],
        *,
        train: Any = None,
        held_out: Any = None,
    ) -> Iterator[Any]:
        """Yield a `Trainer` that logs, saves, uploads and prints nothing."""
        if device not in ("cpu", "cuda:0"):
            raise TrainingError(
                f"transformers.Trainer can't train on {device} alone; start a host for each GPU, "
                "with CUDA_VISIBLE_DEVICES"
            )
        with TemporaryDirectory(prefix="potluck-transformers-") as folder:
            arguments = transformers.TrainingArguments(
                **{
                    **chosen,
                    "output_dir": folder,
                    "use_cpu": device == "cpu",
                    "dataloader_pin_memory": device != "cpu",
                    "report_to": "none",
                    "save_strategy": "no",
                    "eval_strategy": "no",
                    "logging_strategy": "no",
                    "disable_tqdm": True,
                    "push_to_hub": False,
                }
            )
            if device != "cpu":
                arguments._n_gpu = 1  # use one GPU: the others are for other clients
            trainer = self._make(model, arguments, train, held_out)
            for printing in (PrinterCallback, ProgressCallback):
                trainer.remove_callback(printing)
            yield trainer


class _WatchedSteps(transformers.TrainerCallback):
    """Reports progress at each step."""

    def __init__(self, report: TrainingProgress) -> None:
        self._report = report
        self.epochs = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._share(state)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._share(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.epochs = state.epoch or 0.0

    def _share(self, state: Any) -> None:
        self._report(min(state.global_step / state.max_steps, 1.0) if state.max_steps > 0 else 0.0)
