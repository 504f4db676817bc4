"""Sizes, durations and shares for people."""

from __future__ import annotations

import math
import re
from datetime import datetime

from potluck.common.learning.spread import Coverage
from potluck.common.records.privacy_loss import RoundPrivacy
from potluck.common.trainer import SHARE

_BYTE_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def readable_bytes(count: float) -> str:
    """Return `count` bytes with a decimal unit: 0 B, 999 B, 1.5 kB, 23 MB."""
    value, unit = float(count), 0
    while value >= 999.5 and unit < len(_BYTE_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    digits = 1 if unit and value < 9.95 else 0
    return f"{value:.{digits}f} {_BYTE_UNITS[unit]}"


def readable_count(count: int, noun: str) -> str:
    """Return `count` with a noun: 1 round, 30 rounds."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def readable_seconds(seconds: float) -> str:
    """Return a duration as text: 0.4 s, 12 s, 3 min 05 s, 2 h 07 min, 3 d 04 h."""
    if seconds < 9.95:
        return f"{max(seconds, 0.0):.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600:02d} h"


def readable_share(share: float | None) -> str:
    """Return a share in [0, 1] in percent with one decimal; a dash for None."""
    return "–" if share is None or math.isnan(share) else f"{100 * share:.1f} %"


def readable_number(value: float | None) -> str:
    """Return a loss with four significant digits; a dash for None."""
    return "–" if value is None else f"{value:#.4g}".rstrip(".")


def readable_measure(value: float | None, unit: str) -> str:
    """Return a metric's mean as text with its unit: 93.1 %, 0.2712, 3.4 mm; a dash for None."""
    if unit == SHARE:
        return readable_share(value)
    number = readable_number(value)
    return f"{number} {unit}" if unit and value is not None else number


def readable_coverage(coverage: Coverage) -> str:
    """Return a metric's coverage as text: 7 clients, 280 samples; 4 of 7 clients, partial."""
    parts = []
    if coverage.asked:
        of = f"{coverage.clients} of " if coverage.incomplete else ""
        parts.append(f"{of}{readable_count(coverage.asked, 'client')}")
    if coverage.samples:
        parts.append(readable_count(coverage.samples, "sample"))
    if coverage.partial:
        parts.append("partial")
    return ", ".join(parts)


def readable_privacy(privacy: RoundPrivacy) -> str:
    """Return a run's privacy loss as text: ε ≤ 2.31 (δ = 1e-05), 3 clients near the limit."""
    loss = "ε unknown" if privacy.largest is None else f"ε ≤ {privacy.largest:.3g}"
    parts = [f"{loss} (δ = {privacy.delta:g})"]
    if privacy.near_limit:
        parts.append(f"{readable_count(privacy.near_limit, 'client')} near the limit")
    if privacy.refused:
        parts.append(f"{privacy.refused} refused")
    return ", ".join(parts)


def natural_order(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts numbers in names by value: client-2 before client-10."""
    pieces = re.split(r"([0-9]+)", name)
    return [(int(piece), "") if piece.isdecimal() else (-1, piece) for piece in pieces]


def readable_age(moment: datetime, now: datetime) -> str:
    """Return the time between `moment` and `now` as text: just now, 12 s ago."""
    seconds = (now - moment).total_seconds()
    return "just now" if seconds < 1.5 else f"{readable_seconds(seconds)} ago"
