"""The documents of a run's selections at the coordinator, with all that an audit needs.

`selections/RUN.jsonl` in the state directory has one line per step. A line is on disk before the
coordinator sends what it records. `selections/inputs/` has the inputs by digest. So a coordinator
that is killed between its commitment and the reveal continues with the same share, and backups
contain everything. Deleting a run keeps these files.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from potluck.common.disk import sync_path
from potluck.common.errors import StorageError
from potluck.common.net.key_files import KEY_MODE, write_file
from potluck.verifiable.chain import Chain
from potluck.verifiable.coordinator.selection_inputs import part_sha256
from potluck.verifiable.documents import Attendees, Opening, Outcome
from potluck.verifiable.stored_lines import Line, StoredLines

FOLDER: Final = "selections"
"""Name of the folder in a coordinator's state directory."""

_PARTS: Final = "inputs"


@dataclass(kw_only=True)
class LoggedAttempt:
    """One attempt at a round, as the log recorded it.

    chain: chain after the attempt's last document. description: inputs of the selection. share: the
    coordinator's share of the seed; empty if the seed is given. shares: revealed shares; None until
    they have been collected. reasons: one for each client of the cohort. hosts, limits: see
    `Placement`; only if the cohort depends on them. receipts: members' signatures by digest of the
    document and by client. state_after: digest of the selector's state after the round. learned:
    description of the facts about the round from which the selector learned this state. Both are
    empty unless the coordinator was about to commit this attempt.
    """

    chain: Chain
    description: str = ""
    share: str = ""
    shares: Mapping[str, str] | None = None
    reasons: Sequence[str] = ()
    hosts: Sequence[str] = ()
    limits: Sequence[tuple[str, Sequence[str], int]] = ()
    receipts: dict[str, Mapping[str, str]] = field(default_factory=dict)
    state_after: str = ""
    learned: str = ""

    @property
    def silent(self) -> tuple[str, ...]:
        """The speakers that committed to a share of the seed, but did not reveal it; none before
        the shares have been collected."""
        opening, attendees = self.chain.opening, self.chain.attendees
        if opening is None or not opening.joint or attendees is None or self.shares is None:
            return ()
        return tuple(each.client for each in attendees.speakers if each.client not in self.shares)


