"""Reads the numbers of stored profiles that a run may use."""

from __future__ import annotations

from potluck.common.disclosure import (
    LABEL_COUNTS,
    Parameters,
    TaskReference,
    parse_parameters,
)
from potluck.common.errors import ProtocolError
from potluck.common.signal import Floats, read_payload, signal_named
from potluck.server.plan.plan import RunPlan
from potluck.server.store.records import Profile


class ProfileReader:
    """Reads profiles that were computed as a run requests them.

    model: BLAKE3 digest of the run's pre-trained model, for profiles that are computed with it;
    None if there is none yet.
    """

    def __init__(self, plan: RunPlan, *, model: str | None = None) -> None:
        self.model = model
        needs = {
            str(signal) for signal in plan.selector.needs_profiles | plan.strategy.needs_profiles
        }
        self.by_cell = LABEL_COUNTS in needs and plan.run_file.profiles.disclosure == "cells"
        """True if label counts are summed over groups of clients (cells); single clients are then
        not asked for their label counts."""
        self.needs = tuple(sorted(needs - {LABEL_COUNTS} if self.by_cell else needs))
        """The signals that single clients are asked for, sorted."""
        self._classes = plan.task.classes
        self._signals = {name: signal_named(name) for name in self.needs}
        wishes = plan.run_file.profiles
        self._requests = {name: each.request(wishes) for name, each in self._signals.items()}
        task = plan.run_file.task
        self._task = TaskReference(name=task.name, options=task.options)

    def needs_model(self, signal: str) -> bool:
        """Return True if clients need a pre-trained model to compute this signal."""
        return self._signals[signal].needs_model

    def shape(self, signal: str) -> tuple[int, ...]:
        """Return the shape of a client's numbers of this signal."""
        return self._signals[signal].shape(self._classes)

    def request(self, signal: str) -> str:
        """Return the requested parameters of this signal, as canonical JSON."""
        return self._requests[signal].canonical()

    def read(self, profile: Profile) -> Floats:
        """Return the numbers of a profile. Raises ProtocolError unless it has this run's
        parameters."""
        parameters = parse_parameters(profile.parameters_json)
        self._check_made_as_asked(profile, parameters)
        return read_payload(profile.signal, parameters, profile.payload_json, classes=self._classes)

    def _check_made_as_asked(self, profile: Profile, parameters: Parameters) -> None:
        model = self.model if self.needs_model(profile.signal) else None
        if not (
            parameters.satisfies(self._requests[profile.signal])
            and parameters.task == self._task
            and parameters.model == model
        ):
            raise ProtocolError(
                f"client '{profile.client_id}' computed {profile.signal} with different "
                f"parameters than requested: {profile.parameters_json[:300]}"
            )
