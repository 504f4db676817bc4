"""A client's ledger of the sums that it took part in, and the checks against it.

A ledger is a value; the `check_` functions read it, `Ledger.with_entries` extends it. The state
machine hands over entries together with a reply; whoever drives it writes them to disk, synced,
before the reply is sent: a process killed in between has spent more than it gave, never less.

Two moments count. At the *upload* the privacy loss of a noisy sum is charged, because from then on
others can complete the sum without this client. At the *reveal* a set is written down as released,
whatever the coordinator claims later: any two sets of one cohort that are certified or rebuilt have
an honest client in common that reveals for one of them only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, TypeAdapter

from potluck.common.secagg.policy.differencing import check_set
from potluck.common.secagg.policy.query_log import LogPosition
from potluck.common.secagg.rules import BrokenRuleError, Rule
from potluck.common.secagg.wire.messages import Header, LogEntry, Purpose

Adjacency = Literal["add-remove", "replace"]
"""The difference in data that noise hides: a sample more or less, or a sample exchanged."""

_Hexadecimal = Annotated[str, Field(pattern=r"^([0-9a-f]{2})*$")]


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Upload(_Entry):
    """A masked vector was sent. epsilon: charged; None without noise, as sensitivity and adjacency
    are, which say what the noise hides."""

    kind: Literal["upload"] = "upload"
    session_id: _Hexadecimal
    input_id: str
    epsilon: float | None
    sensitivity: int | None = None
    adjacency: Adjacency | None = None
    at: AwareDatetime


class SumRelease(_Entry):
    """Shares were given for a set. clients: its members, each with its host."""

    kind: Literal["release"] = "release"
    session_id: _Hexadecimal
    input_id: str
    federation: str
    run: str
    round: int
    purpose: Purpose
    subject: str
    disclosure: str
    clients: dict[str, str]
    epsilon: float | None
    sensitivity: int | None = None
    adjacency: Adjacency | None = None
    at: AwareDatetime


class LogSeen(_Entry):
    """The query log was checked up to a position; the sessions in it that this client knows of.

    released: of those, the sets that were summed, by session.
    """

    kind: Literal["log"] = "log"
    length: int
    head: _Hexadecimal
    released: dict[str, tuple[str, ...]]


LedgerEntry = Upload | SumRelease | LogSeen

_ENTRY: TypeAdapter[LedgerEntry] = TypeAdapter(
    Annotated[Upload | SumRelease | LogSeen, Field(discriminator="kind")]
)


def entry_from_json(text: str | bytes) -> LedgerEntry:
    """An entry as `entry.model_dump_json()` gave it. Raises pydantic's ValidationError."""
    return _ENTRY.validate_json(text)


class Ledger(_Entry):
    """All entries of one client, oldest first. epsilon_budget: for all noisy sums."""

    entries: tuple[Annotated[LedgerEntry, Field(discriminator="kind")], ...] = ()
    epsilon_budget: float = 0.0

    def with_entries(self, entries: Iterable[LedgerEntry]) -> Ledger:
        """The same ledger, extended."""
        return self.model_copy(update={"entries": (*self.entries, *entries)})

    @property
    def releases(self) -> list[SumRelease]:
        """The sets shares were given for."""
        return [each for each in self.entries if isinstance(each, SumRelease)]

    @property
    def uploads(self) -> list[Upload]:
        """The vectors that were sent."""
        return [each for each in self.entries if isinstance(each, Upload)]

    @property
    def spent(self) -> Fraction:
        """The privacy loss charged so far: ε is the decimal number it is printed as."""
        charged = (each.epsilon for each in self.uploads if each.epsilon is not None)
        return sum((Fraction(repr(epsilon)) for epsilon in charged), Fraction(0))

    @property
    def log_position(self) -> LogPosition:
        """The query log as it was last seen."""
        for each in reversed(self.entries):
            if isinstance(each, LogSeen):
                return LogPosition(each.length, bytes.fromhex(each.head))
        return LogPosition()

    @property
    def owed_sessions(self) -> set[bytes]:
        """Sessions over histograms that the query log must show before the next one."""
        owed: set[str] = set()
        for each in self.entries:
            if isinstance(each, SumRelease) and each.purpose is Purpose.HISTOGRAM:
                owed.add(each.session_id)
            elif isinstance(each, LogSeen):
                owed -= each.released.keys()
        return {bytes.fromhex(session) for session in owed}

    def sets_of(self, input_id: str) -> list[frozenset[str]]:
        """The sets that an input was summed in without noise: those this client gave shares for,
        and those that the query log shows of sessions in which it only uploaded."""
        uploads = [each for each in self.uploads if each.input_id == input_id]
        sessions = {each.session_id for each in uploads if each.epsilon is None}
        releases = [each for each in self.releases if each.input_id == input_id]
        sets = [frozenset(each.clients) for each in releases if each.epsilon is None]
        for each in self.entries:
            if isinstance(each, LogSeen):
                sets += [frozenset(s) for i, s in each.released.items() if i in sessions]
        return sets

    def hosts_of(self) -> dict[str, str]:
        """The host of each client that was ever in a set, as last seen."""
        return {client: host for each in self.releases for client, host in each.clients.items()}


