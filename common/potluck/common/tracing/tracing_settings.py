"""The table `[tracing]` of a coordinator and of a host."""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import Field, field_validator

from potluck.common.settings.configuration import Settings


class TracingSettings(Settings):
    """Destination of spans; by default none are sent."""

    endpoint: str = Field(
        default="",
        description="Collector that receives OTLP over gRPC, http://HOST:PORT or\n"
        "https://HOST:PORT. Empty: no traces. It learns how long clients train, if the\n"
        "run discloses exact numbers of samples.",
    )
    authority: Path | None = Field(
        default=None,
        description="Certificate of the authority of an https address, if that is not a public\n"
        "authority.",
    )
    share: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Share of the rounds that are traced, evenly spread. The coordinator's value\n"
        "counts.",
    )

    @field_validator("endpoint")
    @classmethod
    def _an_address(cls, endpoint: str) -> str:
        if endpoint and re.fullmatch(r"https?://[^/?#@\s]+:\d+/?", endpoint) is None:
            raise ValueError("must be http://HOST:PORT or https://HOST:PORT")
        return endpoint.rstrip("/")


def is_traced(number: int, share: float) -> bool:
    """Return whether a round is traced; traced rounds are evenly spread. number: number of the
    round, from 1."""
    return int(number * share) > int((number - 1) * share)
