"""Adapter for plain loops over batches, as in PyTorch scripts. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from potluck.common.errors import ConfigurationError, TrainingError
from potluck.common.settings.option_checks import signature_of
from potluck.common.trainer import (
    Contribution,
    EvaluationSettings,
    Measure,
    Measured,
    Measures,
    TrainerSettings,
    TrainingProgress,
)
from potluck.integrations.adapters.adapted import AdaptedTrainer, called, name_of
from potluck.integrations.adapters.watched_loaders import (
    WatchedLoader,
    dataset_size,
    seed_loader,
    watched_steps,
)

Found = Mapping[str, Measured | float] | float | None


class LoopTrainer(AdaptedTrainer):
    """Trains and measures with two functions of a script.

    Data are loaders: a `torch.utils.data.DataLoader`, or anything that yields batches.
    """

    def __init__(
        self,
        train: Callable[..., Found],
        evaluate: Callable[..., Found],
        measures: Mapping[str, Measure],
        *,
        private: bool = False,
    ) -> None:
        """train: takes the model and the training loader.

        evaluate: takes the model and the loader of the held-out data. Both may have further
        parameters, filled by name: see `adapted.called`. measures: all metrics that the functions
        return, by name. The functions return metrics by name, or a number if one metric is
        declared. A number is the mean over the loader's samples; a `Measured` has its own count.
        train may return None.

        private: True if train works in runs with `[privacy]`. It must have a parameter `settings`,
        and take all steps with the optimizer and the loader of `settings.noisy_steps`.
        """
        if private and "settings" not in signature_of(train).parameters:
            raise ConfigurationError(
                f"`{name_of(train)}` is declared private, but has no parameter 'settings'; add "
                "the parameter, and train with the optimizer and the loader of "
                "`settings.noisy_steps`"
            )
        super().__init__(measures, private=private)
        self._train, self._evaluate = train, evaluate

    def train(
        self, model: Any, data: Any, settings: TrainerSettings, report: TrainingProgress
    ) -> Contribution:
        """Call the training function with a wrapped loader, which reports progress."""
        self._seed(data, settings.seed)
        loader = WatchedLoader(data, settings.training, report)
        with watched_steps(loader.step):
            found = called(self._train, model, loader, settings=settings)
        whose = f"client '{settings.client}': `{name_of(self._train)}`"
        if not loader.batches:
            raise TrainingError(
                f"{whose} read no batch of its loader, and made no optimizer step; check that the "
                "loader has samples, and that drop_last does not drop all of them"
            )
        if not loader.samples:
            raise TrainingError(
                f"{whose} used its own loader, of a dataset without a length; add a method "
                "__len__ to the dataset, or use the loader that Potluck passes"
            )
        return Contribution(
            samples=loader.samples,
            steps=loader.batches,
            measures=self._named(found, loader.samples, self._train),
        )

    def evaluate(self, model: Any, data: Any, settings: EvaluationSettings) -> Measures:
        """Call the evaluation function."""
        self._seed(data, settings.seed)
        found = called(self._evaluate, model, data, settings=settings)
        return self._named(found, dataset_size(data), self._evaluate)

    def _seed(self, loader: Any, seed: int) -> None:
        """Seed the loader's own generators."""
        seed_loader(loader, seed)

    def _named(self, found: Any, samples: int, function: Callable[..., Found]) -> Measures:
        if found is None:
            return {}
        by = f"`{name_of(function)}`"
        if isinstance(found, Mapping):
            return self.over_samples(found, samples, by=by)
        several = isinstance(found, tuple | list)
        if several or len(self.measures) != 1:
            what = f"a {type(found).__name__} of {len(found)} values" if several else "a number"
            names = ", ".join(f'"{name}": …' for name in self.measures)
            raise TrainingError(f"{by} returned {what}; return a dict of all metrics: {{{names}}}")
        by_name: dict[str, Any] = dict.fromkeys(self.measures, found)
        return self.over_samples(by_name, samples, by=by)
