"""Print a table of counts that describe the structure of the code, with a goal for each.

    .venv/bin/python tools/house_figures.py          # the table
    .venv/bin/python tools/house_figures.py --names  # also what is counted, line by line
    .venv/bin/python tools/house_figures.py --page   # writes the table of architecture.md instead

Counts are over the source roots, without generated stubs.

- A *guest* is code that the core works without, such as secure aggregation or the adapters of
  libraries. `GUESTS` lists the packages. Counted are the names that modules of the core import from
  them, each once.
- *Returns* of an update's walk: docs/contributing/walks.md names the modules that an update passes,
  in order, and a test checks that the functions named there exist. Each module stands for its
  subpackage. Counted is how often the walk enters a subpackage that it has left before.
- A *form* of a committed round is a class or a message of the schema with a field `bytes_up`, apart
  from those in `NOT_COMMITTED`; a subclass of such a class; or one of `OTHER_FORMS`.
- A *small* module has at most `SMALL` lines. Modules named by entry points are not counted as such.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path

import package_tables

HOUSE = Path(__file__).resolve().parents[1]
PAGE = HOUSE / "docs" / "contributing" / "architecture.md"
WALKS = PAGE.with_name("walks.md")
BEGIN, END = "<!-- figures -->\n", "<!-- /figures -->"
MARKED = re.compile(f"{BEGIN}.*{END}", re.DOTALL)

CORE = ("common", "server", "client")
GUESTS = {
    "secure aggregation": "potluck.secagg",
    "privacy of updates": "potluck.privacy",
    "verifiable selection": "potluck.verifiable",
    "adapters": "potluck.integrations.adapters",
    "trackers": "potluck.integrations.trackers",
    # Not a host's routes (`client.transfer.object_stores`): they hold what its owner allows and
    # choose between a store and the coordinator. The requests to a store are found by name.
    "object stores": "potluck.integrations.s3",
    "traces": "potluck.integrations.tracing",
    "Ray": "potluck.experiments.cluster",
}
INTEGRATIONS = "potluck.integrations"
PLUG_INS = ("server.selectors", "server.strategies")
"""The largest subpackages of plug-ins in the core."""
SMALL = 120
"""Maximum number of lines of a small module."""
ROUND_FIELD = "bytes_up"
NOT_COMMITTED = {
    "RunSummary": "a run",
    "LiveShown": "a round in progress",
    "RoundProgress": "a round in progress",
}
"""Classes and messages that have the field, and what they represent instead."""
OTHER_FORMS = (
    "potluck.common.tables.round_columns.round_row",
    "potluck.deploy.operator.json_view.round_values",
    "potluck.deploy.cards.card_parts.CardRound",
    "potluck.experiments.reports.tables.tidy_rows",
    "potluck.server.store.sql.schema.rounds",
)
"""Forms without the field: tables, dictionaries, and the row of a card."""
LINK = re.compile(r"\]\((?:\.\./)+([\w/]+/potluck/[\w/]+\.py)\)")
MESSAGE = re.compile(r"^message (\w+) \{(.*?)^\}", re.DOTALL | re.MULTILINE)


# Modules ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Module:
    """A Python file of a source root. name: its name in import statements."""

    root: str
    name: str
    path: Path

    @property
    def package(self) -> str:
        """Name of the package below `potluck`."""
        return self.name.split(".")[1]

    @property
    def subpackage(self) -> str:
        """Package and subpackage of the module; the package alone for a module at its root."""
        parts = self.name.split(".")[1:]
        if len(parts) > 2 or (len(parts) == 2 and self.path.name == "__init__.py"):
            return ".".join(parts[:2])
        return parts[0]

    @cached_property
    def text(self) -> str:
        """Source text of the module."""
        return self.path.read_text()

    @cached_property
    def _nodes(self) -> Sequence[ast.AST]:
        tree = ast.parse(self.text)
        return [tree, *statements(tree)]

    @cached_property
    def lines(self) -> int:
        """Number of lines."""
        return len(self.text.splitlines())

    @cached_property
    def import_nodes(self) -> Sequence[ast.Import | ast.ImportFrom]:
        """All import statements, also those inside functions."""
        kinds = (ast.Import, ast.ImportFrom)
        return [node for node in self._nodes if isinstance(node, kinds)]

    @cached_property
    def import_lines(self) -> int:
        """Number of lines of the import statements."""
        return sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in self.import_nodes)

    @cached_property
    def plain_lines(self) -> int:
        """Number of lines of docstrings and of blank lines outside them."""
        documented = set[int]()
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        for node in self._nodes:
            if isinstance(node, kinds) and ast.get_docstring(node) is not None:
                first = node.body[0]
                documented |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
        lines = enumerate(self.text.splitlines(), 1)
        return len(documented | {number for number, text in lines if not text.strip()})

    @cached_property
    def classes(self) -> Sequence[ast.ClassDef]:
        """All classes, nested ones as well."""
        return [node for node in self._nodes if isinstance(node, ast.ClassDef)]

    def imported(self) -> Iterator[tuple[str, str]]:
        """Yield each imported name, with its module first; the name is empty if a module is
        imported."""
        for node in self.import_nodes:
            if isinstance(node, ast.Import):
                yield from ((alias.name, "") for alias in node.names)
            else:
                if node.level:
                    raise ValueError(f"{self.name} has a relative import; name the package")
                yield from ((node.module or "", alias.name) for alias in node.names)


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all statements in a node, without their expressions, which most nodes are."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield child
            yield from statements(child)


def module_at(path: Path, house: Path = HOUSE) -> Module:
    """Return the module in a file of a source root."""
    parts = path.relative_to(house).with_suffix("").parts
    name = ".".join(parts[1:]).removesuffix(".__init__")
    return Module(parts[0], name, path)


def read_modules(house: Path = HOUSE) -> list[Module]:
    """Return all modules of the source roots, without generated stubs."""
    files = sorted(house.glob("*/potluck/**/*.py"))
    found = [module_at(path, house) for path in files]
    return [module for module in found if module.package != package_tables.GENERATED]


# Figures ------------------------------------------------------------------------------------------


def guest_of(name: str) -> str | None:
    """Return the guest that a module belongs to; None if it belongs to none."""
    for guest, prefix in GUESTS.items():
        if f"{name}.".startswith(f"{prefix}."):
            return guest
    return "other integrations" if f"{name}.".startswith(f"{INTEGRATIONS}.") else None


def guest_imports(modules: Iterable[Module]) -> dict[str, dict[str, set[str]]]:
    """Return the modules of the core that import from guests, by guest and imported name."""
    found: dict[str, dict[str, set[str]]] = {}
    for module in modules:
        if module.package not in CORE or guest_of(module.name):
            continue
        for origin, name in module.imported():
            full = f"{origin}.{name}".rstrip(".")
            guest = guest_of(origin) or guest_of(full)
            if guest:
                found.setdefault(guest, {}).setdefault(full, set()).add(module.name)
    return found


def importers(modules: Iterable[Module]) -> dict[str, set[str]]:
    """Return the modules that import each module, by its name."""
    modules = list(modules)
    found: dict[str, set[str]] = {module.name: set() for module in modules}
    for module in modules:
        for origin, name in module.imported():
            full = f"{origin}.{name}"
            target = full if full in found else origin
            if target in found and target != module.name:
                found[target].add(module.name)
    return found


def walk(page: str) -> list[str]:
    """Return the subpackages that an update passes, in order, as the page's first walk lists
    them."""
    section = page.partition("## Walk 1")[2].partition("\n## ")[0]
    steps = re.findall(r"^\d+\. .*?(?=^\d+\. |^\S|\Z)", section, re.DOTALL | re.MULTILINE)
    passed = [module_at(HOUSE / path).subpackage for step in steps for path in LINK.findall(step)]
    return [name for name, _ in groupby(passed)]


def returns(passed: Sequence[str]) -> dict[str, int]:
    """Return how often the path of an update enters a subpackage that it has left before, by
    subpackage; the most frequent first."""
    return {name: entered - 1 for name, entered in Counter(passed).most_common() if entered > 1}


def entry_points() -> set[str]:
    """Return the names of the modules in which pyproject.toml declares an entry point."""
    project = tomllib.loads((HOUSE / "pyproject.toml").read_text())["project"]
    groups = [project["scripts"], *project["entry-points"].values()]
    return {target.partition(":")[0] for group in groups for target in group.values()}


def small_with_one_importer(modules: Sequence[Module]) -> list[str]:
    """Return the names of small modules that exactly one other imports and that are not found by
    name."""
    lines = {module.name: module.lines for module in modules}
    found_by_name = entry_points()
    return [
        name
        for name, others in importers(modules).items()
        if len(others) == 1 and lines[name] <= SMALL and name not in found_by_name
    ]


def round_forms(modules: Iterable[Module], schema: Mapping[str, str]) -> list[str]:
    """Return the forms of a committed round, see the module's docstring. schema: text by file."""
    modules = list(modules)
    forms = [
        f"{module.name}.{node.name}"
        for module in modules
        for node in module.classes
        if node.name not in NOT_COMMITTED
        and any(
            isinstance(child, ast.AnnAssign)
            and isinstance(child.target, ast.Name)
            and child.target.id == ROUND_FIELD
            for child in node.body
        )
    ]
    while more := [name for name in subclasses(modules, forms) if name not in forms]:
        forms += more
    return [
        *forms,
        *OTHER_FORMS,
        *(
            f"{file}: {name}"
            for file, text in sorted(schema.items())
            for name, body in MESSAGE.findall(text)
            if name not in NOT_COMMITTED and re.search(rf"\b{ROUND_FIELD}\b", body)
        ),
    ]


