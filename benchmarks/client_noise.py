"""Processor time of a client's share of the noise in a masked update, and of its masks.

    python benchmarks/client_noise.py --values 1000000 --partners 19

One core is used. The noise is for a clipping norm of 1 and σ = 1, in 32-bit words. It is compared
with NumPy's floating-point Gaussian numbers, which are not exact, and with the masks that hide the
same update.
"""

from __future__ import annotations

import argparse
import json
import os

import numpy as np
from repetitions import fastest
from rich.console import Console
from rich.table import Table

from potluck.client.private_training import SumGrid
from potluck.privacy.host.client_noise import ClientNoise
from potluck.secagg.masked_lanes import NoiseInSums
from potluck.secagg.protocol.primitives.masks import Mask, StreamCipher, add_masks

BLOCK = 2**18


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
    found = measure(options.values, options.partners, options.repeats)
    if options.json:
        print(json.dumps(found))
        return
    table = Table("work", "s")
    for name, seconds in found.items():
        table.add_row(name, f"{seconds:.3f}")
    Console().print(table)


def measure(values: int, partners: int, repeats: int) -> dict[str, float]:
    """Return the processor seconds of each kind of work, and ratios between them."""
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
    draw = made.charge(grid)
    generator = np.random.Generator(np.random.PCG64(1))
    update = generator.standard_normal(values, np.float32)
    words = np.zeros(values, "<u4")
    masks = [Mask(os.urandom(32)) for _ in range(clients)]

    def masked() -> None:
        for begin in range(0, values, BLOCK):
            block = words[begin : begin + BLOCK]
            add_masks(block, masks, first=begin, cipher=StreamCipher.AES_256_CTR)

    def drawn() -> None:
        for begin in range(0, values, BLOCK):
            draw(min(BLOCK, values - begin))

    noise_seconds = fastest(drawn, repeats)
    masks_seconds = fastest(masked, repeats)
    numpy_seconds = fastest(lambda: generator.standard_normal(values), repeats)
    return {
        "share of noise": noise_seconds,
        "share of noise, for a million parameters": noise_seconds / values * 1e6,
        "bound on the norm": fastest(lambda: made.bound(update), repeats),
        "masks": masks_seconds,
        "floating-point Gaussian numbers": numpy_seconds,
        "ratio of noise to floating-point numbers": noise_seconds / numpy_seconds,
        "ratio of noise to masks": noise_seconds / masks_seconds,
    }


if __name__ == "__main__":
    main()
