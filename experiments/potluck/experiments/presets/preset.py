"""A preset: a paper's settings as a run file, and our assumptions in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator


class Assumption(BaseModel):
    """A dotted key of the run file whose value we chose, and the reason for the value."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str
    reason: str


class Preset(BaseModel):
    """A preset, read from a file of this folder.

    paper: the paper and its data set. run: a run file, without seed and name. disclosure: settings
    that hosts need in their [disclosure] table in addition to its defaults. assumptions: a table of
    reasons by key in the file.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    paper: str
    run: Mapping[str, Any]
    disclosure: Mapping[str, Any] = Field(default_factory=dict)
    assumptions: tuple[Assumption, ...] = ()

    @field_validator("assumptions", mode="before")
    @classmethod
    def _from_table(cls, value: object) -> object:
        if not isinstance(value, Mapping):
            return value
        return tuple({"key": key, "reason": reason} for key, reason in value.items())
