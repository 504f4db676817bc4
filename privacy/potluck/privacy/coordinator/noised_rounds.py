"""Rounds in which the coordinator adds noise to the sum of the updates.

The updates arrive unmasked. Before their sum is computed, the run's ledger charges each client for
it. A client whose limit would be exceeded is excluded from the sum and not selected again.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache

import numpy as np

from potluck.common.errors import ConfigurationError
from potluck.common.interruptible import in_thread
from potluck.common.records.privacy_loss import ALL_RUNS_BUDGET_SPENT, RUN_BUDGET_SPENT
from potluck.common.run_file.run_settings import PrivateUpdates
from potluck.common.run_file.runfile import RunFile
from potluck.privacy.accounting import GaussianSteps
from potluck.privacy.coordinator.noised_sum import NoisedSum, opened_noised_sum, system_normals
from potluck.privacy.coordinator.round_ledger import (
    CoordinatorLedger,
    NoisedRound,
    RoundLedger,
    divergences,
)
from potluck.privacy.rdp_filter import epsilon_spent, solved_noise
from potluck.server.live.models import RoundModel
from potluck.server.live.run import Run
from potluck.server.machine import events as rounds
from potluck.server.plan.update_noise import adapted, clip_of, with_clip, without_clip
from potluck.server.reduce.update_files import SpooledUpdate
from potluck.server.selection import Judgement
from potluck.server.updates.update_path import OpenRounds

# Adaptive clipping --------------------------------------------------------------------------------
# The bound on updates follows a quantile of their norms (Andrew et al. 2021).
#
# Each round counts the updates within the bound C, with noise, and sets C ← C · exp(-0.2 · (b-γ)).
# b is the noisy share of updates within the bound, γ the quantile. Sum and count are two Gaussian
# mechanisms on the same updates. With multipliers z₁ for the sum and z₂ for the count (whose
# sensitivity is 1/2), they are together as private as one with 1/z² = 1/z₁² + 1/z₂². The ledger
# charges z. The count takes the share `clip_quantile_share` of 1/z².


def noise_of_sum(settings: PrivateUpdates, noise_multiplier: float) -> float:
    """Return the noise multiplier of the sum. Together, the sum and the count of updates within the
    bound then have the run's noise multiplier."""
    if settings.clip_quantile is None:
        return noise_multiplier
    return noise_multiplier / math.sqrt(1 - settings.clip_quantile_share)


def next_clip(total: NoisedSum, settings: PrivateUpdates, noise_multiplier: float) -> float:
    """Return the next round's bound, from a noisy count of updates within the current bound.

    noise_multiplier: noise multiplier of the run, for sum and count together.
    """
    deviation = noise_multiplier / (2 * math.sqrt(settings.clip_quantile_share))
    within = np.where(total.norms <= total.clip, 0.5, -0.5).sum()
    noisy = 0.5 + (float(within) + deviation * float(total.normals(1)[0])) / total.clients
    return adapted(total.clip, noisy, settings)


# Rounds -------------------------------------------------------------------------------------------


