"""The programs, each run to its end in a process of its own."""

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
PATIENCE_SECONDS = 120.0


def run_program(
    program: str,
    *arguments: str,
    folder: Path,
    environment: Mapping[str, str] | None = None,
    stdin: bytes = b"",
) -> subprocess.CompletedProcess[bytes]:
    """`program ARGUMENTS…` in `folder`, with no operator.toml but one that lies there."""
    return subprocess.run(
        [sys.executable, "-m", MODULES[program], *arguments],
        cwd=folder,
        env={**os.environ, "HOME": str(folder), **(environment or {})},
        input=stdin,
        capture_output=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
