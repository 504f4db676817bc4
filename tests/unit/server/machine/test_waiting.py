"""Reported reason for which a run waits, and the length of its pauses."""

from __future__ import annotations

import pytest

from potluck.server.machine.waiting import LONGEST_PAUSE_SECONDS, QuorumStatus, attempt_pause


@pytest.mark.parametrize(
    ("failures", "seconds"),
    [(1, 1.0), (2, 2.0), (3, 4.0), (6, 32.0), (7, 60.0), (8, 60.0), (10_000, 60.0)],
)
def test_pause_between_attempts_grows_with_failures_up_to_a_maximum(
    failures: int, seconds: float
) -> None:
    assert attempt_pause(failures) == seconds <= LONGEST_PAUSE_SECONDS


@pytest.mark.parametrize(
    ("quorum", "suffices", "counted", "lacking"),
    [
        ((6, 9, 6, 0), False, "6 of 9 clients are connected", "3 more"),
        ((9, 9, 2, 0), True, "9 of 9 clients are connected", ""),
        (
            (7, 7, 4, 5),
            False,
            "7 clients on 4 hosts are connected, and a secure sum needs 7 clients on 5 hosts",
            "1 more host",
        ),
        (
            (3, 7, 2, 5),
            False,
            "3 clients on 2 hosts are connected, and a secure sum needs 7 clients on 5 hosts",
            "4 more on 3 more hosts",
        ),
    ],
)
def test_quorum_status_reports_the_missing_clients_or_hosts(
    quorum: tuple[int, int, int, int], suffices: bool, counted: str, lacking: str
) -> None:
    clients, clients_needed, hosts, hosts_needed = quorum
    found = QuorumStatus(
        clients=clients, clients_needed=clients_needed, hosts=hosts, hosts_needed=hosts_needed
    )
    assert (found.suffices, found.counted("are connected"), found.lacking()) == (
        suffices,
        counted,
        lacking,
    )
