"""The state that a strategy goes by in a round: it may depend on who its clients are."""

from __future__ import annotations

from potluck.common.interruptible import in_thread
from potluck.server.runs.run import Run
from potluck.server.state import State


async def enrolled(run: Run) -> State:
    """The strategy's state for the round under way, found once for each roster it has.

    After a kill it is found again, from the same profiles, and is the same.
    """
    plan, committed, clients = run.plan, run.states.strategy, len(run.roster)
    if not (plan.strategy.parts or plan.strategy.needs_profiles):
        return committed
    known = run.enrolled
    if known is not None and known[0] is committed and known[1] == clients:
        return known[2]
    found = await in_thread(plan.strategy.enrol, committed, run.population(), plan.run_file.seed)
    run.enrolled = (committed, clients, found)
    return found
