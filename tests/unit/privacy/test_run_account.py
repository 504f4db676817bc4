"""The privacy loss a coordinator computes from reported samples, compared with host ledgers."""

from __future__ import annotations

from pathlib import Path

import pytest

from potluck.client.disclosure.disclosure_policy import DisclosurePolicy
from potluck.common.disclosure import Weighting
from potluck.common.records.privacy_loss import TrainingsSent
from potluck.common.settings.local_training import LocalTraining
from potluck.privacy.coordinator.run_account import spent_in_run
from potluck.privacy.host.host_guard import HostGuard
from potluck.rpc.v1 import coordinator_pb2 as rpc

TRAINING = LocalTraining(batch_size=16, epochs=1)


def terms(noise_multiplier: float = 0.0, epsilon: float = 0.0) -> rpc.Privacy:
    return rpc.Privacy(
        unit="record",
        noise_multiplier=noise_multiplier,
        epsilon=epsilon,
        delta=1e-5,
        clip=1.0,
        trainings=5,
    )


def sent(samples: int, client: str = "client-0", epochs: int | None = None) -> TrainingsSent:
    return TrainingsSent(client=client, samples=samples, epochs=epochs, count=3, planned=5)


def charged(state: Path, asked: rpc.Privacy, samples: int, weighting: Weighting) -> float:
    """Return the privacy loss in a host's ledger after three trainings."""
    policy = DisclosurePolicy(weighting=weighting, training_epsilon=100)
    guard = HostGuard(state, policy, federation="demo", coordinator="127.0.0.1:7443")
    work = rpc.Train(training_json=TRAINING.as_json(), privacy=asked)
    for number in range(3):
        guard.grant(
            rpc.Instruction(
                id=str(number), client_id="client-0", run_id="run", round=number, train=work
            ),
            samples,
        )
    return guard.spent("client-0")


@pytest.mark.parametrize("asked", [terms(noise_multiplier=1.2), terms(epsilon=3.0)])
def test_exact_sample_counts_give_the_privacy_loss_of_the_ledger(
    tmp_path: Path, asked: rpc.Privacy
) -> None:
    found = spent_in_run(asked, TRAINING, Weighting.EXACT, [sent(210)])
    assert found == {
        "client-0": pytest.approx(charged(tmp_path, asked, 210, Weighting.EXACT), rel=1e-9)
    }


@pytest.mark.parametrize("samples", [190, 210, 360])
def test_rounded_sample_counts_give_at_least_the_privacy_loss_of_the_ledger(
    tmp_path: Path, samples: int
) -> None:
    asked = terms(noise_multiplier=1.2)
    reported = Weighting.BUCKETED.disclosed(samples)
    [found] = spent_in_run(asked, TRAINING, Weighting.BUCKETED, [sent(reported)]).values()
    assert found >= charged(tmp_path, asked, samples, Weighting.BUCKETED)


def test_clients_with_undisclosed_sample_counts_are_omitted() -> None:
    assert spent_in_run(terms(epsilon=3.0), TRAINING, Weighting.EQUAL, [sent(1)]) == {}
    for weighting in Weighting:  # masked updates report 0 samples
        assert spent_in_run(terms(epsilon=3.0), TRAINING, weighting, [sent(0)]) == {}


def test_privacy_loss_grows_with_epochs_and_number_of_trainings() -> None:
    asked = terms(noise_multiplier=1.2)

    def epsilon(*kinds: TrainingsSent) -> float:
        return spent_in_run(asked, TRAINING, Weighting.EXACT, kinds)["client-0"]

    assert epsilon(sent(210, epochs=2)) > epsilon(sent(210))
    assert epsilon(sent(210), sent(300)) > epsilon(sent(210))


def test_many_different_sample_counts_are_rounded_down() -> None:
    asked = terms(noise_multiplier=1.2)
    clients = [sent(1000 + number, f"client-{number}") for number in range(70)]
    found = spent_in_run(asked, TRAINING, Weighting.EXACT, clients)
    exact = spent_in_run(asked, TRAINING, Weighting.EXACT, clients[:1])
    assert len(found) == 70
    assert set(found.values()) == set(exact.values())


def test_privacy_loss_of_client_noise_needs_no_sample_counts() -> None:
    asked = rpc.Privacy(
        unit="client", noise="clients", noise_multiplier=5.0, delta=1e-5, clip=0.5, trainings=5
    )
    kinds = [sent(0, "client-0"), sent(0, "client-1", epochs=2)]
    found = spent_in_run(asked, TRAINING, Weighting.EQUAL, kinds)
    assert found["client-0"] == found["client-1"] > 0
