"""Each client's ledger, never deleted: the privacy spent by its trainings and answers with noise.

Each client has one file of JSON lines in the state directory's `privacy`: the client's name, then
one training or answer per line. The line of a training is on disk, synced, before noise or batches
are drawn; the line of an answer contains the answer's numbers and is on disk before they are sent.
So a process that is killed in between has charged more than it sent, never less. An incomplete last
line is ignored: nothing was sent for it. If these files are lost, the record of the spent budget is
lost.

Profiles and secure sums of counts have other ledgers; `ledger_report` combines all of them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import (
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    TypeAdapter,
    ValidationError,
)

from potluck.client.base.state_directory import clients_with_files, storage_error, write_durably
from potluck.common.errors import StorageError
from potluck.privacy.accounting import GaussianSteps

Unit = Literal["record", "client"]
"""The unit that noise hides: a single record, or a client's whole update."""


class ChargedTraining(BaseModel):
    """One training with noise for records, or one upload of an update with noise as a whole.

    sampling_rate, noise_multiplier, steps: see `GaussianSteps`. work: digest of the instruction.
    federation, coordinator, run, round: recipient of the update.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["training"] = "training"
    unit: Unit = "record"
    data_epoch: int
    sampling_rate: float = Field(gt=0, le=1)
    noise_multiplier: float = Field(gt=0, allow_inf_nan=False)
    steps: int = Field(ge=1)
    work: str
    federation: str
    coordinator: str
    run: str
    round: int
    at: AwareDatetime

    @property
    def event(self) -> GaussianSteps:
        """Privacy loss of the training, as an event, for the unit that its noise hides."""
        return GaussianSteps(
            sampling_rate=self.sampling_rate,
            noise_multiplier=self.noise_multiplier,
            steps=self.steps,
        )

    def event_in(self, unit: Unit) -> GaussianSteps | None:
        """Return the training as an event for a unit; None if its noise does not hide the unit.

        One record changes an update by twice the clip at most. So noise that hides a whole update
        hides a record with half the noise multiplier.
        """
        if self.unit == unit:
            return self.event
        if self.unit == "client":
            return replace(self.event, noise_multiplier=self.noise_multiplier / 2)
        return None

    @property
    def recipient(self) -> tuple[str, str, str]:
        """The federation, its coordinator and the run."""
        return self.federation, self.coordinator, self.run


class ChargedAnswer(BaseModel):
    """One answer to a question, with noise.

    noise_multiplier: in units of the answer's sensitivity. question: kind of the question. work:
    digest of the question. numbers: the answer, which is sent again if the question is asked again.
    federation, coordinator, run, round: its first recipient.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["answer"] = "answer"
    unit: Literal["record"] = "record"
    data_epoch: int
    noise_multiplier: float = Field(gt=0, allow_inf_nan=False)
    question: str
    work: str
    numbers: Mapping[str, FiniteFloat]
    federation: str
    coordinator: str
    run: str
    round: int
    at: AwareDatetime

    @property
    def event(self) -> GaussianSteps:
        """Privacy loss of the answer, as an event for the accountant."""
        return GaussianSteps(noise_multiplier=self.noise_multiplier)

    def event_in(self, unit: Unit) -> GaussianSteps | None:
        """Return the answer as an event for a unit; None if its noise does not hide the unit."""
        return self.event if unit == self.unit else None

    @property
    def recipient(self) -> tuple[str, str, str]:
        """The federation, its coordinator and the run."""
        return self.federation, self.coordinator, self.run


Charge = ChargedTraining | ChargedAnswer
"""A line of a ledger."""

_CHARGE: Final[TypeAdapter[Charge]] = TypeAdapter(Annotated[Charge, Field(discriminator="kind")])


@dataclass(frozen=True)
class _Known:
    """The charges of a client, and the number of valid bytes in its file."""

    charges: tuple[Charge, ...] = ()
    size: int = 0


class PrivacyLedger:
    """The ledgers of all clients in a folder. Calls block; for one caller at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, _Known] = {}

    def of(self, client: str) -> Sequence[Charge]:
        """Return a client's trainings and answers, oldest first.

        Raises StorageError if its file exists but can't be read: a damaged file must not reset the
        spent budget.
        """
        return self._found(client).charges

    def charge(self, client: str, charge: Charge) -> None:
        """Add a line and sync it to disk. Raises StorageError; the ledger is then unchanged."""
        known, path = self._found(client), self._path(client)
        line = charge.model_dump_json() + "\n"
        if known.size:
            _append(path, line.encode(), known.size)
        else:
            line = _first_line(client) + line
            write_durably(path, line)
        self._known[client] = _Known((*known.charges, charge), known.size + len(line.encode()))

    def clients(self) -> list[str]:
        """Return the clients that have a ledger, sorted."""
        return clients_with_files(self._folder, ".jsonl")

    def _found(self, client: str) -> _Known:
        known = self._known.get(client)
        if known is None:
            known = self._known[client] = self._read(client)
        return known

    def _read(self, client: str) -> _Known:
        path = self._path(client)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return _Known()
        except OSError as error:
            raise StorageError(f"can't read {path}: {error.strerror}", path=path) from error
        whole = content[: content.rfind(b"\n") + 1]
        first, *lines = whole.splitlines(keepends=True) or [b""]
        if first != _first_line(client).encode():
            raise _damaged(path)
        try:
            charges = tuple(_CHARGE.validate_json(line) for line in lines)
        except ValidationError as error:
            raise _damaged(path) from error
        return _Known(charges, len(whole))

    def _path(self, client: str) -> Path:
        return self._folder / f"{client}.jsonl"


def _append(path: Path, line: bytes, size: int) -> None:
    """Write a line at offset `size`, over the rest of a failed attempt; sync it to disk."""
    try:
        with path.open("r+b") as file:
            file.seek(size)
            file.truncate()
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise storage_error(path, error) from error


def _damaged(path: Path) -> StorageError:
    return StorageError(
        f"{path} is not a valid privacy ledger; restore it from a backup: without the ledger, "
        "this client would forget its privacy loss",
        path=path,
    )


def _first_line(client: str) -> str:
    return json.dumps({"client": client}) + "\n"
