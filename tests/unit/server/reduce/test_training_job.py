"""A training job of the coordinator, run in the test's own process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from potluck.common.errors import ConfigurationError, NotFiniteError
from potluck.common.tensors.model_arrays import state_arrays
from potluck.common.tensors.tensor_files import open_tensors, write_tensors
from potluck.server.plan.plan import draw_up
from potluck.server.reduce.training_job import (
    TrainingJob,
    UpdateInJob,
    Workplace,
    carry_out,
    public_inputs,
)

RUN = """
rounds = 1
[task]
name = "digits"
public = {public}
[strategy]
name = "feddf"
steps = 20
check_every = 10
learning_rate = {rate}
"""


def job(
    folder: Path, *, public: int = 60, rate: float = 0.01, round_number: int = 1
) -> TrainingJob:
    """Return a job of a round of two clients with random models; the model is their mean."""
    text = RUN.format(public=public, rate=rate)
    task = draw_up(text, source="test").task
    paths = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        write_tensors(folder / f"update-{seed}", state_arrays(task.model()))
        paths.append(folder / f"update-{seed}")
    with open_tensors(paths[0]) as one, open_tensors(paths[1]) as other:
        write_tensors(
            folder / "mean", {n: (one.arrays[n] + other.arrays[n]) / 2 for n in one.arrays}
        )
    return TrainingJob(
        run_file=text,
        workplace=Workplace(model_modules=(), data_directory=None, threads=1),
        round=round_number,
        model=folder / "mean",
        base=folder / "mean",
        updates=[UpdateInJob(client=path.name, path=path, compressed=False) for path in paths],
        trained=folder / f"trained-{round_number}",
    )


def done(job: TrainingJob, progress: Callable[[float], None] = lambda _: None) -> bytes:
    carry_out(job, progress)
    return job.trained.read_bytes()


def test_training_job_writes_a_model_determined_by_its_files_and_round(tmp_path: Path) -> None:
    shares: list[float] = []
    first = done(job(tmp_path), shares.append)
    assert shares == [0.5, 1.0]
    assert first != (tmp_path / "mean").read_bytes()
    assert done(job(tmp_path)) == first
    assert done(job(tmp_path, round_number=2)) != first
    with open_tensors(tmp_path / "trained-1") as file:
        assert all(np.isfinite(array).all() for array in file.arrays.values())


def test_training_job_without_public_data_names_the_missing_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"feddf trains on the coordinator.*has none; set"):
        carry_out(job(tmp_path, public=0), lambda _: None)
    plan = draw_up(RUN.format(public=1, rate=1), source="test")
    with pytest.raises(ConfigurationError, match="task 'digits' has 1; set `public`"):
        public_inputs(plan, None)


def test_training_job_refuses_a_model_with_nan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from potluck.server.strategies.feddf import FedDF

    def spoil(_: FedDF, training: object) -> None:
        first = next(iter(training.network.parameters()))  # type: ignore[attr-defined]
        first.data.fill_(float("nan"))

    monkeypatch.setattr(FedDF, "train", spoil)
    with pytest.raises(NotFiniteError, match=r"tensor '1.weight' contains NaN or infinity; lower"):
        carry_out(job(tmp_path), lambda _: None)
