"""Bytes of files that hosts have, as far as the coordinator knows. Pure.

gRPC takes megabytes before one has gone over the line, and loses them if the connection breaks. So
bytes count when the host names them as its offset, or when the whole file was handed over; each
byte of a file counts once.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

_MOST_REMEMBERED = 10_000
"""Downloads that are remembered until their host asks for the rest."""


@dataclass
class Download:
    """The transfer of one file to one host.

    counted: end of the bytes that are counted. handed: end of the bytes that gRPC took.
    """

    counted: int
    handed: int

    def hand(self, size: int) -> None:
        """Give gRPC the next bytes."""
        self.handed += size

    def complete(self, size: int) -> int:
        """Note that gRPC took the whole file; return the bytes to count for that."""
        confirmed = max(0, size - self.counted)
        self.counted = max(self.counted, size)
        return confirmed


class ConfirmedBytes:
    """The downloads of all hosts."""

    def __init__(self) -> None:
        self._downloads: OrderedDict[tuple[str, str], Download] = OrderedDict()

    def asked(self, peer: str, file: str, offset: int) -> tuple[Download, int]:
        """A host asks for a file from an offset: the download, and the bytes that it confirms.

        Offset 0 begins another download of the file. A host confirms no more than was handed over.
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
