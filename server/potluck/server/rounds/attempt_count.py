"""The attempts at a round: which of them count, and the pauses between them. No clock."""

from __future__ import annotations

from collections.abc import Collection

from potluck.server.rounds.waiting import attempt_pause


class AttemptCount:
    """The number of the attempt under way. spent: number of attempts made that don't count."""

    def __init__(self, most: int, number: int, spent: int) -> None:
        self.number = number
        self.spent = spent
        self._most = most
        self._failures = 0  # in a row that came to nothing
        self._excused: set[str] = set()  # clients whose being left out has cost an attempt

    def next_round(self) -> None:
        """Start the next round with its first attempt, after a commit."""
        self.number, self.spent, self._failures = 1, 0, 0

    def begin_anew(self) -> None:
        """Start another attempt in place of the one under way, which does not count."""
        self.number += 1
        self.spent += 1

    def pause(self) -> float:
        """Seconds before another try, after one more that came to nothing."""
        self._failures += 1
        return attempt_pause(self._failures)

    def excuse(self, clients: Collection[str]) -> bool:
        """Return True if one of these clients was excluded for the first time.

        The attempt does then not count.
        """
        new = set(clients) - self._excused
        self._excused |= new
        return bool(new)

    @property
    def used_up(self) -> bool:
        """True once the round has had as many attempts as the policy grants."""
        return self.number - self.spent >= self._most
