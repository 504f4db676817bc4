"""The metrics of a host: connection, work, file transfers and privacy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

from potluck.common.errors import PotluckError
from potluck.common.monitoring import definitions as metrics
from potluck.common.monitoring.instruments import Instruments, show_certificate, show_disk
from potluck.common.monitoring.metric_labels import (
    Direction,
    DisclosureOutcome,
    HostStage,
    MeasuredParty,
    TrainingWay,
    Work,
    WorkOutcome,
    known_reason,
    known_signal,
)
from potluck.common.net.tls import TlsFiles
from potluck.common.records.privacy_loss import NEAR_LIMIT

# Figures of GPUs ----------------------------------------------------------------------------------
# The values come from the driver. So they include other processes' use, and reading the values
# needs no CUDA context. Without the package nvidia-ml-py, or without a driver, the list is empty.


@dataclass(frozen=True, kw_only=True)
class GpuFigures:
    """Current values of one GPU. utilisation: busy share of the last sampling period, in [0, 1]."""

    number: int
    memory_used: int
    memory_size: int
    utilisation: float


def gpu_figures() -> Sequence[GpuFigures]:
    """Return the values of all GPUs of this machine; none if the driver can't be queried."""
    driver = _driver()
    if driver is None:
        return ()
    found: list[GpuFigures] = []
    try:
        for number in range(driver.nvmlDeviceGetCount()):
            device = driver.nvmlDeviceGetHandleByIndex(number)
            memory = driver.nvmlDeviceGetMemoryInfo(device)
            busy = driver.nvmlDeviceGetUtilizationRates(device)
            found.append(
                GpuFigures(
                    number=number,
                    memory_used=memory.used,
                    memory_size=memory.total,
                    utilisation=busy.gpu / 100,
                )
            )
    except driver.NVMLError:  # a GPU failed, or does not report this value
        return tuple(found)
    return tuple(found)


@cache
def _driver() -> ModuleType | None:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    driver: ModuleType = pynvml
    return driver


# The metrics --------------------------------------------------------------------------------------

_WORK = frozenset(Work)


def told_speed(samples: int, seconds: float) -> float:
    """Return samples per second, rounded to one significant digit; 0 if `seconds` is 0.

    The training's seconds are a metric too. With both, an exact speed would disclose a client's
    number of samples.
    """
    return float(f"{samples / seconds:.0e}") if seconds > 0 else 0.0


