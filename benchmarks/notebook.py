"""Seconds from imports to the first trained model in a notebook.

A new Jupyter kernel runs the first cell of examples/notebooks/first-federation.ipynb: first its
import, then the rest, which starts a coordinator and two hosts and trains for five rounds.

    python benchmarks/notebook.py --repeats 3
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

from jupyter_client.manager import start_new_kernel

NOTEBOOK = Path(__file__).parents[1] / "examples" / "notebooks" / "first-federation.ipynb"


def first_cell() -> tuple[str, str]:
    """Return the import of the first cell, and the lines after it."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    lines = next(cell["source"] for cell in cells if cell["cell_type"] == "code")
    code = "".join(lines)
    imported, _, rest = code.partition("\n\n")
    return imported, rest


def measure() -> dict[str, float]:
    """Return the seconds of the cell's import and of its other lines, in a new kernel."""
    manager, client = start_new_kernel()
    try:
        seconds = {}
        for name, code in zip(("import", "train"), first_cell(), strict=True):
            began = time.perf_counter()
            answer = client.execute_interactive(code, timeout=120, output_hook=lambda _: None)
            seconds[name] = time.perf_counter() - began
            if answer["content"]["status"] != "ok":
                raise SystemExit("\n".join(answer["content"]["traceback"]))
        return seconds
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    lines = [line for part in first_cell() for line in part.splitlines() if line.strip()]
    found = [measure() for _ in range(arguments.repeats)]
    medians = {name: statistics.median(each[name] for each in found) for name in found[0]}
    if arguments.json:
        print(json.dumps({"lines": len(lines), "median_seconds": medians, "all": found}))
        return
    print(f"{len(lines)} lines; import {medians['import']:.1f} s, then {medians['train']:.1f} s")


if __name__ == "__main__":
    main()
