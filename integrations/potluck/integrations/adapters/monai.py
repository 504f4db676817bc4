"""Adapters for MONAI's engines, and for loops that use its transforms, losses and metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain, repeat
from typing import Any

import numpy as np

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
from potluck.integrations.adapters.adapted import AdaptedTrainer, called, name_of
from potluck.integrations.adapters.loops import LoopTrainer
from potluck.integrations.adapters.watched_loaders import dataset_size, seed_loader

with extra_named():
    from ignite.engine import Events
    from monai.data.utils import set_rnd
    from monai.engines.trainer import SupervisedTrainer
    from monai.utils.misc import MAX_SEED


def measured(metric: Any) -> Measured:
    """Return sum and count of a metric's values over images; the metric may be a `DiceMetric`.

    Call it after the last batch. An image's value is the mean over its channels. NaN is skipped: it
    marks a class that an image does not have, or an image without any class.
    """
    return _over_images(metric.get_buffer())


def _over_images(values: Any) -> Measured:
    table = np.asarray(values.detach().cpu(), np.float64)
    table = table.reshape(len(table), -1)
    known = ~np.isnan(table)
    images = known.any(axis=1)
    sums = np.where(known, table, 0.0).sum(axis=1)[images]
    means = sums / known.sum(axis=1)[images]
    return Measured(float(means.sum()), int(images.sum()))


def seed_transforms(loader: Any, seed: int) -> None:
    """Seed the random transforms of a loader's data set, which have their own generators."""
    seed_loader(loader, seed)
    set_rnd(getattr(loader, "dataset", loader), seed % MAX_SEED)


class MonaiLoopTrainer(LoopTrainer):
    """A `LoopTrainer` for data sets with random transforms of MONAI, which it seeds."""

    def _seed(self, loader: Any, seed: int) -> None:
        seed_transforms(loader, seed)


class MonaiEngineTrainer(AdaptedTrainer):
    """Trains with a `monai.engines.Trainer`, measures with a `monai.engines.Evaluator`.

    Data are loaders. The metrics have the same names as the evaluator's. MONAI's metrics are means
    over images, since they store each image's value; other metrics are means over samples. `loss`,
    if declared, is also measured in training.
    """

    def __init__(
        self,
        trainer: Callable[..., Any],
        evaluator: Callable[..., Any],
        measures: Mapping[str, Measure],
        *,
        private: bool = False,
    ) -> None:
        """trainer: takes the network and the training loader, and returns an engine.

        evaluator: takes the network and the loader of the held-out data, and returns an engine.
        Both may have further parameters, filled by name: see `adapted.called`.

        private: True if the trainer works in runs with `[privacy]`: it is a `SupervisedTrainer`
        without `amp`, its loss is a mean over records, and its handlers change nothing because of a
        loss or a metric. The number of steps that the host grants then replaces the trainer's
        number of epochs.
        """
        super().__init__(measures, private=private)
        self._trainer, self._evaluator = trainer, evaluator

    def train(
        self, model: Any, data: Any, settings: TrainerSettings, report: TrainingProgress
    ) -> Contribution:
        """Run the engine."""
        seed_transforms(data, settings.seed)
        engine = called(self._trainer, model, data, settings=settings)
        privacy = settings.privacy
        watching = _WatchedEngine(report, planned=0 if privacy is None else privacy.steps)
        engine.add_event_handler(Events.ITERATION_STARTED, watching.begin)
        if privacy is not None:
            return _run_privately(engine, data, settings, privacy)
        engine.add_event_handler(Events.ITERATION_COMPLETED, watching.end)
        engine.run()
        if not watching.samples:
            raise TrainingError(
                f"client '{settings.client}': the training read no batch of its loader; check "
                "that the loader has samples, and that drop_last does not drop all of them"
            )
        measures: dict[str, Measured] = {}
        if "loss" in self.measures:
            measures["loss"] = Measured(watching.loss, watching.samples)
        samples = dataset_size(data) or watching.first_pass
        return Contribution(samples=samples, steps=engine.state.iteration, measures=measures)

    def evaluate(self, model: Any, data: Any, settings: EvaluationSettings) -> Measures:
        """Run the evaluator."""
        seed_transforms(data, settings.seed)
        evaluator = called(self._evaluator, model, data, settings=settings)
        evaluator.run()
        details = getattr(evaluator.state, "metric_details", {})
        found: dict[str, Measured | float] = {}
        for name, value in evaluator.state.metrics.items():
            if name in self.measures:
                found[name] = _over_images(details[name]) if name in details else float(value)
        return self.over_samples(found, dataset_size(data), by=f"`{name_of(self._evaluator)}`")


def _run_privately(
    engine: Any, data: Any, settings: TrainerSettings, privacy: PrivateTraining
) -> Contribution:
    """Run an engine with noise: an optimizer with noise and its loader replace the engine's own."""
    if (
        type(engine) is not SupervisedTrainer
        or engine.amp
        or engine._process_function != (engine._iteration)
    ):
        raise ConfigurationError(
            "runs with [privacy] need a plain SupervisedTrainer: remove amp, which may skip "
            "steps because of a record, and the custom iteration function"
        )
    with settings.noisy_steps(engine.network, engine.optimizer, data) as (noisy, batches):
        engine.optimizer = noisy
        # One epoch of unknown length: empty batches are skipped, so their number is not known.
        passes = -(-privacy.steps // len(batches))
        engine.data_loader = chain.from_iterable(repeat(batches, passes))
        engine.state.epoch_length, engine.state.max_epochs = None, 1
        engine.run()
    return Contribution(samples=dataset_size(data), steps=privacy.steps)


class _WatchedEngine:
    """Reports progress at each batch, and sums samples and losses."""

    def __init__(self, report: TrainingProgress, *, planned: int) -> None:
        """planned: number of iterations; 0: the engine's own number."""
        self._report, self._planned = report, planned
        self.samples = self.first_pass = 0
        self.loss = 0.0

    def begin(self, engine: Any) -> None:
        state = engine.state
        planned = self._planned or state.max_epochs * (state.epoch_length or 0)
        self._report(min((state.iteration - 1) / planned, 1.0) if planned else 0.0)

    def end(self, engine: Any) -> None:
        """Count a batch's samples and loss.

        The engine's output is a list with one entry per sample, or one entry for the batch."""
        output = engine.state.output
        samples = len(output) if isinstance(output, list) else len(output["pred"])
        loss = (output[0] if isinstance(output, list) else output)["loss"]
        self.samples += samples
        self.loss += float(loss) * samples
        if engine.state.epoch == 1:
            self.first_pass += samples
