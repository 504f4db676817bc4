"""The watch over a host's copy of the membership."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

import structlog

from potluck.common.net.membership import troubles_of
from potluck.common.net.membership_in_force import MembershipInForce

log = structlog.get_logger()

WARNING_SECONDS: Final = 86_400.0
"""Pause between two warnings about member records that expire."""


async def follow(in_force: MembershipInForce | None, clients: Sequence[str]) -> None:
    """Watch the membership's file, and warn about records that expire, until cancelled.

    in_force: the membership in force; None without a federation root. Returns at once if None.
    """
    if in_force is None:
        return
    watching = asyncio.create_task(in_force.watch())
    try:
        while True:
            for trouble in troubles_of(in_force.members, clients, datetime.now(UTC)):
                log.warning(trouble)
            await asyncio.sleep(WARNING_SECONDS)
    finally:
        watching.cancel()
