"""Metrics that the processes of all parties have."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from potluck.common.monitoring.definitions import CERTIFICATE_EXPIRY, DISK_FREE, DISK_SIZE
from potluck.common.monitoring.instruments import Instruments
from potluck.common.net.tls import TlsFiles


def show_disk(instruments: Instruments, folder: Path) -> None:
    """Set the metrics of the free space and the size of the disk that contains a folder."""
    with suppress(OSError):
        usage = shutil.disk_usage(folder)
        instruments.set(DISK_FREE, usage.free)
        instruments.set(DISK_SIZE, usage.total)


def show_certificate(instruments: Instruments, tls: TlsFiles) -> None:
    """Set the metric of the time when the certificate expires. Raises the errors of
    `TlsFiles.load`."""
    instruments.set(CERTIFICATE_EXPIRY, tls.load().expires.timestamp())
