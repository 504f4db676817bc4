"""An audit: how much of a client's data can be guessed from its updates with noise.

The audit is that of T. Steinke, M. Nasr and M. Jagielski, "Privacy auditing with one (1) training
run" (NeurIPS 2023). A coin decides for each of m canaries if it is among the client's records. The
auditor sees the updates, guesses for some canaries, and abstains for the others. The more guesses
are correct, the larger ε must be.

The auditor here is a coordinator that knows all records. It sends the same model in each round.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import binom
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from potluck.client.disclosure.disclosure_policy import DisclosurePolicy
from potluck.client.private_training import GrantedTraining
from potluck.client.training.objectives.cross_entropy import CrossEntropy
from potluck.client.training.steps.loop import TrainingContext
from potluck.common.disclosure import Weighting
from potluck.common.names import ClientId
from potluck.common.settings.local_training import LocalTraining
from potluck.common.task import Examples
from potluck.common.tasks.digits import Digits
from potluck.privacy.host.host_guard import HostGuard, spent_in_epoch
from potluck.privacy.host.privacy_ledger import PrivacyLedger
from potluck.privacy.host.record_training import RecordTraining
from potluck.rpc.v1 import coordinator_pb2 as rpc

CLIENT = "client-0"
CLAIMED = 2.0
"""The ε that the run asks for, and that the client's owner allows."""
DELTA = 1e-10
"""δ of the noise; small, since the audit's bound on an error contains the term 2mδ for m
canaries."""
ERROR = 1e-6
"""Probability with which a lower bound of the audit may exceed the true ε."""

CANARIES, GUESSES = 1000, 500
ROUNDS, STEPS, BATCH, CLIP = 4, 4, 1024, 1.0
SETTINGS = LocalTraining(learning_rate=0.01, batch_size=BATCH, steps=STEPS)
"""Learning rate so small that the records' gradients stay those of the first model."""


# The bound ----------------------------------------------------------------------------------------


def chance_of(correct: int, guesses: int, epsilon: float, *, canaries: int, delta: float) -> float:
    """Bound the probability of `correct` right guesses after an (ε, δ)-private training.

    Theorem 5.2 of the paper. Let W be the number of successes in r trials that succeed with
    probability e^ε / (e^ε + 1) each. Then P[at least v of r guesses are correct] is at most
    P[W ≥ v] + 2mδ · max over i ≥ 1 of P[v - i ≤ W < v] / i, whatever the number of abstentions."""
    success = 1 / (1 + math.exp(-epsilon))
    distance = np.arange(1, correct + 1)
    cdf = binom.cdf(correct - 1, guesses, success)
    between = cdf - binom.cdf(correct - 1 - distance, guesses, success)
    slack = float((between / distance).max(initial=0.0))
    return float(binom.sf(correct - 1, guesses, success)) + 2 * canaries * delta * slack


def least_epsilon(correct: int, guesses: int, *, canaries: int, delta: float) -> float:
    """Return the largest ε that is refuted at `ERROR`; 0 if none is."""

    def refuted(epsilon: float) -> bool:
        return chance_of(correct, guesses, epsilon, canaries=canaries, delta=delta) <= ERROR

    low, high = 0.0, 30.0
    if not refuted(low):
        return low
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


@pytest.mark.parametrize("guesses", [20, 100, 500])
def test_epsilon_bound_of_only_correct_guesses_equals_the_closed_form(guesses: int) -> None:
    found = least_epsilon(guesses, guesses, canaries=1000, delta=0.0)
    success = ERROR ** (1 / guesses)  # success ** guesses == ERROR
    assert found == pytest.approx(math.log(success / (1 - success)), abs=1e-5)


def test_epsilon_bound_of_half_correct_guesses_is_zero() -> None:
    assert least_epsilon(250, 500, canaries=1000, delta=0.0) == 0.0


def test_guess_probability_includes_the_delta_term() -> None:
    # 3 of 4 guesses at ε = 0: W has the probabilities 1, 4, 6, 4, 1 sixteenths. The maximum of
    # P[3 - i ≤ W < 3] / i is at i = 1: 6/16; then 10/32 and 11/48.
    found = chance_of(3, 4, 0.0, canaries=7, delta=0.01)
    assert found == pytest.approx(5 / 16 + 2 * 7 * 0.01 * 6 / 16, abs=1e-12)


def test_epsilon_bound_falls_with_a_larger_delta() -> None:
    found = [least_epsilon(480, 500, canaries=1000, delta=each) for each in (0.0, 1e-10, 1e-8)]
    assert found[0] >= found[1] > found[2] > 0


def test_epsilon_bound_of_randomised_response_is_close_to_its_epsilon() -> None:
    """The theorem is tight for answers that are true with probability e^ε / (e^ε + 1)."""
    answers, epsilon = 100_000, 1.5
    success = 1 / (1 + math.exp(-epsilon))
    correct = int(np.random.default_rng(1).binomial(answers, success))
    found = least_epsilon(correct, answers, canaries=answers, delta=0.0)
    assert 0.9 * epsilon < found <= epsilon


# The audit ----------------------------------------------------------------------------------------


def canaries() -> Examples:
    """Return images of noise with random labels: their gradients are nearly orthogonal."""
    generator = torch.Generator().manual_seed(1)
    return Examples(
        inputs=torch.randn(CANARIES, 8, 8, generator=generator),
        labels=torch.randint(10, (CANARIES,), generator=generator),
    )


