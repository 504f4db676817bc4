"""A picture of a partition: the number of each client's samples, by class."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from potluck.deploy.view.pictures import write_picture
from potluck.deploy.view.readable import readable_count
from potluck.experiments.reports.partition_description import Description

_INK = "#333333"


def plot_partition(description: Description, path: Path) -> None:
    """Write a PNG with one bar per client: its samples by class. Raises StorageError."""
    counts = np.array([client.label_counts for client in description.clients])
    clients, classes = counts.shape
    figure = Figure(figsize=(float(np.clip(0.12 * clients, 7.0, 16.0)), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    colours = colormaps["tab20" if classes <= 20 else "turbo"]
    base = np.zeros(clients)
    for label in range(classes):
        shade = colours(label if classes <= 20 else label / (classes - 1))
        axes.bar(
            np.arange(clients), counts[:, label], bottom=base, width=0.9, color=shade,
            label=str(label), linewidth=0,
        )  # fmt: skip
        base += counts[:, label]
    axes.set_xlim(-0.6, clients - 0.4)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("client", color=_INK)
    axes.set_ylabel("samples by class", color=_INK)
    axes.tick_params(colors=_INK, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.legend(
        title="class", loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8,
        ncols=-(-classes // 20), reverse=True,
    )  # fmt: skip
    samples = int(counts.sum())
    axes.set_title(
        f"{description.task}: {readable_count(clients, 'client')}, {samples:,} samples, "
        f"CCI {description.metrics.cci:.3f}",
        loc="left", fontsize=12, color=_INK,
    )  # fmt: skip
    write_picture(figure, path, dpi=130)
