"""Generate the compatibility table of docs/reference/strategies by trying every combination.

    .venv/bin/python tools/compatibility_table.py docs/reference/strategies/compatibility.md

rewrites the table. Every built-in selector, strategy and objective is planned as the coordinator
plans them before a run. A refused combination is listed with the reason of the refusal.
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
from potluck.server.rounds.plan import draw_up

_TASK = '[task]\nname = "digits"\n'
_OWN = "potluck."
"""Prefix of built-in plug-ins. The page covers only those that come with Potluck."""


BEGIN, END = "<!-- compatibility -->\n", "<!-- /compatibility -->"
MARKED = re.compile(f"{BEGIN}.*{END}", re.DOTALL)


@dataclass
class Tables:
    """Rows of the table, refused combinations and the number of combinations tried."""

    rows: list[list[str]] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    combinations: int = 0


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
            [
                run_text(strategy, selector=selector, objective=objective)
                for selector, objective in itertools.product(selectors, objectives)
            ],
        )
        if every == "no":  # perhaps refused only because of the objective
            plain = [run_text(strategy, selector=selector) for selector in selectors]
            every = "no" if _tried(tables, plain) == "no" else "with `cross-entropy`"
        tables.combinations += len(selectors) * len(objectives)
        adam = _tried(tables, [run_text(strategy, training=_ADAM)])
        step = _tried(tables, [run_text("scaffold", options=f'step = "{strategy}"\n')])
        masked = _checked(tables, partial(_mask, strategy))
        tables.rows.append([f"`{strategy}`", every, adam, step, masked])
    gradients = run_text("scaffold", options='control = "gradients"\n', training=_ADAM)
    _tried(tables, [gradients])
    return tables


def _mask(strategy: str) -> Sequence[str]:
    """Plan a run with masks.

    Return its remarks, without the one that is the same for every strategy.
    """
    draw_up(f"secure_aggregation = true\n{run_text(strategy)}", source="run file")
    return ()


def _tried(tables: Tables, texts: Sequence[str]) -> str:
    def draw_all() -> Sequence[str]:
        return [r for text in texts for r in draw_up(text, source="run file").remarks]

    return _checked(tables, draw_all)


def _checked(tables: Tables, attempt: Callable[[], Sequence[str]]) -> str:
    """Return `yes`, `said` for a run with remarks, or `no`; store the remarks or the reason."""
    try:
        remarks = attempt()
    except ConfigurationError as error:
        tables.refusals.append(f"Refused: {error.message.removeprefix('run file: ')}")
        return "no"
    tables.refusals.extend(f"Said: {remark}" for remark in remarks)
    return "said" if remarks else "yes"


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
    notes = "\n".join(f"- {refusal}." for refusal in dict.fromkeys(tables.refusals))
    return (
        f"{table}\n\nTried: {tables.combinations} combinations of {len(tables.rows)} strategies, "
        f"{len(selectors)} selectors ({', '.join(f'`{s}`' for s in selectors)}) and "
        f"{len(objectives)} objectives ({', '.join(f'`{o}`' for o in objectives)}).\n\n{notes}\n"
    )


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(MARKED.sub(lambda _: f"{BEGIN}{markdown(try_all())}{END}", page.read_text()))
