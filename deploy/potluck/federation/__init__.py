"""Potluck from Python: federations, runs and what comes of them, for scripts and notebooks.

`Federation.local` starts one on this machine, `Federation.connect` uses one that is there. All
else is what the `potluck` command does, through the same calls.
"""

import sys
from pathlib import Path
from typing import Any

from potluck.common.process.entry import WINDOWS

if sys.platform == "win32":
    raise ImportError(WINDOWS)

from potluck.common.net.protocol import SOFTWARE_VERSION
from potluck.federation.federation import Federation
from potluck.federation.rounds import Member, Round, Spread
from potluck.federation.run import Run


def load_model(path: str | Path, *, data: str | Path | None = None) -> Any:
    """The network with the weights of a file that `potluck model` or `Run.save` wrote.

    See `trained_model.load_model`. Raises ConfigurationError where the library safetensors, of the
    extra `notebook`, is not installed.
    """
    from potluck.federation.trained_model import load_model as load  # imports torch

    return load(path, data=data)


__version__ = SOFTWARE_VERSION

__all__ = ["Federation", "Member", "Round", "Run", "Spread", "__version__", "load_model"]
