"""A federation that a script does not close is closed when Python exits."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import asyncio, contextlib
from potluck.federation import Federation
from potluck.federation.background import background_loop

async def opened():
    closing = contextlib.AsyncExitStack()
    listening = asyncio.create_task(asyncio.Event().wait())
    closing.callback(print, "closed")
    closing.callback(listening.cancel)
    return closing

closing = background_loop().call(opened())
federation = Federation(client=object(), closing=closing)
"""


def test_federation_left_open_is_closed_at_exit() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=True
    )
    assert (ended.stdout, ended.stderr) == ("closed\n", "")
