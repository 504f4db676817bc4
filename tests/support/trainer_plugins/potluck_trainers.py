"""A task with its own trainer for named arrays. An option sets one client's fault. No torch."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from potluck.common.errors import TrainingError
from potluck.common.names import ClientId
from potluck.common.task import ClientData, Task
from potluck.common.trainer import (
    Capability,
    Contribution,
    EvaluationSettings,
    Measure,
    Measured,
    Measures,
    Trainer,
    TrainerSettings,
    TrainingProgress,
)

SAMPLES = 40


@dataclass(frozen=True)
class Stream:
    """Noisy points (x, y) of a line, generated on iteration."""

    client: str
    seed: int

    def __iter__(self) -> Iterator[tuple[float, float]]:
        generator = np.random.default_rng(self.seed)
        for _ in range(SAMPLES):
            x = generator.normal()
            yield x, 2.0 * x - 1.0 + 0.1 * generator.normal()


class Descent(Trainer):
    """Stochastic gradient descent on the squared error."""

    measures: ClassVar = {
        "squared_error": Measure(label="squared error", lowest=0, highest=1e6),
        "near": Measure(label="near", unit="share", higher_is_better=True, lowest=0, highest=1),
        "loss": Measure(label="loss", lowest=0),
    }
    capabilities = frozenset(
        {Capability.LOSS, Capability.GRADIENT_NORM, Capability.SKETCH, "utility"}
    )

    def __init__(self, fault: str, unable: int = 0) -> None:
        self._fault = fault
        self._unable = unable

    def train(
        self, model: Any, data: Any, settings: TrainerSettings, report: TrainingProgress
    ) -> Contribution:
        """Make one pass, with one step per point."""
        faulty = self._fault if data.client == "client-1" else ""
        self._fail(faulty, model)
        count, total = 0, 0.0
        for x, y in data:
            error = float(model["slope"][0] * x + model["offset"]) - y
            model["slope"] -= np.float32(settings.learning_rate * error * x)
            model["offset"] -= np.float32(settings.learning_rate * error)
            total, count = total + error**2, count + 1
            report(count / SAMPLES)
        if faulty == "not-a-number":
            model["slope"][0] = np.nan
        if faulty == "shapes":
            model["slope"] = np.zeros(3, np.float32)
        if faulty == "names":
            model["spare"] = np.zeros(3, np.float32)
        if faulty == "nothing":
            return None  # type: ignore[return-value]  # a typical mistake of plug-ins
        name = "accuracy" if faulty == "undeclared" else "squared_error"
        total = float("inf") if faulty == "infinite" else total
        trainings = settings.folder() / "trainings"
        with trainings.open("a") as file:
            file.write(f"{settings.round}\n")
        reports = {"utility": total} if "utility" in settings.reports else {}
        return Contribution(
            samples=count, steps=count, measures={name: Measured(total, count)}, reports=reports
        )

    def _fail(self, fault: str, model: Any) -> None:
        if fault == "raises":
            raise ValueError("the scanner's\nfile is empty")
        if fault == "exits":
            model.clear()
            sys.exit(3)
        if fault == "interrupts":
            raise KeyboardInterrupt
        while fault == "hangs":
            time.sleep(0.01)

    def evaluate(self, model: Any, data: Any, settings: EvaluationSettings) -> Measures:
        """Evaluate on the points. Write the settings to the client's folder."""
        if settings.client is not None:
            note = f"{settings.client} {settings.seed} {settings.device}"
            (settings.folder() / "evaluation").write_text(note)
        if data.client in ("raises", "hangs"):
            self._fail(data.client, model)
        if data.client == "undeclared":
            return {"accuracy": Measured(1.0, 1)}
        if data.client.startswith("client-") and int(data.client[7:]) < self._unable:
            if self._fault == "evaluation-hangs":
                self._fail("hangs", model)
            raise TrainingError(f"'{data.client}' lacks its reference readings")
        points = np.array(list(data))
        errors = model["slope"][0] * points[:, 0] + model["offset"] - points[:, 1]
        squares = Measured(float((errors**2).sum()), len(points))
        if self._fault == "evaluation" and data.client == "client-1":
            return {"squared_error": Measured(-5.0, 3)}
        near = Measured(float((abs(errors) < 1).sum()), len(points))
        return {"squared_error": squares, "near": near, "loss": squares}

    def gradient_norm(self, model: Any, data: Any) -> float:
        """Return the gradient norm of half the mean squared error."""
        points = np.array(list(data))
        errors = model["slope"][0] * points[:, 0] + model["offset"] - points[:, 1]
        return float(np.hypot((errors * points[:, 0]).mean(), errors.mean()))


class CountedDescent(Descent):
    """Trainer that also counts the points on either side of zero."""

    capabilities = Descent.capabilities | {Capability.LABEL_COUNTS}

    def label_counts(self, data: Any) -> list[int]:
        """Return the counts of x ≤ 0 and x > 0."""
        right = sum(x > 0 for x, _ in data)
        return [SAMPLES - right, right]

    def samples(self, data: Any) -> int:
        """Return the number of points."""
        return SAMPLES


@dataclass(frozen=True, kw_only=True)
class Line(Task):
    """Task to fit a line. `fault`: fault of client-1's training (see `Descent`) or evaluation.
    unable: number of clients, from client-0, whose evaluation raises TrainingError, or hangs if the
    fault is "evaluation-hangs". coordinator: "" if the coordinator has no evaluation data;
    otherwise the result of its evaluation: "measures", "raises", "hangs" or "undeclared"."""

    fault: str = ""
    unable: int = 0
    coordinator: str = ""

    training: ClassVar = {"learning_rate": 0.05}

    def model(self) -> Any:
        """Return a line's slope and offset."""
        return {
            "slope": np.random.normal(size=1).astype(np.float32),
            "offset": np.zeros((), np.float32),
        }

    def trainer(self) -> Trainer:
        """Return the trainer, with the fault if there is one."""
        return Descent(self.fault, self.unable)

    def client_data(self, client: ClientId, data: Path | None) -> ClientData[Stream]:
        """Return streams of points to train on, and of held-out points."""
        number = int(client.rpartition("-")[2])
        return ClientData(train=Stream(client, number), held_out=Stream(client, 1000 + number))

    def evaluation_data(self, data: Path | None) -> Stream | None:
        """Return the coordinator's samples; None if the clients evaluate."""
        return Stream(self.coordinator, 99) if self.coordinator else None


class CountedLine(Line):
    """`Line` with label counts."""

    classes: ClassVar[int] = 2  # type: ignore[misc]  # tasks may set it in the class

    def trainer(self) -> Trainer:
        """Return the trainer that counts labels."""
        return CountedDescent(self.fault)
