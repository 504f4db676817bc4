"""A run as HTML, for notebooks, and displays in a notebook that update themselves."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any

from potluck.deploy.operator.run_view import (
    RunView,
    fraction_done,
    run_state_name,
    shown_measures,
    waiting_text,
)
from potluck.deploy.view.readable import readable_coverage, readable_measure
from potluck.deploy.view.watch_table import progress_text
from potluck.federation.rounds import Round

# HTML ---------------------------------------------------------------------------------------------

SHOWN_ROUNDS = 10
_SHOWN_CLIENTS = 8


def run_html(run_id: str, view: RunView, rounds: Sequence[Round]) -> str:
    """Return the run's state, its newest rounds as a table, and the current round, as HTML."""
    status = view.status
    if status is None:
        return f"<p>run {escape(run_id)}</p>"
    reason = f": {escape(status.reason)}" if view.ended and status.reason else ""
    head = (
        f"<p><b>{escape(status.name)}</b> · {escape(status.task)} · {escape(status.selector)} · "
        f"{escape(status.strategy)} · {run_state_name(status.state)}{reason}, "
        f"{status.committed_rounds} of {status.rounds} rounds "
        f"<small>run {escape(run_id)}</small></p>"
    )
    return head + _table(view, rounds[-SHOWN_ROUNDS:]) + _under_way(view)


def _table(view: RunView, rounds: Sequence[Round]) -> str:
    measures = {
        name: measure
        for name, measure in shown_measures(view.status).items()
        if any(name in each.measures for each in rounds)
    }
    head = "".join(f"<th>{escape(measure.label)}</th>" for measure in measures.values())
    covered = any(each.coverage for each in rounds)
    head += "<th>over</th>" * covered
    body = ""
    for each in rounds:
        values = [
            readable_measure(each.measures[name], measure.unit) if name in each.measures else ""
            for name, measure in measures.items()
        ]
        over = [each.coverage[name] for name in measures if name in each.coverage]
        values += [readable_coverage(over[0]) if over else ""] * covered
        more = " …" if len(each.cohort) > _SHOWN_CLIENTS else ""
        cells = [str(each.number), *values, ", ".join(each.cohort[:_SHOWN_CLIENTS]) + more]
        body += f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
    return f"<table><tr><th>round</th>{head}<th>cohort</th></tr>{body}</table>" if rounds else ""


def _under_way(view: RunView) -> str:
    """Return the current round as a progress bar, or the reason why the run waits."""
    status, progress = view.status, view.progress
    if status is None or view.ended:
        return ""
    if status.HasField("waiting"):
        return f"<p>{escape(waiting_text(status.waiting, datetime.now(UTC)))}</p>"
    if progress is None:
        return ""
    return (
        f'<p><progress max="1" value="{fraction_done(progress):.2f}"></progress> '
        f"round {progress.round}: {escape(progress_text(progress).plain)}</p>"
    )


# Displays -----------------------------------------------------------------------------------------
# A notebook has already loaded IPython, so Potluck need not depend on it.


def in_notebook() -> bool:
    """Return True in an IPython kernel; False in IPython on a terminal and in plain Python."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


def shown(value: object) -> Any:
    """Display a value in the running cell.

    The returned handle's `update` replaces the displayed value.
    """
    return sys.modules["IPython"].display.display(value, display_id=True)
