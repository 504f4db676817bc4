"""Runs Potluck's programs, each in its own process, until they end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

MODULES = {
    "potluck": "potluck.deploy",
    "potluck-server": "potluck.server",
    "potluck-client": "potluck.client",
    "potluck-relay": "potluck.relay",
}
PATIENCE_SECONDS = 240.0


def run_program(
    program: str,
    *arguments: str,
    folder: Path,
    environment: Mapping[str, str] | None = None,
    stdin: bytes = b"",
) -> subprocess.CompletedProcess[bytes]:
    """Run `program ARGUMENTS…` in `folder`; operator.toml is only read from there."""
    return subprocess.run(
        [sys.executable, "-m", MODULES[program], *arguments],
        cwd=folder,
        env={**os.environ, "HOME": str(folder), **(environment or {})},
        input=stdin,
        capture_output=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
