"""SVG parts for the pictures that scripts draw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

_FONT = "font-family='DejaVu Sans, Verdana, sans-serif'"
_ARROWHEAD = (
    "<defs><marker id='to' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' markerHeight='7' "
    "orient='auto'><path d='M0 0L8 4L0 8z' fill='#555'/></marker></defs>"
)


def text(
    x: float,
    y: float,
    words: str,
    *,
    size: int,
    weight: str = "normal",
    anchor: Literal["start", "middle", "end"] = "middle",
) -> str:
    """Return a line of text. anchor: the part of the line that is at x: start, middle or end."""
    return (
        f"<text x='{x:g}' y='{y:g}' font-size='{size}' font-weight='{weight}' "
        f"text-anchor='{anchor}' fill='#222'>{words}</text>"
    )


def rectangle(x: float, y: float, width: float, height: float, style: str) -> str:
    """Return a rectangle with this style."""
    return f"<rect x='{x:g}' y='{y:g}' width='{width:g}' height='{height:g}' {style}/>"


def line(start: tuple[float, float], end: tuple[float, float], style: str) -> str:
    """Return a straight line; the style `ARROW` makes it an arrow."""
    (x, y), (to_x, to_y) = start, end
    return f"<path d='M{x:g} {y:g}L{to_x:g} {to_y:g}' fill='none' stroke='#555' {style}/>"


ARROW = "stroke-width='1.4' marker-end='url(#to)'"


def drawing(parts: Sequence[str], *, width: float, height: float, title: str) -> str:
    """Return the whole picture on white, with one element per line."""
    size = f"viewBox='0 0 {width:g} {height:g}' width='{width:g}' height='{height:g}'"
    lines = [
        f"<svg xmlns='http://www.w3.org/2000/svg' {size} {_FONT}>",
        f"<title>{title}</title>",
        _ARROWHEAD,
        rectangle(0, 0, width, height, "fill='white'"),
        *parts,
        "</svg>",
    ]
    return "\n".join(lines).replace("><", ">\n<") + "\n"
