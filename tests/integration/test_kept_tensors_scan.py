"""Tensors that clients keep are in nothing that a coordinator receives or sends.

The test searches the coordinator's own messages, inside TLS, in runs with questions and with
evaluations on the clients. The same search finds these tensors if the whole model is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.sum_federation import Members, sum_federation
from support.wire_recording import Recording

from potluck.client.disclosure.disclosure_policy import DisclosurePolicy
from potluck.client.training.local_update import Trained, train_update
from potluck.common.learning.task_loading import models_seeded
from potluck.common.tasks.digits import Digits
from potluck.common.tensors.model_arrays import state_arrays
from potluck.common.tensors.tensor_files import open_tensors
from potluck.server.store import RunState

pytestmark = pytest.mark.asyncio(loop_scope="module")

CLIENTS = 6
HEAD = ("3.weight", "3.bias")
"""Names of the kept tensors of the task's network."""
SEED = 11
OPEN = DisclosurePolicy(exact_sums=True, questions=("loss",), held_out_counts=True)
KEEP = "[model]\nkeep = ['3.*']\n"
PLAIN = "[selector]\nname = 'pow-d'\n"
SHORT = "[transport]\nup = {encoding = 'int8', delta = true}\ndown = {encoding = 'bfloat16'}\n"


def run_file(tables: str) -> str:
    return f"""
rounds = 2
clients_per_round = {CLIENTS}
expected_clients = {CLIENTS}
seed = {SEED}
task = {{name = "digits", clients = {CLIENTS}, held_out = 0.25}}
training = {{steps = 5}}
{tables}"""


class Heads:
    """The last layer of each client after each of its trainings, and before the first."""

    def __init__(self) -> None:
        with models_seeded(SEED):
            first = state_arrays(Digits().model())
        self.first = {name: first[name].copy() for name in HEAD}
        self.all = [self.first]

    def noting(self, honest: Callable[..., Trained]) -> Callable[..., Trained]:
        def noted(training: Any, *arguments: Any, **named: Any) -> Trained:
            trained = honest(training, *arguments, **named)
            arrays = state_arrays(training.loaded.model)
            self.all.append({name: arrays[name].copy() for name in HEAD})
            return trained

        return noted

    def found(self, traffic: bytes) -> bool:
        """Return True if four consecutive numbers of a head, or of its change, occur."""
        return any(
            row.tobytes() in traffic
            for head in self.all
            for values in (head["3.weight"], head["3.weight"] - self.first["3.weight"])
            for row in rows(values)
            if row.any()
        )


def rows(values: NDArray[Any]) -> NDArray[np.float32]:
    """Return the first four of every sixteen numbers."""
    return values.astype(np.float32).reshape(-1, 16)[:, :4]


def kept_files(folder: Path) -> list[Path]:
    """Return the files of the tensors that hosts keep."""
    return sorted(folder.glob("host-*/kept/*.safetensors"))


async def scanned(
    members: Members, folder: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> tuple[Heads, bytes, list[Path]]:
    """Return the last layers of a run's clients, all traffic, and the files that hosts keep."""
    recording, heads = Recording(), Heads()
    monkeypatch.setattr("potluck.client.training.device.train_update", heads.noting(train_update))
    async with sum_federation(members, folder, interceptors=[recording]) as federation:
        await federation.start(disclosure=OPEN)
        row = await federation.finished(text)
        assert row.state is RunState.FINISHED, row.reason
        assert len(heads.all) == 1 + 2 * CLIENTS
    assert len(recording.traffic) > 100_000
    return heads, recording.traffic, kept_files(folder)


@pytest.mark.parametrize(
    "text",
    [run_file(PLAIN + KEEP), run_file(PLAIN + KEEP + SHORT)],
    ids=["plain", "int8"],
)
async def test_tensors_that_clients_keep_are_never_sent(
    members: Members, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    heads, traffic, files = await scanned(members, tmp_path, monkeypatch, text)
    assert not heads.found(traffic)
    assert b"1.weight" in traffic
    assert not any(name.encode() in traffic for name in HEAD)
    assert len(files) == CLIENTS
    kept = []
    for path in files:
        with open_tensors(path) as file:
            assert set(file.layout.by_name) == set(HEAD)
            kept.append({name: array.copy() for name, array in file.arrays.items()})
    weights = [each["3.weight"].tobytes() for each in kept]
    assert len(set(weights)) == CLIENTS, "each has its own"
    last = {head["3.weight"].tobytes() for head in heads.all[-CLIENTS:]}
    assert set(weights) == last


async def test_scan_finds_tensors_that_are_sent(
    members: Members, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads, traffic, files = await scanned(members, tmp_path, monkeypatch, run_file(PLAIN))
    assert heads.found(traffic)
    assert all(name.encode() in traffic for name in HEAD)
    assert files == []
