"""The example of private training records the events that Opacus' own engine counts."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import dp_accounting as dp
import pytest
import torch
from dp_accounting.rdp import RdpAccountant
from opacus import PrivacyEngine
from support.examples import EXAMPLES
from torch import nn
from torch.utils.data import DataLoader

from potluck.client.disclosure.disclosure_policy import DisclosurePolicy
from potluck.client.training.own_training import OwnTraining
from potluck.client.training.task_training import LoadedTask, TrainingFiles
from potluck.common.learning.measures import own_trainer
from potluck.common.names import ClientId
from potluck.common.settings.local_training import LocalTraining
from potluck.common.tensors.model_arrays import state_arrays
from potluck.common.tensors.tensor_files import write_tensors
from potluck.common.trainer import TrainingProgress
from potluck.privacy.accounting import epsilon_by_rdp
from potluck.privacy.host.host_guard import HostGuard
from potluck.privacy.host.privacy_ledger import PrivacyLedger
from potluck.rpc.v1 import coordinator_pb2 as rpc

DELTA, SIGMA = 1e-5, 1.1
BATCH = 66
"""Expected batch size: a sixth of the images of client-0."""


def example() -> Any:
    """Return the example's module."""
    path = EXAMPLES / "private-training" / "private_digits.py"
    spec = importlib.util.spec_from_file_location("private_digits", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore:Secure RNG turned off", "ignore:Full backward hook is firing")
def test_private_example_has_the_epsilon_of_dp_accounting_and_opacus(tmp_path: Path) -> None:
    module = example()
    module.write_images(tmp_path / "data")
    loaded = LoadedTask("private-digits", module.PrivateDigits(), "cpu", tmp_path / "data")
    trainer = own_trainer(loaded.task, loaded.name)
    assert trainer is not None
    training = OwnTraining(loaded, trainer)
    settings = LocalTraining(batch_size=BATCH, epochs=1, learning_rate=0.5)
    work = rpc.Train(
        training_json=settings.as_json(),
        privacy=rpc.Privacy(
            unit="record", noise_multiplier=SIGMA, delta=DELTA, clip=1.0, trainings=6
        ),
    )
    instruction = rpc.Instruction(id="a", client_id="client-0", run_id="run", round=1, train=work)
    samples = training.samples(ClientId("client-0"))
    guard = HostGuard(tmp_path / "state", DisclosurePolicy(), federation="demo", coordinator="c")
    write_tensors(tmp_path / "model", state_arrays(loaded.model))
    outcome = training.train(
        instruction,
        TrainingFiles(
            model=tmp_path / "model",
            update=tmp_path / "update",
            keep_at=tmp_path.joinpath,
            granted=guard.grant(instruction, samples),
        ),
        TrainingProgress(),
    )
    assert outcome.samples == samples
    [charged] = PrivacyLedger(tmp_path / "state" / "privacy").of("client-0")
    found = epsilon_by_rdp([charged.event], DELTA)

    # The same schedule as an event of dp-accounting.
    rate, steps = BATCH / samples, 6
    accountant = RdpAccountant()
    sampled = dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(SIGMA))
    accountant.compose(dp.SelfComposedDpEvent(sampled, steps))
    assert found == pytest.approx(accountant.get_epsilon(DELTA), abs=1e-9)

    # The same loop with an engine of Opacus, as scripts use it.
    model, [loader, _] = module.build_model(), module.load(tmp_path / "data" / "client-0.npz")
    engine = PrivacyEngine(accountant="rdp")
    private: Any = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        data_loader=DataLoader(loader.dataset, batch_size=BATCH),
        noise_multiplier=SIGMA,
        max_grad_norm=1.0,
    )
    network, optimizer, batches = private
    for images, digits in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(images), digits).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert engine.accountant.history == [(SIGMA, pytest.approx(rate), steps)]
    # The accountant of Opacus uses other orders, so its ε differs a little.
    assert found == pytest.approx(engine.accountant.get_epsilon(DELTA), rel=0.01)
