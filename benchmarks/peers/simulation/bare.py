"""FedAvg by a bare PyTorch loop in several processes: CASE PROCESSES ROUNDS NOTES.

The model and the sums are in shared memory of all processes.
"""

from __future__ import annotations

import sys

import torch
from simulation_cases import CASES, Case, RoundNotes, cohort, train
from torch import Tensor, multiprocessing
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def work(
    case: Case, share: list[list[int]], model: Tensor, total: Tensor, begin: object, end: object
) -> None:
    """Train this process's clients in each round, and sum their weights."""
    torch.set_num_threads(1)
    clients = sorted({client for each in share for client in each})
    data = {client: case.data(client) for client in clients}
    network = case.initial()
    for number, mine in enumerate(share):
        begin.wait()  # type: ignore[attr-defined]  # a barrier
        total.zero_()
        for client in mine:
            vector_to_parameters(model, network.parameters())
            train(network, *data[client], case, seed=1000 * number + client)
            total += parameters_to_vector(network.parameters()).detach()
        end.wait()  # type: ignore[attr-defined]  # a barrier


def alone(case: Case, rounds: int, notes: RoundNotes) -> None:
    """Train in this process with one thread; more threads make such small steps slower."""
    torch.set_num_threads(1)
    chosen = [cohort(case, number) for number in range(rounds)]
    data = {client: case.data(client) for client in {c for each in chosen for c in each}}
    network = case.initial()
    model = parameters_to_vector(network.parameters()).detach()
    for number, clients in enumerate(chosen):
        total = torch.zeros_like(model)
        for client in clients:
            vector_to_parameters(model, network.parameters())
            train(network, *data[client], case, seed=1000 * number + client)
            total += parameters_to_vector(network.parameters()).detach()
        model = total / len(clients)
        notes.committed()


def together(case: Case, processes: int, rounds: int, notes: RoundNotes) -> None:
    """Train in several processes."""
    model = parameters_to_vector(case.initial().parameters()).detach().share_memory_()
    totals = [torch.zeros_like(model).share_memory_() for _ in range(processes)]
    context = multiprocessing.get_context("spawn")
    begin, end = context.Barrier(processes + 1), context.Barrier(processes + 1)
    chosen = [cohort(case, number) for number in range(rounds)]
    workers = [
        context.Process(
            target=work,
            args=(
                case,
                [each[place::processes] for each in chosen],
                model,
                totals[place],
                begin,
                end,
            ),
            daemon=True,
        )
        for place in range(processes)
    ]
    for worker in workers:
        worker.start()
    for _ in range(rounds):
        begin.wait()
        end.wait()
        model.copy_(sum(totals) / case.count)
        notes.committed()
    for worker in workers:
        worker.join()


def main() -> None:
    name, processes, rounds, path = sys.argv[1:]
    case, notes = CASES[name], RoundNotes(path)
    if int(processes) == 1:
        alone(case, int(rounds), notes)
    else:
        together(case, int(processes), int(rounds), notes)


if __name__ == "__main__":
    main()
