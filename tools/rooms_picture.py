"""Draw the picture of the subpackages in docs/contributing/architecture.md from the imports.

    .venv/bin/python tools/rooms_picture.py > docs/images/rooms.svg

A box is a subpackage: a folder directly in a package, with the number of modules in it. An arrow
points from a subpackage to one that it imports. Arrows that follow from other arrows are omitted:
if a imports b and b imports c, there is no arrow from a to c.
"""

from __future__ import annotations

import ast
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

from svg_parts import drawing, rectangle, text

HOUSE = Path(__file__).resolve().parents[1]

Graph: TypeAlias = Mapping[str, set[str]]
"""The names to which each name's arrows point."""

BOX_WIDTH, BOX_HEIGHT = 104, 38
GAP, STEP = 22, 74
"""Space between neighbouring boxes, and distance from one level to the next."""
PADDING, HEADING, MARGIN, BETWEEN = 22, 52, 24, 56
"""Space around a package's boxes, above them, around the picture and between packages."""
COLOURS = {
    "client": "#e3f1e4",
    "common": "#f1eee4",
    "deploy": "#e6ecf6",
    "experiments": "#efe6f3",
    "integrations": "#f3efe0",
    "relay": "#e4f1f1",
    "secagg": "#f4e6ec",
    "server": "#f6e7e3",
}


# The tree ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Package:
    """A package: modules by subpackage, modules at its root, and imports between subpackages."""

    name: str
    rooms: Mapping[str, int]
    doors: Sequence[str]
    arrows: Graph


def package_folders() -> list[Path]:
    """Return the folders of packages that contain subpackages, without the generated stubs."""
    return sorted({room.parents[1] for room in HOUSE.glob("*/potluck/*/*/__init__.py")})


