"""Wrappers of batch loaders that report progress, count samples and set seeds.

This module does not import torch.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from potluck.common.settings.local_training import LocalTraining
from potluck.common.trainer import TrainingProgress


class WatchedLoader:
    """A loader that reports progress at each batch. It has the attributes of the wrapped loader.

    Some libraries, such as Opacus, make their own loader from these attributes, so batches can't be
    counted. Then each step of the optimizer counts as a batch.
    """

    def __init__(
        self, loader: Iterable[Any], training: LocalTraining, report: TrainingProgress
    ) -> None:
        """training: gives the planned length of the training, from which progress is computed."""
        self._loader, self._report = loader, report
        self._steps, self._epochs = training.steps, training.epochs
        self._passes = self._samples = self._rebuilt_steps = 0
        self._batches = 0

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of one pass. Raises RoundClosedError if the training is cancelled."""
        for batch in self._loader:
            self._report(self._share())
            self._batches += 1
            if self._passes == 0:
                self._samples += samples_of(batch)
            yield batch
        self._passes += 1

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # not every loader has a length

    def __getattr__(self, name: str) -> Any:
        # without `_loader`, as in an unfinished copy, the next line would recurse
        if name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)

    def step(self) -> None:
        """Count a step of an optimizer; pass this to `watched_steps`. Raises RoundClosedError."""
        if not self._batches:
            self._report(self._share())
            self._rebuilt_steps += 1

    @property
    def batches(self) -> int:
        """Number of batches so far."""
        return self._batches or self._rebuilt_steps

    @property
    def samples(self) -> int:
        """Number of samples: the dataset's length if known, else the samples of the first pass."""
        return dataset_size(self._loader) or self._samples

    def _share(self) -> float:
        try:
            steps = self._steps or self._epochs * len(self)
            done = self.batches / steps if steps else 0.0
        except TypeError:
            done = self._passes / self._epochs
        return min(done, 1.0)


@contextlib.contextmanager
def watched_steps(step: Callable[[], None]) -> Iterator[None]:
    """Call `step` before each step of a torch optimizer in this thread, while the block runs."""
    optimizers: Any = sys.modules.get("torch.optim.optimizer")
    if optimizers is None:
        yield
        return
    thread = threading.get_ident()

    def before(*_: Any) -> None:
        if threading.get_ident() == thread:
            step()

    hook = optimizers.register_optimizer_step_pre_hook(before)
    try:
        yield
    finally:
        hook.remove()


def dataset_size(loader: Any) -> int:
    """Return the length of a loader's dataset; 0 if it is unknown."""
    try:
        return len(loader.dataset)
    except (AttributeError, TypeError, NotImplementedError):
        return 0


def samples_of(batch: Any) -> int:
    """Return the number of samples in a batch: the length of its first array, or 1."""
    if getattr(batch, "shape", ()):
        return int(batch.shape[0])
    parts: Iterable[Any] = ()
    if isinstance(batch, Mapping):
        parts = batch.values()
    elif isinstance(batch, Sequence) and not isinstance(batch, str):
        parts = batch
    return next((samples_of(part) for part in parts), 1)


def seed_loader(loader: Any, seed: int) -> None:
    """Seed the generators of a loader and its sampler, if they have their own.

    Without a generator of its own, a loader or sampler uses torch's global one; the host seeds
    that.
    """
    for owner in (loader, getattr(loader, "sampler", None)):
        generator = getattr(owner, "generator", None)
        if generator is not None and hasattr(generator, "manual_seed"):
            generator.manual_seed(seed)
