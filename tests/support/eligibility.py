"""Eligibility of clients, built from real parts, for runs without a coordinator."""

from __future__ import annotations

from collections.abc import Callable

from potluck.server.eligibility.alarms import SelectionAlarms
from potluck.server.eligibility.collected_sums import LabelSums
from potluck.server.eligibility.eligibility import Eligibility
from potluck.server.eligibility.host_checks import HostChecks
from potluck.server.eligibility.left_out import LeftOutRegister
from potluck.server.eligibility.picks import PickRecord
from potluck.server.hosts.attendance import Attendance
from potluck.server.live.selecting import Selecting
from potluck.server.machine.events import Event
from potluck.server.machine.roster import RunRoster
from potluck.server.plan.plan import RunPlan
from potluck.server.profiles.collect import Profiling
from potluck.server.profiles.trust import Trust
from potluck.server.store.store_thread import InStore


def rules(
    plan: RunPlan,
    roster: RunRoster,
    profiling: Profiling,
    attendance: Attendance,
    in_store: InStore,
    *,
    warn: Callable[[str], None] = lambda _: None,
    post: Callable[[Event], None] = lambda _: None,
) -> Eligibility:
    """Return the eligibility rules of run `r`, without secure sums."""
    left_out = LeftOutRegister("r", plan, attendance, in_store, post)
    return Eligibility(
        plan=plan,
        roster=roster,
        profiling=profiling,
        picks=PickRecord(roster),
        checks=HostChecks("r", plan, b"", attendance, left_out, lambda: False),
        left_out=left_out,
        label_sums=LabelSums(),
        warn=warn,
        post=post,
    )


def selecting(
    plan: RunPlan,
    roster: RunRoster,
    attendance: Attendance,
    in_store: InStore,
    *,
    warn: Callable[[str], None] = lambda _: None,
    post: Callable[[Event], None] = lambda _: None,
) -> Selecting:
    """Return the object that selects the clients of run `r`; profiles come from the store."""
    profiling = Profiling("r", plan, roster, attendance, in_store, Trust(federation="f"))
    return Selecting(
        "r",
        plan,
        profiling,
        rules(plan, roster, profiling, attendance, in_store, warn=warn, post=post),
        SelectionAlarms(roster, plan.run_file.sample_limits, warn),
        attendance=attendance,
        in_store=in_store,
    )
