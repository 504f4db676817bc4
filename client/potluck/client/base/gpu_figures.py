"""Memory and utilisation of this machine's NVIDIA GPUs, if it has any.

The values come from the driver. So they include other processes' use, and reading the values needs
no CUDA context. Without the package nvidia-ml-py, or without a driver, the list is empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType


@dataclass(frozen=True, kw_only=True)
class GpuFigures:
    """Current values of one GPU. utilisation: in [0, 1], over the driver's last sampling period."""

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
