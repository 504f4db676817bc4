"""A matplotlib figure that notebooks show."""

from __future__ import annotations

from io import BytesIO

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


class Picture(Figure):
    """A figure made without pyplot; a notebook shows it even if pyplot is not imported."""

    def __init__(self, *, width: float, height: float) -> None:
        """Make an empty figure. width, height: in inches."""
        super().__init__(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(self)

    def _repr_png_(self) -> bytes:
        with BytesIO() as file:
            self.savefig(file, format="png", dpi=80, facecolor="white")
            return file.getvalue()
