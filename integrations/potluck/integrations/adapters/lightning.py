"""Adapter for PyTorch Lightning: a `LightningModule`'s own steps train and measure it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from tempfile import TemporaryDirectory
from typing import Any, Final

from potluck.common.errors import ConfigurationError, TrainingError
from potluck.common.settings.extras import extra_named
from potluck.common.trainer import (
    Contribution,
    EvaluationSettings,
    Measure,
    Measured,
    Measures,
    PrivateTraining,
    TrainerSettings,
    TrainingProgress,
)
from potluck.integrations.adapters.adapted import AdaptedTrainer
from potluck.integrations.adapters.watched_loaders import dataset_size, seed_loader

with extra_named():
    import lightning
    from lightning.pytorch.utilities.data import extract_batch_size
    from torch.optim import Optimizer


class LightningTrainer(AdaptedTrainer):
    """Trains with `training_step`, measures with `validation_step`.

    The task's model is a `LightningModule`. Data are loaders, or other objects that
    `lightning.Trainer` accepts. Metrics are the values that `validation_step` logs, by the same
    names, as means over the samples. `loss`, if declared, is also measured in training."""

    def __init__(
        self,
        measures: Mapping[str, Measure],
        *,
        learning_rate: str | None = None,
        private: bool = False,
        **options: Any,
    ) -> None:
        """options: options of `lightning.Trainer`.

        learning_rate: attribute of the module, such as "lr", that is set to the round's learning
        rate before each training; None: the module's own rate.

        `epochs`, `steps` and `gradient_clip` of the run's `[training]` table are used unless
        `options` has max_epochs, max_steps or gradient_clip_val.

        private: True if the module can train in runs with `[privacy]`: the loss of `training_step`
        is a mean over records, and `configure_optimizers` returns one optimizer. The number of
        steps that the host grants then replaces these settings. Raises ConfigurationError for
        options with which noise would hide nothing.
        """
        if private:
            _check_private(options)
        super().__init__(measures, private=private)
        self._learning_rate, self._options = learning_rate, options

    def train(
        self, model: Any, data: Any, settings: TrainerSettings, report: TrainingProgress
    ) -> Contribution:
        """Fit the module to the data."""
        _check_module(model)
        if self._learning_rate is not None:
            setattr(model, self._learning_rate, settings.learning_rate)
        seed_loader(data, settings.seed)
        watching = _WatchedFit(report)
        if settings.privacy is not None:
            return self._train_privately(model, data, settings, settings.privacy, watching)
        training = settings.training
        chosen: dict[str, Any] = {
            "max_epochs": None if training.steps else training.epochs,
            "max_steps": training.steps or -1,
            "gradient_clip_val": training.gradient_clip,
            **self._options,
        }
        chosen["callbacks"] = [*_listed(chosen.get("callbacks")), watching]
        with _quiet_trainer(settings.device, chosen) as trainer:
            trainer.fit(model, train_dataloaders=data)
            steps = trainer.global_step
        if not watching.samples:
            raise TrainingError(
                f"client '{settings.client}': the training read no batch of its loader; check "
                "that the loader has samples, and that drop_last does not drop all of them"
            )
        measures: dict[str, Measured] = {}
        if "loss" in self.measures:
            measures["loss"] = Measured(watching.loss, watching.samples)
        samples = dataset_size(data) or watching.first_pass
        return Contribution(samples=samples, steps=steps, measures=measures)

    def _train_privately(
        self,
        model: Any,
        data: Any,
        settings: TrainerSettings,
        privacy: PrivateTraining,
        watching: _WatchedFit,
    ) -> Contribution:
        """Fit the module with noise: an optimizer with noise replaces the module's own."""
        optimizer = model.configure_optimizers()
        if not isinstance(optimizer, Optimizer):
            raise ConfigurationError(
                f"`configure_optimizers` returned a {type(optimizer).__name__}; return one "
                "optimizer only, because runs with [privacy] do not support schedulers"
            )
        unused = {"max_epochs", "max_steps", "min_epochs", "min_steps", "gradient_clip_val"}
        options = {name: each for name, each in self._options.items() if name not in unused}
        with settings.noisy_steps(model, optimizer, data) as (noisy, batches):
            options["max_epochs"] = -(-privacy.steps // len(batches))
            options["callbacks"] = [watching]
            model.configure_optimizers = lambda: noisy
            try:
                with _quiet_trainer(settings.device, options) as trainer:
                    trainer.fit(model, train_dataloaders=batches)
            finally:
                del model.configure_optimizers  # restores the class's own method
        return Contribution(samples=dataset_size(data), steps=privacy.steps)

    def evaluate(self, model: Any, data: Any, settings: EvaluationSettings) -> Measures:
        """Validate the module on the data."""
        _check_module(model)
        seed_loader(data, settings.seed)
        options = {**self._options, "callbacks": _listed(self._options.get("callbacks"))}
        with _quiet_trainer(settings.device, options) as trainer:
            [logged] = trainer.validate(model, dataloaders=data, verbose=False)
        found = {name: float(logged[name]) for name in self.measures if name in logged}
        return self.over_samples(found, dataset_size(data), by="`validation_step`")


_NOT_PRIVATE: Final = {
    "accumulate_grad_batches": "a record may be in several of the accumulated batches",
    "callbacks": "a callback may stop or change a training because of a record",
    "max_time": "a record may change the number of steps",
    "overfit_batches": "overfitting to a few batches changes how batches are drawn",
    "plugins": "a plugin may skip steps because of a record",
    "precision": "mixed precision may skip steps because of a record",
    "strategy": "several devices draw batches differently",
}
"""Options of `lightning.Trainer` with which noise would hide nothing, with the reasons."""


def _check_private(options: Mapping[str, Any]) -> None:
    for name, why in _NOT_PRIVATE.items():
        if name in options:
            raise ConfigurationError(
                f"LightningTrainer: option {name} is not compatible with private = True: {why}; "
                "remove the option or private = True",
                option=name,
            )


def _check_module(model: Any) -> None:
    """Raise TrainingError for a model that `lightning` can't train."""
    if isinstance(model, lightning.LightningModule):
        return
    name = type(model).__name__
    if any(each.__module__.startswith("pytorch_lightning") for each in type(model).__mro__):
        raise TrainingError(
            f"the model {name} is a module of pytorch_lightning, which lightning does not train; "
            "use `import lightning` instead of `import pytorch_lightning`, and derive the model "
            "from lightning.LightningModule"
        )
    raise TrainingError(
        f"the model {name} is not a LightningModule; derive the model from "
        "lightning.LightningModule"
    )


class _WatchedFit(lightning.Callback):
    """Reports progress at each batch, and sums samples and losses."""

    def __init__(self, report: TrainingProgress) -> None:
        self._report = report
        self.samples = self.first_pass = 0
        self.loss = 0.0

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        del pl_module, batch, batch_idx
        planned = trainer.estimated_stepping_batches
        self._report(min(trainer.global_step / planned, 1.0) if planned > 0 else 0.0)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        del pl_module, batch_idx
        samples = extract_batch_size(batch)
        self.samples += samples
        if trainer.current_epoch == 0:
            self.first_pass += samples
        loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs
        if loss is not None:  # Lightning has divided the loss by the number of accumulated batches
            self.loss += float(loss) * trainer.accumulate_grad_batches * samples


@contextlib.contextmanager
def _quiet_trainer(device: str, options: Mapping[str, Any]) -> Iterator[Any]:
    """Yield a `lightning.Trainer` for this device that logs, saves and prints nothing."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    kind, _, index = device.partition(":")
    where: dict[str, Any] = (
        {"accelerator": "cpu", "devices": 1}
        if kind == "cpu"
        else {"accelerator": "gpu", "devices": [int(index or 0)]}
    )
    with TemporaryDirectory(prefix="potluck-lightning-") as folder:
        yield lightning.Trainer(
            **{
                **options,
                **where,
                "logger": False,
                "enable_checkpointing": False,
                "enable_progress_bar": False,
                "enable_model_summary": False,
                "default_root_dir": folder,
            }
        )


def _listed(callbacks: Any) -> list[Any]:
    if callbacks is None:
        return []
    return list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]
