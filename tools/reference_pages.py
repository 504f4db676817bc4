"""Fill the generated parts of the pages on selectors and strategies in docs.

    .venv/bin/python tools/reference_pages.py

Each page is named like its plug-in. Its prose is written by hand. Its table of facts and the values
and defaults of its options come from the code. The last column of the options, their effect, is
written by hand and not changed. The overview of each folder shows the first paragraph of every
page.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from compatibility_table import built_in, run_text, try_all
from potluck.common.errors import ConfigurationError
from potluck.common.run_file.run_settings import PrivateUpdates
from potluck.common.settings import plugins
from potluck.server.plan.plan import draw_up
from potluck.server.plan.selection_privacy import Protection, Treatment, verdict_on
from potluck.server.selection import Selector
from potluck.server.strategy import Strategy
from what_leaves import leaving_table

DOCS = Path(__file__).resolve().parents[1] / "docs"
REFERENCE = DOCS / "reference"
SELECTION = DOCS / "privacy" / "selection.md"
"""The page on selectors in runs with noise."""
OWNERS = DOCS / "privacy" / "for-data-owners.md"
"""The page with the table of what leaves a client."""
FOLDERS = {plugins.SELECTORS: "selectors", plugins.STRATEGIES: "strategies"}
FIELDS = (
    "When",
    "Needs",
    "Costs",
    "Reveals",
    "Options",
)
"""Titles of the sections of every page, in order."""
_TREATMENTS = {
    Treatment.FREE: "yes",
    Treatment.CHARGED: "yes; clients are charged for their answers",
    Treatment.REFUSED: "no",
}
_MASKED = 'secure_aggregation = true\n[task]\nname = "colored-digits"\nclients = 20\n'
_TYPES = {int: "integer", float: "number", str: "name"}
_ROW = re.compile(r"^\| `(\w+)` \|.*\| (.*) \|$", re.MULTILINE)


def pages(group: str) -> dict[str, Path]:
    """Return the page of each built-in plug-in of a group, by the plug-in's name."""
    return {name: REFERENCE / FOLDERS[group] / f"{name}.md" for name in built_in(group)}


def marked(text: str, mark: str, content: str) -> str:
    """Return the page with new content between two comments. Raises SystemExit if it lacks them."""
    between = re.compile(f"<!-- {mark} -->\n.*?<!-- /{mark} -->", re.DOTALL)
    if not between.search(text):
        raise SystemExit(f"the page lacks '<!-- {mark} -->'; add it: {text.partition(chr(10))[0]}")
    return between.sub(lambda _: f"<!-- {mark} -->\n{content}\n<!-- /{mark} -->", text, count=1)


_NOTHING = {"none", "no limit"}
"""Values of facts that a page omits."""


def filled(group: str, name: str, text: str) -> str:
    """Return the page of a plug-in, with its facts and options from the code."""
    facts = selector_facts(name) if group == plugins.SELECTORS else strategy_facts(name)
    rows = "\n".join(f"| {what} | {value} |" for what, value in facts if value not in _NOTHING)
    text = marked(text, "facts", f"| with the default options | |\n|---|---|\n{rows}")
    return marked(text, "options", option_table(plugins.find(group, name), text))


def summary(text: str) -> str:
    """Return the first paragraph of a page."""
    return " ".join(text.split("\n\n")[1].split())


def overview(group: str) -> str:
    """Return the table of all plug-ins of a group, with the facts that matter for a choice."""
    if group == plugins.SELECTORS:
        head, cells = "needs", {name: _short_needs(name) for name in pages(group)}
    else:
        head, cells = (
            "models sent per direction",
            {name: _short_traffic(name) for name in pages(group)},
        )
    lines = [f"| name | in a sentence | {head} | secure aggregation |", "|---|---|---|---|"]
    for name, page in pages(group).items():
        line = summary(page.read_text(encoding="utf-8"))
        lines.append(f"| [`{name}`]({name}.md) | {line} | {cells[name]} | {_masked(group, name)} |")
    return "\n".join(lines)


