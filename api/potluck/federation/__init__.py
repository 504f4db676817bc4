"""Potluck from Python: federations, runs and their results, for scripts and notebooks.

`Federation.local` starts a federation on this machine; `Federation.connect` uses an existing one.
Their methods do the same as the `potluck` command, by the same calls.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from potluck.common.process.entry import WINDOWS

if sys.platform == "win32":
    raise ImportError(WINDOWS)

from potluck.common.learning.spread import Coverage, Spread
from potluck.common.net.build_version import software_version
from potluck.common.records.round import RoundMember as Member
from potluck.federation.federation import Federation
from potluck.federation.rounds import Round
from potluck.federation.run import Run


def load_model(path: str | Path, *, data: str | Path | None = None) -> Any:
    """Return the network with the weights of a file that `potluck model` or `Run.save` wrote.

    See `trained_model.load_model`. Raises ConfigurationError if the library safetensors, of the
    extra `notebook`, is not installed.
    """
    from potluck.federation.trained_model import load_model as load  # imports torch

    return load(path, data=data)


if TYPE_CHECKING:
    __version__: str
else:

    def __getattr__(name: str) -> str:
        """Look up the version of this build at its first use, since the lookup may run git."""
        if name == "__version__":
            return software_version()
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Coverage",
    "Federation",
    "Member",
    "Round",
    "Run",
    "Spread",
    "__version__",
    "load_model",
]
