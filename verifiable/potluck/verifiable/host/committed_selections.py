"""A host's view of the selections of each run, stored in its state directory.

Each run has a file of the documents and trainings that the host has accepted. A document is on disk
before its receipt is sent, and a training before it begins. So a host that restarts never reveals
its share of a seed for a second list of commitments, and never accepts a second cohort for an
attempt, or a second training of a client by one cohort.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Collection
from collections.abc import Set as AbstractSet
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import structlog

from potluck.client.disclosure.member_keys import signing_key
from potluck.client.disclosure.weightings import is_masked
from potluck.client.handlers.instruction_log import digest_of_training
from potluck.common.errors import IdentityError
from potluck.common.net.key_files import KEY_MODE, write_file
from potluck.common.net.membership import Members
from potluck.common.net.membership_in_force import MembershipInForce
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.verifiable.chain import Chain, check_members
from potluck.verifiable.documents import (
    SHARE_BYTES,
    Attendees,
    BrokenSelectionError,
    Document,
    Opening,
    Outcome,
    Speaker,
    commitment_to,
    receipt,
    share_of,
)
from potluck.verifiable.stored_lines import Line, StoredLines

log = structlog.get_logger()

FOLDER: Final = "selections"
"""Name of the folder in a host's state directory."""

_OPENING, _ATTENDEES, _OUTCOME = "opening", "attendees", "outcome"
_CLIENT: Final = "client"
_MISSED: Final = "missed"
_UNTRAINED: Final = "untrained"
TRAINING: Final = "training"
"""Key of the lines that record trainings."""

_KEY_FILE: Final = "share-key"
_MOST_RUNS: Final = 16
"""Number of runs whose chains stay in memory."""
MOST_UNTRAINED: Final = 10
"""Maximum number of successive cohorts with clients of this host that train none of them. Without
it, a coordinator could select until it likes the cohort, and train only then."""


class _KnownRun:
    """The chain of one run, and its file.

    speaker: the client that received the last document. stored: digests of all documents. late:
    True if the host had missed the last document. trained: digest of each client's training by the
    last outcome. untrained: number of successive cohorts before the last opening that had a client
    of this host, but by which none of them trained.
    """

    def __init__(self, folder: Path, run: str, own: AbstractSet[str]) -> None:
        """own: the clients of this host."""
        # The id comes from the coordinator, so it may not be a safe file name.
        name = hashlib.sha256(run.encode()).hexdigest()[:40]
        self._file = StoredLines(folder / f"{name}.jsonl")
        self.chain, self.speaker, self.late = Chain.begin(run), "", False
        self.stored: set[str] = set()
        self._own = own
        self.trained: dict[str, str] = {}
        self.untrained = 0
        for line in self._file.read():
            self._note(with_line(self.chain, line), line)

    def keep(self, kind: str, text: bytes, chain: Chain, client: str, *, missed: bool) -> None:
        """Store a document that the chain has accepted. Raises StorageError."""
        if chain is not self.chain:
            line: dict[str, object] = {kind: text.decode(), _CLIENT: client, "at": _now()}
            if missed:
                line[_MISSED] = "yes"
            if kind == _OPENING:
                line[_UNTRAINED] = self.untrained_with_the_last()
            self._file.add(line)
            self._note(chain, line)

    def train(self, client: str, training: str) -> None:
        """Store the digest of a client's training by the last outcome. Raises StorageError."""
        line = {TRAINING: training, _CLIENT: client, "at": _now()}
        self._file.add(line)
        self._note(self.chain, line)

    def untrained_with_the_last(self) -> int:
        """Return `untrained`, including the last cohort."""
        outcome = self.chain.outcome
        if outcome is None or self.late or self._own.isdisjoint(outcome.cohort):
            return self.untrained
        return 0 if self.trained else self.untrained + 1

    def _note(self, chain: Chain, line: Line) -> None:
        if TRAINING in line:
            self.trained[line[_CLIENT]] = line[TRAINING]
            return
        if _OPENING in line:
            self.trained, self.untrained = {}, line.get(_UNTRAINED, 0)
        self.chain, self.speaker = chain, line.get(_CLIENT, self.speaker)
        self.late = _MISSED in line
        self.stored.add(chain.tip)