class HostMetrics:
    """Records a host's metrics.

    Its methods are called on the event loop. Only the refresh runs in other threads: it reads
    current values when metrics are requested.
    """

    def __init__(self, instruments: Instruments | None = None) -> None:
        self.instruments = instruments or Instruments(MeasuredParty.HOST)
        self._attended_before = False
        self._attends = False
        self._spent = 0.0
        self._spent_on_trainings: dict[str, float] = {}
        self.instruments.set(metrics.ATTENDING, 0)

    # Looked up --------------------------------------------------------------------------------

    def watch(
        self,
        *,
        state: Path,
        tls: TlsFiles,
        stages: Callable[[], Mapping[str, int]],
    ) -> None:
        """Read disk, certificate, stages and GPUs whenever metrics are requested.

        `stages`: function that returns the number of instructions in progress, by stage.
        """

        def refresh() -> None:
            show_disk(self.instruments, state)
            with suppress(PotluckError):  # the file is being replaced: keep the old value
                show_certificate(self.instruments, tls)
            found = stages()
            for stage in HostStage:
                self.instruments.set(metrics.INSTRUCTIONS, found.get(stage, 0), stage=stage)
            self._show_gpus()

        self.instruments.refresh_with(refresh)

    def _show_gpus(self) -> None:
        for gpu in gpu_figures():
            number = str(gpu.number)
            self.instruments.set(metrics.GPU_USED, gpu.memory_used, gpu=number)
            self.instruments.set(metrics.GPU_SIZE, gpu.memory_size, gpu=number)
            self.instruments.set(metrics.GPU_UTILISATION, gpu.utilisation, gpu=number)

    # Connection -------------------------------------------------------------------------------

    def ready(self) -> str:
        """Return why the host is not ready; empty while it is connected."""
        return "" if self._attends else "not connected to the coordinator"

    def serves(self, clients: int, *, budget: float) -> None:
        """Record the number of the host's clients and the privacy budget of each client."""
        self.instruments.set(metrics.HOST_CLIENTS, clients)
        self.instruments.set(metrics.HOST_PRIVACY_BUDGET, budget)
        self.instruments.set(metrics.HOST_PRIVACY_SPENT, self._spent)

    def attends(self) -> None:
        """Record that the coordinator has accepted the connection."""
        if self._attended_before:
            self.instruments.count(metrics.RECONNECTS)
        self._attended_before = self._attends = True
        self.instruments.set(metrics.ATTENDING, 1)

    def lost(self) -> None:
        """Record that the control stream has ended."""
        self._attends = False
        self.instruments.set(metrics.ATTENDING, 0)

    # Work -------------------------------------------------------------------------------------

    def worked(self, work: str | None, outcome: WorkOutcome) -> None:
        """Count an instruction that has ended, unless its kind of work is unknown."""
        if work is not None and work in _WORK:
            self.instruments.count(metrics.WORK, work=work, outcome=outcome)

    def failed(self, reason: str) -> None:
        """Count an instruction that has failed."""
        self.instruments.count(metrics.WORK_FAILURES, reason=known_reason(reason))

    def trains(self, way: TrainingWay) -> None:
        """Count a training by how it is carried out: in a batched step with others, or alone."""
        self.instruments.count(metrics.TRAININGS, way=way)

    def trained(self, samples: int, seconds: float, loss: float) -> None:
        """Record a finished training; `samples`: samples seen, over all passes."""
        self.instruments.observe(metrics.TRAINING_SECONDS, seconds)
        self.instruments.set(metrics.TRAINING_SPEED, told_speed(samples, seconds))
        self.instruments.set(metrics.TRAINING_LOSS, loss)

    # Files ------------------------------------------------------------------------------------

    def moved(self, direction: Direction, size: int) -> None:
        """Count transferred bytes of a model or an update."""
        self.instruments.count(metrics.HOST_BYTES, size, direction=direction)

    def moved_through_store(self, direction: Direction, size: int) -> None:
        """Count the bytes that were transferred through an object store."""
        self.instruments.count(metrics.HOST_STORE_BYTES, size, direction=direction)

    def retried(self, direction: Direction) -> None:
        """Count a repeated attempt at a transfer."""
        self.instruments.count(metrics.HOST_RETRIES, direction=direction)

    # Privacy ----------------------------------------------------------------------------------

    def disclosed(self, signal: str, outcome: DisclosureOutcome) -> None:
        """Count a request for a client's profile, by its outcome."""
        self.instruments.count(metrics.DISCLOSURES, signal=known_signal(signal), outcome=outcome)

    def spent(self, epsilon: float) -> None:
        """Record the total ε that a client has spent; the metric is the maximum over clients."""
        self._spent = max(self._spent, epsilon)
        self.instruments.set(metrics.HOST_PRIVACY_SPENT, self._spent)

    def spent_on_trainings(self, client: str, epsilon: float, *, limit: float) -> None:
        """Record the ε that a client has spent on trainings with noise, and its owner's limit.

        The metrics are rounded to two significant digits: an exact ε would disclose the number of
        samples."""
        self._spent_on_trainings[client] = epsilon
        spent = self._spent_on_trainings.values()
        largest, near = max(spent), sum(each >= NEAR_LIMIT * limit for each in spent)
        left = max(0.0, limit - largest)
        self.instruments.set(metrics.HOST_TRAINING_PRIVACY_SPENT, float(f"{largest:.1e}"))
        self.instruments.set(metrics.HOST_TRAINING_PRIVACY_LEFT, float(f"{left:.1e}"))
        self.instruments.set(metrics.HOST_NEAR_PRIVACY_LIMIT, near)
