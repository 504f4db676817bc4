"""Train a model of heart disease in four hospitals, none of which sends its patients away.

The program starts a coordinator and a host per hospital on this machine, trains logistic regression
and a small network, and compares each with models trained without a federation.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from potluck.common.names import ClientId
from potluck.common.task import Examples
from potluck.experiments.tasks.heart import HOSPITALS, Heart
from potluck.federation import Federation, Run

CLIENTS = {f"client-{number}": hospital for number, hospital in enumerate(HOSPITALS)}
EPOCHS, LEARNING_RATE, BATCH = 2, 0.05, 16
SEED = 7


def main() -> None:
    options = argparse.ArgumentParser(description="Heart disease in four hospitals.")
    options.add_argument("--rounds", type=int, default=20, help="rounds of each federation")
    rounds = options.parse_args().rounds
    with Federation.local(hosts=len(HOSPITALS)) as federation:
        for network in ("logistic", "perceptron"):
            run = federation.run(
                task={"name": "heart", "network": network},
                selector={"name": "fedentopt", "buffer": 1},
                training={"epochs": EPOCHS, "learning_rate": LEARNING_RATE, "batch_size": BATCH},
                rounds=rounds,
                clients_per_round=2,
                seed=SEED,
            ).wait()
            show_disclosures(run, network)
            show_choices(run, network)
            show_accuracies(run, Heart(network=network), rounds * EPOCHS)


def show_disclosures(run: Run, network: str) -> None:
    """Print what the hospitals disclose to the coordinator."""
    print(f"What each hospital discloses for {network}")
    spent = run.disclosures.groupby("client")["epsilon"].sum()
    counts = run.profiles
    for client, hospital in CLIENTS.items():
        healthy, ill = round(counts["label_0"][client]), round(counts["label_1"][client])
        print(
            f"  {hospital:<12} label counts with noise: {healthy:>3} healthy, "
            f"{ill:>3} ill; epsilon {spent[client]:.3g} spent by now"
        )
    print("  if selected: its weights after training, its training loss, its number of patients")
    print("  after each round: counts of right and wrong answers on held-out patients, the loss")
    print("  never: a patient's features or label\n")


def show_choices(run: Run, network: str) -> None:
    """Print which hospitals the selector chose in each round, and why."""
    print(f"Choices for {network}")
    for committed in run.history:
        chosen = (f"{CLIENTS[each.client]} ({each.reason})" for each in committed.members)
        print(f"  round {committed.number:>2}  {', '.join(chosen)}")
    print()


def show_accuracies(run: Run, task: Heart, epochs: int) -> None:
    """Print the accuracy per hospital, on patients that no model was trained on."""
    data = [task.client_data(ClientId(hospital), None) for hospital in HOSPITALS]
    federated = run.model()
    pooled = trained(task, [each.train for each in data], epochs)
    print(f"Accuracy of {task.network} on held-out patients, in %")
    print("  hospital     patients  federation   alone  pooled  always the commoner label")
    for hospital, own in zip(HOSPITALS, data, strict=True):
        if (held_out := own.held_out) is None:
            continue
        alone = trained(task, [own.train], epochs)
        rates = [accuracy(each, held_out) for each in (federated, alone, pooled)]
        ill = held_out.labels.double().mean().item()
        rates.append(100 * max(ill, 1 - ill))
        shown = "{:>12.1f}{:>8.1f}{:>8.1f}{:>11.1f}".format(*rates)
        print(f"  {hospital:<12}{len(held_out):>9}{shown}")
    print()


def trained(task: Heart, parts: list[Examples], epochs: int) -> nn.Module:
    """Return a model trained on samples in one place, with the settings of the federation."""
    torch.manual_seed(SEED)
    model = task.model()
    inputs = torch.cat([part.inputs for part in parts])
    labels = torch.cat([part.labels for part in parts])
    optimiser = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for _ in range(epochs):
        for batch in torch.randperm(len(labels)).split(BATCH):
            optimiser.zero_grad()
            loss: Tensor = cross_entropy(model(inputs[batch]), labels[batch])
            loss.backward()
            optimiser.step()
    return model


def accuracy(model: nn.Module, examples: Examples) -> float:
    """Return the share of samples that the model classifies correctly, in percent."""
    with torch.no_grad():
        right = model(examples.inputs).argmax(dim=1) == examples.labels
    return 100 * right.double().mean().item()


if __name__ == "__main__":
    main()
