"""Answers a coordinator's requests for disclosures: within the policy, measured once, recorded.

The order matters: check the policy first, then the ledger, then read the data. A new release is
synced to disk before it is sent. So repeated requests, or killing this process at any point, never
disclose two draws of the noise.
"""

from __future__ import annotations

import asyncio
import json
import random
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import numpy as np
import structlog

from potluck.client.base.host_metrics import HostMetrics
from potluck.client.disclosure.disclosure_policy import DisclosurePolicy, check_signal, terms
from potluck.client.disclosure.laplace import noisy_counts
from potluck.client.disclosure.member_keys import signing_key
from potluck.client.disclosure.privacy_budget import PrivacyBudget
from potluck.client.disclosure.release_ledger import Recipient, Release, ReleaseKey
from potluck.common.disclosure import (
    BUILT_IN_SIGNALS,
    Parameters,
    TaskReference,
    canonical_json,
)
from potluck.common.errors import ConfigurationError, ProtocolError, TrainingError
from potluck.common.monitoring.metric_labels import DisclosureOutcome
from potluck.common.net.membership import profile_statement
from potluck.common.net.membership_in_force import MembershipInForce
from potluck.common.signal import Counts, check_known, parse_request, signal_named, title_of
from potluck.rpc.v1 import coordinator_pb2 as rpc

log = structlog.get_logger()


Measure = Callable[[Parameters], Awaitable[dict[str, Any]]]
"""Function that reads the data and returns the value to send, with noise added."""


@dataclass(frozen=True, kw_only=True)
class Asker:
    """The coordinator that sends a request: its federation and address, as verified by TLS."""

    federation: str
    coordinator: str


@dataclass(kw_only=True)
class Discloser:
    """Answers requests for profiles, for all clients of a host. Runs on the event loop."""

    policy: DisclosurePolicy
    budget: PrivacyBudget
    asker: Asker
    member_key: Path | None
    in_force: MembershipInForce | None = None
    metrics: HostMetrics = field(default_factory=HostMetrics)
    _one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def answer(self, instruction: rpc.Instruction, measure: Measure) -> rpc.Profile:
        """Return the requested profile. `measure` reads the data; it is called at most once.

        Raises DisclosureRefusedError, ProtocolError, ConfigurationError, StorageError, and what
        `measure` raises.
        """
        work, client = instruction.disclose, instruction.client_id
        signal = work.signal
        check_known(signal)
        if signal not in BUILT_IN_SIGNALS:  # check before its code is loaded
            check_signal(self.policy, client, signal)
        request = parse_request(signal, work.parameters_json)
        parameters = terms(
            self.policy, client, signal, request,
            task=_task(work.task),
            model=work.model.blake3 if signal_named(signal).needs_model else None,
        )  # fmt: skip
        key = ReleaseKey(self.policy.data_epoch, signal, parameters.canonical())
        recipient = Recipient(
            federation=self.asker.federation,
            coordinator=self.asker.coordinator,
            run=instruction.run_id,
            at=datetime.now(UTC),
        )
        async with self._one_at_a_time:
            kept = self.budget.releases.find(client, key)
            fresh, payload_json = kept is None, ""
            if kept is None:
                self.budget.check_release(client, key.signal, parameters)
                payload_json = canonical_json(await measure(parameters))
            with self.budget.turn:
                release = kept or self._make(client, key, parameters, payload_json)
                # Sign again: the key in force may have changed.
                signature = self._sign(client, key, release.payload_json).hex()
                release = release.model_copy(update={"signature": signature})
                if not any(recipient.same(each) for each in release.recipients):
                    recipients = (*release.recipients, recipient)
                    release = release.model_copy(update={"recipients": recipients})
                    # Write before sending: the disk then has every disclosed release. Don't use a
                    # thread: cancelling this instruction could leave the write half done.
                    self.budget.keep_release(client, release)
                    self._tell(client, release, recipient, fresh=fresh)
        outcome = DisclosureOutcome.MADE if fresh else DisclosureOutcome.REPEATED
        self.metrics.disclosed(signal, outcome)
        return rpc.Profile(
            signal=release.signal,
            parameters_json=release.parameters_json,
            payload_json=release.payload_json,
            data_epoch=release.data_epoch,
            signature=bytes.fromhex(release.signature),
        )

    def _make(
        self, client: str, key: ReleaseKey, parameters: Parameters, payload_json: str
    ) -> Release:
        """Return a new release.

        Raises DisclosureRefusedError if the budget has been spent since the first check.
        """
        self.budget.check_release(client, key.signal, parameters)
        return Release(
            data_epoch=key.data_epoch,
            signal=key.signal,
            parameters_json=key.parameters_json,
            payload_json=payload_json,
            epsilon=parameters.epsilon,
            at=datetime.now(UTC),
        )

    def _sign(self, client: str, key: ReleaseKey, payload_json: str) -> bytes:
        if self.member_key is None:
            return b""
        return signing_key(self.member_key, client, self.in_force).sign(
            profile_statement(
                federation=self.asker.federation,
                client=client,
                data_epoch=key.data_epoch,
                signal=key.signal,
                parameters_json=key.parameters_json,
                payload_json=payload_json,
            )
        )

    def _tell(self, client: str, release: Release, recipient: Recipient, *, fresh: bool) -> None:
        spent = float(self.budget.spent(client))
        log.info(
            f"disclosed {description(release)} of {client} to the coordinator of federation "
            f"{recipient.federation} at {recipient.coordinator}, for run {recipient.run}"
            + ("" if fresh else "; this repeats an earlier disclosure and spends no budget"),
            client=client,
            epsilon_spent=spent,
            epsilon_budget=self.policy.epsilon_budget,
        )


