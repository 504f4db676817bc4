"""The chain of a run's selections, and the rules that every document must obey. No I/O.

Hosts, the coordinator and auditors build a `Chain` from the same documents. A document that breaks
a rule raises BrokenSelectionError and changes nothing. A document that arrives again changes
nothing either, so a coordinator may send it again after a restart.

    opening ─→ attendees ─→ outcome ─→ opening of the next attempt or round
       └───────────┴──────────────────────↗   (an attempt that was given up)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from potluck.verifiable.documents import (
    COORDINATOR,
    Attendees,
    BrokenSelectionError,
    Opening,
    Outcome,
    commitment_to,
    genesis,
    joint_seed,
)
from potluck.verifiable.draws import RECOMPUTED, drawn, needs_times

MOST_DRAWS: Final = 10
"""Maximum number of successive attempts that reveal shares, but get no cohort. Each attempt draws a
new cohort, so a coordinator could repeat attempts until it likes the cohort."""


@dataclass(frozen=True, kw_only=True)
class Chain:
    """The documents of a run up to now.

    tip: digest of the last document. whole: False if a document in the middle is missing. draws:
    number of attempts that reached the attendees, at the current round and at those before it that
    got no cohort. times: number of selections of each client in rounds before the current one;
    complete only if the chain is whole.
    """

    run: str
    tip: str
    whole: bool = True
    opening: Opening | None = None
    opening_sha256: str = ""
    attendees: Attendees | None = None
    attendees_sha256: str = ""
    outcome: Outcome | None = None
    outcome_sha256: str = ""
    draws: int = 0
    times: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def begin(cls, run: str) -> Chain:
        """Return the chain of a run before its first document."""
        return cls(run=run, tip=genesis(run))

    @property
    def digests(self) -> dict[str, str]:
        """The SHA-256 digests (hexadecimal) of the current attempt's documents, in order, by kind:
        "opening", "attendees", "outcome". A document that has not come is missing."""
        known = {
            "opening": self.opening_sha256,
            "attendees": self.attendees_sha256,
            "outcome": self.outcome_sha256,
        }
        return {kind: sha256 for kind, sha256 in known.items() if sha256}

    # Documents --------------------------------------------------------------------------------

    def opened(self, text: bytes) -> Chain:
        """Return the chain with an opening."""
        sha256 = Opening.digest_of(text)
        if sha256 == self.opening_sha256:
            return self
        new, last = Opening.parse(text), self.opening
        _require(new.run == self.run, f"the opening belongs to another run: {new.run[:40]}")
        _require(
            new.joint == bool(new.commitment),
            "the opening must have either a seed or a commitment to a share of a seed",
        )
        _require(
            not new.joint or new.count > 0,
            "the opening has no size of the cohort, but hosts need it to recompute the cohort",
        )
        _require(
            new.round <= new.rounds,
            f"round {new.round} was opened, but the run has {new.rounds} rounds",
        )
        whole = self.whole and new.previous == self.tip
        _require(
            whole or not (new.joint and needs_times(new.selector)),
            "the coordinator did not send this host all earlier documents of the run, so the host "
            f"can't check the turns of {new.selector[:40]}; start a new run",
        )
        draws, times = self.draws, self.times
        if last is not None:
            _require(
                (new.round, new.attempt) > (last.round, last.attempt),
                f"round {new.round}, attempt {new.attempt} was opened after round {last.round}, "
                f"attempt {last.attempt}, but selections must be in order; if the coordinator was "
                "restored from a backup, start a new run",
            )
            _require(
                (new.selector, new.joint, new.rounds) == (last.selector, last.joint, last.rounds)
                and (not new.joint or new.count == last.count),
                "the selector, the number of clients, the number of rounds or the kind of seed "
                "changed during the run; start a new run for other settings",
            )
            _require(
                new.round == last.round
                or new.previous != self.tip
                or (self.outcome is not None and new.round == last.round + 1),
                f"round {new.round} was opened, but round {last.round} has no cohort or a round "
                "between them is missing; start a new run",
            )
            # A gap doesn't end the count: a coordinator could claim one before each attempt.
            if new.round > last.round and self.outcome is not None:
                draws, times = 0, dict(times)
                for client in self.outcome.cohort:
                    times[client] = times.get(client, 0) + 1
        return Chain(
            run=self.run,
            tip=sha256,
            whole=whole,
            opening=new,
            opening_sha256=sha256,
            draws=draws,
            times=times,
        )

    def attended(self, text: bytes) -> Chain:
        """Return the chain with the attendees of the current attempt."""
        sha256, opening = Attendees.digest_of(text), self._opening()
        if sha256 == self.attendees_sha256:
            return self
        new = Attendees.parse(text)
        _require(
            self.attendees is None,
            f"round {opening.round}, attempt {opening.attempt} already has a list of available "
            "clients; hosts reveal shares for one list only",
        )
        _require(
            new.previous == self.opening_sha256,
            "the list of available clients belongs to another opening",
        )
        _distinct(new.available, "the list of available clients")
        speakers = [each.client for each in new.speakers]
        _distinct(speakers, "the list of speakers")
        _require(
            set(speakers) <= set(new.available),
            "a speaker is missing in the list of available clients",
        )
        _require(
            all(bool(each.commitment) == opening.joint for each in new.speakers),
            "exactly the speakers of a joint seed must have a commitment",
        )
        _require(
            self.draws < MOST_DRAWS,
            f"{MOST_DRAWS} selections were drawn one after another, but got no cohort, which is "
            f"the maximum; round {opening.round} can't be drawn: start a new run",
        )
        if opening.joint:
            self._check_times(opening, new)
        return replace(
            self, tip=sha256, attendees=new, attendees_sha256=sha256, draws=self.draws + 1
        )

    def ended(self, text: bytes) -> Chain:
        """Return the chain with the outcome of the current attempt."""
        sha256, opening = Outcome.digest_of(text), self._opening()
        if sha256 == self.outcome_sha256:
            return self
        attendees = self._attendees()
        new = Outcome.parse(text)
        _require(self.outcome is None, "the attempt already has another outcome")
        _require(
            new.previous == self.attendees_sha256,
            "the outcome belongs to another list of available clients",
        )
        _distinct(new.cohort, "the cohort")
        _require(
            set(new.cohort) <= set(attendees.available),
            "the cohort has clients that are missing in the list of available clients",
        )
        _require(
            opening.count == 0 or len(new.cohort) <= opening.count,
            f"the cohort has {len(new.cohort)} clients, but the run selects {opening.count}",
        )
        seed = self.seed(new.share, new.shares)
        if opening.joint:
            cohort = self.recomputed(seed)
            _require(
                cohort == new.cohort,
                "the seed and the inputs give another cohort than the coordinator's: "
                f"{_differ(cohort, new.cohort)}",
            )
        return replace(self, tip=sha256, outcome=new, outcome_sha256=sha256)

    # What follows from them -------------------------------------------------------------------

    def seed(self, share: str, shares: Mapping[str, str]) -> int:
        """Return the seed of the current attempt. share, shares: as in `Outcome`.

        Raises BrokenSelectionError if a share was not committed to, or a host has not revealed its
        share: with all but some shares, the coordinator could choose which ones.
        """
        opening, attendees = self._opening(), self._attendees()
        if opening.seed is not None:
            _require(
                not share and not shares, "the outcome has shares, although the opening has a seed"
            )
            return opening.seed
        _require(bool(share), "the coordinator's share of the seed is missing")
        own = commitment_to(share, opening.previous, COORDINATOR)
        _require(
            own == opening.commitment,
            "the coordinator's share of the seed does not match its commitment",
        )
        speakers = [each.client for each in attendees.speakers]
        _require(
            shares.keys() <= set(speakers),
            "a share of the seed is from a client that is not a speaker",
        )
        _require(
            len(shares) == len(speakers),
            f"{len(shares)} of {len(speakers)} hosts revealed their shares of the seed, but all "
            "are required",
        )
        for each in attendees.speakers:
            _require(
                commitment_to(shares[each.client], self.opening_sha256, each.client)
                == each.commitment,
                f"client '{each.client}' revealed a share of the seed that does not match its "
                "commitment",
            )
        return joint_seed(self.attendees_sha256, share, [shares[name] for name in speakers])

    def recomputed(self, seed: int) -> tuple[str, ...]:
        """Return the cohort that a seed gives in the current attempt. The run's selector must be in
        `draws.RECOMPUTED`."""
        opening, attendees = self._opening(), self._attendees()
        _require(
            opening.selector in RECOMPUTED,
            f"hosts can't recompute selector '{opening.selector[:40]}'",
        )
        return drawn(
            opening.selector,
            seed=seed,
            round_number=opening.round,
            count=opening.count,
            available=attendees.available,
            times=attendees.times,
        )

    def _check_times(self, opening: Opening, attendees: Attendees) -> None:
        """Check the number of earlier selections of each client. The chain of a selector that needs
        these numbers is whole, see `opened`."""
        if not needs_times(opening.selector):
            _require(
                attendees.times is None,
                "the list of available clients must have numbers of earlier selections for "
                "selector round-robin only",
            )
            return
        counted = tuple(self.times.get(client, 0) for client in attendees.available)
        _require(
            counted == attendees.times,
            "the numbers of earlier selections differ from those in this run's chain",
        )

    def _opening(self) -> Opening:
        if self.opening is None:
            raise BrokenSelectionError("the selection has no opening yet")
        return self.opening

    def _attendees(self) -> Attendees:
        if self.attendees is None:
            raise BrokenSelectionError("the selection has no attendees yet")
        return self.attendees


def check_members(attendees: Attendees, hosts: Mapping[str, str]) -> None:
    """Check that no host has two speakers, and that each available client is a member on a
    speaker's host. hosts: host of each member, by client. Raises BrokenSelectionError."""
    speaking = {hosts.get(each.client) for each in attendees.speakers}
    _require(
        len(speaking) == len(attendees.speakers), "the list of speakers has two clients of one host"
    )
    strangers = [client for client in attendees.available if hosts.get(client) not in speaking]
    _require(
        not strangers,
        f"client '{''.join(strangers[:1])}' is available, but is not a member on the host of a "
        "speaker",
    )


def _require(holds: bool, broken: str) -> None:
    if not holds:
        raise BrokenSelectionError(f"refused selection: {broken}")


def _distinct(clients: Sequence[str], what: str) -> None:
    _require(len(set(clients)) == len(clients), f"{what} has a client twice")


def _differ(expected: Sequence[str], found: Sequence[str]) -> str:
    missing, strangers = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if not missing and not strangers:
        return "the cohort has another order"
    return (
        f"missing clients: {', '.join(missing[:3]) or 'none'}; additional clients: "
        f"{', '.join(strangers[:3]) or 'none'}"
    )
