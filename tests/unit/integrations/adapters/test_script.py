"""A task made from functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from potluck.common.errors import ConfigurationError
from potluck.common.learning.measures import own_trainer
from potluck.common.learning.training import training_for
from potluck.common.names import ClientId
from potluck.common.trainer import Measure
from potluck.integrations.adapters.loops import LoopTrainer
from potluck.integrations.adapters.script import script_task

CLIENT = ClientId("client-3")


def load(file: Path) -> tuple[Any, Any]:
    return file.name, "held out"


def test_script_task_uses_the_given_functions() -> None:
    trainer = LoopTrainer(lambda *_: None, lambda *_: 0.0, {"loss": Measure(label="loss")})
    made = script_task(
        model=lambda: {"weights": np.zeros(3, np.float32)},
        data=lambda client, folder: load(folder / f"{client}.csv"),
        trainer=trainer,
        training={"learning_rate": 0.5},
    )
    task = made()
    assert list(task.model()) == ["weights"]
    data = task.client_data(CLIENT, Path("data"))
    assert (data.train, data.held_out) == ("client-3.csv", "held out")
    assert task.evaluation_data(None) is None
    assert own_trainer(task, "mine") is trainer
    assert training_for(task, {}, source="run").learning_rate == 0.5
    with pytest.raises(ConfigurationError, match="set data_directory"):
        task.client_data(CLIENT, None)
