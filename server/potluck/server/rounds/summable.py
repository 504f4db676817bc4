"""What goes together with sums that hosts make, and how updates are weighed in them; checked before
a run starts."""

from __future__ import annotations

from potluck.common.disclosure import Weighting
from potluck.common.errors import ConfigurationError
from potluck.common.run_file.run_settings import DirectionSettings
from potluck.common.run_file.runfile import RunFile
from potluck.common.updates.lanes import LARGEST_WEIGHT, MOST_MEMBERS, LaneTerms
from potluck.server.selection import Selector
from potluck.server.strategy import Strategy, Summation


def lane_terms(run_file: RunFile, strategy: Strategy) -> LaneTerms:
    """How all clients of a run make their updates whole numbers; the same in all its rounds."""
    alike = run_file.weighting is Weighting.EQUAL or strategy.summation is Summation.EQUAL
    cap = 1 if alike else run_file.sample_limits.maximum or LARGEST_WEIGHT
    sums = run_file.host_sums
    return LaneTerms(
        quantum_bits=sums.quantum_bits,
        weight_unit=1 if alike else sums.weight_unit,
        weight_cap=min(cap, LARGEST_WEIGHT),
    )


def check_summing(
    run_file: RunFile, strategy: Strategy, selector: Selector, *, source: str
) -> None:
    """Raise ConfigurationError where a run with sums made by hosts needs single updates."""
    if not run_file.host_sums.enabled:
        return
    for subject, why, remedy in (
        _of_form(run_file),
        _of_strategy(run_file.strategy.name, strategy),
        _of_selector(run_file.selector.name, selector),
    ):
        if why:
            raise ConfigurationError(
                f"{source}: {subject} and host_sums don't go together: {why}; {remedy}"
            )


def _of_form(run_file: RunFile) -> tuple[str, str, str]:
    clock, cohort = run_file.virtual_clock, run_file.count + run_file.round.over_selection
    if run_file.secure_aggregation:
        return "secure_aggregation", "masked updates are added up anyway", "remove one of them"
    if run_file.transport.up != DirectionSettings():
        why = "sums have an encoding of their own, and are differences"
        return "transport.up", why, "remove [transport.up]"
    if clock.enabled and (clock.deadline_seconds or run_file.round.over_selection):
        why = "on a virtual clock updates that are here are left out for their simulated seconds"
        remedy = "remove virtual_clock.deadline_seconds and round.over_selection"
        return "virtual_clock", why, remedy
    if cohort > MOST_MEMBERS:
        return f"a cohort of {cohort}", f"sums are over {MOST_MEMBERS} at most", "lower `count`"
    return "", "", ""


def _of_strategy(name: str, strategy: Strategy) -> tuple[str, str, str]:
    why = ""
    if strategy.individual:
        why = f"{name} looks at single updates, and the coordinator gets sums of them"
    elif strategy.one_way:
        why = f"sums have all tensors of the model, and {name} moves some by itself"
    elif strategy.trains:
        why = f"{name} trains on the coordinator with single updates"
    remedy = "choose a strategy that averages (fedavg, fedavgm, fedadam, fednova, …), or no sums"
    return f"strategy {name}", why, remedy


def _of_selector(name: str, selector: Selector) -> tuple[str, str, str]:
    why = ""
    if selector.learns:
        why = f"{name} learns of each update its {', '.join(sorted(selector.learns))}"
    elif selector.measures:
        why = f"{name} has means of some updates measured"
    elif selector.weighs:
        why = f"{name} says what each update counts with"
    elif selector.drops:
        why = f"{name} says what each client leaves out of its update"
    elif selector.before_upload(2) is not None:
        why = f"{name} spares clients their uploads for what each says of its model"
    return f"selector {name}", why, "choose another selector, or no sums"
