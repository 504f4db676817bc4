"""Processor time of a client's share of the noise in a masked update, and of its masks.

    python benchmarks/client_noise.py --values 1000000 --partners 19

One core is used. The noise is for a clipping norm of 1 and σ = 1, in 32-bit words. It is compared
with NumPy's floating-point Gaussian numbers, which are not exact, and with the masks that hide the
same update.

Then a client trains LeNet-5 on 1,280 samples of CIFAR-10's size for one epoch and masks its update,
in turns with and without noise. The fastest times of both are compared.
"""

from __future__ import annotations

import argparse
import json
import os

import numpy as np
import torch
from numpy.typing import NDArray
from private_training import plain
from repetitions import fastest
from rich.console import Console
from rich.table import Table

from potluck.client.private_training import SumGrid
from potluck.common.models.lenet import lenet5
from potluck.common.task import Examples
from potluck.privacy.host.client_noise import ClientNoise
from potluck.secagg.masked_vectors import NoiseInSums
from potluck.secagg.protocol.primitives.masks import Mask, StreamCipher, add_masks
from potluck.secagg.protocol.vectors.word_limits import to_words

BLOCK = 2**18
SAMPLES = 1280


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--values", type=int, default=1_000_000, help="number of parameters of the model"
    )
    parser.add_argument(
        "--partners", type=int, default=19, help="number of other clients in the sum"
    )
    parser.add_argument(
        "--repeats", type=int, default=5, help="number of repetitions; the fastest is printed"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {
        **measure(options.values, options.partners, options.repeats),
        **measure_training(options.partners, options.repeats),
    }
    if options.json:
        print(json.dumps(found))
        return
    table = Table("work", "s")
    for name, seconds in found.items():
        table.add_row(name, f"{seconds:.3f}")
    Console().print(table)


class Upload:
    """The masks and the noise of a client's update, for an update of `values` numbers."""

    def __init__(self, values: int, partners: int) -> None:
        clients, contributors = partners + 1, partners // 2
        noise = NoiseInSums(clip=1.0, multiplier=1.0, contributors=contributors, quorum=clients)
        grid = SumGrid(
            scale=(2**31 / clients - 2) / noise.bound,
            values=values,
            clients=clients,
            contributors=contributors,
            largest=2**31 - 1,
        )
        made = ClientNoise(clip=1.0, noise_multiplier=1.0, charge=lambda _: None)
        self.bound, self._draw = made.bound, made.charge(grid)
        self._words = np.zeros(values, "<u4")
        self._masks = [Mask(os.urandom(32)) for _ in range(clients)]

    def add_masks(self) -> None:
        """Add all masks to the words of an update."""
        for begin in range(0, self._words.size, BLOCK):
            block = self._words[begin : begin + BLOCK]
            add_masks(block, self._masks, first=begin, cipher=StreamCipher.AES_256_CTR)

    def add_noise(self) -> None:
        """Add a share of noise to the words of an update."""
        for begin in range(0, self._words.size, BLOCK):
            block = self._words[begin : begin + BLOCK]
            block += to_words(self._draw(block.size), 32)


def measure(values: int, partners: int, repeats: int) -> dict[str, float]:
    """Return the processor seconds of each kind of work, and ratios between them."""
    upload = Upload(values, partners)
    generator = np.random.Generator(np.random.PCG64(1))
    update = generator.standard_normal(values, np.float32)
    noise_seconds = fastest(upload.add_noise, repeats)
    masks_seconds = fastest(upload.add_masks, repeats)
    numpy_seconds = fastest(lambda: generator.standard_normal(values), repeats)
    return {
        "share of noise": noise_seconds,
        "share of noise, for a million parameters": noise_seconds / values * 1e6,
        "bound on the norm": fastest(lambda: upload.bound(update), repeats),
        "masks": masks_seconds,
        "floating-point Gaussian numbers": numpy_seconds,
        "ratio of noise to floating-point numbers": noise_seconds / numpy_seconds,
        "ratio of noise to masks": noise_seconds / masks_seconds,
    }


def measure_training(partners: int, repeats: int) -> dict[str, float]:
    """Return the processor seconds of a masked training with and without noise, and their ratio."""
    data = Examples(inputs=torch.randn(SAMPLES, 3, 32, 32), labels=torch.arange(SAMPLES) % 10)
    upload = Upload(_vector(lenet5()).size, partners)

    def trained(*, noisy: bool) -> None:
        model = lenet5()
        update = -_vector(model)
        plain(model, data)
        update += _vector(model)
        if noisy:
            upload.bound(update)
            upload.add_noise()
        upload.add_masks()

    without, noisy = [], []
    for _ in range(repeats + 1):  # the first warms up
        without.append(fastest(lambda: trained(noisy=False), 1))
        noisy.append(fastest(lambda: trained(noisy=True), 1))
    return {
        "training, masked": min(without[1:]),
        "training, masked, with noise": min(noisy[1:]),
        "ratio of the trainings": min(noisy[1:]) / min(without[1:]),
    }


def _vector(model: torch.nn.Module) -> NDArray[np.float32]:
    """Return a copy of all parameters as one vector."""
    vector: NDArray[np.float32] = torch.cat(
        [each.detach().flatten() for each in model.parameters()]
    ).numpy()
    return vector


if __name__ == "__main__":
    main()
