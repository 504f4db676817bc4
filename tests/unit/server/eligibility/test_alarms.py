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


def test_a_tag_that_no_host_gives_is_told_once_where_it_makes_cohorts_small() -> None:
    said = list[str]()
    alarms = SelectionAlarms(RunRoster("abcd"), SampleLimits(), said.append)
    for values in (("x", "x", "y", "y"), ("", "x", "y", "z")):
        alarms.look_at_tags([("site", values, 1)], 2, 3)
    alarms.look_at_tags([("sit", ("",) * 4, 4)], 3, 3)
    assert not said
    for _ in range(2):
        alarms.look_at_tags([("sit", ("",) * 4, 1)], 1, 3)
    [alarm] = said
    assert "has 1 of 3 clients: the hosts of 4 clients do not give the tag 'sit'" in alarm
