"""The extension point for signals: a client's one-time disclosures about its data.

A signal is one class, derived from `ProfileSignal` and registered in the entry-point group
`potluck.signals`. It is installed on both sides: the coordinator requests it and checks the
answers, hosts compute it. Potluck does everything else: the owner's policy, the privacy budget, the
noise, the ledger, signatures, storage, and the columns that selectors read. Each client discloses a
signal once; for numbers that change from round to round, write a `Question` instead.

A module with a signal is loaded on coordinators too: import torch inside `measure` only.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from potluck.common.disclosure import Mode, Parameters, Request, first_fault
from potluck.common.errors import PluginError, ProtocolError, TrainingError
from potluck.common.names import ClientId
from potluck.common.run_file.run_settings import ProfileSettings
from potluck.common.settings.plugins import SIGNALS, Plugin, create, installed
from potluck.common.task import ClientData, Examples

Counts = NDArray[np.int64]
Floats = NDArray[np.float64]

MOST_SAMPLES = 1 << 40
"""Maximum plausible count, with or without noise."""

MOST_PAYLOAD_BYTES = 1 << 20

Count = Annotated[int, Field(strict=True, ge=-MOST_SAMPLES, le=MOST_SAMPLES)]
"""Number of samples in a payload; negative only if noise was added."""
Share = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]
"""Number in [0, 1] in a payload."""


class Payload(BaseModel):
    """Base class of the payloads that clients send as JSON objects. Unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class EstimatedMatrix(Protocol):
    """A client's estimated interaction matrix.

    matrix: classes × 2, int64; each sample counts in one cell. degenerate: True if the estimate
    found no attribute.
    """

    @property
    def matrix(self) -> Counts:
        """Number of samples by class and estimated attribute."""
        ...

    @property
    def degenerate(self) -> bool:
        """True if no class could be split."""
        ...


@dataclass(frozen=True, kw_only=True)
class SignalContext:
    """The facts from which a signal is computed on a host.

    data: function that returns the client's data, with `Examples` unless the task has its own
    trainer (`trains_by_itself`). task: name of the task. classes, groups: as in `Task`. parameters:
    parameters of the disclosure. label_counts: function that returns the number of training samples
    of each class. estimated_matrix: function that estimates the interaction matrix with the run's
    pre-trained model, for signals that set `needs_model`; takes long. noisy: function that adds the
    disclosure's noise to int64 counts of any shape and returns the result; without noise, it
    returns them unchanged. Call it only once. A sample must add 1 to at most one count; otherwise
    the protection is weaker than ε states.
    """

    client: ClientId
    data: Callable[[], ClientData[Any]]
    task: str
    classes: int
    groups: int
    trains_by_itself: bool
    parameters: Parameters
    label_counts: Callable[[], list[int]]
    estimated_matrix: Callable[[], EstimatedMatrix]
    noisy: Callable[[Counts], Counts]

    def examples(self, wanted: str) -> Examples:
        """Return the training samples of a classification task.

        wanted: the signal in plain words, for the error. Raises TrainingError if the task has its
        own trainer.
        """
        if self.trains_by_itself:
            raise TrainingError(
                f"task '{self.task}' has its own trainer and therefore no {wanted}; choose a "
                f"selector that does not need {wanted}"
            )
        found: Examples = self.data().train
        return found


class ProfileSignal(Plugin):
    """Base class of signals. The constructor takes no arguments."""

    group = SIGNALS

    title: ClassVar[str]
    """Name of the signal in plain words, for data owners, such as "label counts"."""
    payload: ClassVar[type[Payload]]
    """Class of the payload that a client sends. The payload's field with the signal's name contains
    the numbers."""
    modes: ClassVar[tuple[Mode, ...]] = (Mode.NOISY, Mode.EXACT)
    """The signal's modes, at least one; if it has both, the one with noise is first."""
    needs_model: ClassVar[bool] = False
    """True if clients need the run's pre-trained model. The settings of `[profiles.triplet]` are
    then sent with the request."""
    hides_records: ClassVar[bool] = True
    """True if the noisy mode's ε holds for each single record. Runs with `[privacy]` refuse
    selectors that need signals without this. Must be False without a noisy mode."""

    @abstractmethod
    def shape(self, classes: int) -> tuple[int, ...]:
        """Return the shape of the numbers, for a task with this number of classes."""

    @abstractmethod
    def measure(self, context: SignalContext) -> Mapping[str, Any]:
        """Return the payload of a client. Called on the host, from a worker thread; may block.

        Pass counts through `context.noisy`, and compute everything else from its result. The host
        refuses a noisy disclosure for which no noise was drawn. Raises TrainingError if the signal
        can't be computed from the data.
        """

    def request(self, wishes: ProfileSettings) -> Request:
        """Return the request for a run's settings: noisy unless the settings request exact
        numbers."""
        mode = self.modes[-1 if wishes.disclosure == "exact" else 0]
        if not mode.adds_noise:
            return Request(mode=mode)
        return Request(mode=mode, epsilon=wishes.epsilon, adjacency=wishes.adjacency)


