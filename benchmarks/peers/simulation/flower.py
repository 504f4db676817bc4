"""FedAvg on Flower's simulation, one Ray actor per core: CASE PROCESSES ROUNDS NOTES."""

from __future__ import annotations

import os
import sys
import traceback
from collections import OrderedDict
from typing import Any

import torch
from flwr.client import ClientApp, NumPyClient
from flwr.common import Context, ndarrays_to_parameters
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.simulation import run_simulation
from simulation_cases import CASES, Case, RoundNotes, kept_data, train


class Trainee(NumPyClient):
    """A simulated client, which trains with the bare loop."""

    def __init__(self, name: str, number: int) -> None:
        self._name, self._number = name, number

    def fit(self, parameters: Any, config: Any) -> tuple[Any, int, dict[str, Any]]:
        torch.set_num_threads(1)
        case: Case = CASES[self._name]
        network = case.initial()
        names = network.state_dict().keys()
        weights = [torch.from_numpy(array.copy()) for array in parameters]
        network.load_state_dict(OrderedDict(zip(names, weights, strict=True)))
        train(network, *kept_data(self._name, self._number), case, seed=self._number)
        return [value.numpy() for value in network.state_dict().values()], case.samples, {}


class Strict(FedAvg):
    """FedAvg that ends the run if a client of the round failed."""

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        if failures:
            raise RuntimeError(f"{len(failures)} clients failed; the first failure: {failures[0]}")
        return super().aggregate_fit(server_round, results, failures)


def main() -> None:
    name, processes, rounds, path = sys.argv[1:]
    case, notes = CASES[name], RoundNotes(path)

    def client(context: Context) -> Any:
        return Trainee(name, int(context.node_config["partition-id"])).to_client()

    def noted(number: int, *_: Any) -> None:
        if number:  # 0 is the initial model
            notes.committed()

    def server(_: Context) -> ServerAppComponents:
        initial = [value.numpy() for value in case.initial().state_dict().values()]
        strategy = Strict(
            fraction_fit=case.count / case.clients,
            fraction_evaluate=0.0,
            min_fit_clients=case.count,
            min_available_clients=case.clients,
            initial_parameters=ndarrays_to_parameters(initial),
            evaluate_fn=noted,
        )
        config = ServerConfig(num_rounds=int(rounds))
        return ServerAppComponents(strategy=strategy, config=config)

    run_simulation(
        server_app=ServerApp(server_fn=server),
        client_app=ClientApp(client_fn=client),
        num_supernodes=case.clients,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": int(processes), "include_dashboard": False},
        },
    )


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # remaining threads of Flower and Ray would keep the process alive