class CommittedSelections:
    """Checks and stores documents of selections; implements the host's `SelectionGuard`."""

    def __init__(
        self,
        state_directory: Path,
        member_key: Path | None,
        in_force: MembershipInForce | None,
        clients: Collection[str],
    ) -> None:
        """member_key: as in the host's configuration. in_force: None without a federation root.
        clients: the clients of this host."""
        self._folder = state_directory / FOLDER
        self._clients = frozenset(clients)
        self._member_key = member_key
        self._in_force = in_force
        self._runs: dict[str, _KnownRun] = {}
        self._secret = b""
        self._lock = threading.Lock()

    # Documents --------------------------------------------------------------------------------

    def take(self, instruction: rpc.Instruction) -> rpc.SelectionReceipt:
        """Check and store a document; return the receipt to send."""
        kind = instruction.selection.WhichOneof("document") or ""
        text: bytes = getattr(instruction.selection, kind) if kind else b""
        with self._lock:
            known = self._known(instruction.run_id)
            if instruction.selection.missed:
                return self._take_missed(known, kind, text, instruction.client_id)
            chain = _with(known.chain, kind, text)
            self._check_client(known, chain, instruction.client_id)
            if kind == _OPENING:
                _require(
                    chain.opening is not None and chain.opening.round == instruction.round,
                    "the opening and its instruction name different rounds",
                )
                _require(
                    chain is known.chain or known.untrained_with_the_last() < MOST_UNTRAINED,
                    f"the last {MOST_UNTRAINED} cohorts with clients of this host trained none of "
                    "them, so this host takes no part in more selections of this run; start a new "
                    "run",
                )
            elif kind == _ATTENDEES:
                self._check_speakers(chain, instruction.client_id)
            else:
                self._check_share(known, chain)
            if known.chain.whole and not chain.whole:
                log.warning(
                    "coordinator did not send some selections of a run to this host",
                    run=instruction.run_id,
                    before_round=instruction.round,
                )
            known.keep(kind, text, chain, instruction.client_id, missed=False)
            return self._receipt(chain, kind, instruction.client_id)

    def _take_missed(
        self, known: _KnownRun, kind: str, text: bytes, client: str
    ) -> rpc.SelectionReceipt:
        """Check and store a document that the host missed; reveal nothing."""
        if digest_of(kind, text) not in known.stored:
            chain = _with(known.chain, kind, text)
            _require(chain.whole, "a document that was missed must continue this host's chain")
            if kind == _ATTENDEES:
                self._check_members(chain)
            known.keep(kind, text, chain, client, missed=True)
        return rpc.SelectionReceipt()

    def check(self, instruction: rpc.Instruction) -> None:
        """Check that a training belongs to the last selection that this host has accepted, and is
        the client's only one by it; store it."""
        with self._lock:
            self._check(self._known(instruction.run_id), instruction)

    def _check(self, known: _KnownRun, instruction: rpc.Instruction) -> None:
        chain, work, client = known.chain, instruction.train, instruction.client_id
        if not work.HasField("selection"):
            _require(
                chain.opening is None,
                f"run {instruction.run_id[:40]} commits to its selections, but a training for "
                f"client '{client}' names no selection",
            )
            return
        opening, outcome = chain.opening, chain.outcome
        if (
            opening is None
            or outcome is None
            or known.late
            or work.selection.outcome_sha256 != chain.outcome_sha256
        ):
            raise BrokenSelectionError(
                f"refused selection: client '{client}' was instructed to train for a selection "
                "that is not the last one that this host has received",
                client=client,
            )
        _require(
            opening.round == instruction.round,
            "the training and its selection name different rounds",
        )
        _require(
            client in outcome.cohort,
            f"client '{client}' was instructed to train, but is not in the committed cohort",
        )
        _require(
            not work.selection.hosts_verify or opening.joint,
            "the training claims that hosts can recompute the cohort, but hosts can't",
        )
        named = tuple(work.selection.cohort)
        _require(
            named == outcome.cohort or not (named or is_masked(work)),
            "the training names another cohort than the committed cohort",
        )
        training = digest_of_training(instruction)
        if client not in known.trained:
            known.train(client, training)
        _require(
            known.trained[client] == training,
            f"client '{client}' already has another training by this selection; a selection allows "
            "one per client",
        )

    def _receipt(self, chain: Chain, kind: str, client: str) -> rpc.SelectionReceipt:
        """Return the receipt for the chain's last document of this kind."""
        found = rpc.SelectionReceipt()
        joint = chain.opening is not None and chain.opening.joint
        sha256 = chain.outcome_sha256
        if kind == _OPENING:
            sha256 = chain.opening_sha256
            if joint:
                found.commitment = commitment_to(self._share(chain, client), sha256, client)
        elif kind == _ATTENDEES:
            sha256 = chain.attendees_sha256
            if joint:
                found.share = self._share(chain, client)
        if self._member_key is not None:
            key = signing_key(self._member_key, client, self._in_force)
            found.signature = key.sign(receipt(sha256, client, found.commitment))
        return found

    # What a chain alone does not show ---------------------------------------------------------

    def _check_client(self, known: _KnownRun, chain: Chain, client: str) -> None:
        """Check that the documents of one attempt at a joint seed come to the same client.

        Each client would have a share of its own. A coordinator that knew several shares of a host
        could leave out any but one, and so choose among many seeds."""
        same = chain.opening_sha256 == known.chain.opening_sha256
        if same and chain.opening is not None and chain.opening.joint:
            _require(
                client == known.speaker,
                f"client '{known.speaker}' already speaks for this host in this attempt, so client "
                f"'{client}' can't",
            )

    def _check_speakers(self, chain: Chain, client: str) -> None:
        """Check that the host's commitment is listed unchanged, and the members."""
        assert chain.attendees is not None  # noqa: S101  # `attended` has set it
        speakers = {each.client: each for each in chain.attendees.speakers}
        mine = speakers.get(client)
        _require(mine is not None, f"the list of speakers lacks client '{client}'")
        if chain.opening is not None and chain.opening.joint and mine is not None:
            own = commitment_to(self._share(chain, client), chain.opening_sha256, client)
            _require(
                mine.commitment == own,
                f"the list of speakers has a changed commitment of client '{client}'",
            )
        self._check_members(chain)

    def _check_members(self, chain: Chain) -> None:
        """Check that members signed the listed commitments, and the rules of `check_members`; with
        a federation root only."""
        assert chain.attendees is not None  # noqa: S101  # `attended` has set it
        if self._in_force is None:
            return
        members = self._in_force.members
        if members is None:
            raise BrokenSelectionError(
                "refused selection: this host has a federation root, but no member list has "
                "arrived; set members in the host's configuration or in the coordinator's"
            )
        for each in chain.attendees.speakers:
            _check_signature(members, chain.opening_sha256, each)
        check_members(chain.attendees, members.hosts)

    def _check_share(self, known: _KnownRun, chain: Chain) -> None:
        """Check that the share that this host has revealed is part of the seed."""
        if chain.opening is None or not chain.opening.joint or chain.outcome is None:
            return
        own = self._share(chain, known.speaker)
        _require(
            chain.outcome.shares.get(known.speaker) == own,
            f"the seed was made without the share that client '{known.speaker}' revealed",
        )

    def _share(self, chain: Chain, client: str) -> str:
        return share_of(self._read_secret(), chain.opening_sha256, client)

    def _read_secret(self) -> bytes:
        """Return the secret from which this host derives its shares; create it on first use."""
        if not self._secret:
            path = self._folder / _KEY_FILE
            try:
                found = path.read_bytes()
            except FileNotFoundError:
                found = os.urandom(SHARE_BYTES)
                write_file(path, found, KEY_MODE, remedy="free disk space")
            self._secret = found
        return self._secret

    def _known(self, run: str) -> _KnownRun:
        if run not in self._runs:
            if len(self._runs) >= _MOST_RUNS:
                del self._runs[next(iter(self._runs))]
            self._runs[run] = _KnownRun(self._folder, run, self._clients)
        return self._runs[run]


