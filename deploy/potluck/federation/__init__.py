"""Potluck from Python: federations, runs and what comes of them, for scripts and notebooks.

`Federation.local` starts one on this machine, `Federation.connect` uses one that is there. All
else is what the `potluck` command does, through the same calls.
"""

from potluck.common.net.protocol import SOFTWARE_VERSION
from potluck.federation.federation import Federation
from potluck.federation.rounds import Member, Round, Spread
from potluck.federation.run import Run

__version__ = SOFTWARE_VERSION

__all__ = ["Federation", "Member", "Round", "Run", "Spread", "__version__"]