def randomness(policy: DisclosurePolicy, client: str, parameters: Parameters) -> random.Random:
    """Return the source of noise: the operating system's generator, except in a simulation."""
    if policy.simulation_seed is None:
        return secrets.SystemRandom()
    return random.Random(f"{policy.simulation_seed}/{client}/{parameters.canonical()}")


def noised(counts: list[int], parameters: Parameters, generator: random.Random) -> list[int]:
    """Return the counts, with noise if the parameters ask for noise. generator: result of
    `randomness`.
    """
    if parameters.epsilon is None or parameters.adjacency is None:
        return counts
    return noisy_counts(
        counts,
        epsilon=parameters.epsilon,
        adjacency=parameters.adjacency,
        randomness=generator,
    )


class ReleaseNoise:
    """The noise of one release. A signal draws it once, for all of its counts."""

    def __init__(self, signal: str, parameters: Parameters, generator: random.Random) -> None:
        self._signal, self._parameters, self._generator = signal, parameters, generator
        self._drawn = False

    def __call__(self, counts: Counts) -> Counts:
        """Return counts with noise, or unchanged if the release has none.

        Raises TrainingError for numbers that are not whole, and if it is called twice.
        """
        if self._drawn:
            raise TrainingError(
                f"signal '{self._signal}' requested noise twice; pass all of its counts in one call"
            )
        self._drawn = True
        if counts.dtype.kind not in "iu":
            raise TrainingError(
                f"signal '{self._signal}' requests noise for numbers of type {counts.dtype}; use "
                "int64"
            )
        noisy = noised(counts.ravel().tolist(), self._parameters, self._generator)
        return np.array(noisy, dtype=np.int64).reshape(counts.shape)

    def check_drawn(self) -> None:
        """Raise TrainingError if the release is a noisy one, and no noise was drawn."""
        if self._parameters.mode.adds_noise and not self._drawn:
            raise TrainingError(
                f"signal '{self._signal}' did not add noise to a noisy disclosure; pass its "
                "counts through context.noisy"
            )


def description(release: Release) -> str:
    """Return a description of a release, for people."""
    words = title_of(release.signal)
    if release.epsilon is None:
        return f"the {words}, without noise,"
    adjacency = json.loads(release.parameters_json)["adjacency"]
    return f"the {words}, with noise (ε = {release.epsilon:g}, {adjacency}),"


def _task(plugin: rpc.Plugin) -> TaskReference:
    try:
        options = json.loads(plugin.options_json or "{}")
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise ProtocolError(f"options of task '{plugin.name[:40]}' are not a JSON object")
    if not plugin.name:
        raise ConfigurationError("the request for a disclosure does not name a task")
    return TaskReference(name=plugin.name, options=cast(dict[str, Any], options))