def imported_names(module: Path) -> Iterator[list[str]]:
    """Yield each name that a module imports from the product, in parts: package, subpackage, …"""
    for node in ast.walk(ast.parse(module.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        yield from (name.split(".")[1:] for name in names if name.startswith("potluck."))


def read_package(folder: Path) -> tuple[Package, set[str]]:
    """Return a package, and the names of the packages that it imports."""
    rooms = {
        room.name: sum(module.name != "__init__.py" for module in room.rglob("*.py"))
        for room in sorted(folder.iterdir())
        if (room / "__init__.py").is_file()
    }
    arrows: dict[str, set[str]] = {room: set() for room in rooms}
    packages = set[str]()
    for module in sorted(folder.rglob("*.py")):
        room = module.relative_to(folder).parts[0]
        for package, *inside in imported_names(module):
            packages.add(package)
            if package == folder.name and room in rooms and inside and inside[0] in rooms:
                arrows[room].add(inside[0])
        arrows.get(room, set()).discard(room)
    doors = [module.stem for module in sorted(folder.glob("*.py")) if module.stem != "__main__"]
    return Package(folder.name, rooms, doors, reduced(arrows)), packages - {folder.name}


def reduced(graph: Graph) -> Graph:
    """Return an acyclic graph without the arrows that follow from other arrows."""

    def reachable(name: str) -> set[str]:
        return graph[name].union(*(reachable(other) for other in graph[name]))

    return {
        name: {other for other in others if not any(other in reachable(o) for o in others)}
        for name, others in graph.items()
    }


# Places ------------------------------------------------------------------------------------------


def levels(graph: Graph) -> dict[str, int]:
    """Return the level of each name: 0 if it points to nothing, else one above all its targets."""
    found: dict[str, int] = {}

    def level(name: str) -> int:
        if name not in found:
            found[name] = max((level(other) + 1 for other in graph[name]), default=0)
        return found[name]

    for name in sorted(graph):
        level(name)
    return found


@dataclass
class Arrangement:
    """Positions of a package's boxes. paths: points that each arrow passes."""

    columns: int
    height: int
    places: dict[str, tuple[float, int]] = field(default_factory=dict)
    paths: list[list[str]] = field(default_factory=list)


def arranged(package: Package) -> Arrangement:
    """Arrange boxes in levels; an arrow that crosses a level takes up space there, like a box."""
    level_of = levels(package.arrows)
    height = max(level_of.values(), default=0) + 1
    rows: list[list[str]] = [[] for _ in range(height)]
    for name in sorted(package.rooms):
        rows[level_of[name]].append(name)
    paths: list[list[str]] = []
    for name in sorted(package.arrows):
        for other in sorted(package.arrows[name]):
            between = range(level_of[name] - 1, level_of[other], -1)
            passed = [f"{name}>{other}@{level}" for level in between]
            for level, point in zip(between, passed, strict=True):
                rows[level].append(point)
            paths.append([name, *passed, other])
    columns = max(len(row) for row in rows)
    plan = Arrangement(columns, height, paths=paths)
    neighbours: dict[str, set[str]] = {}
    for path in paths:
        for upper, lower in pairwise(path):
            neighbours.setdefault(upper, set()).add(lower)
            neighbours.setdefault(lower, set()).add(upper)
    for _ in range(8):
        for sweep in (range(height), reversed(range(height))):
            for level in sweep:
                set_row(plan, rows[level], neighbours, level)
    return plan


def set_row(plan: Arrangement, row: list[str], neighbours: Graph, level: int) -> None:
    """Order a level's boxes by the mean position of their neighbours, and space them evenly."""

    def wish(name: str) -> float:
        tied = [plan.places[n][0] for n in neighbours.get(name, ()) if n in plan.places]
        return sum(tied) / len(tied) if tied else float(plan.columns)

    row.sort(key=lambda name: (wish(name), name))
    first = (plan.columns - len(row)) / 2
    for index, name in enumerate(row):
        plan.places[name] = (first + index, level)


# The picture -------------------------------------------------------------------------------------


def curve(points: Sequence[tuple[float, float]]) -> str:
    """Return an arrow as a curve through points; it is vertical at each point."""
    (x, y), *others = points
    steps = [f"M{x:g} {y:g}"]
    for to_x, to_y in others:
        middle = (y + to_y) / 2
        steps.append(f"C{x:g} {middle:g} {to_x:g} {middle:g} {to_x:g} {to_y:g}")
        x, y = to_x, to_y
    way = " ".join(steps)
    return f"<path d='{way}' fill='none' stroke='#555' stroke-width='1.4' marker-end='url(#to)'/>"


@dataclass(frozen=True)
class Block:
    """A package drawn at the origin."""

    name: str
    width: float
    height: float
    parts: Sequence[str]


def draw_package(package: Package) -> Block:
    """Draw a package: its name, its subpackages with arrows between them, its public modules."""
    plan = arranged(package)
    lines = wrapped(package.doors, width=max(34, 18 * plan.columns))
    width = max(plan.columns * (BOX_WIDTH + GAP) - GAP + 2 * PADDING, 300)
    bottom = HEADING + (plan.height - 1) * STEP + BOX_HEIGHT
    height = bottom + 26 + 16 * len(lines)
    left = (width - plan.columns * (BOX_WIDTH + GAP) + GAP) / 2

    def corner(name: str) -> tuple[float, float]:
        column, level = plan.places[name]
        return left + column * (BOX_WIDTH + GAP), HEADING + (plan.height - 1 - level) * STEP

    parts = [
        rectangle(0, 0, width, height, f"rx='10' fill='{COLOURS.get(package.name, '#eee')}'"),
        text(width / 2, 30, f"potluck.{package.name}", size=17, weight="bold"),
    ]
    for path in plan.paths:
        points: list[tuple[float, float]] = []
        for name in path:
            x, y = corner(name)
            if name != path[0]:
                points.append((x + BOX_WIDTH / 2, y - (1 if name in package.rooms else 0)))
            if name != path[-1]:
                points.append((x + BOX_WIDTH / 2, y + BOX_HEIGHT))
        parts.append(curve(points))
    for name, modules in package.rooms.items():
        x, y = corner(name)
        parts += [
            rectangle(x, y, BOX_WIDTH, BOX_HEIGHT, "rx='5' fill='white' stroke='#777'"),
            text(x + BOX_WIDTH / 2, y + 17, name, size=13, weight="bold"),
            text(x + BOX_WIDTH / 2, y + 31, counted(modules), size=10),
        ]
    for index, line in enumerate(lines):
        parts.append(text(width / 2, bottom + 28 + 16 * index, line, size=11))
    return Block(package.name, width, height, parts)


def counted(modules: int) -> str:
    """Return a number of modules as text."""
    return f"{modules} module{'s' * (modules != 1)}"


def wrapped(doors: Sequence[str], *, width: int) -> list[str]:
    """Return the names of a package's public modules, in lines of `width` characters."""
    return textwrap.wrap(f"at the root: {', '.join(doors)}", width)


def picture() -> str:
    """Return the picture of all packages; a package is above the packages that it imports."""
    found = [read_package(folder) for folder in package_folders()]
    names = {package.name for package, _ in found}
    arrows = reduced({package.name: imported & names for package, imported in found})
    level_of = levels(arrows)
    rows: list[list[Block]] = [[] for _ in range(max(level_of.values()) + 1)]
    for package, _ in found:
        rows[level_of[package.name]].append(draw_package(package))
    widths = [sum(b.width for b in row) + BETWEEN * (len(row) - 1) for row in rows]
    width, y = max(widths) + 2 * MARGIN, float(MARGIN)
    parts: list[str] = []
    box_of: dict[str, tuple[float, float, Block]] = {}
    for row, row_width in reversed(list(zip(rows, widths, strict=True))):
        x = (width - row_width) / 2
        for block in row:
            box_of[block.name] = (x, y, block)
            inside = "".join(block.parts)
            parts.append(f"<g transform='translate({x:g} {y:g})'>{inside}</g>")
            x += block.width + BETWEEN
        y += max(block.height for block in row) + BETWEEN
    for name in sorted(arrows):
        x, top, block = box_of[name]
        for other in sorted(arrows[name]):
            to_x, to_y, to = box_of[other]
            low, high = max(x, to_x), min(x + block.width, to_x + to.width)
            parts.append(curve([((low + high) / 2, top + block.height), ((low + high) / 2, to_y)]))
    height = y - BETWEEN + MARGIN
    title = "The rooms of Potluck and which of them import which"
    return drawing(parts, width=width, height=height, title=title)


if __name__ == "__main__":
    sys.stdout.write(picture())
