"""A preset: a paper's settings as a run file, and what of it is ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

UNCHECKED: Final = "not checked against the paper"


@dataclass(frozen=True, kw_only=True)
class Assumption:
    """A dotted key of the run file whose value is ours, and why it is that value."""

    key: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Preset:
    """run: a run file, without seed and name. paper: whose settings these are. disclosure: what the
    hosts must allow, in their table of that name, beyond its defaults."""

    name: str
    paper: str
    run: Mapping[str, Any]
    disclosure: Mapping[str, Any] = field(default_factory=dict)
    assumptions: tuple[Assumption, ...] = ()


def because(**reasons: str) -> tuple[Assumption, ...]:
    """Keys with two underscores for each dot."""
    return tuple(
        Assumption(key=key.replace("__", "."), reason=reason) for key, reason in reasons.items()
    )
