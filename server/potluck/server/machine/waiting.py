"""The waits of a run: for clients before a selection, and after a failed attempt."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from potluck.server.store.records import FailedAttempt

# Waits --------------------------------------------------------------------------------------------

FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """The current wait of a run for clients.

    what: description in one line, without a time. until: time when the wait ends and the run
    continues or fails; None for no limit. clients, hosts: numbers of clients and hosts that may be
    selected now. clients_needed, hosts_needed: minimum numbers; hosts_needed is 0 if hosts are not
    counted.
    """

    what: str
    until: float | None
    clients: int
    clients_needed: int
    hosts: int
    hosts_needed: int


@dataclass(frozen=True, kw_only=True)
class QuorumStatus:
    """Numbers of clients and hosts that may be selected, and the minimum numbers.

    at_least: True if the minimum numbers are shown as "at least N", because a selection would use
    more clients. excluded: number of clients, connected or not, that can't be selected.
    """

    clients: int
    clients_needed: int
    hosts: int
    hosts_needed: int
    at_least: bool = False
    excluded: int = 0

    @property
    def suffices(self) -> bool:
        """True if a round can start."""
        return self.clients >= self.clients_needed and self.hosts >= self.hosts_needed

    def counted(self, verb: str) -> str:
        """Return a text with the current and the needed numbers of clients and hosts. verb: follows
        "clients" in the text, such as "are connected"."""
        least = "at least " if self.at_least else ""
        not_counted = f" (not counting {self.excluded} in quarantine or without a profile)" * (
            self.excluded > 0
        )
        if not self.hosts_needed:
            return f"{self.clients} of {least}{self.clients_needed}{not_counted} clients {verb}"
        return (
            f"{self.clients} clients on {self.hosts} hosts{not_counted} {verb}, and a secure sum "
            f"needs {least}{self.clients_needed} clients on {least}{self.hosts_needed} hosts"
        )

    def lacking(self) -> str:
        """Return a text with the missing numbers of clients and hosts."""
        clients = self.clients_needed - self.clients
        hosts = self.hosts_needed - self.hosts
        counted = [f"{clients} more"] if clients > 0 else []
        counted += [f"{hosts} more {'host' if hosts == 1 else 'hosts'}"] if hosts > 0 else []
        return " on ".join(counted)


def attempt_pause(failures: int) -> float:
    """Return the pause in seconds before the next attempt. failures: number of failed attempts in a
    row."""
    doubled = FIRST_PAUSE_SECONDS * 2.0 ** min(failures - 1, 30)
    return min(doubled, LONGEST_PAUSE_SECONDS)


# Attempts -----------------------------------------------------------------------------------------
# Has no clock: returns pauses in seconds.


class AttemptCount:
    """Counts the attempts at the current round.

    spent: number of attempts that don't count against the maximum. failed: number of failed
    attempts that counted, those before a restart included.
    """

    def __init__(self, most: int, number: int, spent: int, failed: int) -> None:
        self.number = number
        self.spent = spent
        self.failed = failed
        self._most = most
        self._failures = 0  # number of failed attempts in a row
        self._excused: set[str] = set()  # clients whose exclusion has ended an attempt

    def next_round(self) -> None:
        """Start the next round with its first attempt, after a commit."""
        self.number, self.spent, self.failed, self._failures = 1, 0, 0, 0

    def begin_anew(self) -> None:
        """Start another attempt; the current one does not count against the maximum."""
        self.number += 1
        self.spent += 1

    def note(self, attempt: FailedAttempt) -> None:
        """Record how the current attempt failed."""
        if attempt.counts:
            self.failed += 1
        else:
            self.spent += 1

    def pause(self) -> float:
        """Count a failed attempt; return the seconds to wait before the next one."""
        self._failures += 1
        return attempt_pause(self._failures)

    def excuse(self, clients: Collection[str]) -> bool:
        """Return True if the exclusion of one of these clients ended an attempt for the first time.

        The attempt then does not count.
        """
        new = set(clients) - self._excused
        self._excused |= new
        return bool(new)

    @property
    def used_up(self) -> bool:
        """True if the round has had the maximum number of attempts."""
        return self.number - self.spent >= self._most