def selector_facts(name: str) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of each fact that a selector declares."""
    selector = cast(Selector, plugins.find(plugins.SELECTORS, name)())
    yield "profiles that clients disclose once", _names(selector.needs_profiles)
    yield "questions that hosts must allow", _names(selector.asks_questions)
    yield "numbers reported with each update", _names(selector.reports)
    yield "facts of single updates", _names(selector.needs_facts)
    yield "evaluation data on the coordinator", "yes" if selector.measures else "no"
    yield "maximum number of clients", f"{selector.most_clients or 'no limit'}"
    yield "recommended `[training]`", _settings(selector.training)
    yield "works with secure aggregation", _masked(plugins.SELECTORS, name)
    for unit in _units():
        verdict = verdict_on(selector, name, unit).treatment
        yield f'works with `[privacy]`, `unit = "{unit}"`', _TREATMENTS[verdict]


def noise_table() -> str:
    """Return the table of selectors in runs with noise; selectors with equal facts share a row."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for name in pages(plugins.SELECTORS):
        selector = cast(Selector, plugins.find(plugins.SELECTORS, name)())
        verdicts = [verdict_on(selector, name, unit) for unit in _units()]
        cells = tuple(": ".join(filter(None, (v.treatment, v.reason))) for v in verdicts)
        rows.setdefault(cells, []).append(name)
    units = [f'`unit = "{unit}"`' for unit in _units()]
    lines = [f"| selectors | {' | '.join(units)} |", f"|---|{'---|' * len(units)}"]
    lines += [f"| {_names(names)} | {' | '.join(cells)} |" for cells, names in sorted(rows.items())]
    return "\n".join(lines)


def _units() -> list[Protection]:
    """Return the units that a run file may name."""
    hint = PrivateUpdates.model_fields["unit"].annotation
    return [Protection(unit) for unit in typing.get_args(hint)]


def strategy_facts(name: str) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of each fact that a strategy declares, and of its compatibility."""
    strategy = cast(Strategy, plugins.find(plugins.STRATEGIES, name)())
    _, _, adam, step, masked = _compatibility()[name]
    yield "tensors beside the weights, in both directions", _names(strategy.auxiliary)
    yield "profiles that clients disclose once", _names(strategy.needs_profiles)
    yield "reads single updates", "yes" if strategy.individual else "no"
    yield "weighs updates by samples", "yes" if strategy.by_samples else "no"
    yield "trains on the coordinator", "yes" if strategy.trains else "no"
    yield "maximum number of clients", f"{strategy.most_clients or 'no limit'}"
    yield "recommended `[training]`", _settings(strategy.training)
    yield "selectors that it does not work with", _refused(name, plugins.SELECTORS)
    yield "objectives that it does not work with", _refused(name, plugins.OBJECTIVES)
    yield "works with `adam` and `adamw`", adam.replace("warns", "with a warning")
    yield "works as the `step` of `scaffold`", step
    yield "works with secure aggregation", masked


def option_table(plugin: type[plugins.Plugin], text: str) -> str:
    """Return the table of a plug-in's options. text: the current page, from which the descriptions
    of their effects are copied."""
    parameters = inspect.signature(plugin).parameters
    if not parameters:
        return "No options."
    _, _, options = text.partition("<!-- options -->")
    effects = dict(_ROW.findall(options))
    hints = _hints(plugin)
    lines = ["| option | values | default | effect |", "|---|---|---|---|"]
    for name, parameter in parameters.items():
        default = _default(parameter.default)
        effect = effects.get(name, "")
        lines.append(f"| `{name}` | {values(hints[name])} | {default} | {effect} |")
    return "\n".join(lines)


def _hints(plugin: type[plugins.Plugin]) -> dict[str, Any]:
    """Return the annotations of a plug-in's options; those of dataclasses may be inherited."""
    if dataclasses.is_dataclass(plugin):
        return typing.get_type_hints(plugin, include_extras=True)
    return typing.get_type_hints(plugin.__init__, include_extras=True)


