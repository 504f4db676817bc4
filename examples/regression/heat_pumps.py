"""Predict how much electricity a heat pump uses in a day, from the weather and the house.

python heat_pumps.py FOLDER writes generated readings of meters: a CSV file for each of four
clients.
"""

# pyright: reportUnknownMemberType=false
# torch is typed in part.

import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from potluck.integrations.adapters.loops import LoopTrainer
from potluck.integrations.adapters.script import Measure, Measured, script_task

Batches = Iterable[tuple[torch.Tensor, torch.Tensor]]

COLUMNS = "outside_celsius,wind_metres_per_second,sun_hours,floor_square_metres,kwh"


def build_model() -> nn.Module:
    scale = nn.BatchNorm1d(4, momentum=None)
    return nn.Sequential(scale, nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))


def load(file: Path) -> tuple[Batches, Batches]:
    """Return loaders of a client's training days (four fifths) and held-out days (every fifth)."""
    table = torch.from_numpy(np.loadtxt(file, np.float32, delimiter=",", skiprows=1))
    fifth = torch.arange(len(table)) % 5 == 4
    days = TensorDataset(table[~fifth, :4], table[~fifth, 4:] / 100)
    held_out = TensorDataset(table[fifth, :4], table[fifth, 4:] / 100)
    return DataLoader(days, batch_size=32, shuffle=True), DataLoader(held_out, batch_size=256)


def train(
    model: nn.Module, loader: Batches, epochs: int, learning_rate: float, device: torch.device
) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    model.train()
    for _ in range(epochs):
        for inputs, targets in loader:
            inputs, targets = inputs.to(device), targets.to(device)
            loss = nn.functional.smooth_l1_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@torch.no_grad()
def measure(model: nn.Module, loader: Batches, device: torch.device) -> dict[str, Measured]:
    """Return errors summed over days, so that means over the federation are exact."""
    model.eval()
    absolute, squared, days = 0.0, 0.0, 0
    for inputs, targets in loader:
        error = 100 * (model(inputs.to(device)) - targets.to(device))
        absolute += error.abs().sum().item()
        squared += error.square().sum().item()
        days += len(inputs)
    return {"absolute_error": Measured(absolute, days), "loss": Measured(squared, days)}


HeatPumps = script_task(
    model=build_model,
    data=lambda client, folder: load(folder / f"{client}.csv"),
    trainer=LoopTrainer(
        train,
        measure,
        {
            "absolute_error": Measure(label="mean error", unit="kWh", lowest=0),
            "loss": Measure(label="squared error", unit="kWh²", lowest=0),
        },
    ),
    training={"learning_rate": 0.005, "epochs": 3},
)


def write_days(folder: Path, clients: int = 4, days: int = 600) -> None:
    """Write generated days; each client has its own climate and houses."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(11)
    for client in range(clients):
        outside = generator.normal(12 - 5 * client, 6, days)
        wind, sun = generator.gamma(2, 2, days), generator.uniform(0, 12, days)
        floor = generator.normal(90 + 30 * client, 20, days).clip(40)
        needed = np.maximum(20 - outside, 0) * (1 + 0.05 * wind) * floor / 150 - 0.4 * sun
        drawn = np.maximum(needed, 0) / (3.8 + 0.05 * outside) + generator.normal(5, 0.5, days)
        table = np.column_stack([outside, wind, sun, floor, drawn])
        file = folder / f"client-{client}.csv"
        np.savetxt(file, table, "%.2f", delimiter=",", header=COLUMNS, comments="")


if __name__ == "__main__":
    write_days(Path(sys.argv[1]))
