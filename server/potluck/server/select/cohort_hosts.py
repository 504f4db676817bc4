"""Ensures that a cohort's clients are on as many hosts as masked or summed updates need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from potluck.server.eligibility.alarms import TagLimit
from potluck.server.eligibility.eligibility import ScarceError
from potluck.server.eligibility.host_cover import cover, on_enough_hosts
from potluck.server.machine.troubles import counted
from potluck.server.plan.plan import RunPlan
from potluck.server.selection import Rows, Selection, SelectionContext


class Placement(Protocol):
    """Interface to the hosts of a run's clients: their present hosts (`Selecting`), or those when a
    recorded selection was made."""

    def hosts(self) -> Sequence[str]:
        """Return the host of each row of the roster; an empty text if the host is unknown."""
        ...

    def tag_limits(self) -> Sequence[TagLimit]:
        """Return, for each limited tag, its value for each row of the roster and the maximum number
        of clients with one value."""
        ...


def check_hosts(selecting: Placement, plan: RunPlan, round_number: int, available: Rows) -> None:
    """Raise ScarceError if no cohort of the available clients is on enough hosts for the round."""
    least = plan.rules.hosts
    if not least:
        return
    hosts = selecting.hosts()
    limits = [(values, most) for _, values, most in selecting.tag_limits()]
    if cover((), available.tolist(), hosts=hosts, least=least, limits=limits) is not None:
        return
    there = len({hosts[row] for row in available} - {""})
    within = " within selector_limits.at_most_per" if limits else ""
    raise ScarceError(
        f"round {round_number}: {counted(len(available))} on {there} hosts may be selected, but "
        f"a masked round needs a cohort on {least} hosts{within}; start more "
        f"hosts{(' or raise these limits' if limits else '')}"
    )


def complete(
    selecting: Placement, plan: RunPlan, selection: Selection, context: SelectionContext
) -> Selection:
    """Return the selection, with clients on further hosts added if its updates are masked or summed
    and need more hosts.

    The reason of an added client is "needed for N hosts". Hosts are added until a model can be
    computed from the cohort's updates, or until no further hosts are left.
    """
    run_file, least = plan.run_file, plan.rules.hosts
    if not least:
        return selection
    hosts = selecting.hosts()
    if plan.path.suffices([hosts[int(row)] for row in selection.rows], run_file):
        return selection
    limits = [(values, most) for _, values, most in selecting.tag_limits()]
    rows = selection.rows
    for number in range(least, context.count + 1):
        more = on_enough_hosts(
            selection.rows,
            context.available,
            hosts=hosts,
            least=number,
            count=context.count,
            limits=limits,
            draw=context.generator("masking.hosts"),
        )
        if more is None:
            break
        rows = more
        if plan.path.suffices([hosts[int(row)] for row in rows], run_file):
            break
    chosen_for = dict(zip(selection.rows.tolist(), selection.reasons, strict=True))
    needed = f"needed for {len({hosts[row] for row in rows})} hosts"
    reasons = [chosen_for.get(row, needed) for row in rows.tolist()]
    return replace(selection, rows=rows, reasons=reasons)
