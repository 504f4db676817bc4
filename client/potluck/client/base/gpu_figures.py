"""Memory and utilisation of this machine's NVIDIA GPUs, where there are any.

Read from the driver, so it shows what others use as well and needs no context of its own on the
device. Without the package nvidia-ml-py, or without a driver, there are simply no figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType


@dataclass(frozen=True, kw_only=True)
class GpuFigures:
    """One GPU now. utilisation: share of the driver's last sampling period, in [0, 1]."""

    number: int
    memory_used: int
    memory_size: int
    utilisation: float


def gpu_figures() -> Sequence[GpuFigures]:
    """All GPUs of this machine; none where the driver can't be asked."""
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
    except driver.NVMLError:  # a GPU fell off, or does not say
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