def with_line(chain: Chain, line: Line) -> Chain:
    """Return the chain with the document of a stored line. Raises BrokenSelectionError."""
    for kind in (_OPENING, _ATTENDEES, _OUTCOME):
        if kind in line:
            return _with(chain, kind, text_of(line, kind))
    return chain


def text_of(line: Line, kind: str) -> bytes:
    """Return the document in a stored line. Raises BrokenSelectionError if there is none."""
    text = line.get(kind)
    if not isinstance(text, str):
        raise BrokenSelectionError(f"the line has no {kind}")
    return text.encode()


def _with(chain: Chain, kind: str, text: bytes) -> Chain:
    """Return the chain with one more document. Raises BrokenSelectionError."""
    if kind == _OPENING:
        return chain.opened(text)
    if kind == _ATTENDEES:
        return chain.attended(text)
    if kind == _OUTCOME:
        return chain.ended(text)
    raise BrokenSelectionError(
        "this host does not know this type of selection document; update the host's software"
    )


def digest_of(kind: str, text: bytes) -> str:
    """Return the digest of a document. Raises BrokenSelectionError if its kind is unknown."""
    documents: dict[str, type[Document]] = {
        _OPENING: Opening,
        _ATTENDEES: Attendees,
        _OUTCOME: Outcome,
    }
    _require(kind in documents, "the type of the document is unknown")
    return documents[kind].digest_of(text)


def _check_signature(members: Members, opening: str, speaker: Speaker) -> None:
    """Check that a member signed its commitment. opening: digest of the opening."""
    signed = receipt(opening, speaker.client, speaker.commitment)
    signature = bytes.fromhex(speaker.signature)
    try:
        members.verify(speaker.client, signed, signature, datetime.now(UTC))
    except IdentityError as error:
        raise BrokenSelectionError(f"refused selection: {error.message}") from None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _require(holds: bool, broken: str) -> None:
    if not holds:
        raise BrokenSelectionError(f"refused selection: {broken}")
