"""Alarms about clients that are selected far too often."""

from __future__ import annotations

import numpy as np

from potluck.common.run_file.run_settings import SampleLimits
from potluck.server.eligibility.alarms import SelectionAlarms
from potluck.server.machine.roster import RunRoster


def test_client_selected_far_too_often_raises_one_alarm() -> None:
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
    """The hosts of the other half are gone: the rest are picked twice as often as the mean."""
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


def test_round_started_before_a_restart_raises_no_selection_alarm() -> None:
    said = list[str]()
    alarms = SelectionAlarms(RunRoster("abcd"), SampleLimits(), said.append)
    for _ in range(100):
        alarms.look_at_picks(["a"])
    assert not said


def test_tag_set_by_no_host_raises_one_alarm_if_cohorts_become_too_small() -> None:
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
