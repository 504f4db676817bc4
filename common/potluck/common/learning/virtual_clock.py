"""Simulated durations of clients on devices of different speed.

Durations follow a shifted exponential distribution, as in FLASH: T_i = α_T · N_i + Exp with mean
λ_T · N_i. No process waits for this time to pass. The coordinator draws each client's speed. The
client, which knows its number of samples, reports simulated seconds instead of measured ones. From
the reported seconds, the coordinator decides which clients were in time.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Annotated, Final, Literal, Self

import numpy as np
from pydantic import Field, StringConstraints, model_validator

from potluck.common.settings.configuration import Settings

_LATE = 2.0
"""Seconds per sample of a client that drops out, in units of the deadline.

It is above 1, so the client misses the deadline with any number of samples.
"""

MOST_SECONDS: Final = 1e9
"""Maximum of each simulated time and factor, so that their products stay finite."""

Clients = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}(:[0-9]{1,9})?$")]
"""A client's id, or a range of them such as client-0:23."""


class VirtualClock(Settings):
    """The clock that times a run's trainings. Sent as JSON."""

    enabled: bool = Field(
        default=False,
        description="True: trainings take simulated instead of measured time. Records, selectors\n"
        "and the deadline then use simulated seconds.",
    )
    seconds_per_sample: float = Field(
        default=1.0,
        ge=0,
        le=MOST_SECONDS,
        description="Minimum duration of a training, per sample of the client, in seconds (α_T).",
    )
    tail_per_sample: float = Field(
        default=1.0,
        ge=0,
        le=MOST_SECONDS,
        description="Mean of the random, exponentially distributed time that is added, per\n"
        "sample, in seconds (λ_T). Larger: durations differ more. FLASH uses 1, 10 and 100.",
    )
    draw: Literal["round", "client"] = Field(
        default="round",
        description="When random times are drawn: round (again in each round) or client (once\n"
        "for each client, so that slow clients stay slow).",
    )
    deadline_seconds: float | None = Field(
        default=None,
        gt=0,
        le=MOST_SECONDS,
        description="Simulated seconds after its selection at which a client is late. Unset: no\n"
        "client is late.",
    )
    slower: dict[Clients, Annotated[float, Field(gt=0, le=MOST_SECONDS)]] = Field(
        default_factory=dict,
        description="Factors by which the trainings of some clients take longer, such as\n"
        'slower = {"client-0:5" = 4.0, client-9 = 2.0}.',
    )
    drop_outs: dict[Clients, Annotated[float, Field(ge=0, le=1)]] = Field(
        default_factory=dict,
        description="Probabilities that a client's update does not arrive in a round, such as\n"
        'drop_outs = {"client-0:5" = 0.4}. The client is then late; needs deadline_seconds.',
    )

    trace: str | None = Field(
        default=None,
        min_length=1,
        description="CSV file in the coordinator's data directory that lists when clients are\n"
        "available and how fast they are; `potluck traces` creates such files. Needs\n"
        "deadline_seconds. Unset: all clients are always available.",
    )
    trace_sha256: str | None = Field(
        default=None,
        pattern="^[0-9a-f]{64}$",
        description="Expected SHA-256 of the trace. Unset: any content is accepted.",
    )

    @model_validator(mode="after")
    def _late_at_some_time(self) -> Self:
        if self.trace is not None and self.deadline_seconds is None:
            raise ValueError(
                "`trace` needs `deadline_seconds`, the time after which an unavailable client "
                "counts as late; set it, or remove trace"
            )
        if self.drop_outs and self.deadline_seconds is None:
            raise ValueError(
                "`drop_outs` needs `deadline_seconds`, the time after which a client that "
                "dropped out counts as late; set it, or remove drop_outs"
            )
        return self

    def without_trace(self) -> VirtualClock:
        """Return this clock with all clients available at all times."""
        return self.model_copy(update={"trace": None, "trace_sha256": None})

    def slowness(self, client: str) -> float:
        """Return the factor by which a client's trainings take longer; 1 if none is set."""
        return _of(self.slower, client, 1.0)

    def drop_out_chance(self, client: str) -> float:
        """Return the probability that a client's update does not arrive in a round."""
        return _of(self.drop_outs, client, 0.0)


def pace(
    clock: VirtualClock,
    *,
    seed: int,
    client: str,
    round_number: int,
    speed: float = 1.0,
    passes: float = 1.0,
) -> float:
    """Return the seconds per sample that a client takes in a round (0: before round 1).

    speed: divisor of the duration. passes: number of passes over the samples, divided by
    `training.epochs`. A client that drops out takes longer than the deadline, whatever its speed
    and passes. The same arguments always give the same result.
    """
    chance = clock.drop_out_chance(client)
    if chance and round_number and clock.deadline_seconds is not None:
        drawn = _generator(f"drop-out/{seed}/{client}/{round_number}").random()
        if drawn < chance:
            return _LATE * clock.deadline_seconds
    drawn_for = str(round_number) if clock.draw == "round" else "every round"
    generator = _generator(f"virtual clock/{seed}/{client}/{drawn_for}")
    tail = float(generator.standard_exponential()) * clock.tail_per_sample
    return (clock.seconds_per_sample + tail) * clock.slowness(client) / speed * passes


def _generator(text: str) -> np.random.Generator:
    words = np.frombuffer(hashlib.sha256(text.encode()).digest(), dtype="<u4").tolist()
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(words)))


def _of(named: Mapping[str, float], client: str, usual: float) -> float:
    """Return the value of the first entry whose clients include this one; `usual` if there is
    none."""
    for names, value in named.items():
        first, colon, last = names.partition(":")
        if names == client or (colon and _within(first, last, client)):
            return value
    return usual


def _within(first: str, last: str, client: str) -> bool:
    """Return True if a client's id has the range's prefix and a number from `first` to `last`."""
    prefix = re.sub("[0-9]*$", "", first)
    number, begin = client.removeprefix(prefix), first.removeprefix(prefix)
    counted = client.startswith(prefix) and number.isdecimal() and begin.isdecimal()
    return counted and int(begin) <= int(number) <= int(last)
