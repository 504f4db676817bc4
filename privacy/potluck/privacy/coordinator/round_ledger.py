"""The coordinator's ledgers: which clients are in which sums with noise, kept for ever.

Each run has one file of JSON lines in the state directory's `privacy`: the run's name, then one sum
per line. A line is on disk, synced, before the noise of its sum is drawn. A coordinator that is
killed in between, or before the round is committed, draws new noise and adds a line after its
restart. So it may charge more than it published, never less. An incomplete last line is ignored:
its noise was never drawn. Deleting a run keeps its file, and backups contain it. A run's
pre-training has a separate file, and counts as part of the run.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from potluck.common.disk import sync_path
from potluck.common.errors import StorageError
from potluck.privacy.accounting import GaussianSteps, rdp_of
from potluck.privacy.rdp_filter import NOTHING, epsilon_spent
from potluck.server.plan.pretraining import is_pretraining, pretraining_id

FOLDER: Final = "privacy"
"""Name of the folder of ledgers in a coordinator's state directory."""


class NoisedRound(BaseModel):
    """One sum with noise. clients: clients in the sum. clip: maximum L2 norm of an update.

    noise_multiplier: standard deviation of the noise, in units of `clip`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    round: int
    attempt: int
    noise_multiplier: float = Field(gt=0, allow_inf_nan=False)
    clip: float = Field(gt=0, allow_inf_nan=False)
    clients: tuple[str, ...]
    at: AwareDatetime

    @property
    def event(self) -> GaussianSteps:
        """Privacy loss of each client of the round, as an event for the accountant."""
        return GaussianSteps(noise_multiplier=self.noise_multiplier)


class RoundLedger:
    """The ledger of one run. Calls block; for one caller at a time."""

    def __init__(self, state_directory: Path, run_id: str) -> None:
        self._pretraining: RoundLedger | None = None
        if not is_pretraining(run_id):
            self._pretraining = RoundLedger(state_directory, pretraining_id(run_id))
        self._path = state_directory / FOLDER / f"{run_id}.jsonl"
        self._first = json.dumps({"run": run_id}) + "\n"
        self._rounds: list[NoisedRound] | None = None
        self._size = 0
        self._charged: dict[str, Counter[GaussianSteps]] = {}

    def charge(self, charged: NoisedRound) -> None:
        """Add a noisy sum, synced to disk. Raises StorageError; the ledger is then unchanged."""
        rounds = self._read()
        lines = (self._first * (not self._size) + charged.model_dump_json() + "\n").encode()
        try:
            _append(self._path, lines, self._size)
        except OSError as error:
            raise StorageError(
                f"can't write the privacy ledger {self._path}: {error.strerror}", path=self._path
            ) from error
        self._size += len(lines)
        rounds.append(charged)
        self._note(charged)

    def rounds(self) -> Sequence[NoisedRound]:
        """Return the charged sums, oldest first, without those of the pre-training.

        Raises StorageError if the file exists but can't be read: a damaged file must not reset the
        spent budget.
        """
        return tuple(self._read())

    def events_of(self, client: str) -> Mapping[GaussianSteps, int]:
        """Return the number of charges of a client, by event. Raises StorageError."""
        found = Counter(self.own_events_of(client))
        if self._pretraining is not None:
            found.update(self._pretraining.events_of(client))
        return found

    def own_events_of(self, client: str) -> Mapping[GaussianSteps, int]:
        """Return the number of charges of a client, by event, without those of the pre-training.

        Raises StorageError.
        """
        self._read()
        return self._charged.get(client, {})

    def clients(self) -> list[str]:
        """Return the clients that were charged, sorted. Raises StorageError."""
        self._read()
        earlier = [] if self._pretraining is None else self._pretraining.clients()
        return sorted({*self._charged, *earlier})

    def spent(self, delta: float) -> Mapping[str, float]:
        """Return the ε that each charged client has spent, by client. Raises StorageError."""
        return {
            client: epsilon_spent(divergences(self.events_of(client)), delta)
            for client in self.clients()
        }

    def _read(self) -> list[NoisedRound]:
        if self._rounds is not None:
            return self._rounds
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            content = b""
        except OSError as error:
            raise StorageError(
                f"can't read the privacy ledger {self._path}: {error.strerror}", path=self._path
            ) from error
        whole = content[: content.rfind(b"\n") + 1]
        first, *lines = whole.splitlines(keepends=True) or [self._first.encode()]
        try:
            found = [NoisedRound.model_validate_json(line) for line in lines]
        except ValidationError as error:
            raise self._damaged() from error
        if first != self._first.encode():
            raise self._damaged()
        self._rounds, self._size = found, len(whole)
        for each in found:
            self._note(each)
        return found

    def _note(self, charged: NoisedRound) -> None:
        for client in charged.clients:
            self._charged.setdefault(client, Counter())[charged.event] += 1

    def _damaged(self) -> StorageError:
        return StorageError(
            f"{self._path} is not a valid privacy ledger; restore it from a backup: without the "
            "ledger, the run would forget the privacy loss of its clients",
            path=self._path,
        )


class CoordinatorLedger:
    """All ledgers of a coordinator together, of running, ended and deleted runs. Calls block."""

    def __init__(self, state_directory: Path) -> None:
        self._state = state_directory
        self._read: dict[str, tuple[int, RoundLedger]] = {}  # size of the file when it was read

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other runs of this coordinator from charging while the block runs.

        Raises StorageError if the lock can't be taken.
        """
        folder = self._state / FOLDER
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(folder, os.O_RDONLY)
        except OSError as error:
            raise StorageError(
                f"can't lock the folder of privacy ledgers {folder}: {error.strerror}", path=folder
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def events_of(self, clients: Sequence[str]) -> Mapping[str, Mapping[GaussianSteps, int]]:
        """Return each client's number of charges in all runs, by event. Raises StorageError."""
        found = {client: Counter[GaussianSteps]() for client in clients}
        for path in sorted((self._state / FOLDER).glob("*.jsonl")):
            ledger = self._ledger(path)
            for client, events in found.items():
                events.update(ledger.own_events_of(client))
        return found

    def _ledger(self, path: Path) -> RoundLedger:
        """Return the ledger in a file, read again if another run has charged since."""
        size = path.stat().st_size
        known = self._read.get(path.stem)
        if known is None or known[0] != size:
            known = size, RoundLedger(self._state, path.stem)
            self._read[path.stem] = known
        return known[1]


def divergences(events: Mapping[GaussianSteps, int]) -> tuple[float, ...]:
    """Return the sum of the events' Rényi divergences, per order. events: count of each event."""
    found = NOTHING
    for event, count in events.items():
        more = rdp_of(replace(event, steps=event.steps * count))
        found = tuple(one + other for one, other in zip(found, more, strict=True))
    return found


def _append(path: Path, lines: bytes, size: int) -> None:
    """Write lines at offset `size`, over the rest of a failed attempt; sync file and folder."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    with os.fdopen(descriptor, "r+b") as file:
        file.seek(size)
        file.truncate()
        file.write(lines)
        file.flush()
        os.fsync(file.fileno())
    if not size:
        for folder in (path.parent, path.parent.parent):
            sync_path(folder)
