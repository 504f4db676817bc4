"""Audits the label counts that a run's clients claim, and stores the input of the audit.

Module `label_audit` has the statistics. The input is how each update changes the output bias: a few
numbers per client and round. They are recorded while updates are combined, because the updates are
deleted afterwards.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
from pydantic import TypeAdapter, ValidationError

from potluck.common.disclosure import LABEL_COUNTS, Weighting
from potluck.common.errors import ConfigurationError, RunError, StorageError
from potluck.common.tensors.encoding import EncodedUpdate, Encoding
from potluck.common.tensors.stored_tensors import forms
from potluck.common.tensors.tensor_files import Tensors
from potluck.server.plan.plan import RunPlan
from potluck.server.reduce.audit.label_audit import (
    BiasUpdates,
    ClientAudit,
    LocalSteps,
    audit_labels,
    output_bias,
)
from potluck.server.selection import Population
from potluck.server.store.records import RoundRow

Changes = Mapping[str, Sequence[float]]
"""Change of the output bias by each client's training: one number per class, by client."""

_CHANGES: TypeAdapter[dict[str, list[float]]] = TypeAdapter(dict[str, list[float]])
_ROUNDING: Final = 4 * float(np.finfo(np.float32).eps)
"""Relative changes up to this value may be rounding errors of update − model."""


class BiasRecords:
    """Files with each round's changes of the output bias: ROUND.json in the run's folder.
    Blocking."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, round_number: int, changes: Changes) -> None:
        """Record the changes of a round, and replace those of an abandoned attempt. Raises
        OSError."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = self._folder / f".{round_number}.new"
        with temporary.open("wb") as file:
            file.write(_CHANGES.dump_json({client: list(row) for client, row in changes.items()}))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._path(round_number))

    def read(self, round_number: int) -> Changes:
        """Return the recorded changes of a round; empty if there are none. Raises StorageError if
        the file is damaged."""
        path = self._path(round_number)
        try:
            return _CHANGES.validate_json(path.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValidationError) as error:
            raise StorageError(
                f"{path} can't be read ({type(error).__name__}); move the file to another folder "
                "to audit the other rounds",
                path=path,
            ) from None

    def _path(self, round_number: int) -> Path:
        return self._folder / f"{round_number}.json"


def why_not_audited(plan: RunPlan) -> str:
    """Return the reason why this run can't be audited, in one line; empty if it can."""
    run_file = plan.run_file
    if LABEL_COUNTS not in {str(signal) for signal in plan.selector.needs_profiles}:
        return (
            f"no client was asked for label counts, which selector '{run_file.selector.name}' does "
            "not need"
        )
    if run_file.secure_aggregation:
        return "updates are masked, so the change of the output bias by a single update is unknown"
    if run_file.host_sums.enabled:
        return (
            "hosts send sums of updates, so the change of the output bias by a single update is "
            "unknown"
        )
    if run_file.model is not None and run_file.model.divides:
        key = "keep" if run_file.model.keep else "trainable"
        return (
            f"`{key}` of [model] divides the model, so that the output bias may be missing in "
            "clients' updates"
        )
    if run_file.profiles.disclosure == "cells":
        return (
            "label counts are known for groups of clients only, so single clients do not claim "
            "label counts"
        )
    return _unplain_training(plan)


def _unplain_training(plan: RunPlan) -> str:
    """Return why the run's local training breaks the audit's assumptions; empty if it does not."""
    run_file, training, strategy = plan.run_file, plan.training, plan.strategy
    if plan.trainer is not None:
        return (
            f"task '{run_file.task.name}' has its own training loop, which the audit does not "
            "support"
        )
    if strategy.correction is not None:
        return f"strategy '{run_file.strategy.name}' corrects the steps of clients"
    if strategy.parts or strategy.one_way:
        return (
            f"strategy '{run_file.strategy.name}' has clients train parts of the model, and the "
            "output bias may not be among them"
        )
    if plan.selector.drops_tensors:
        return "clients omit tensors from their updates, and the output bias may be one of them"
    if plan.selector.sets_quotas:
        return (
            f"selector '{run_file.selector.name}' limits the samples of each class in trainings, "
            "but clients claim all of their samples"
        )
    if training.optimizer != "sgd":
        return f"the audit is valid for training.optimizer = 'sgd', not for '{training.optimizer}'"
    if training.weight_decay:
        return (
            f"training.weight_decay = {training.weight_decay:g} also changes the output "
            "bias; the audit is valid for 0"
        )
    other = [each.name for each in run_file.objective if each.name != "cross-entropy"]
    if other:
        return f"the audit is valid for objective 'cross-entropy', not for '{other[0]}'"
    if run_file.transport.down.encoding is not Encoding.FLOAT32:
        return (
            f"models are sent as {run_file.transport.down.encoding}, so clients start from a "
            "rounded output bias; use transport.down.encoding = 'float32'"
        )
    if run_file.transport.up.encoding is not Encoding.FLOAT32:
        return (
            f"updates are sent as {run_file.transport.up.encoding}, whose rounding hides how "
            "the bias changed; use transport.up.encoding = 'float32'"
        )
    return ""


