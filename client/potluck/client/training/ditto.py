"""Ditto: a personal model per client, near the round's model (Li et al., ICML 2021, Algorithm 1).

v ← v − η·(∇F(v) + λ·(v − w)), where w is the received round's model. This is the run's local
training with λ/2·‖v − w‖² added to the loss. At a client's first training, v starts as w.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from potluck.client.objective import Objective
from potluck.client.training.objective_sum import ObjectiveSum
from potluck.client.training.plugin_options import json_object
from potluck.client.training.steps.loop import TrainingContext, TrainingResult, train, trainable
from potluck.client.training.steps.smaller_batches import within_memory
from potluck.client.training.task_training import LoadedTask, TrainingFiles
from potluck.common.errors import ProtocolError
from potluck.common.learning.training import training_for
from potluck.common.settings import plugins
from potluck.common.settings.local_training import LocalTraining
from potluck.common.task import Examples, Task
from potluck.common.tensors.tensor_files import write_tensors
from potluck.common.updates.kept_states import PERSONAL
from potluck.rpc.v1 import coordinator_pb2 as rpc


@dataclass(frozen=True, kw_only=True)
class Ditto:
    """The training of a client's own model. pull: λ ≥ 0, the weight of the added term."""

    pull: float
    settings: LocalTraining

    @staticmethod
    def read(work: rpc.Train, task: Task) -> Ditto | None:
        """Return the training of the client's own model that an instruction requests; None if it
        requests none.

        Raises ProtocolError, ConfigurationError.
        """
        if not work.HasField("personal"):
            return None
        pull = work.personal.pull
        if not 0 <= pull < float("inf"):
            raise ProtocolError(f"personal.pull is {pull}; it must be a number ≥ 0")
        settings = json_object(work.personal.training_json, "training_json of personal")
        return Ditto(pull=pull, settings=training_for(task, settings, source="personal"))

    def train(
        self,
        loaded: LoadedTask,
        samples: Examples,
        objective: Objective,
        context: TrainingContext,
        files: TrainingFiles,
    ) -> None:
        """Train the client's model and write it to its file. Afterwards the loaded model has this
        model's weights.

        Raises what `train` of the loop raises, LayoutError and StorageError.
        """
        held = ObjectiveSum((objective, plugins.create(Objective, "fedprox", {"mu": self.pull})))

        def attempt(settings: LocalTraining) -> TrainingResult:
            loaded.set_weights(files)
            loaded.model.to(context.device)
            received = tuple(t.detach().clone() for t in trainable(loaded.model).values())
            if PERSONAL in files.kept:
                loaded.set_weights(replace(files, model=files.kept[PERSONAL]))
            return train(loaded.model, samples, held, settings, own, received=received)

        own = replace(context, seed=_own_seed(context.seed))
        within_memory(attempt, self.settings)
        write_tensors(files.keep_at(PERSONAL), loaded.weights(), layout=loaded.layout, sync=True)


def halves(context: TrainingContext) -> tuple[TrainingContext, TrainingContext]:
    """Return contexts for two trainings, each of which reports half of the progress."""
    note = context.progress
    return (
        replace(context, progress=lambda share: note(share / 2)),
        replace(context, progress=lambda share: note((1 + share) / 2)),
    )


def _own_seed(seed: int) -> int:
    """Return a seed for the client's own model, so that its batches differ from the round's."""
    digest = hashlib.sha256(f"{seed}/{PERSONAL}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