def log_seen(ledger: Ledger, position: LogPosition, entries: Sequence[LogEntry]) -> LogSeen:
    """The entry for a log that was checked: `entries` are what is new in it."""
    known = {each.session_id for each in ledger.uploads}
    known |= {each.session_id for each in ledger.releases}
    released = {
        entry.session_id.hex(): entry.clients
        for entry in entries
        if entry.session_id.hex() in known and not entry.noisy
    }
    noisy = {e.session_id.hex(): () for e in entries if e.noisy and e.session_id.hex() in known}
    return LogSeen(length=position.length, head=position.head.hex(), released=released | noisy)


def check_charge(ledger: Ledger, header: Header) -> None:
    """Raise BrokenRuleError (budget) unless the ledger can pay for a noisy sum."""
    if header.noise is None:
        return
    budget = Fraction(repr(ledger.epsilon_budget))
    left = budget - ledger.spent
    if Fraction(repr(header.noise.epsilon)) > left:
        raise BrokenRuleError(
            Rule.BUDGET,
            f"the sum costs ε = {header.noise.epsilon:g}, of {ledger.epsilon_budget:g} "
            f"{float(left):g} is left; only its owner can raise epsilon_budget",
        )


def check_release(
    ledger: Ledger,
    header: Header,
    input_id: str,
    clients: Mapping[str, str],
    least_hosts: int,
) -> None:
    """Raise BrokenRuleError (released, differencing) unless this set may be summed as well.

    clients: the set, each with its host. Fresh noise makes every sum a new one. Without it, an
    update or a metric may be summed again over the identical set only; histograms over every set
    that `differencing.check_set` allows.
    """
    if header.noise is not None:
        return
    earlier = ledger.sets_of(input_id)
    if header.purpose is Purpose.HISTOGRAM:
        hosts = ledger.hosts_of() | dict(clients)
        unknown = {c for each in earlier for c in each if c not in hosts}
        # Log entries name no hosts: clients never met count as one host, to be cautious.
        check_set(clients, earlier, hosts | dict.fromkeys(unknown, "?"), least_hosts)
    elif any(each != frozenset(clients) for each in earlier):
        raise BrokenRuleError(
            Rule.RELEASED, "this input is in a released sum over another set of clients"
        )


def upload_entry(header: Header, input_id: str, at: datetime) -> Upload:
    """The entry to keep before a masked vector is sent."""
    return Upload(session_id=header.session_id.hex(), input_id=input_id, at=at, **_noise_of(header))


def release_entry(
    header: Header, input_id: str, clients: Mapping[str, str], at: datetime
) -> SumRelease:
    """The entry to keep before shares are given."""
    return SumRelease(
        session_id=header.session_id.hex(),
        input_id=input_id,
        federation=header.federation,
        run=header.run,
        round=header.round,
        purpose=header.purpose,
        subject=header.subject,
        disclosure=header.disclosure,
        clients=dict(clients),
        at=at,
        **_noise_of(header),
    )


def _noise_of(header: Header) -> dict[str, Any]:
    noise = header.noise
    if noise is None:
        return {"epsilon": None}
    adjacency: Adjacency = "add-remove" if noise.sensitivity == 1 else "replace"
    return {"epsilon": noise.epsilon, "sensitivity": noise.sensitivity, "adjacency": adjacency}
