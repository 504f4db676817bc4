"""The choice between training clients together and one by one, if the run leaves it to the host.

The host measures once per network and keeps the choice. So repeated runs on this machine are equal,
bit for bit. (Results of the two ways differ by the rounding of floats.) The choice is a small JSON
file. If the file is deleted, the host measures again after its next start; a running host keeps its
choice.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import structlog
import torch

from potluck.client.objective import Objective
from potluck.client.training.kept_choices import KeptChoice, keep_choice, read_choice
from potluck.client.training.lanes.lane_network import LaneNetwork, stacked
from potluck.client.training.lanes.lane_steps import ClientLane, LaneRules, train_lanes
from potluck.client.training.steps.loop import TrainingContext, train
from potluck.common.settings.local_training import LocalTraining
from potluck.common.task import Examples

log = structlog.get_logger()

LANES: Final = 4
"""Number of lanes in the measurement; one choice applies to groups of any size."""
_FEWEST_REPEATS: Final = 3
_MOST_REPEATS: Final = 9
"""Maximum number of measurements, used if both ways take similar times or the machine is busy."""
_FEWEST_STEPS: Final = 3
_MOST_STEPS: Final = 60
_SECONDS: Final = 0.05
"""Target seconds of one measurement; longer only if the minimum number of steps takes longer."""


class LaneChoice(KeptChoice):
    """The measured seconds of a step per client, for training alone and for training together."""

    alone_seconds: float
    together_seconds: float

    @property
    def together(self) -> bool:
        """True if training together is the faster way."""
        return self.together_seconds < self.alone_seconds

    @property
    def reason(self) -> str:
        """The reason for the choice, for people."""
        alone, together = (
            f"{1e6 * each:,.0f} µs" for each in (self.alone_seconds, self.together_seconds)
        )
        return (
            f"a step takes {alone} per client if clients train alone, and {together} in a "
            "batched step"
        )


class LaneChoices:
    """The choices in a folder, which several processes may share."""

    def __init__(self, folder: Path | None) -> None:
        """folder: folder of the choices; None keeps them in memory only."""
        self._folder = folder
        self._known: dict[str, LaneChoice] = {}

    def of(self, subject: str, measure: Callable[[], LaneChoice]) -> LaneChoice:
        """Return the choice for a subject; measure it if none is kept. Raises StorageError."""
        known = self._known.get(subject)
        if known is None:
            known = read_choice(self._folder, LaneChoice, subject)
            known = known or keep_choice(self._folder, measure())
            self._known[subject] = known
            log.info("way to train clients chosen", together=known.together, reason=known.reason)
        return known


def subject_of(
    network: torch.nn.Module, sample: torch.Tensor, rules: LaneRules, device: torch.device
) -> str:
    """Return, as text, everything that a choice depends on: network, batches, steps, device,
    software.
    """
    on = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    settings = rules.settings
    parts = {
        "network": repr(network),
        "sample": f"{tuple(sample.shape)} {sample.dtype}",
        "batch": settings.batch_size,
        "steps": f"{settings.momentum} {settings.weight_decay} {settings.gradient_clip} {rules.mu}",
        "device": f"{on} with {torch.get_num_threads()} threads",
        "torch": torch.__version__,
    }
    return "\n".join(f"{name}: {value}" for name, value in parts.items())


def measured(
    subject: str,
    model: torch.nn.Module,
    sample: torch.Tensor,
    objective: Objective,
    rules: LaneRules,
    *,
    classes: int,
    device: torch.device,
) -> LaneChoice:
    """Measure a few steps of both ways, alternately, on random inputs of a sample's shape.

    The fastest time of each way counts, since other work on the machine can only make steps slower.
    The steps are repeated while it is not clear which way is faster. The model's weights are
    changed. Raises what training raises.
    """
    trial = _Trial(model, sample, objective, rules, classes=classes, device=device)
    first = trial.seconds(trial.alone, _FEWEST_STEPS)
    steps = int(min(_MOST_STEPS, max(_FEWEST_STEPS, _SECONDS / max(first, 1e-6))))
    trial.seconds(trial.together, _FEWEST_STEPS)  # warms up
    alone, together = fastest(
        lambda: trial.seconds(trial.alone, steps),
        lambda: trial.seconds(trial.together, steps) / LANES,
    )
    return LaneChoice(subject=subject, alone_seconds=alone, together_seconds=together)


def fastest(one: Callable[[], float], other: Callable[[], float]) -> tuple[float, float]:
    """Return the minimum of two measurements, each repeated, alternately.

    Each is taken three times, and then again, up to nine times, until all values of one are less
    than all values of the other.
    """
    ones: list[float] = []
    others: list[float] = []
    while len(ones) < _FEWEST_REPEATS or (len(ones) < _MOST_REPEATS and not distinct(ones, others)):
        ones.append(one())
        others.append(other())
    return min(ones), min(others)


def distinct(ones: Sequence[float], others: Sequence[float]) -> bool:
    """Return True if all of `ones` are less than all of `others`, or all are greater."""
    return max(ones) < min(others) or max(others) < min(ones)


class _Trial:
    """Trainings on random inputs, to be measured."""

    def __init__(
        self,
        model: torch.nn.Module,
        sample: torch.Tensor,
        objective: Objective,
        rules: LaneRules,
        *,
        classes: int,
        device: torch.device,
    ) -> None:
        self._model, self._objective, self._rules = model, objective, rules
        self._device, self._network = device, LaneNetwork(model)
        noise = torch.Generator().manual_seed(0)
        some = 4 * rules.settings.batch_size
        inputs = torch.randn(some, *sample.shape[1:], generator=noise).to(sample.dtype)
        labels = torch.randint(classes, (some,), generator=noise)
        self._data = Examples(inputs=inputs, labels=labels).to(device)
        self._context = TrainingContext(classes=classes, seed=0, round=rules.round, device=device)

    def seconds(self, train_some: Callable[[LocalTraining], None], steps: int) -> float:
        """Return the seconds per step.

        On a CPU with one thread, count this thread's processor time only, so that other work on the
        machine does not count."""
        settings = self._rules.settings.model_copy(update={"steps": steps, "learning_rate": 1e-6})
        clock = time.perf_counter
        if self._device.type == "cpu" and torch.get_num_threads() == 1:
            clock = time.thread_time
        begun = clock()
        train_some(settings)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return (clock() - begun) / steps

    def alone(self, settings: LocalTraining) -> None:
        """Train one client."""
        train(self._model, self._data, self._objective, settings, self._context)

    def together(self, settings: LocalTraining) -> None:
        """Train `LANES` clients together."""
        state = {name: each.to(self._device) for name, each in self._model.state_dict().items()}
        steps = settings.planned_steps(len(self._data))
        train_lanes(
            self._network,
            stacked(state, self._network.names, LANES),
            [ClientLane(steps=steps, data=self._data, seed=lane) for lane in range(LANES)],
            LaneRules(settings=settings, mu=self._rules.mu, round=self._rules.round),
            progress=lambda _: None,
            cancelled=lambda: False,
        )