def signal_named(name: str) -> ProfileSignal:
    """Return the installed signal of this name. Raises PluginError."""
    signal = create(ProfileSignal, name, {})
    if name not in signal.payload.model_fields:
        raise PluginError(
            f"signal {name}: the payload has no field '{name}'; give the field with the numbers "
            "this name",
            name=name,
        )
    return signal


def title_of(name: str) -> str:
    """Return a signal's title in plain words, or its name if it is not installed any more."""
    return signal_named(name).title if name in installed(SIGNALS) else f"'{name[:40]}'"


def check_known(name: str) -> None:
    """Raise ProtocolError unless a signal of this name is installed. The signal is not loaded."""
    known = installed(SIGNALS)
    if name not in known:
        raise ProtocolError(
            f"signal {name[:40]!r} is not installed; installed signals: {', '.join(known)}"
        )


def parse_request(name: str, text: str) -> Request:
    """Return a request from its JSON text. Raises ProtocolError if it is malformed or unknown."""
    check_known(name)
    signal = signal_named(name)
    try:
        request = Request.model_validate_json(text)
    except ValidationError as error:
        raise ProtocolError(
            f"the parameters of a {name} request are not valid: {first_fault(error)}"
        ) from None
    if request.mode not in signal.modes:
        raise ProtocolError(
            f"signal {name} has no mode '{request.mode}'; its modes are {', '.join(signal.modes)}",
            signal=name,
        )
    if (request.settings is None) == signal.needs_model:
        allowed = "must" if signal.needs_model else "must not"
        raise ProtocolError(f"a {name} request {allowed} contain training settings")
    return request


def read_payload(name: str, parameters: Parameters, text: str, *, classes: int) -> Floats:
    """Return the numbers of a disclosure, in the signal's shape. text: its payload from a peer.

    Raises ProtocolError for a wrong form or length, NaN and implausibly large numbers, even if the
    payload is signed. Numbers may be negative only if noise was added.
    """
    if len(text) > MOST_PAYLOAD_BYTES:
        raise ProtocolError(
            f"a {name} profile has {len(text)} characters; the maximum is {MOST_PAYLOAD_BYTES}"
        )
    if name not in installed(SIGNALS):
        _refuse(name, "this process does not know the signal")
    signal = signal_named(name)
    try:
        numbers = np.array(getattr(signal.payload.model_validate_json(text), name), np.float64)
    except ValidationError as error:
        _refuse(name, first_fault(error))
    except (TypeError, ValueError):  # rows of unequal length, or texts
        _refuse(name, "its numbers are not an array with rows of equal length")
    shape = signal.shape(classes)
    if numbers.ndim and shape[0] == classes != len(numbers):
        _refuse(name, f"it has {len(numbers)} entries, but the task has {classes} classes")
    if numbers.shape != shape:
        _refuse(name, f"its numbers have the shape {numbers.shape}, not {shape}")
    if not bool((np.abs(numbers) <= MOST_SAMPLES).all()):
        _refuse(name, f"a number is larger than {MOST_SAMPLES}")
    if not parameters.mode.adds_noise and bool((numbers < 0).any()):
        _refuse(name, "a count is negative, although no noise was added")
    return numbers


def _refuse(name: str, why: str) -> NoReturn:
    raise ProtocolError(f"a {name} profile is not valid: {why}", signal=name)
