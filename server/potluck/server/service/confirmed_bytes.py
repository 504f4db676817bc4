"""Counts the bytes of files that hosts have confirmed. Pure.

gRPC buffers megabytes before it sends any, and loses them if the connection breaks. So bytes count
only when the host requests the file from a later offset, or when gRPC took the whole file. Each
byte of a file counts once.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

_MOST_REMEMBERED = 10_000
"""Maximum number of interrupted downloads that are remembered until their host requests the
rest."""


@dataclass
class Download:
    """The transfer of one file to one host.

    counted: offset up to which bytes are in the traffic counter. handed: offset up to which bytes
    were passed to gRPC.
    """

    counted: int
    handed: int

    def hand(self, size: int) -> None:
        """Record that gRPC took the next bytes."""
        self.handed += size

    def complete(self, size: int) -> int:
        """Record that gRPC took the whole file; return the number of bytes to count now."""
        confirmed = max(0, size - self.counted)
        self.counted = max(self.counted, size)
        return confirmed


class ConfirmedBytes:
    """The downloads of all hosts."""

    def __init__(self) -> None:
        self._downloads: OrderedDict[tuple[str, str], Download] = OrderedDict()

    def asked(self, peer: str, file: str, offset: int) -> tuple[Download, int]:
        """Record a host's request for a file from an offset. Return the download, and the number of
        bytes to count.

        Offset 0 starts a new download of the file. A host can't confirm more than gRPC took.
        """
        before = self._downloads.pop((peer, file), None)
        if before is None or not offset:
            counted, confirmed = offset, 0
        else:
            confirmed = max(0, min(offset, before.handed) - before.counted)
            counted = max(offset, before.counted)
        download = Download(counted=counted, handed=offset)
        self._downloads[peer, file] = download
        if len(self._downloads) > _MOST_REMEMBERED:
            self._downloads.popitem(last=False)
        return download, confirmed