class NoisedRounds(OpenRounds):
    """Handles a run's unmasked updates: charges the clients and adds noise to the sums."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._settings = private_updates(run.plan.run_file)
        self._ledger = RoundLedger(run.services.state_directory, run.id)
        self._all_runs = CoordinatorLedger(run.services.state_directory)
        self._turn = asyncio.Lock()

    @classmethod
    def check_sizes(cls, run_file: RunFile) -> None:
        """Raise ConfigurationError unless there is a noise multiplier that keeps the run within its
        ε."""
        noise_of(private_updates(run_file), run_file.rounds)

    async def unable(self, clients: Sequence[str]) -> Mapping[str, str]:
        """Return the clients whose budget allows no further training, with the reasons."""
        async with self._turn:
            return await asyncio.to_thread(self._spent, clients)

    async def reduce(self, updates: Sequence[SpooledUpdate]) -> RoundModel | None:
        """Charge the clients, and make the round's model from the noisy sum of their updates."""
        run, settings = self._run, self._settings
        async with self._turn:
            spent = await asyncio.to_thread(self._charge, [each.client for each in updates])
            kept = [each for each in updates if each.client not in spent]
            if spent:
                await run.selecting.left_out.add_and_store(spent)
            if len(kept) < run.machine.cohort.needed:
                why = "too many clients of the round have spent their privacy budget"
                run.post(rounds.SumFailed(*run.key[1:], why, tuple(spent.items())))
                return None
            clients = [each.client for each in kept]
        model, state, total = await in_thread(
            run.models.work.next_model_by_sum,
            run.machine.round,
            clients,
            opened_noised_sum(
                run.models.work.opened_round(kept, run.models.current),
                clip=self._clip,
                noise_multiplier=noise_of_sum(settings, self._noise),
                clients=run.plan.run_file.clients_per_round,
                normals=system_normals,
            ),
            run.models.current,
            without_clip(run.models.states.strategy),
            clients=len(run.roster),
        )
        if settings.clip_quantile is not None:
            state = with_clip(state, next_clip(total, settings, self._noise))
        rows = run.roster.rows(list(spent)).tolist()
        aside = dict(zip(rows, spent.values(), strict=True))
        return RoundModel(
            model=model,
            strategy_state=state,
            judgement=Judgement(set_aside=aside),
            spent=await asyncio.to_thread(self._ledger.spent, settings.delta),
        )

    @property
    def _clip(self) -> float:
        """The bound on the norm of this round's updates."""
        return clip_of(self._run.models.states.strategy, self._settings)

    @property
    def _noise(self) -> float:
        return noise_of(self._settings, self._run.plan.run_file.rounds)

    def _charge(self, clients: Sequence[str]) -> Mapping[str, str]:
        """Charge the clients that stay within their limits, if they suffice for a round.

        Returns the other clients, with the reasons.
        """
        _, number, attempt = self._run.key
        with self._all_runs.locked():
            spent = self._spent(clients)
            kept = tuple(client for client in clients if client not in spent)
            if len(kept) >= self._run.machine.cohort.needed:
                self._ledger.charge(
                    NoisedRound(
                        round=number,
                        attempt=attempt,
                        noise_multiplier=self._noise,
                        clip=self._clip,
                        clients=kept,
                        at=datetime.now(UTC),
                    )
                )
        return spent

    def _spent(self, clients: Sequence[str]) -> Mapping[str, str]:
        """Return the clients for which one more sum would exceed a limit, with the reasons."""
        in_run = self._settings.epsilon
        in_all = self._run.services.epsilon_over_runs
        everywhere = {} if in_all is None else self._all_runs.events_of(clients)
        found: dict[str, str] = {}
        for client in clients:
            if in_run is not None:
                count = self._beyond(self._ledger.events_of(client), in_run)
                if count is not None:
                    found[client] = (
                        f"{RUN_BUDGET_SPENT} (ε ≤ {in_run:g}, trainings charged: {count}); start a "
                        "run with a larger privacy.epsilon or privacy.trainings"
                    )
                    continue
            if in_all is not None:
                count = self._beyond(everywhere[client], in_all)
                if count is not None:
                    found[client] = (
                        f"{ALL_RUNS_BUDGET_SPENT} (ε ≤ {in_all:g}, trainings charged: {count}); "
                        "raise epsilon_over_runs of the coordinator, or give the run more noise"
                    )
        return found

    def _beyond(self, events: Mapping[GaussianSteps, int], limit: float) -> int | None:
        """Return the number of events if one more sum would exceed the limit, else None."""
        event = GaussianSteps(noise_multiplier=self._noise)
        if admits(events, event, limit, self._settings.delta):
            return None
        return sum(events.values())


def private_updates(run_file: RunFile) -> PrivateUpdates:
    """Return the run's [privacy] table. Raises ConfigurationError if it has none."""
    if run_file.privacy is None:
        raise ConfigurationError(
            "the run file has no table [privacy], which sums with noise need; add the table"
        )
    return run_file.privacy


def noise_of(settings: PrivateUpdates, rounds_of_run: int) -> float:
    """Return the run's noise multiplier; compute it if the run gives an ε.

    Raises ConfigurationError if no noise suffices for the ε.
    """
    if settings.noise_multiplier is not None:
        return settings.noise_multiplier
    trainings = settings.trainings or rounds_of_run
    return _solved(settings.epsilon or 0.0, settings.delta, trainings)


@lru_cache(maxsize=256)
def _solved(epsilon: float, delta: float, trainings: int) -> float:
    return solved_noise(epsilon=epsilon, delta=delta, sampling_rate=1.0, steps=trainings)


def admits(
    events: Mapping[GaussianSteps, int], event: GaussianSteps, epsilon: float, delta: float
) -> bool:
    """Return True if a client with these events stays within ε after one more event."""
    after = {**events, event: events.get(event, 0) + 1}
    return epsilon_spent(divergences(after), delta) <= epsilon
