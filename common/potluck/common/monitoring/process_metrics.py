"""Metrics that the processes of all parties have."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from potluck.common.monitoring.definitions import CERTIFICATE_EXPIRY, DISK_FREE, DISK_SIZE
from potluck.common.monitoring.instruments import Instruments
from potluck.common.net.tls import TlsFiles


def show_disk(instruments: Instruments, folder: Path) -> None:
    """Set the metrics of free space and size of a folder's disk."""
    with suppress(OSError):
        usage = shutil.disk_usage(folder)
        instruments.set(DISK_FREE, usage.free)
        instruments.set(DISK_SIZE, usage.total)


def show_certificate(instruments: Instruments, tls: TlsFiles) -> None:
    """Set the metric of the time at which the certificate expires. Raises what `TlsFiles.load`
    raises."""
    instruments.set(CERTIFICATE_EXPIRY, tls.load().expires.timestamp())
