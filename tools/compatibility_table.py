"""Generate the compatibility table of docs/reference/strategies by trying every combination.

    .venv/bin/python tools/compatibility_table.py docs/reference/strategies/compatibility.md

rewrites the table. Every combination is planned as the coordinator plans a run before it starts. A
refused combination is listed with the reason of the refusal.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from potluck.common.errors import ConfigurationError
from potluck.common.settings import plugins
from potluck.server.plan.plan import draw_up

_TASK = '[task]\nname = "digits"\n'
_OWN = "potluck."
"""Prefix of built-in plug-ins. The page covers only those that come with Potluck."""


BEGIN, END = "<!-- compatibility -->\n", "<!-- /compatibility -->"
MARKED = re.compile(f"{BEGIN}.*{END}", re.DOTALL)


@dataclass
class Tables:
    """The rows of the table, the strategies by reason or remark, and the number of combinations
    tried."""

    rows: list[list[str]] = field(default_factory=list)
    notes: dict[str, list[str]] = field(default_factory=dict)
    combinations: int = 0

    def note(self, answer: str, message: str, strategy: str) -> None:
        """Add a plan's message; messages that differ only in the strategy's name become one."""
        parts, _, reason = message.removeprefix("run file: ").partition(": ")
        named = re.compile(rf"(?<![\w-])(?:strategy )?{strategy}(?![\w-])")
        if not reason:  # the whole message is the reason
            parts, reason = "", parts
        other = named.sub("", parts).replace(" are not compatible", "")
        for word in ("is not compatible with", "strategies", "strategy", "selector", " and "):
            other = other.replace(word, "")
        other = " ".join(other.removeprefix("with").split())
        text = f"{answer}{f' ({other})' if other else ''}: {named.sub('the strategy', reason)}"
        known = self.notes.setdefault(text, [])
        if f"`{strategy}`" not in known:
            known.append(f"`{strategy}`")


_ADAM = 'optimizer = "adam"\n'


def built_in(group: str) -> list[str]:
    """Return the names of the plug-ins that come with Potluck."""
    return [n for n in plugins.installed(group) if plugins.origin(group, n).startswith(_OWN)]


def run_text(
    strategy: str,
    *,
    selector: str = "uniform",
    objective: str = "cross-entropy",
    options: str = "",
    training: str = "",
) -> str:
    """Return a run file with these plug-ins and options."""
    return (
        f'{_TASK}[selector]\nname = "{selector}"\n[strategy]\nname = "{strategy}"\n{options}'
        f'[objective]\nname = "{objective}"\n[training]\n{training}'
    )


def try_all() -> Tables:
    """Plan a run for every combination of plug-ins."""
    tables = Tables()
    selectors, objectives = built_in(plugins.SELECTORS), built_in(plugins.OBJECTIVES)
    strategies = built_in(plugins.STRATEGIES)
    for strategy in strategies:
        every = _tried(
            tables,
            strategy,
            [
                run_text(strategy, selector=selector, objective=objective)
                for selector, objective in itertools.product(selectors, objectives)
            ],
        )
        if every == "no":
            every = _except(tables, strategy, selectors, objectives)
        tables.combinations += len(selectors) * len(objectives)
        adam = _tried(tables, strategy, [run_text(strategy, training=_ADAM)])
        as_step = run_text("scaffold", options=f'step = "{strategy}"\n')
        step = _tried(tables, strategy, [as_step])
        masked = _checked(tables, strategy, partial(_mask, strategy))
        tables.rows.append([f"`{strategy}`", every, adam, step, masked])
    gradients = run_text("scaffold", options='control = "gradients"\n', training=_ADAM)
    _tried(tables, "scaffold", [gradients])
    return tables


def _except(
    tables: Tables, strategy: str, selectors: Sequence[str], objectives: Sequence[str]
) -> str:
    """Return the selectors or objectives that are incompatible with the strategy, as text."""
    without = [
        name
        for name in selectors
        if _tried(tables, strategy, [run_text(strategy, selector=name)]) == "no"
    ]
    with_objective = [
        name
        for name in objectives
        if _tried(tables, strategy, [run_text(strategy, objective=name)]) != "no"
    ]
    cells = [f"except {', '.join(f'`{name}`' for name in without)}"] if without else []
    if len(with_objective) < len(objectives):
        cells.append(f"only {', '.join(f'`{name}`' for name in with_objective)}")
    return "; ".join(cells) or "no"


def _mask(strategy: str) -> Sequence[str]:
    """Plan a run with masks.

    Return its remarks, without the one that is the same for every strategy.
    """
    draw_up(f"secure_aggregation = true\n{run_text(strategy)}", source="run file")
    return ()


def _tried(tables: Tables, strategy: str, texts: Sequence[str]) -> str:
    def draw_all() -> Sequence[str]:
        return [r for text in texts for r in draw_up(text, source="run file").remarks]

    return _checked(tables, strategy, draw_all)


def _checked(tables: Tables, strategy: str, attempt: Callable[[], Sequence[str]]) -> str:
    """Return `yes`, `warns` for a run with remarks, or `no`; store the remarks or the reason."""
    try:
        remarks = attempt()
    except ConfigurationError as error:
        tables.note("refused", error.message, strategy)
        return "no"
    for remark in dict.fromkeys(remarks):
        tables.note("warns", remark, strategy)
    return "warns" if remarks else "yes"


def markdown(tables: Tables) -> str:
    """Return the tables in the Markdown of the docs."""
    selectors, objectives = built_in(plugins.SELECTORS), built_in(plugins.OBJECTIVES)
    head = [
        "strategy",
        "any selector with any objective",
        "`adam`, `adamw`",
        "as the `step` of `scaffold`",
        "secure aggregation",
    ]
    lines = [head, ["---"] * len(head), *tables.rows]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    notes = "\n".join(
        f"| {', '.join(strategies)} | {note} |" for note, strategies in tables.notes.items()
    )
    return (
        f"{table}\n\nThe table rests on {tables.combinations} combinations of {len(tables.rows)} "
        f"strategies, {len(selectors)} selectors and {len(objectives)} objectives.\n\n"
        f"| strategies | reason and remedy |\n| --- | --- |\n{notes}\n"
    )


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(MARKED.sub(lambda _: f"{BEGIN}{markdown(try_all())}{END}", page.read_text()))
