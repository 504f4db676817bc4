"""Alarms about clients that are picked far too often."""

from __future__ import annotations

from potluck.common.run_file.run_settings import SampleLimits
from potluck.server.eligibility.alarms import SelectionAlarms
from potluck.server.eligibility.picks import PickRecord
from potluck.server.rounds.roster import RunRoster


def test_one_alarm_for_who_is_picked_far_too_often() -> None:
    said = list[str]()
    roster = RunRoster("abcd")
    roster.append(f"client-{n}" for n in range(20))
    alarms, picks = SelectionAlarms(roster, SampleLimits(), said.append), PickRecord(roster)
    for _ in range(30):
        picks.add(["a"])
        alarms.look_at_picks(picks.counts)
    [alarm] = said
    assert "lopsided: a (" in alarm
    assert "quarantine" in alarm
