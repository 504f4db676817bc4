"""Speed at which a round's updates are reduced, compared with the memory bound of numpy.

    python benchmarks/reduce.py --clients 10 --megabytes 100

Update files are written once and read from the page cache, as in a round. The bound, measured in
the same run with as many threads, is numpy's sum of the same bytes read from the files: every
method must at least read them. Speeds are in float32 bytes of the model, times the number of
clients; encoded files are smaller.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from potluck.common.tensors.encoding import EncodedUpdate, Encoding, encode, encoded_layout
from potluck.common.tensors.tensor_files import TensorFile, open_tensors, write_tensors
from potluck.server.reduce.blocks import BLOCK_ELEMENTS
from potluck.server.reduce.reduction import reduce
from potluck.server.reduce.update_norms import update_norms
from potluck.server.strategy import Combine, Reduction

TENSORS = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument(
        "--megabytes", type=float, default=100.0, help="size of the float32 model, in MB"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        speeds = measure(
            Path(folder), options.clients, options.megabytes, options.threads, options.repeats
        )
    if options.json:
        print(json.dumps({"clients": options.clients, "megabytes": options.megabytes, **speeds}))
        return
    print(f"{options.clients} updates of {options.megabytes:g} MB, {options.threads} threads\n")
    for name, speed in speeds.items():
        print(f"{name:<24}{speed:8.2f} GB/s{speed / speeds['bound']:8.0%} of the bound")


def measure(
    folder: Path, clients: int, megabytes: float, threads: int, repeats: int
) -> dict[str, float]:
    """Return the GB/s of each reduction, the best of `repeats`, by name; `bound` first."""
    generator = np.random.Generator(np.random.SFC64(1))
    elements = int(megabytes * 1e6 / 4 / TENSORS)
    arrays = {
        f"layer{index}.weight": generator.standard_normal(elements, dtype=np.float32)
        for index in range(TENSORS)
    }
    write_tensors(folder / "model", arrays)
    model = open_tensors(folder / "model")
    total = clients * model.layout.data_bytes

    def speed(work: Callable[[], object]) -> float:
        return total / 1e9 / min(seconds(work) for _ in range(repeats))

    def reducing(updates: list[EncodedUpdate], combine: Combine) -> float:
        norms = np.ones(clients)  # placeholder: computing norms is measured separately
        return speed(lambda: reduce(updates, combine, model, norms=norms, threads=threads))

    plain: list[EncodedUpdate] = []
    for index in range(clients):
        changed = {name: array + np.float32(index) for name, array in arrays.items()}
        write_tensors(folder / f"{index}", changed)
        plain.append(EncodedUpdate(open_tensors(folder / f"{index}"), model.layout))
    weights = np.full(clients, 1 / clients)
    speeds = {"bound": speed(lambda: sum_all(plain, threads))}
    for name, combine in {
        "mean": Combine(weights=weights),
        "clipped mean": Combine(weights=weights, reduction=Reduction.CLIPPED_MEAN, clip=1.0),
        "median": Combine(weights=weights, reduction=Reduction.MEDIAN),
        "trimmed mean": Combine(weights=weights, reduction=Reduction.TRIMMED_MEAN, trim=0.1),
    }.items():
        speeds[name] = reducing(plain, combine)
    speeds["norms"] = speed(lambda: update_norms(plain, model, threads=threads))
    for encoding in (Encoding.BFLOAT16, Encoding.INT8):
        deltas = encoded(folder, clients, encoding, arrays, model)
        speeds[f"mean, {encoding} deltas"] = reducing(deltas, Combine(weights=weights))
    return speeds


def encoded(
    folder: Path,
    clients: int,
    encoding: Encoding,
    arrays: dict[str, np.typing.NDArray[np.float32]],
    model: TensorFile,
) -> list[EncodedUpdate]:
    """Write deltas from the model to files in an encoding."""
    generator = np.random.Generator(np.random.PCG64(1))
    layout = encoded_layout(model.layout, encoding)
    updates = []
    for index in range(clients):
        path = folder / f"{index}.{encoding}"
        changed = {name: array * np.float32(1.01) for name, array in arrays.items()}
        write_tensors(
            path, encode(changed, encoding, base=model.arrays, generator=generator), layout=layout
        )
        updates.append(EncodedUpdate(open_tensors(path), model.layout, encoding, model))
    return updates


def sum_all(updates: list[EncodedUpdate], threads: int) -> float:
    """Return the sum of all weights of all updates, in float32; threads share the blocks."""
    size = updates[0].parameters
    begins = iter(range(0, size, 2 * BLOCK_ELEMENTS))

    def work() -> float:
        scratch = np.empty(2 * BLOCK_ELEMENTS, np.float32)
        return sum(
            float(update.block(begin, min(begin + 2 * BLOCK_ELEMENTS, size), scratch).sum())
            for begin in begins
            for update in updates
        )

    with ThreadPoolExecutor(threads) as pool:
        return sum(future.result() for future in [pool.submit(work) for _ in range(threads)])


def seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