class SelectionLog:
    """The log of one run. Calls block; for one caller at a time."""

    def __init__(self, state_directory: Path, run: str) -> None:
        self._parts = state_directory / FOLDER / _PARTS
        self._file = StoredLines(state_directory / FOLDER / f"{run}.jsonl")
        self.chain = Chain.begin(run)
        self.attempts: list[LoggedAttempt] = []
        """All attempts, oldest first."""
        for line in self._file.read():
            self._take(line, _followed(self.chain, line))

    @property
    def path(self) -> Path:
        """The file of the log."""
        return self._file.path

    @property
    def last(self) -> LoggedAttempt | None:
        """The last attempt; None if there is none."""
        return self.attempts[-1] if self.attempts else None

    def find(self, round_number: int, attempt: int) -> LoggedAttempt | None:
        """Return an attempt at a round; None if it has no opening."""
        for each in reversed(self.attempts):
            opening = each.chain.opening
            if opening and (opening.round, opening.attempt) == (round_number, attempt):
                return each
        return None

    def attempts_at(self, round_number: int) -> list[LoggedAttempt]:
        """Return all attempts at a round, oldest first."""
        return [
            each
            for each in self.attempts
            if each.chain.opening is not None and each.chain.opening.round == round_number
        ]

    def documents(self) -> list[tuple[str, str, bytes]]:
        """Return digest, kind and text of each document of the run, oldest first."""
        found = list[tuple[str, str, bytes]]()
        for attempt in self.attempts:
            chain = attempt.chain
            texts = {
                "opening": chain.opening,
                "attendees": chain.attendees,
                "outcome": chain.outcome,
            }
            for kind, sha256 in chain.digests.items():
                document = texts[kind]
                assert document is not None  # noqa: S101  # it has a digest
                found.append((sha256, kind, document.encode()))
        return found

    # Steps ------------------------------------------------------------------------------------

    def open(self, opening: Opening, share: str, description: str) -> LoggedAttempt:
        """Add an attempt; store its inputs with `keep_parts` first. Raises StorageError."""
        self._add({"opening": _text(opening), "share": share, "inputs": description})
        return self.attempts[-1]

    def attend(self, attendees: Attendees) -> None:
        """Add the attendees of the last attempt. Raises StorageError."""
        self._add({"attendees": _text(attendees)})

    def reveal(self, shares: Mapping[str, str]) -> None:
        """Add the shares that hosts have revealed for the last attempt. Raises StorageError."""
        self._add({"shares": dict(shares)})

    def end(self, outcome: Outcome, **details: Any) -> None:
        """Add the outcome of the last attempt. details: fields of `LoggedAttempt`.

        Raises StorageError."""
        self._add({"outcome": _text(outcome), **details})

    def sign(self, document_sha256: str, signatures: Mapping[str, str]) -> None:
        """Add signatures of members on a document. Raises StorageError."""
        if signatures:
            self._add({"signed": document_sha256, "signatures": dict(signatures)})

    def learn(self, state_sha256: str, learned: str) -> None:
        """Add the digest of the selector's state after the last attempt, and the description of the
        facts from which it learned; store these with `keep_parts` first. Raises StorageError."""
        self._add({"state": state_sha256, "learned": learned})

    def _add(self, line: Line) -> None:
        chain = _followed(self.chain, line)
        self._file.add(line)
        self._take(line, chain)

    def _take(self, line: Line, chain: Chain) -> None:
        self.chain = chain
        if "opening" in line:
            self.attempts.append(
                LoggedAttempt(chain=self.chain, description=line["inputs"], share=line["share"])
            )
            return
        last = self.attempts[-1]
        if "shares" in line:
            last.shares = line["shares"]
        elif "outcome" in line:
            last.reasons = line["reasons"]
            last.hosts = line.get("hosts", ())
            last.limits = [tuple(each) for each in line.get("limits", ())]
        elif "signed" in line:
            last.receipts[line["signed"]] = line["signatures"]
        elif "state" in line:
            last.state_after, last.learned = line["state"], line.get("learned", "")
        last.chain = self.chain

    # Inputs -----------------------------------------------------------------------------------

    def keep_parts(self, parts: Mapping[str, bytes]) -> None:
        """Store those parts of a selection's inputs that are not stored yet; return when they are
        on disk.

        Raises StorageError.
        """
        new = {sha256: content for sha256, content in parts.items() if not self._has(sha256)}
        for sha256, content in new.items():
            packed = zlib.compress(content, 1)
            write_file(self._parts / sha256, packed, KEY_MODE, remedy="free disk space")
        if new:
            sync_path(self._parts)

    def part(self, sha256: str) -> bytes:
        """Return a stored part of a selection's inputs. Raises StorageError if it is missing or
        damaged."""
        path = self._parts / Path(sha256).name
        try:
            content = zlib.decompress(path.read_bytes())
        except (OSError, zlib.error) as error:
            raise StorageError(f"can't read {path}: {error}", path=path) from error
        if part_sha256(content) != sha256:
            raise StorageError(
                f"{path} is damaged: the digest of its content does not match its name; "
                "restore it from a backup",
                path=path,
            )
        return content

    def _has(self, sha256: str) -> bool:
        return (self._parts / sha256).exists()


def _text(document: Opening | Attendees | Outcome) -> str:
    return document.encode().decode()


def _followed(chain: Chain, line: Line) -> Chain:
    """Return the chain, extended by a line's document. Raises BrokenSelectionError."""
    if "opening" in line:
        return chain.opened(line["opening"].encode())
    if "attendees" in line:
        return chain.attended(line["attendees"].encode())
    return chain.ended(line["outcome"].encode()) if "outcome" in line else chain
