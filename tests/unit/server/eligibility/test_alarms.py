"""Alarms about clients that are picked far too often."""

from __future__ import annotations

import numpy as np

from potluck.common.run_file.run_settings import SampleLimits
from potluck.server.eligibility.alarms import SelectionAlarms
from potluck.server.rounds.roster import RunRoster


def test_one_alarm_for_who_is_picked_far_too_often() -> None:
    said = list[str]()
    roster = RunRoster("abcd")
    roster.append(f"client-{n}" for n in range(20))
    alarms = SelectionAlarms(roster, SampleLimits(), said.append)
    for _ in range(30):
        alarms.choosing(np.arange(24))
        alarms.look_at_picks(["a"])
    [alarm] = said
    assert "lopsided: a (" in alarm
    assert "quarantine" in alarm


def test_uniform_selection_among_half_of_the_clients_raises_no_alarm() -> None:
    """The others are on hosts that are gone: those left are picked twice as often as the mean."""
    said = list[str]()
    roster = RunRoster(f"client-{n}" for n in range(24))
    alarms = SelectionAlarms(roster, SampleLimits(), said.append)
    generator, left = np.random.default_rng(11), np.arange(6)
    for round_number in range(300):
        available = np.arange(24) if round_number < 10 else left
        alarms.choosing(available)
        cohort = generator.choice(available, 3, replace=False)
        alarms.look_at_picks([roster.ids[row] for row in cohort])
    assert not said
    for _ in range(60):
        alarms.choosing(left)
        alarms.look_at_picks(["client-0"])
    [alarm] = said
    assert "lopsided: client-0 (" in alarm


def test_a_round_begun_before_a_restart_does_not_count() -> None:
    said = list[str]()
    alarms = SelectionAlarms(RunRoster("abcd"), SampleLimits(), said.append)
    for _ in range(100):
        alarms.look_at_picks(["a"])
    assert not said


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
    assert "has 1 of 3 clients: the hosts of 4 clients do not set the tag 'sit'" in alarm
