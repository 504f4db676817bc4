"""Simulated durations of clients on devices of unequal speed.

A shifted exponential, as FLASH simulates its clients: T_i = α_T · N_i + Exp with mean λ_T · N_i.
Nothing waits for it. The coordinator draws how fast a client is, the client, which knows its number
of samples, reports the simulated seconds instead of the measured ones, and the coordinator decides
by them who was in time.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import numpy as np
from pydantic import Field

from potluck.common.settings.configuration import Settings


class VirtualClock(Settings):
    """The clock that times a run's trainings. Travels as JSON."""

    enabled: bool = Field(
        default=False,
        description="Time trainings by simulated durations instead of measured ones: what is\n"
        "recorded, what selectors learn, and who is late.",
    )
    seconds_per_sample: float = Field(
        default=1.0,
        ge=0,
        allow_inf_nan=False,
        description="The least that a training takes, for each of the client's samples (α_T).",
    )
    tail_per_sample: float = Field(
        default=1.0,
        ge=0,
        allow_inf_nan=False,
        description="The mean of the exponential time on top, for each sample (λ_T); FLASH has\n"
        "1, 10 and 100.",
    )
    draw: Literal["round", "client"] = Field(
        default="round",
        description="Whether it is drawn anew in each round, or once for each client, so that\n"
        "slow clients stay slow.",
    )
    deadline_seconds: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="Simulated seconds after which a client is late; unset, none is.",
    )


def pace(clock: VirtualClock, *, seed: int, client: str, round_number: int) -> float:
    """Seconds that a client takes for each of its samples in a round, before round 1 in round 0.

    A pure function of its arguments.
    """
    drawn_for = str(round_number) if clock.draw == "round" else "every round"
    text = f"virtual clock/{seed}/{client}/{drawn_for}"
    words = np.frombuffer(hashlib.sha256(text.encode()).digest(), dtype="<u4").tolist()
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(words)))
    tail = float(generator.standard_exponential()) * clock.tail_per_sample
    return clock.seconds_per_sample + tail
