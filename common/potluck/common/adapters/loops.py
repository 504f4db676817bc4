"""Plain loops over batches, as PyTorch scripts have them. Nothing here needs torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from potluck.common.adapters.adapted import AdaptedTrainer, called
from potluck.common.adapters.watched_loaders import WatchedLoader, dataset_size, seed_loader
from potluck.common.errors import TrainingError
from potluck.common.trainer import (
    Contribution,
    EvaluationSettings,
    Measure,
    Measured,
    Measures,
    TrainerSettings,
    TrainingProgress,
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
    ) -> None:
        """train: gets the model and the training loader. evaluate: the model and the loader of what
        is held out. Both get further parameters by their names: see `adapted.called`. measures: all
        that they return, by name.

        They return measures by name, or a number where one measure is declared. A number is the
        mean over the samples of the loader; `Measured` says what it is over. train may return None.
        """
        super().__init__(measures)
        self._train, self._evaluate = train, evaluate

    def train(
        self, model: Any, data: Any, settings: TrainerSettings, report: TrainingProgress
    ) -> Contribution:
        """Hand the loader to the function, watched."""
        self._seed(data, settings.seed)
        loader = WatchedLoader(data, settings.training, report)
        found = called(self._train, model, loader, settings=settings)
        if not loader.batches:
            raise TrainingError(
                f"client '{settings.client}': the training took no batch of its loader; see that "
                "it has samples, and that drop_last does not drop them"
            )
        return Contribution(
            samples=loader.samples,
            steps=loader.batches,
            measures=self._named(found, loader.samples),
        )

    def evaluate(self, model: Any, data: Any, settings: EvaluationSettings) -> Measures:
        """Call the function."""
        self._seed(data, settings.seed)
        found = called(self._evaluate, model, data, settings=settings)
        return self._named(found, dataset_size(data))

    def _seed(self, loader: Any, seed: int) -> None:
        """Seed what the loader draws from generators of its own."""
        seed_loader(loader, seed)

    def _named(self, found: Found, samples: int) -> Measures:
        if found is None:
            return {}
        if not isinstance(found, Mapping):
            if len(self.measures) != 1:
                raise TrainingError(
                    f"a number alone is no measure where {len(self.measures)} are declared; return "
                    f"them by name: {', '.join(self.measures)}"
                )
            found = dict.fromkeys(self.measures, found)
        return self.over_samples(found, samples)
