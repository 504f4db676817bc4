"""One virtual environment per peer, created once."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from potluck.common.errors import ConfigurationError

INSTALL_SECONDS = 900.0
"""Maximum seconds to create an environment."""


async def environment(
    folder: Path,
    distribution: str,
    version: str,
    *,
    extra: str = "",
    others: Sequence[str] = ("numpy",),
) -> Path:
    """Return the `bin` folder of an environment with this version of a distribution.

    extra: name of one of its extras. others: further distributions to install.

    Raises ConfigurationError if the environment can't be created.
    """
    home = folder / "-".join(filter(None, (distribution, version, extra)))
    complete = home / "complete"
    if not complete.exists():
        home.parent.mkdir(parents=True, exist_ok=True)
        requirement = (
            f"{distribution}[{extra}]=={version}" if extra else f"{distribution}=={version}"
        )
        try:
            async with asyncio.timeout(INSTALL_SECONDS):
                await _succeed(sys.executable, "-m", "venv", "--clear", str(home))
                pip = str(home / "bin" / "pip")
                await _succeed(pip, "install", "--quiet", requirement, *others)
        except TimeoutError:
            raise ConfigurationError(
                f"{requirement} is not installed after {INSTALL_SECONDS:.0f} s; "
                "check the network and try again"
            ) from None
        except ConfigurationError as error:
            raise ConfigurationError(
                f"{requirement} can't be installed into {home}: {error}; "
                "name another version, or exclude this peer with --only"
            ) from None
        complete.touch()
    return home / "bin"


async def _succeed(*command: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        lines = [line for line in output.decode(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
        raise ConfigurationError(errors[0][:300] if errors else "no reason was given")
