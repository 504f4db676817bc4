"""Processes of a federation on this machine, found by its folder."""

from __future__ import annotations

import asyncio
from pathlib import Path


async def processes_of(folder: Path) -> list[str]:
    """Return all processes whose command line names the demo's folder, except the demo itself."""
    listing = await asyncio.create_subprocess_exec(
        "ps", "-A", "-ww", "-o", "stat=,args=", stdout=asyncio.subprocess.PIPE
    )
    out, _ = await listing.communicate()
    lines = [line for line in out.decode().splitlines() if str(folder) in line]
    return [line for line in lines if "--folder" not in line and not line.startswith("Z")]


async def until_no_process_of(folder: Path) -> None:
    async with asyncio.timeout(240):
        while await processes_of(folder):  # noqa: ASYNC110  # other processes give no signal
            await asyncio.sleep(0.05)
