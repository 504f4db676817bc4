"""A small convolutional network reads digits; its own loop trains it with DP-SGD.

python private_digits.py FOLDER writes a file of images for each of four clients, a quarter of all.
"""

# pyright: reportUnknownMemberType=false
# torch is typed in part.

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from potluck.common.tasks.digits import images_and_digits
from potluck.common.trainer import TrainerSettings
from potluck.integrations.adapters.loops import LoopTrainer
from potluck.integrations.adapters.script import Measured, script_task, share

Batches = Iterable[tuple[torch.Tensor, torch.Tensor]]


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def load(file: Path) -> tuple[Batches, Batches]:
    """Return loaders of a client's training images (nine tenths) and held-out ones (a tenth)."""
    with np.load(file) as found:
        images, digits = torch.from_numpy(found["images"]), torch.from_numpy(found["digits"])
    tenth = torch.arange(len(images)) % 10 == 9
    training = TensorDataset(images[~tenth, None], digits[~tenth])
    held_out = TensorDataset(images[tenth, None], digits[tenth])
    return DataLoader(training, batch_size=64), DataLoader(held_out, batch_size=256)


def train(model: nn.Module, loader: Batches, settings: TrainerSettings) -> None:
    optimizer: Any = torch.optim.SGD(
        model.parameters(), lr=settings.learning_rate, momentum=settings.training.momentum
    )
    model.train()
    with settings.noisy_steps(model, optimizer, loader) as (optimizer, loader):
        for _ in range(settings.training.epochs):
            for images, digits in loader:
                images, digits = images.to(settings.device), digits.to(settings.device)
                loss = nn.functional.cross_entropy(model(images), digits)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()


@torch.no_grad()
def measure(model: nn.Module, loader: Batches, device: torch.device) -> dict[str, Measured]:
    model.eval()
    right = count = 0
    for images, digits in loader:
        found = model(images.to(device)).argmax(dim=1)
        right += int((found == digits.to(device)).sum())
        count += len(digits)
    return {"accuracy": Measured(right, count)}


PrivateDigits = script_task(
    model=build_model,
    data=lambda client, folder: load(folder / f"{client}.npz"),
    trainer=LoopTrainer(train, measure, {"accuracy": share("accuracy")}, private=True),
    training={"learning_rate": 0.5, "momentum": 0.5, "epochs": 3, "batch_size": 64},
)


def write_images(folder: Path, clients: int = 4) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    images, digits = images_and_digits()
    owners = np.random.default_rng(7).integers(clients, size=len(images))
    for client in range(clients):
        own = owners == client
        np.savez(folder / f"client-{client}.npz", images=images[own], digits=digits[own])


if __name__ == "__main__":
    write_images(Path(sys.argv[1]))
