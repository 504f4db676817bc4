"""Tracks a run's clients, and decides whether they suffice for a round. Has no clock.

A selection first waits for disconnected clients that may still reconnect, so that a host that
restarts between two rounds does not change the cohort. Then it uses the connected clients. If these
are too few, it waits for more clients. This wait is limited by the run file until the run has
selected its first cohort; later it has no limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set

from potluck.common.run_file.run_settings import LateJoiners
from potluck.server.machine.cohort import RoundCohort
from potluck.server.machine.roster import RunRoster
from potluck.server.machine.round_rules import RoundRules
from potluck.server.machine.troubles import LeftOutClients, listed
from potluck.server.machine.waiting import QuorumStatus, Waiting
from potluck.server.store.records import MemberState

# Presence -----------------------------------------------------------------------------------------
# Has no clock: callers pass the time.


class Presence:
    """The connected clients. grace: seconds for which a disconnected client may still reconnect."""

    def __init__(self, grace: float) -> None:
        self.grace = grace
        self._attending: set[str] = set()
        self._back_by: dict[str, float] = {}  # disconnected client → latest time to reconnect
        self._host_of: dict[str, str] = {}
        self.unseen: set[str] = set()
        """Clients of a resumed run that have not connected since the restart."""

    @property
    def attending(self) -> Set[str]:
        """Clients whose host is connected."""
        return self._attending

    def attends(self, client: str) -> bool:
        """Return True if a client's host is connected."""
        return client in self._attending

    def back_by(self, client: str) -> float:
        """Return the time until which a disconnected client may reconnect; −∞ if it may not."""
        if client in self._attending:
            return -math.inf
        return self._back_by.get(client, -math.inf)

    def returning(self, now: float) -> Mapping[str, float]:
        """Return the disconnected clients that may still reconnect, each with its time limit."""
        return {client: by for client, by in self._back_by.items() if now < by}

    def host_of(self, client: str) -> str:
        """Return the host that has or last had this client; empty if no host ever had it."""
        return self._host_of.get(client, "")

    def hosts(self, clients: Iterable[str]) -> frozenset[str]:
        """Return the known hosts of these clients."""
        return frozenset(filter(None, map(self.host_of, clients)))

    def join(self, clients: Iterable[str], hosts: Mapping[str, str]) -> None:
        """Record that clients have connected, from these hosts."""
        for client in clients:
            self._attending.add(client)
            self._back_by.pop(client, None)
            self.unseen.discard(client)
        self._host_of.update(hosts)

    def leave(self, clients: Iterable[str], now: float) -> None:
        """Record that the clients' host has disconnected."""
        for client in clients:
            self._attending.discard(client)
            self._back_by[client] = now + self.grace

    def expect(self, clients: Iterable[str], until: float) -> None:
        """Set the time until which the disconnected clients among these may reconnect."""
        for client in clients:
            if client not in self._attending:
                self._back_by[client] = until


# The pool -----------------------------------------------------------------------------------------

REATTACH_SECONDS = 30.0
"""Maximum seconds to wait for a run's clients after a restart, or after too few were connected."""

_LONG_AGO = -math.inf