def clipped_gradients(model: nn.Module, data: Examples) -> Tensor:
    """Return each record's gradient, clipped to `CLIP`: records × weights."""
    weights = {name: each.detach() for name, each in model.named_parameters()}

    def loss(given: dict[str, Tensor], inputs: Tensor, label: Tensor) -> Tensor:
        outputs: Tensor = functional_call(model, given, (inputs[None],))
        return nn.functional.cross_entropy(outputs, label[None])

    found = vmap(grad(loss), in_dims=(None, 0, 0))(weights, data.inputs, data.labels)
    flat = torch.cat([each.flatten(1) for each in found.values()], dim=1)
    factors = (CLIP / flat.norm(dim=1, keepdim=True)).clamp(max=1)
    return flat.mul(factors).double()


def scores(
    change: Tensor, of_canaries: Tensor, of_others: Tensor, rate: float
) -> NDArray[np.float64]:
    """Return how likely each canary is among the records, larger if likelier.

    change: sum of all gradients and of the noise in all steps. The scores are the posterior means
    of a linear model with normal priors: a record is in each step's batch with probability `rate`,
    a canary only if it is among the records. The variance of the noise is estimated from the
    directions in which no record has a gradient."""
    times = rate * STEPS * ROUNDS
    known = times * (of_others.sum(dim=0) + 0.5 * of_canaries.sum(dim=0))
    widths = torch.full((len(of_canaries) + len(of_others), 1), (times * (1 - rate)) ** 0.5)
    widths[: len(of_canaries)] = 0.5 * times
    directions = torch.cat([of_canaries, of_others]) * widths
    rest = change - known
    basis = torch.linalg.qr(directions.T).Q
    outside = rest - basis @ (basis.T @ rest)
    variance = outside.square().sum() / (len(rest) - len(directions))
    products = directions @ directions.T
    products.diagonal().add_(variance)
    found: NDArray[np.float64] = torch.linalg.solve(products, directions @ rest)[:CANARIES].numpy()
    return found


def audited(state: Path, loop: Callable[[GrantedTraining], GrantedTraining]) -> tuple[float, float]:
    """Train in `ROUNDS` rounds from one model and audit. Return (claimed ε, lower bound of ε).

    loop: changes the terms that the training gets, after the ledger was charged for the original
    terms."""
    task = Digits(clients=2)
    others, inserted = task.client_data(ClientId(CLIENT), None).train, canaries()
    torch.manual_seed(0)
    model = task.model()
    start = {name: each.clone() for name, each in model.state_dict().items()}
    coins = torch.Generator().manual_seed(secrets.randbits(63))  # the theorem needs fair coins
    included = torch.rand(CANARIES, generator=coins) < 0.5
    data = Examples(
        inputs=torch.cat([others.inputs, inserted.inputs[included]]),
        labels=torch.cat([others.labels, inserted.labels[included]]),
    )
    # The number of records is public, and would disclose how many canaries there are. So the owner
    # discloses it as a power of two, which is the same for nearly all outcomes of the coins.
    policy = DisclosurePolicy(
        weighting=Weighting.BUCKETED, training_epsilon=CLAIMED, training_delta=DELTA
    )
    guard = HostGuard(state, policy, federation="demo", coordinator="127.0.0.1:7443")
    change, rate = torch.zeros(sum(each.numel() for each in start.values())).double(), 0.0
    for round_ in range(1, ROUNDS + 1):
        granted = guard.grant(instruction(round_), len(data))
        assert granted.expected_batch == BATCH
        rate = granted.sampling_rate
        model.load_state_dict(start)
        context = TrainingContext(classes=10, seed=1, round=round_, device=torch.device("cpu"))
        RecordTraining().train(model, data, CrossEntropy(), SETTINGS, context, loop(granted))
        moved = [(start[name] - each).flatten() for name, each in model.state_dict().items()]
        change += torch.cat(moved).double() * (BATCH / SETTINGS.learning_rate)
    model.load_state_dict(start)
    found = scores(
        change, clipped_gradients(model, inserted), clipped_gradients(model, others), rate
    )
    order, half = np.argsort(found), GUESSES // 2
    truth = included.numpy()
    correct = int((~truth[order[:half]]).sum() + truth[order[-half:]].sum())
    trainings = PrivacyLedger(state / "privacy").of(CLIENT)
    claimed = spent_in_epoch(trainings, policy).epsilon_spent
    found_epsilon = least_epsilon(correct, GUESSES, canaries=CANARIES, delta=DELTA)
    print(f"{correct} of {GUESSES} correct: ε ≥ {found_epsilon:.3f}; claimed: {claimed:.4f}")
    return claimed, found_epsilon


def instruction(round_: int) -> rpc.Instruction:
    work = rpc.Train(
        training_json=SETTINGS.as_json(),
        privacy=rpc.Privacy(
            unit="record", epsilon=CLAIMED, delta=DELTA, clip=CLIP, trainings=ROUNDS
        ),
    )
    return rpc.Instruction(
        id=f"run-{round_}", client_id=CLIENT, run_id="run", round=round_, train=work
    )


def test_audit_of_trainings_with_noise_finds_less_than_the_claimed_epsilon(tmp_path: Path) -> None:
    claimed, found = audited(tmp_path, lambda granted: granted)
    assert 0.99 * CLAIMED < claimed <= CLAIMED
    # By the theorem, this fails with probability 1e-6 at most if the claim is true.
    assert found < claimed


def test_audit_of_trainings_without_noise_refutes_the_claimed_epsilon(tmp_path: Path) -> None:
    """The ledger is charged as before; the loop gets no noise to add."""
    claimed, found = audited(tmp_path, lambda granted: replace(granted, noise_multiplier=1e-9))
    # 474 correct guesses of 500 refute ε = 2. The auditor is wrong only if a canary that is among
    # the records is in none of 16 batches, which has a chance of 2**-16 each, so 27 wrong guesses
    # are far less likely than 1e-6.
    assert found > claimed
