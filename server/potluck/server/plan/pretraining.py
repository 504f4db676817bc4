"""Pre-training: a few rounds of plain FedAvg before round 1, to estimate FedDiverse's triplets.

These rounds don't count as rounds of the run. They form a separate run, which listings hide. It
survives kills like any run; its models are kept until the main run has copied them.
"""

from __future__ import annotations

import hashlib
from datetime import datetime

import tomlkit

from potluck.common.run_file.run_settings import Evaluation, PluginTable
from potluck.common.run_file.runfile import RunFile
from potluck.server.store.records import NewRun

_PREFIX = "pre-"


def pretraining_id(run_id: str) -> str:
    """Return the id of the pre-training run for this run. Neither id is a prefix of the other."""
    return _PREFIX + run_id


def is_pretraining(run_id: str) -> bool:
    """Return True if a run is the pre-training of another run."""
    return run_id.startswith(_PREFIX)


def pretraining_run(run_id: str, run_file: RunFile, *, clients: int, at: datetime) -> NewRun:
    """Return the pre-training run for `run_id`: T₀ rounds of FedAvg with uniform selection.

    clients: number of clients, all of which train in each round. The seed differs from the main
    run's, so that round 1 does not train on the same batches again.
    """
    settings = run_file.profiles.triplet
    count = run_file.clients_per_round
    if settings.pretraining_participation == "all":
        count = max(count, run_file.expected_clients, clients)
    digest = hashlib.sha256(f"{run_file.seed}/pre-training".encode()).digest()
    changed = run_file.model_copy(
        update={
            "name": f"{run_file.name[:60]} (pre-training)",
            "rounds": settings.pretraining_rounds,
            "clients_per_round": count,
            "seed": int.from_bytes(digest[:8], "big") >> 1,
            "selector": PluginTable(name="uniform"),
            "strategy": PluginTable(name="fedavg"),
            "evaluation": Evaluation(every=0),
            "stop": None,
            "virtual_clock": run_file.virtual_clock.without_trace(),
            "retention": run_file.retention.model_copy(update={"keep_best": None}),
        }
    )
    text = tomlkit.dumps(changed.model_dump(mode="json", exclude_none=True))
    return NewRun.of(pretraining_id(run_id), changed, text, at, {})
