"""Messages about clients' troubles; a trouble that many clients have is reported only once.
Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from potluck.server.store.records import MemberState

_SHOWN = 5
_MOST_SENTENCES = 5
_VERBS = {
    MemberState.LOST: ("was lost", "were lost"),
    MemberState.LATE: ("is late", "are late"),
    MemberState.FAILED: ("failed", "failed"),
}


@dataclass(kw_only=True)
class LeftOutClients:
    """Clients that can't take part in a run until their host is restarted, with the reasons."""

    troubles: dict[str, str] = field(default_factory=dict)

    def __contains__(self, client: str) -> bool:
        return client in self.troubles

    def __bool__(self) -> bool:
        return bool(self.troubles)

    def add(self, troubles: Mapping[str, str]) -> Mapping[str, str]:
        """Exclude clients; return those that were not excluded before."""
        new = {client: why for client, why in troubles.items() if client not in self.troubles}
        self.troubles |= new
        return new

    def remove(self, clients: Sequence[str]) -> tuple[str, ...]:
        """Readmit clients; return those that were excluded before."""
        return tuple(c for c in clients if self.troubles.pop(c, None) is not None)

    def summary(self) -> str:
        """Return a text with the excluded clients and the reasons."""
        return each_once(self.troubles, "excluded")

    def why_too_few(self, roster: Sequence[str], needed: int) -> str:
        """Return why a run can't continue without its excluded clients; empty if it can."""
        left = sum(client not in self.troubles for client in roster)
        if not self.troubles or left >= needed:
            return ""
        return (
            f"{left} of {counted(len(roster))} can take part, but at least {needed} are needed; "
            f"{self.summary()}; correct the causes, restart the hosts of these clients, then "
            "resume the run"
        )


class TroubleNotices:
    """Notices about members that have finished or failed in an attempt.

    A trouble that many members share is reported immediately for the first member, and at the end
    of the attempt for the others. Members that are excluded from the run are reported at the end,
    all together.
    """

    def __init__(self) -> None:
        self._said: set[tuple[MemberState, str]] = set()
        self._rest: dict[MemberState, dict[str, str]] = {}
        self._left_out: dict[str, str] = {}
        self._all: dict[str, str] = {}

    def over(self, client: str, state: MemberState, trouble: str, *, left_out: bool) -> str:
        """Record a member's final state. Return the notice to publish now; empty if there is
        none."""
        self._all[client] = trouble
        if left_out:
            self._left_out[client] = trouble
            return ""
        key = (state, sentence(client, trouble))
        if key in self._said:
            self._rest.setdefault(state, {})[client] = trouble
            return ""
        self._said.add(key)
        return f"{client} {_VERBS[state][0]}: {trouble}"

    def rest(self) -> list[str]:
        """Return the notices that are published at the end of the attempt."""
        said = [each_once(self._left_out, "excluded")] if self._left_out else []
        for state, troubles in self._rest.items():
            for trouble, clients in alike(troubles).items():
                one, several = _VERBS[state]
                if len(clients) == 1:
                    said.append(f"{clients[0]} {one}: {_shown(clients, trouble)}")
                else:
                    text = f"{len(clients)} more clients {several}: {trouble} ({listed(clients)})"
                    said.append(text)
        return said

    def summary(self) -> list[str]:
        """Return each distinct trouble once, with the number of clients that have it."""
        return [
            _shown(clients, trouble) + (f" ({counted(len(clients))})" if len(clients) > 1 else "")
            for trouble, clients in alike(self._all).items()
        ]


def sentence(client: str, trouble: str) -> str:
    """Return a client's trouble without the client's id, so that the same trouble has the same text
    for all clients."""
    return trouble.replace(f"'{client}'", "'…'")


def alike(troubles: Mapping[str, str]) -> Mapping[str, Sequence[str]]:
    """Group clients by the text of their trouble, the most frequent trouble first."""
    found: dict[str, list[str]] = {}
    for client, trouble in troubles.items():
        found.setdefault(sentence(client, trouble), []).append(client)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def each_once(troubles: Mapping[str, str], fate: str) -> str:
    """Return each trouble once, with the number of clients and some of their ids: '3 clients FATE:
    …'."""
    found = list(alike(troubles).items())
    parts = [
        f"{counted(len(clients))} {fate}: {_shown(clients, trouble)} ({listed(clients)})"
        for trouble, clients in found[:_MOST_SENTENCES]
    ]
    more = sum(len(clients) for _, clients in found[_MOST_SENTENCES:])
    return "; ".join([*parts, *([f"{counted(more)} {fate} for other reasons"] if more else [])])


def _shown(clients: Sequence[str], trouble: str) -> str:
    """Return the trouble, with the client's id added if only one client has it."""
    return trouble.replace("'…'", f"'{clients[0]}'") if len(clients) == 1 else trouble


def counted(clients: int) -> str:
    """Return a number of clients in words, such as "1 client" or "3 clients"."""
    return f"{clients} client" + "s" * (clients != 1)


def listed(clients: Sequence[str], most: int = _SHOWN) -> str:
    """Return a text with the first `most` clients and the number of the remaining ones."""
    shown = ", ".join(clients[:most])
    return shown if len(clients) <= most else f"{shown} and {len(clients) - most} more"
