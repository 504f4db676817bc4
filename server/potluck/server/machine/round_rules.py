"""The settings of a run file that the state machine uses."""

from __future__ import annotations

import math
from dataclasses import dataclass

from potluck.common.run_file.run_settings import Leavers, RoundPolicy


@dataclass(frozen=True, kw_only=True)
class RoundRules:
    """The settings of a run file that the state machine uses.

    hosts: minimum number of hosts that a round's clients must be on; 0 for no minimum. simulated:
    True if the rounds run on a virtual clock. The round then waits for all clients; a client is in
    time if it took at most `simulated_deadline` simulated seconds. offers: True if clients wait
    with their upload until the selector has decided which updates are wanted.
    """

    rounds: int
    clients_per_round: int
    expected_clients: int
    start_timeout_seconds: float
    policy: RoundPolicy
    hosts: int = 0
    evaluate_every: int = 1
    simulated: bool = False
    simulated_deadline: float = math.inf
    offers: bool = False

    @property
    def grace_seconds(self) -> float:
        """Seconds for which a disconnected host may still reconnect."""
        return self.policy.grace_seconds if self.policy.leavers is Leavers.WAIT else 0.0

    @property
    def needed(self) -> int:
        """Minimum number of clients with which a round can start."""
        return max(self.policy.needed(self.clients_per_round), self.hosts)

    def awaits_late(self, *, received: bool) -> bool:
        """Return True if an update that missed its round may still join a later round.

        received: True if the update has arrived. On a virtual clock, an update that has not arrived
        is never awaited.
        """
        return self.policy.late_updates.rounds > 0 and (received or not self.simulated)

    def evaluates(self, round_number: int) -> bool:
        """Return True if this round's model is evaluated."""
        if self.evaluate_every == 0:
            return False
        return round_number % self.evaluate_every == 0 or round_number == self.rounds
