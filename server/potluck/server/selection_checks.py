"""Whether what a selector says makes sense."""

from __future__ import annotations

from potluck.common.errors import RunError
from potluck.server.selection import Selection, SelectionContext


def check_selection(selection: Selection, context: SelectionContext, name: str) -> None:
    """Raises RunError, naming the selector, unless it chose available clients, none twice."""
    rows = [int(row) for row in selection.rows]
    if not rows:
        raise RunError(f"selector '{name}' chose nobody in round {context.round}", selector=name)
    if len(set(rows)) != len(rows):
        raise RunError(f"selector '{name}' chose a client twice", selector=name)
    strangers = sorted(set(rows) - set(context.available.tolist()))
    if strangers:
        raise RunError(
            f"selector '{name}' chose row {strangers[0]}, which is not available", selector=name
        )
    if len(rows) > context.count:
        raise RunError(
            f"selector '{name}' chose {len(rows)} clients; the run asks for {context.count}",
            selector=name,
        )
    if len(selection.reasons) != len(rows):
        raise RunError(f"selector '{name}' must give one reason for each client", selector=name)
    if selection.quotas is not None:
        raise RunError(
            f"selector '{name}' limits how many samples clients train on, which running "
            "federations can't do; unset the option that asks for it (of kl: truncate)",
            selector=name,
        )
