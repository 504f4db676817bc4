"""FedAvg on pfl-research's simulated backend: CASE PROCESSES ROUNDS NOTES.

If there are several processes, each runs this file: PFL_WORKER_ADDRESSES and PFL_WORKER_RANK set
its role, as usual in pfl-research. Only the first round is evaluated; its time does not count.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from simulation_cases import CASES, Case, RoundNotes
from torch import Tensor, nn


class Network(nn.Module):
    """The network with the interface that pfl-research needs."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.layers = case.initial()

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layers(inputs)
        return outputs

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self(inputs), labels)

    def metrics(self, inputs: Tensor, labels: Tensor) -> dict[str, Any]:
        return {"loss": Weighted(float(self.loss(inputs, labels)), len(labels))}


class Noted(TrainingProcessCallback):
    """Records when rounds end."""

    def __init__(self, notes: RoundNotes) -> None:
        self._notes = notes

    def after_central_iteration(
        self, aggregate_metrics: Any, model: Any, *, central_iteration: int
    ) -> tuple[bool, Any]:
        self._notes.committed()
        return False, Metrics()


def main() -> None:
    name, _, rounds, path = sys.argv[1:]
    case = CASES[name]
    torch.set_num_threads(1)
    clients = [str(number) for number in range(case.clients)]
    data = FederatedDataset.from_slices(
        {client: list(case.data(int(client))) for client in clients},
        get_user_sampler("random", clients),
    )
    network = Network(case)
    model = PyTorchModel(
        network,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(network.parameters(), 1.0),
    )
    first = os.environ.get("PFL_WORKER_RANK", "0") == "0"
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=int(rounds),
            evaluation_frequency=1 << 30,
            train_cohort_size=case.count,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=data, val_data=data),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=case.epochs,
            local_learning_rate=case.learning_rate,
            local_batch_size=case.batch_size,
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[Noted(RoundNotes(path))] if first else [],
    )


if __name__ == "__main__":
    main()