def values(hint: Any, *, bounds: Sequence[object] = ()) -> str:
    """Return the values that an annotation allows, as text."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return ", ".join(f"`{each}`" for each in arguments)
    if origin is typing.Annotated:
        return values(arguments[0], bounds=[*bounds, *_constraints(arguments[1:])])
    if origin in (typing.Union, types.UnionType):
        present = [each for each in arguments if each is not type(None)]
        return " or ".join(values(each, bounds=bounds) for each in present)
    if origin is tuple:
        return f"list of {values(arguments[0])}"
    if origin is not None or hint not in (bool, *_TYPES):
        return "table"
    if hint is bool:
        return "`true`, `false`"
    return ", ".join([_TYPES[hint], *map(_bound, bounds)])


def _constraints(metadata: Sequence[object]) -> Iterator[object]:
    for each in metadata:
        yield from each.metadata if isinstance(each, FieldInfo) else [each]


def _bound(bound: object) -> str:
    match bound:
        case Ge(ge=value):
            return f"≥ {value}"
        case Gt(gt=value):
            return f"> {value}"
        case Le(le=value):
            return f"≤ {value}"
        case Lt(lt=value):
            return f"< {value}"
    raise ValueError(f"no text for this bound: {bound}; add it to `values`")


def _default(value: object) -> str:
    if value is None:
        return "unset"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _names(names: Collection[Any]) -> str:
    return ", ".join(f"`{each}`" for each in sorted(map(str, names))) or "none"


def _settings(settings: Mapping[str, object]) -> str:
    return ", ".join(f"`{key} = {value}`" for key, value in settings.items()) or "none"


def _short_needs(name: str) -> str:
    selector = cast(Selector, plugins.find(plugins.SELECTORS, name)())
    parts = [
        _names(part)
        for part in (selector.needs_profiles, selector.asks_questions, selector.reports)
        if part
    ]
    parts += ["single updates"] if selector.needs_facts else []
    parts += ["evaluation data"] if selector.measures else []
    return ", ".join(parts) or "nothing"


def _short_traffic(name: str) -> str:
    strategy = cast(Strategy, plugins.find(plugins.STRATEGIES, name)())
    return f"{1 + len(strategy.auxiliary)}"


def _refused(strategy: str, group: str) -> str:
    """Return the names of the plug-ins of a group that are incompatible with a strategy."""
    kind = "selector" if group == plugins.SELECTORS else "objective"
    found = [name for name in built_in(group) if not _accepted(strategy, {kind: name})]
    return "all but `cross-entropy`" if len(found) == len(built_in(group)) - 1 else _names(found)


def _accepted(strategy: str, parts: Mapping[str, str]) -> bool:
    try:
        draw_up(run_text(strategy, **parts), source="run file")
    except ConfigurationError:
        return False
    return True


def _masked(group: str, name: str) -> str:
    if group == plugins.STRATEGIES:
        return _compatibility()[name][-1]
    # With more than 2 added clients, `dc-exhaustive` would have too many subsets to try.
    added = "added = 2\n" if name == "dc-exhaustive" else ""
    try:
        draw_up(f'{_MASKED}[selector]\nname = "{name}"\n{added}', source="run file")
    except ConfigurationError as error:
        if "secure aggregation" not in error.message:
            raise
        return "no"
    return "yes"


@cache
def _compatibility() -> dict[str, list[str]]:
    return {row[0].strip("`"): row for row in try_all().rows}


def rendered() -> Iterator[tuple[Path, str]]:
    """Yield the path of each page with its required text."""
    for group, folder in FOLDERS.items():
        for name, page in pages(group).items():
            yield page, filled(group, name, page.read_text(encoding="utf-8"))
        index = REFERENCE / folder / "index.md"
        yield index, marked(index.read_text(encoding="utf-8"), "overview", overview(group))
    yield SELECTION, marked(SELECTION.read_text(encoding="utf-8"), "selectors", noise_table())
    yield OWNERS, marked(OWNERS.read_text(encoding="utf-8"), "leaves", leaving_table())


if __name__ == "__main__":
    for page, text in rendered():
        page.write_text(text, encoding="utf-8")
