"""The log of released sums: a chain of hashes that a coordinator can extend but not rewrite.

head₀ is 32 zero bytes; headᵢ = SHA-256("log" ‖ headᵢ₋₁ ‖ entryᵢ). The coordinator appends an entry,
and stores it, before it sends a certificate. Invitations to sum histograms carry the head, and the
entries that lead to it from one that the client knows. A client refuses a log that does not extend
the one it saw last, or that lacks a session it gave shares in. A coordinator that keeps two logs
for two groups of clients is found out when the groups meet, not before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from potluck.common.secagg.rules import Rule, require
from potluck.common.secagg.wire.message_encoding import check_names, decode
from potluck.common.secagg.wire.messages import DIGEST_BYTES, LogEntry

GENESIS: Final = bytes(DIGEST_BYTES)


@dataclass(frozen=True)
class LogPosition:
    """So many entries, and the head after them."""

    length: int = 0
    head: bytes = GENESIS

    def extend(self, entries: Iterable[bytes]) -> LogPosition:
        """The position after serialised entries."""
        position = self
        for entry in entries:
            head = hashlib.sha256(b"log" + position.head + entry).digest()
            position = LogPosition(position.length + 1, head)
        return position


def check_log(
    known: LogPosition,
    begin: int,
    entries: Sequence[bytes],
    announced: LogPosition,
    owed: Collection[bytes],
) -> tuple[LogEntry, ...]:
    """The entries after the known position.

    begin: where `entries` begin, either 0 or where the known log ends. owed: sessions that must be
    among the new entries. Raises BrokenRuleError (query-log).
    """
    require(begin in (0, known.length), Rule.QUERY_LOG, "the log shown does not begin where known")
    skipped = known.length - begin
    require(len(entries) >= skipped, Rule.QUERY_LOG, "the log is shorter than it was")
    origin = known if begin else LogPosition()
    met = origin.extend(entries[:skipped])
    require(met == known, Rule.QUERY_LOG, "the log differs from what it was")
    fresh = entries[skipped:]
    require(known.extend(fresh) == announced, Rule.QUERY_LOG, "the log does not lead to its head")
    parsed = tuple(decode(LogEntry, entry) for entry in fresh)
    for entry in parsed:
        check_names(entry.clients, "a log entry's clients")
    missing = set(owed) - {entry.session_id for entry in parsed}
    require(not missing, Rule.QUERY_LOG, "the log lacks a sum this client took part in")
    return parsed