def check_auditable(plan: RunPlan) -> None:
    """Raise RunError if this run can't be audited."""
    why = why_not_audited(plan)
    if why:
        raise RunError(f"claimed label counts can't be audited in this run: {why}")


def bias_changes(
    updates: Mapping[str, EncodedUpdate], model: Tensors, classes: int
) -> dict[str, list[float]]:
    """Return how each client's update changes the output bias; empty if the model has no such
    bias."""
    try:
        name = output_bias(forms(model.arrays), classes)
    except ConfigurationError:
        return {}
    before = model.arrays[name].astype(np.float64)
    begin = 0
    for tensor in model.layout.tensors:
        if tensor.name == name:
            break
        begin += tensor.elements if tensor.floating else 0
    changes: dict[str, list[float]] = {}
    for client, update in updates.items():
        after = update.read(begin, begin + classes, np.empty(classes, np.float32))
        change = after.astype(np.float64) - before
        change[np.abs(change) <= _ROUNDING * np.abs(before)] = 0.0
        changes[client] = change.tolist()
    return changes


def audit_run(
    plan: RunPlan,
    population: Population,
    noise_rates: Mapping[str, float],
    rounds: Sequence[RoundRow],
    records: BiasRecords,
) -> list[ClientAudit]:
    """Return an audit of each client, in the order of the population. Blocking.

    noise_rates: ε / Δ₁ (Δ₁: L1 sensitivity) of the noise in each client's claimed counts; clients
    that are missing made no claim. The maximum change of a bias is known exactly if clients report
    their exact number of steps; otherwise a lower bound of this maximum is used. Raises
    StorageError.
    """
    seen = _seen(plan, rounds, records)
    claims = population.label_counts
    if claims is None:
        claims = np.full((len(population), population.classes), np.nan)
    audits: list[ClientAudit] = []
    for row, client in enumerate(population.ids):
        # Audit one client at a time, with only its rounds: in a large federation, a client misses
        # most rounds.
        [audit] = audit_labels(
            claims[row : row + 1],
            seen.get(client, []),
            noise_rates=np.array([noise_rates.get(client, np.inf)]),
        )
        audits.append(replace(audit, row=row))
    return audits


def _seen(
    plan: RunPlan, rounds: Sequence[RoundRow], records: BiasRecords
) -> dict[str, list[BiasUpdates]]:
    training = plan.training
    exact = plan.run_file.weighting is Weighting.EXACT
    fewest_steps = 1 if plan.selector.sets_epochs else training.planned_steps(samples=1)
    seen: defaultdict[str, list[BiasUpdates]] = defaultdict(list)
    for one in rounds:
        updates = {each.client_id: each.update for each in one.included if each.update}
        for client, changes in records.read(one.key.round).items():
            update = updates.get(client) if exact else None
            steps = LocalSteps(
                samples=1 if update is None else max(1, update.samples),
                steps=fewest_steps if update is None else max(1, update.steps),
                batch_size=training.batch_size,
                learning_rate=training.learning_rate_in(one.key.round),
                momentum=training.momentum,
            )
            row = np.array([changes])
            known = update is not None and training.smallest_batch_size is None
            seen[client].append(
                BiasUpdates(
                    changes=row,
                    fewest=steps.fewest_samples(row) if known else None,
                    # Clipped gradients change a bias less, and how much less is not known: the
                    # bound is 0.
                    spans=np.array([0.0 if training.gradient_clip else steps.span]),
                )
            )
    return seen