def subclasses(modules: Iterable[Module], classes: Sequence[str]) -> Iterator[str]:
    """Yield the full names of the classes whose direct base is one of `classes` (full names)."""
    for module in modules:
        defined = {node.name: f"{module.name}.{node.name}" for node in module.classes}
        imported = {
            alias.asname or alias.name: f"{node.module}.{alias.name}"
            for node in module.import_nodes
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        known = defined | imported
        for node in module.classes:
            bases = {known.get(base.id) for base in node.bases if isinstance(base, ast.Name)}
            if bases & set(classes):
                yield f"{module.name}.{node.name}"


def read_schema() -> dict[str, str]:
    """Return the text of each file of the schema, by file name."""
    return {file.name: file.read_text() for file in (HOUSE / "protos").rglob("*.proto")}


# The table ----------------------------------------------------------------------------------------


def core_of(modules: Iterable[Module]) -> list[Module]:
    """Return the modules of the core."""
    return [module for module in modules if module.package in CORE and not guest_of(module.name)]


def figures(modules: Sequence[Module]) -> list[tuple[str, str, str]]:
    """Return one row per count: its description, its value and its goal."""
    core = core_of(modules)
    plug_ins = [module for module in core if module.subpackage in PLUG_INS]
    by_name = entry_points()
    lines = sum(module.lines for module in modules)
    import_lines = sum(module.import_lines for module in modules)
    rows = [
        ("lines of the core", f"{sum(m.lines for m in core):,}", "≤ 46,000"),
        ("lines of selectors and strategies", f"{sum(m.lines for m in plug_ins):,}", ""),
        ("docstrings and blank lines of the core", f"{sum(m.plain_lines for m in core):,}", ""),
        ("modules of the core", f"{len(core)}", "≤ 400"),
        ("modules of selectors and strategies", f"{len(plug_ins)}", ""),
        ("entry points' modules among these", f"{sum(m.name in by_name for m in plug_ins)}", ""),
        ("lines of the product", f"{lines:,}", ""),
        ("modules of the product", f"{len(modules)}", "≤ 600"),
        ("entry points' modules", f"{sum(m.name in by_name for m in modules)}", ""),
        ("small modules with one importer", f"{len(small_with_one_importer(modules))}", ""),
        ("classes", f"{sum(len(module.classes) for module in modules):,}", ""),
        ("share of lines that import", f"{import_lines / lines * 100:.1f} %", "≤ 8 %"),
        ("mean lines of a module", f"{lines / len(modules):.0f}", ""),
        ("mean lines of a module that import", f"{import_lines / len(modules):.0f}", ""),
    ]
    found = guest_imports(modules)
    names = sum(map(len, found.values()))
    importing = {module for by_name in found.values() for ms in by_name.values() for module in ms}
    rows.append(("names of guests that the core imports", f"{names}", "0"))
    rows += [(f"… of {guest}", f"{len(by_name)}", "0") for guest, by_name in sorted(found.items())]
    rows.append(("modules of the core that import a guest", f"{len(importing)}", "0"))
    once = [name for name, others in importers(modules).items() if len(others) == 1]
    passed = walk(WALKS.read_text())
    entered_again = returns(passed)
    spelling = [module for module in modules if re.search(rf"\b{ROUND_FIELD}\b", module.text)]
    rows += [
        ("modules that exactly one other imports", f"{len(once)}", ""),
        ("subpackages that an update passes", f"{len(set(passed))}", ""),
        ("returns of an update's walk", f"{sum(entered_again.values())}", "≤ 8"),
    ]
    rows += [(f"… to {name}", f"{count}", "") for name, count in entered_again.items()]
    forms = round_forms(modules, read_schema())
    rows += [
        ("forms of a committed round", f"{len(forms)}", "≤ 5"),
        ("… subclasses", f"{len(set(subclasses(modules, forms)))}", ""),
        ("… tables and dictionaries", f"{len(OTHER_FORMS)}", ""),
        (f"modules that spell out {ROUND_FIELD}", f"{len(spelling)}", ""),
    ]
    return rows


REASONS = {
    "lines of the core": (
        "{lines of selectors and strategies} are selectors and strategies; "
        "{docstrings and blank lines of the core} are docstrings and blank lines."
    ),
    "modules of the core": (
        "{modules of selectors and strategies} are in `selectors` and `strategies`; entry points "
        "name {entry points' modules among these} of these."
    ),
    "modules of the product": (
        "Entry points name {entry points' modules}. Another {small modules with one importer} are "
        "small and have one importer; readers look for their subjects by file name."
    ),
    "share of lines that import": (
        "A module has {mean lines of a module} lines on average. It imports each name explicitly, "
        "in {mean lines of a module that import} of them."
    ),
    "returns of an update's walk": ("{returns}: the run directs each step."),
    "forms of a committed round": (
        "One record and its {… subclasses} subclasses, {… tables and dictionaries} tables and "
        "dictionaries; the others are contracts: message, `summary.json`, results, web UI."
    ),
}
"""Reason why each figure is above its goal. In braces: names of other figures."""


def page_table(modules: Sequence[Module]) -> str:
    """Return the table of architecture.md: the figures above their goal, with the reasons.

    Numbers of lines are rounded to hundreds, so that few changes of the code change the page.
    """
    rows = [(what, _rounded(number), goal) for what, number, goal in figures(modules)]
    now = {what: number for what, number, _ in rows}
    again = returns(walk(WALKS.read_text()))
    now["returns"] = ", ".join(f"{n} `{name.split('.')[-1]}`" for name, n in again.items())
    lines = ["| figure | now | goal | why it is above the goal |", "|---|---:|---:|---|"]
    for what, number, goal in rows:
        if what in REASONS:
            cells = (what, number, goal.removeprefix("≤ "), REASONS[what].format_map(now))
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _rounded(number: str) -> str:
    """Return a number of thousands rounded to hundreds; any other number unchanged."""
    return f"{round(int(number.replace(',', '')), -2):,}" if "," in number else number


def filled(page: str, table: str) -> str:
    """Return the text of the page with the table between its marks."""
    return MARKED.sub(lambda _: f"{BEGIN}{table}{END}", page)


def sizes(modules: Sequence[Module]) -> list[tuple[str, str, str]]:
    """Return the lines and modules of each source root, and of each subpackage in it."""
    counted = Counter[tuple[str, str]]()
    count = Counter[tuple[str, str]]()
    for module in modules:
        for place in ((module.root, ""), (module.root, module.subpackage)):
            counted[place] += module.lines
            count[place] += 1
    return [
        (f"  {name}" if name else f"{root}/", f"{counted[root, name]:,}", f"{count[root, name]}")
        for root, name in sorted(counted)
    ]


def aligned(head: tuple[str, str, str], rows: Sequence[tuple[str, str, str]]) -> str:
    """Return the rows as text; the first column is left-aligned, the others right-aligned."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(3)]
    lines = [
        f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}".rstrip()
        for a, b, c in (head, *rows)
    ]
    return "\n".join(lines) + "\n"


def names_counted(modules: Sequence[Module]) -> Iterator[str]:
    """Yield the counted names, one per line."""
    for guest, by_name in sorted(guest_imports(modules).items()):
        for name, others in sorted(by_name.items()):
            yield f"{guest}: {name} ← {', '.join(sorted(others))}"
    yield from (f"form: {form}" for form in round_forms(modules, read_schema()))
    yield f"walk: {' → '.join(walk(WALKS.read_text()))}"
    yield from (f"small: {name}" for name in sorted(small_with_one_importer(modules)))
    for name, others in sorted(importers(modules).items()):
        if len(others) == 1:
            yield f"imported once: {name} ← {next(iter(others))}"


if __name__ == "__main__":
    product = read_modules()
    if "--page" in sys.argv[1:]:
        PAGE.write_text(filled(PAGE.read_text(), page_table(product)))
        sys.exit()
    sys.stdout.write(aligned(("figure", "now", "goal"), figures(product)))
    sys.stdout.write("\n" + aligned(("place", "lines", "modules"), sizes(product)))
    if "--names" in sys.argv[1:]:
        sys.stdout.write("\n" + "\n".join(names_counted(product)) + "\n")
