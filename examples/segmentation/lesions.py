"""Find lesions in volumes with MONAI's 3D U-Net.

python lesions.py FOLDER writes generated volumes for four clients: a folder of .npz files for each.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateImportUsage=false
# torch and MONAI are typed in part.

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from monai.data import DataLoader, Dataset, create_test_image_3d, decollate_batch
from monai.losses import DiceLoss
from monai.metrics import DiceMetric
from monai.networks.nets import UNet
from monai.transforms import AsDiscrete, Compose, RandFlipd, RandGaussianNoised

from potluck.integrations.adapters.monai import MonaiLoopTrainer, measured
from potluck.integrations.adapters.script import Measure, Measured, script_task, share

Batches = Iterable[dict[str, Any]]


def build_model() -> torch.nn.Module:
    return UNet(
        spatial_dims=3,
        in_channels=1,
        out_channels=1,
        channels=(8, 16, 32),
        strides=(2, 2),
        num_res_units=1,
        norm="instance",
    )


def read(file: Path) -> dict[str, torch.Tensor]:
    """Read an image and its label, 1 × 32 × 32 × 32 each, from a file."""
    with np.load(file) as arrays:
        return {name: torch.from_numpy(arrays[name][None].copy()) for name in ("image", "label")}


def load(folder: Path) -> tuple[Batches, Batches]:
    """Return loaders, which read when needed: training volumes, and every fourth held out."""
    files = sorted(folder.glob("*.npz"))
    augment = Compose(
        [
            read,
            RandFlipd(["image", "label"], prob=0.5, spatial_axis=0),
            RandGaussianNoised("image", prob=0.5, std=0.05),
        ]
    )
    train = Dataset([file for number, file in enumerate(files) if number % 4], augment)
    held_out = Dataset(files[::4], read)
    return DataLoader(train, batch_size=2, shuffle=True), DataLoader(held_out, batch_size=2)


def train(
    model: torch.nn.Module, loader: Batches, epochs: int, learning_rate: float, device: torch.device
) -> dict[str, Measured]:
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    loss_function, total, volumes = DiceLoss(sigmoid=True), 0.0, 0
    model.train()
    for _ in range(epochs):
        for batch in loader:
            images, labels = (batch[name].to(device) for name in ("image", "label"))
            loss = loss_function(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(images)
            volumes += len(images)
    return {"loss": Measured(total, volumes)}


@torch.no_grad()
def measure(model: torch.nn.Module, loader: Batches, device: torch.device) -> dict[str, Measured]:
    discrete: Any = Compose([torch.sigmoid, AsDiscrete(threshold=0.5)])
    single: Any = decollate_batch
    dice = DiceMetric()
    model.eval()
    for batch in loader:
        found = [discrete(each) for each in single(model(batch["image"].to(device)))]
        dice(found, single(batch["label"].to(device)))
    return {"dice": measured(dice)}


Lesions = script_task(
    model=build_model,
    data=lambda client, folder: load(folder / client),
    trainer=MonaiLoopTrainer(
        train,
        measure,
        {
            "dice": share("Dice"),
            "loss": Measure(label="Dice loss", lowest=0, highest=1),
        },
    ),
    training={"learning_rate": 0.01, "epochs": 2},
)


def write_volumes(folder: Path, clients: int = 4, volumes: int = 8) -> None:
    """Write generated volumes: balls (the lesions) on noise, whose strength differs by client."""
    for client in range(clients):
        generator = np.random.RandomState(client)
        (folder / f"client-{client}").mkdir(parents=True, exist_ok=True)
        for number in range(volumes):
            image, label = create_test_image_3d(
                *(32, 32, 32),
                num_objs=4,
                rad_min=4,
                rad_max=7,
                num_seg_classes=1,
                noise_max=0.2 + 0.1 * client,
                random_state=generator,
            )
            file = folder / f"client-{client}" / f"volume-{number}.npz"
            np.savez(file, image=image.astype(np.float32), label=label.astype(np.float32))


if __name__ == "__main__":
    write_volumes(Path(sys.argv[1]))
