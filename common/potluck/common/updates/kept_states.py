"""Purposes of the states that clients store between trainings. These states never leave a
client."""

from __future__ import annotations

from typing import Final

CORRECTION: Final = "correction"
"""State of a strategy's correction, such as SCAFFOLD's control variates."""
MODEL: Final = "model"
"""The tensors that `keep` of `[model]` names."""
PERSONAL: Final = "personal"
"""The client's own model, trained in addition to the round's model."""
PURPOSES: Final = frozenset({CORRECTION, MODEL, PERSONAL})
"""All purposes for which a host of this release can store states."""
