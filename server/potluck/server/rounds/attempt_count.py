"""Counts the attempts at a round, and computes the pauses between them. No clock."""

from __future__ import annotations

from collections.abc import Collection

from potluck.server.rounds.waiting import attempt_pause


class AttemptCount:
    """Counts the attempts at the current round. spent: number of attempts that don't count."""

    def __init__(self, most: int, number: int, spent: int) -> None:
        self.number = number
        self.spent = spent
        self._most = most
        self._failures = 0  # number of failed attempts in a row
        self._excused: set[str] = set()  # clients whose exclusion ended an attempt

    def next_round(self) -> None:
        """Start the next round with its first attempt, after a commit."""
        self.number, self.spent, self._failures = 1, 0, 0

    def begin_anew(self) -> None:
        """Start another attempt; the current one does not count."""
        self.number += 1
        self.spent += 1

    def pause(self) -> float:
        """Count a failed attempt; return the seconds to wait before the next one."""
        self._failures += 1
        return attempt_pause(self._failures)

    def excuse(self, clients: Collection[str]) -> bool:
        """Return True if one of these clients has ended an attempt for the first time, by being
        excluded.

        The attempt then does not count.
        """
        new = set(clients) - self._excused
        self._excused |= new
        return bool(new)

    @property
    def failed(self) -> int:
        """Number of failed attempts at the current round that count."""
        return max(0, self.number - 1 - self.spent)

    @property
    def used_up(self) -> bool:
        """True if the round has had the maximum number of attempts."""
        return self.number - self.spent >= self._most