class ClientPool:
    """The clients of one run, and whether they suffice for a round.

    under_way: True if the run has already selected a cohort.
    """

    def __init__(self, rules: RoundRules, roster: RunRoster, *, under_way: bool) -> None:
        self.rules = rules
        self.presence = Presence(rules.grace_seconds)
        self.roster = roster
        self.under_way = under_way
        self.excluded: frozenset[str] = frozenset()
        self.left_out = LeftOutClients()
        """Clients that can't take part."""
        self.still_training: frozenset[str] = frozenset()
        """Clients that still train for a closed round. They are only selected if the other clients
        are too few."""
        self.spared: set[str] = set()
        """Clients that failed an attempt at this round. They are only selected if the other clients
        are too few."""
        self.together: Callable[[Sequence[str], int], bool] = lambda _clients, _needed: True
        """Function that returns True if that many of these clients can be available at once."""
        self.waiting: Waiting | None = None
        """The current wait for more clients; None if there are enough."""
        self.wake: float | None = None
        """Time of the next check if no event comes before; None if no check is needed."""
        self.given_up = ""
        """Reason why a run that never selected a cohort has stopped waiting; empty while it waits.
        """
        self._last = _LONG_AGO  # latest time to wait, for a run that never selected a cohort
        self._returning_until = _LONG_AGO  # latest time to wait for disconnected clients
        self._pause = _LONG_AGO
        self._refused: set[str] = set()  # clients that connected too late to join
        self._short = False  # True if too few were connected at the last check

    def start(self, now: float) -> None:
        """Start the run, or resume it after a restart; give the clients of its roster time to
        reconnect."""
        self._last = now + self.rules.start_timeout_seconds
        self._expect_everybody(now)
        self.presence.unseen.update(self.roster)

    def begin(self, now: float, pause: float = 0.0) -> None:
        """Prepare the selection of a round, after a pause.

        The pool also waits for clients that disconnect within the first grace period. The wait is
        limited, so a federation in which some client always disconnects still continues.
        """
        self._pause = now + pause
        self._returning_until = max(self._returning_until, now + 2 * self.rules.grace_seconds)

    def _expect_everybody(self, now: float) -> None:
        """Wait for all clients of the roster. After a failure that disconnects all hosts, they
        reconnect one by one."""
        if self.roster:
            self._returning_until = now + max(REATTACH_SECONDS, self.rules.grace_seconds)
            self.presence.expect(self.roster, self._returning_until)

    def away(self) -> list[str]:
        """Return the disconnected clients in roster order. If the run needs several hosts, each
        text also names the client's host."""
        away = [client for client in self.roster if not self.presence.attends(client)]
        if not self.rules.hosts:
            return away
        return [f"{client} ({self.presence.host_of(client) or 'no host yet'})" for client in away]

    def away_hosts(self) -> list[str]:
        """Return the disconnected hosts of clients that may be selected, sorted.

        If a client's host is unknown, the client's id is used.
        """
        away = [c for c in self.selectable(self.roster) if not self.presence.attends(c)]
        return sorted({self.presence.host_of(client) or client for client in away})

    def present(self, now: float) -> tuple[str, ...]:
        """Return selectable clients that are connected or may still reconnect, in roster order."""
        return tuple(
            client for client in self.selectable(self.roster) if self.is_present(client, now)
        )

    def is_present(self, client: str, now: float) -> bool:
        """Return True if a client is connected, or may still reconnect in time."""
        return self.presence.attends(client) or now < self.presence.back_by(client)

    def admit_late(self, clients: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Admit new clients to a run that has a roster; return the admitted and the refused
        clients, sorted.

        If the run refuses late joiners, all new clients are refused.
        """
        known = self._refused | self.left_out.troubles.keys()
        new = tuple(sorted(c for c in clients if c not in self.roster and c not in known))
        if not self.roster:
            return (), ()
        if self.rules.policy.late_joiners is LateJoiners.REFUSE:
            self._refused.update(new)
            return (), new
        self.roster.append(new)
        return new, ()

    # Whether a round can begin -----------------------------------------------------------------

    def first_roster(self, now: float) -> tuple[str, ...]:
        """Return all connected clients once they are enough to start the run; empty before."""
        attending = self.presence.attending
        # a run that waits for a fixed number of clients also counts excluded ones
        if not self.rules.expected_clients:
            attending = attending - self.left_out.troubles.keys()
        wanted = self.rules.expected_clients or self.rules.clients_per_round
        quorum = self._quorum(attending, wanted)
        if quorum.suffices:
            return tuple(sorted(attending))
        self._wait_for_more(quorum, now)
        return ()

    def ready(self, now: float) -> tuple[str, ...]:
        """Return the clients to select among, in roster order; none while the run waits."""
        self.waiting = self.wake = None
        self.given_up = self.left_out.why_too_few(self.roster.ids, self.rules.needed)
        if self.given_up:
            return ()
        selectable = self.selectable(self.roster)
        available = self._candidates(selectable)
        quorum = self._quorum(available, self.rules.needed, at_least=True)
        if self._short and quorum.suffices:
            self._short = False
            self._expect_everybody(now)
        if now < self._pause:
            self._wait("pausing before the next attempt", self._pause, quorum)
            return ()
        returning = self.presence.returning(now)
        expected = [client for client in selectable if client in returning] if returning else []
        if expected and now < self._returning_until:
            until = min(max(returning[client] for client in expected), self._returning_until)
            self._wait(f"waiting for {listed(expected)} to come back", until, quorum)
            return ()
        if quorum.suffices:
            return available
        self._wait_for_more(quorum, now)
        return ()

    def is_overdue(self, now: float) -> bool:
        """Return True if a run that never selected a cohort has waited for its maximum time."""
        return not self.under_way and now >= self._last

    def suffices(self, clients: Sequence[str], needed: int) -> bool:
        """Return True if these are at least `needed` clients, on enough hosts."""
        return self._quorum(clients, needed).suffices

    def lost_its_hosts(self, cohort: RoundCohort) -> bool:
        """Return True if the cohort is too small only because some of its members are
        disconnected.

        Members that have not connected since a restart count as connected until they are lost:
        the attempt fails as it would have without the restart.
        """
        presence = self.presence
        there = [
            client
            for client, member in cohort.members.items()
            if member.state is not MemberState.LOST
            and (presence.attends(client) or client in presence.unseen)
        ]
        needed = cohort.needed
        return self.suffices(tuple(cohort.members), needed) and not self.suffices(there, needed)

    def selectable(self, clients: Iterable[str]) -> tuple[str, ...]:
        """Return the clients that are not excluded."""
        return tuple(c for c in clients if c not in self.excluded and c not in self.left_out)

    def _candidates(self, selectable: Sequence[str]) -> tuple[str, ...]:
        """Return the connected clients that a selection may use.

        Clients that failed in this round, or that still train for an earlier round, are omitted if
        the other clients suffice, and can be available together.
        """
        attending = [client for client in selectable if self.presence.attends(client)]
        free = [client for client in attending if client not in self.still_training]
        fresh = [client for client in free if client not in self.spared]
        needed = self.rules.needed
        for some in (fresh, free):
            if len(some) == len(attending):
                break
            if self.suffices(some, needed) and self.together(some, needed):
                return tuple(some)
        return tuple(attending)

    def _quorum(
        self, clients: Collection[str], needed: int, *, at_least: bool = False
    ) -> QuorumStatus:
        return QuorumStatus(
            clients=len(clients),
            clients_needed=max(needed, self.rules.hosts),
            hosts=len(self.presence.hosts(clients)) if self.rules.hosts else 0,
            hosts_needed=self.rules.hosts,
            at_least=at_least,
            excluded=len(self.excluded),
        )

    # Waiting ----------------------------------------------------------------------------------

    def _wait_for_more(self, quorum: QuorumStatus, now: float) -> None:
        """Wait for more clients. A run that never selected a cohort gives up after its maximum
        time."""
        if self.is_overdue(now):
            attended = f"were connected after {self.rules.start_timeout_seconds:g} s"
            self.given_up = (
                f"{quorum.counted(attended)}; start more hosts, or lower `clients_per_round` or "
                f"`expected_clients` in the run file{self._and_left_out()}"
            )
            return
        self._short = self.under_way
        until = None if self.under_way else self._last
        connected = quorum.counted("are connected")
        what = f"{connected}; waiting for {quorum.lacking()}{self._and_left_out()}"
        self._wait(what, until, quorum)

    def _and_left_out(self) -> str:
        return f"; {self.left_out.summary()}" if self.left_out else ""

    def _wait(self, what: str, until: float | None, quorum: QuorumStatus) -> None:
        self.wake = until
        self.waiting = Waiting(
            what=what,
            until=until,
            clients=quorum.clients,
            clients_needed=quorum.clients_needed,
            hosts=quorum.hosts,
            hosts_needed=quorum.hosts_needed,
        )
